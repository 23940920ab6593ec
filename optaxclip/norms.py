"""Norms: how a group of entries becomes one number.

A `Norm` maps each entry's modulus, reduces the mapped entries over the axes of a leaf, joins the
leaves of a group and finishes the total. Every norm here is absolutely homogeneous,
`norm(a * x) == abs(a) * norm(x)`, which is what lets the engine rescale a group whose powers
overflow or underflow and measure it again.

  norm          | of entries x with n = len(x)    | name
  --------------|---------------------------------|-----------
  `l1`          | sum(abs(x))                     | "l1"
  `l2`          | sqrt(sum(abs(x)**2))            | "l2"
  `linf`        | max(abs(x))                     | "linf"
  `lp(p)`       | sum(abs(x)**p)**(1/p)           |
  `rms`         | sqrt(sum(abs(x)**2) / n)        | "rms"
  `mean_abs`    | sum(abs(x)) / n                 | "mean_abs"
  `average_l2`  | sqrt(sum(abs(x)**2)) / n        | "average_l2"
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import safe_sqrt, select
from optaxclip._base.sums import largest_of, sum_of, sum_over


def _abs_squared(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return lax.square(x)


def _total(total: Array, count: Array) -> Array:
    del count
    return total


def _mean(total: Array, count: Array) -> Array:
    return total / count


def _root(total: Array, count: Array) -> Array:
    del count
    return safe_sqrt(total)


def _root_mean(total: Array, count: Array) -> Array:
    return safe_sqrt(total / count)


def _root_over_count(total: Array, count: Array) -> Array:
    return safe_sqrt(total) / count


def _one(count: int) -> int:
    del count
    return 1


def _count(count: int) -> int:
    return count


@dataclasses.dataclass(frozen=True, repr=False)
class Norm:
    """A norm as three steps, so that any scope can share them.

    Attributes:
      name: for messages.
      map: entries `[...]` (real or complex) to non-negative real summands `[...]`.
      finish: the joined total and the group's number of entries (at least 1, an array of the same
        dtype) to the norm.
      is_max: whether leaves reduce and join by maximum; by sum otherwise.
      degree: the power to which `map` raises; what tells when a total has lost too much.
      weight: for `sqrt(sum of squares / weight)`, the weight from the number of entries.
    """

    name: str
    map: Callable[[Array], Array]
    finish: Callable[[Array, Array], Array]
    is_max: bool = False
    degree: float = 1
    weight: Callable[[int], int] | None = None

    def __repr__(self) -> str:
        return f"Norm({self.name!r})"

    def reduce(self, x: Array, axes: tuple[int, ...], *, fused: bool = False) -> Array:
        """The total of one leaf's entries over `axes`, which are removed.

        Args:
          x: the entries.
          axes: which axes to reduce.
          fused: what `sum_over` says.
        """
        mapped = self.map(x)
        if self.is_max:
            return jnp.max(mapped, axis=axes, initial=0)
        return sum_over(mapped, axes, fused=fused)

    def join(self, totals: list[Array]) -> Array:
        """The total of a group from the totals of its leaves."""
        return largest_of(totals) if self.is_max else sum_of(totals)

    def least(self, size: int, dtype: jnp.dtype) -> float:
        """The total of `size` entries below which so much underflowed that it shows in the norm."""
        info = jnp.finfo(dtype)
        return size * (float(info.tiny) / float(info.eps)) if self.degree > 1 else 0.0

    def rescaling(self, total: Array, least: Any) -> Array:
        """The power of two by which entries must be multiplied before they are mapped.

        1 where the total is exact; elsewhere it overflowed, or too much of it underflowed.

        Args:
          total: the totals of groups.
          least: what `least` says of each, a number or an array that broadcasts.
        """
        far = _far(total.dtype)
        is_low = total < jnp.asarray(least).astype(total.dtype)
        scale = select(is_low, far, jnp.ones_like(total))
        return select(total <= jnp.finfo(total.dtype).max, scale, 1 / far)

    def unit_of(self, scale: Array) -> Array:
        """What entries are divided by if they are multiplied by what `rescaling` gives."""
        # Not a division, which XLA would make a step of its own.
        far = _far(scale.dtype)
        return select(scale > 1, 1 / far, select(scale < 1, far, jnp.ones_like(scale)))

    def at_unit(self, total: Array, *, up: bool = False) -> Array:
        """A total as it is of entries divided (or with `up` multiplied) by what `rescaling` gives.

        For degree 1 and 2.
        """
        far = _far(total.dtype)
        for _ in range(int(self.degree)):
            # The compiler would multiply the factors first, which overflows.
            total = lax.optimization_barrier(total * (far if up else 1 / far))
        return total


def _far(dtype: jnp.dtype) -> float:
    """Far enough for squares, and not so far that entries next to the thresholds are lost."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


l1 = Norm("l1", jnp.abs, _total)
l2 = Norm("l2", _abs_squared, _root, degree=2, weight=_one)
linf = Norm("linf", jnp.abs, _total, is_max=True)
rms = Norm("rms", _abs_squared, _root_mean, degree=2, weight=_count)
mean_abs = Norm("mean_abs", jnp.abs, _mean)
average_l2 = Norm("average_l2", _abs_squared, _root_over_count, degree=2)

_NAMED = {norm.name: norm for norm in (l1, l2, linf, rms, mean_abs, average_l2)}


@functools.cache
def lp(p: float) -> Norm:
    """The p-norm, `sum(abs(x)**p)**(1/p)`.

    Args:
      p: the order, above 0 and at most 64, or infinity; below 1 it is not a norm in the strict
        sense, but homogeneous all the same.

    Raises:
      ValueError: if `p` is outside that range.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.global_norm([jnp.array([3.0, -4.0])], norm=optaxclip.norms.lp(3)))
      4.4979415
    """
    if p == math.inf:
        return linf
    if not 0 < p <= 64:
        raise ValueError(f"p must be above 0 and at most 64 (or math.inf), got {p!r}")
    if p in (1, 2):
        return l1 if p == 1 else l2

    def power(x: Array) -> Array:
        size = jnp.abs(x)
        zero = size == 0
        return jnp.where(zero, 0, jnp.where(zero, 1, size) ** p)

    def root(total: Array, count: Array) -> Array:
        del count
        zero = total == 0
        return jnp.where(zero, 0, jnp.where(zero, 1, total) ** (1 / p))

    return Norm(f"l{p:g}", power, root, degree=p)


def as_norm(norm: str | Norm) -> Norm:
    """The norm of that name, or `norm` itself.

    Raises:
      ValueError: for an unknown name.
      TypeError: for something that is neither a name nor a `Norm`.
    """
    if isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str):
        raise TypeError(f"norm must be a name or an optaxclip.norms.Norm, got {norm!r}")
    if norm not in _NAMED:
        raise ValueError(f"norm must be one of {sorted(_NAMED)} or norms.lp(p), got {norm!r}")
    return _NAMED[norm]

"""Norms of groups of elements.

A `Norm` has two functions: `map` transforms elements, and `finalize` computes the norm from their
sum or maximum. All norms satisfy `norm(a * x) == abs(a) * norm(x)`, so elements can be rescaled if
their powers would overflow or underflow.

  norm          | for elements x with n = len(x)  | name
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
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import is_real, safe_sqrt
from optaxclip._base.validation import check_called, did_you_mean, short_repr, validate_call


@dataclasses.dataclass(frozen=True, repr=False)
class Norm:
    """A norm, defined by a function of the elements and a function of their total.

    Attributes:
      name: The name used in messages.
      map: A function that transforms real or complex elements `[...]` to non-negative real numbers
        `[...]`. Their sum is the total of a group.
      finalize: A function that computes the norm from the total of a group and its number of
        elements. The number is at least 1 and has the dtype of the total.
      is_max: If True, the total is the maximum instead of the sum.
      degree: The power to which `map` raises elements, used to prevent overflow and underflow.
    """

    name: str
    map: Callable[[Array], Array]
    finalize: Callable[[Array, Array], Array]
    is_max: bool = False
    degree: float = 1

    def __repr__(self) -> str:
        return f"Norm({self.name!r})"


def _abs_square(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return lax.square(x)


def _divide(total: Array, count: Any) -> Array:
    # Do not divide in float64, because `checkify.float_checks` then compares the divisor with 0 and
    # causes a warning if 64-bit types are not enabled (as of JAX 0.10.2).
    if total.dtype == jnp.float64 and isinstance(count, (np.ndarray, np.generic)):
        return total * np.reciprocal(count)
    return total / count


l1: Norm = Norm("l1", jnp.abs, lambda total, _: total)
l2: Norm = Norm("l2", _abs_square, lambda total, _: safe_sqrt(total), degree=2)
linf: Norm = Norm("linf", jnp.abs, lambda total, _: total, is_max=True)
rms: Norm = Norm("rms", _abs_square, lambda total, n: safe_sqrt(_divide(total, n)), degree=2)
mean_abs: Norm = Norm("mean_abs", jnp.abs, _divide)
average_l2: Norm = Norm(
    "average_l2", _abs_square, lambda total, n: _divide(safe_sqrt(total), n), degree=2
)

_BY_NAME = {norm.name: norm for norm in (l1, l2, linf, rms, mean_abs, average_l2)}


@validate_call()
def lp(p: float) -> Norm:
    """Returns the p-norm, `sum(abs(x)**p)**(1/p)`.

    Rounding errors are larger if `p` is not 1, 2, or infinity. Transformations with `strict=True`
    then reduce the norms of `n` float32 elements to as little as
    `1 - 1e-6 * (1 + (1 + log2(n) / 4) / p)` times the threshold, compared with `1 - 2e-6` times the
    threshold for other norms.

    Args:
      p: The order, which is positive and at most 64, or infinity. Orders below 1 are allowed,
        although the function is then not a norm.

    Raises:
      ValueError: If `p` is out of range.
      TypeError: If `p` is not a Python or NumPy number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.global_norm([jnp.array([3.0, -4.0])], norm=optaxclip.norms.lp(3)))
      4.4979415
    """
    # Compiled programs depend on `p`, so it must be static.
    if isinstance(p, Array) or not is_real(p) or np.ndim(p):
        raise TypeError(
            f"p must be a Python or NumPy number, got {short_repr(p)} of type {type(p).__name__}"
        )
    if p == math.inf:
        return linf
    if not 0 < p <= 64:
        raise ValueError(f"p must be positive and at most 64 (or math.inf), got {p!r}")
    # The common norms have faster implementations.
    if p in (1, 2):
        return l1 if p == 1 else l2
    return _power_norm(np.asarray(p).item())


@functools.cache
def _power_norm(p: float) -> Norm:
    """Returns the norm for `p`, cached so that equal norms share compiled programs."""

    def power(x: Array) -> Array:
        size = jnp.abs(x)
        # The derivative of a power below 1 is infinite at 0.
        zero = size == 0
        return jnp.where(zero, 0, jnp.where(zero, 1, size) ** p)

    def root(total: Array, count: Array) -> Array:
        del count
        zero = total == 0
        return jnp.where(zero, 0, jnp.where(zero, 1, total) ** (1 / p))

    return Norm(f"l{p:g}", power, root, degree=p)


def as_norm(norm: str | Norm) -> Norm:
    """Returns the norm with this name, or `norm` itself if it is a `Norm`."""
    if isinstance(norm, Norm):
        return norm
    check_called(norm, __name__, "norm", "norms")
    if isinstance(norm, str) and norm in _BY_NAME:
        return _BY_NAME[norm]
    # NumPy and PyTorch use the order of a norm, or a name for a matrix norm.
    text = str(float(norm) if is_real(norm) and np.ndim(norm) == 0 else norm).lower()
    similar = _FOREIGN_NAMES.get(text)
    if not isinstance(norm, str):
        hint = f"; for this norm, pass norm={repr(similar) if similar else f'norms.lp({norm!r})'}"
        raise TypeError(
            f"norm must be a name or an optaxclip.norms.Norm, got {short_repr(norm)}"
            f"{hint * (is_real(norm) and bool(norm > 0))}"
        )
    hint = f"; did you mean {similar!r}?" if similar else did_you_mean(text, _BY_NAME)
    raise ValueError(f"norm must be one of {sorted(_BY_NAME)} or norms.lp(p), got {norm!r}{hint}")


_FOREIGN_NAMES: dict[str, str] = {"1": "l1", "1.0": "l1", "2": "l2", "2.0": "l2", "inf": "linf"}
_FOREIGN_NAMES |= {"max": "linf", "fro": "l2", "frobenius": "l2", "euclidean": "l2"}

"""Norms: how a group of entries becomes one number.

A `Norm` has two functions. `map` turns each entry into a summand; the engine adds up the summands
of a group (or takes the largest); `finish` turns that total into the norm. Every norm here is
absolutely homogeneous, `norm(a * x) == abs(a) * norm(x)`. So if powers of the entries overflow or
underflow, the engine measures the entries at another scale.

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
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import is_real, safe_sqrt
from optaxclip._base.validation import check_called, did_you_mean, short_repr, validate_call


def _abs_square(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return lax.square(x)


def _identity(total: Array, count: Array) -> Array:
    del count
    return total


def _divide_no_nan(total: Array, count: Any) -> Array:
    # Not a division in float64: `checkify.float_checks` compares the divisor with 0, and JAX 0.10.2
    # then warns of float64 if 64-bit types are not enabled.
    if total.dtype == jnp.float64 and isinstance(count, (np.ndarray, np.generic)):
        return total * np.reciprocal(count)
    return total / count


def _mean(total: Array, count: Array) -> Array:
    return _divide_no_nan(total, count)


def _root(total: Array, count: Array) -> Array:
    del count
    return safe_sqrt(total)


def _root_mean(total: Array, count: Array) -> Array:
    return safe_sqrt(_divide_no_nan(total, count))


def _root_over_count(total: Array, count: Array) -> Array:
    return _divide_no_nan(safe_sqrt(total), count)


@dataclasses.dataclass(frozen=True, repr=False)
class Norm:
    """A norm: a function of each entry, and a function of the sum over a group.

    Attributes:
      name: the name in messages.
      map: from entries `[...]` (real or complex) to non-negative real summands `[...]`.
      finish: from the total of a group and its number of entries (at least 1, an array of the same
        dtype) to the norm.
      is_max: whether the total is the largest summand, not their sum.
      degree: the power to which `map` raises entries; it tells which totals overflow or underflow.
    """

    name: str
    map: Callable[[Array], Array]
    finalize: Callable[[Array, Array], Array]
    is_max: bool = False
    degree: float = 1

    def __repr__(self) -> str:
        return f"Norm({self.name!r})"


l1: Norm = Norm("l1", jnp.abs, _identity)
l2: Norm = Norm("l2", _abs_square, _root, degree=2)
linf: Norm = Norm("linf", jnp.abs, _identity, is_max=True)
rms: Norm = Norm("rms", _abs_square, _root_mean, degree=2)
mean_abs: Norm = Norm("mean_abs", jnp.abs, _mean)
average_l2: Norm = Norm("average_l2", _abs_square, _root_over_count, degree=2)

_BY_NAME = {norm.name: norm for norm in (l1, l2, linf, rms, mean_abs, average_l2)}


@validate_call()
def lp(p: float) -> Norm:
    """The p-norm, `sum(abs(x)**p)**(1/p)`.

    Powers lose digits, so a `strict` clip leaves more room for rounding. If `p` is not 1, 2 or
    infinity, its results are below the threshold by up to `1 + (1 + log2(n) / 4) / p` millionths for
    `n` entries in float32; with all other norms, by up to 2 millionths.

    Args:
      p: the order, above 0 and at most 64, or infinity. Below 1 it does not give a norm in the
        strict sense, but still a homogeneous function.

    Raises:
      ValueError: if `p` is outside that range.
      TypeError: if `p` is not a number of Python or NumPy.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.global_norm([jnp.array([3.0, -4.0])], norm=optaxclip.norms.lp(3)))
      4.4979415
    """
    if isinstance(p, Array) or not is_real(p) or np.ndim(p):
        raise TypeError(
            "p must be a number of Python or NumPy, such as 3, because a new program is compiled "
            f"for each value; got {short_repr(p)} of type {type(p).__name__}"
        )
    if p == math.inf:
        return linf
    if not 0 < p <= 64:
        raise ValueError(f"p must be above 0 and at most 64 (or math.inf), got {p!r}")
    if p in (1, 2):
        return l1 if p == 1 else l2
    return _power_norm(np.asarray(p).item())


@functools.cache
def _power_norm(p: float) -> Norm:
    """The norm for `p`; each call returns the same object, so that clips by it compile once."""

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
    """The norm with this name, or `norm` itself.

    Raises:
      ValueError: for an unknown name.
      TypeError: for something that is neither a name nor a `Norm`.
    """
    if isinstance(norm, Norm):
        return norm
    check_called(norm, __name__, "norm", "norms")
    if isinstance(norm, str) and norm in _BY_NAME:
        return _BY_NAME[norm]
    text = str(float(norm) if is_real(norm) and np.ndim(norm) == 0 else norm).lower()
    meant = _FOREIGN_NAMES.get(text)
    if not isinstance(norm, str):
        instead = f": pass norm={repr(meant) if meant else f'norms.lp({norm!r})'}"
        raise TypeError(
            f"norm must be a name or an optaxclip.norms.Norm, got {short_repr(norm)}"
            f"{instead * (is_real(norm) and bool(norm > 0))}"
        )
    hint = f"; did you mean {meant!r}?" if meant else did_you_mean(text, _BY_NAME)
    raise ValueError(f"norm must be one of {sorted(_BY_NAME)} or norms.lp(p), got {norm!r}{hint}")


_FOREIGN_NAMES: dict[str, str] = {"1": "l1", "1.0": "l1", "2": "l2", "2.0": "l2", "inf": "linf"}
_FOREIGN_NAMES |= {"max": "linf", "fro": "l2", "frobenius": "l2", "euclidean": "l2"}

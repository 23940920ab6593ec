"""Norms of groups of elements.

A `Norm` has two functions. `map` computes the summand of an element, and `finalize` computes the
norm from the sum (or the maximum) of the summands of a group. All norms are absolutely homogeneous,
`norm(a * x) == abs(a) * norm(x)`. Therefore, elements can be measured at another scale if their
powers overflow or underflow.

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
    """A norm: a function of elements, and a function of the sum over a group.

    Attributes:
      name: The name in messages.
      map: A function from elements `[...]` (real or complex) to non-negative real summands `[...]`.
      finalize: A function from the total of a group and its number of elements (at least 1, an
        array of the same dtype) to the norm.
      is_max: If True, the total is the largest summand instead of the sum.
      degree: The power to which `map` raises elements. It determines which totals overflow or
        underflow.
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
    # No division in float64, because `checkify.float_checks` compares the divisor with 0, which
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

    Powers are less accurate, so clipping with `strict` needs a larger margin for rounding. If `p`
    is not 1, 2 or infinity, the new norms are below the threshold by up to
    `1 + (1 + log2(n) / 4) / p` millionths for `n` elements in float32, compared with up to 2
    millionths for all other norms.

    Args:
      p: The order, above 0 and at most 64, or infinity. For orders below 1, the function is
        homogeneous, but not a norm in the strict sense.

    Raises:
      ValueError: If `p` is outside this range.
      TypeError: If `p` is not a number of Python or NumPy.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> print(optaxclip.ops.global_norm([jnp.array([3.0, -4.0])], norm=optaxclip.norms.lp(3)))
      4.4979415
    """
    if isinstance(p, Array) or not is_real(p) or np.ndim(p):
        raise TypeError(
            "p must be a number of Python or NumPy, because a new program is compiled for each "
            f"value, got {short_repr(p)} of type {type(p).__name__}; pass, for example, p=3"
        )
    if p == math.inf:
        return linf
    if not 0 < p <= 64:
        raise ValueError(f"p must be above 0 and at most 64 (or math.inf), got {p!r}")
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
    """Returns the norm with this name, or `norm` itself.

    Raises:
      ValueError: If the name is unknown.
      TypeError: If `norm` is neither a name nor a `Norm`.
    """
    if isinstance(norm, Norm):
        return norm
    check_called(norm, __name__, "norm", "norms")
    if isinstance(norm, str) and norm in _BY_NAME:
        return _BY_NAME[norm]
    # NumPy and PyTorch denote norms by their order, and matrix norms by names.
    text = str(float(norm) if is_real(norm) and np.ndim(norm) == 0 else norm).lower()
    similar = _FOREIGN_NAMES.get(text)
    if not isinstance(norm, str):
        hint = f"; pass norm={repr(similar) if similar else f'norms.lp({norm!r})'}"
        raise TypeError(
            f"norm must be a name or an optaxclip.norms.Norm, got {short_repr(norm)}"
            f"{hint * (is_real(norm) and bool(norm > 0))}"
        )
    hint = f"; did you mean {similar!r}?" if similar else did_you_mean(text, _BY_NAME)
    raise ValueError(f"norm must be one of {sorted(_BY_NAME)} or norms.lp(p), got {norm!r}{hint}")


_FOREIGN_NAMES: dict[str, str] = {"1": "l1", "1.0": "l1", "2": "l2", "2.0": "l2", "inf": "linf"}
_FOREIGN_NAMES |= {"max": "linf", "fro": "l2", "frobenius": "l2", "euclidean": "l2"}

"""Where the ranges of number formats end, and the thresholds between which entries are counted.

A threshold is a number `value`, and whether an entry of this very size is above it. Rounding to
nearest sends half the smallest number of a format to 0, and all above it to another number; so the
bins of a histogram hold the sizes above one power of two, up to and with the next one.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Bound(NamedTuple):
    """A size, and whether an entry of this very size counts as above it."""

    value: float
    inclusive: bool = False


# A list of numbers, because a later JAX may know more formats, and states must keep their shapes.
TOO_LARGE = (
    Bound(7.0, inclusive=True),  # float4_e2m1fn
    Bound(7.75, inclusive=True),  # float6_e2m3fn
    Bound(15.75, inclusive=True),  # float8_e3m4
    Bound(30.0, inclusive=True),  # float6_e3m2fn
    Bound(31.0, inclusive=True),  # float8_e4m3b11fnuz
    Bound(248.0, inclusive=True),  # float8_e4m3, float8_e4m3fnuz
    Bound(464.0),  # float8_e4m3fn
    Bound(61440.0, inclusive=True),  # float8_e5m2, float8_e5m2fnuz
    Bound(65520.0, inclusive=True),  # float16
    Bound(2.0**128 - 2.0**119, inclusive=True),  # bfloat16
    Bound(2.0**128 - 2.0**103, inclusive=True),  # float32
)
"""The sizes above which entries are too large for number formats; for float64 none is."""

INFINITE, NAN = Bound(float("inf"), inclusive=True), Bound(float("inf"))
NOT_ZERO = Bound(0.0)


def exponents(*, wide: bool) -> range:
    """The exponents of the powers of two that float32, or float64, can hold."""
    return range(-1074, 1024) if wide else range(-149, 128)


@functools.cache
def thresholds(*, wide: bool) -> tuple[Bound, ...]:
    """The thresholds above which entries are counted, in order, for float32 or float64."""
    powers = (Bound(2.0**k) for k in exponents(wide=wide))
    found = (NOT_ZERO, *powers, *TOO_LARGE, INFINITE, NAN)
    return tuple(sorted(found, key=lambda x: (x.value, not x.inclusive)))


def lost_below(dtype: jax.typing.DTypeLike) -> float:
    """The largest size that rounds to 0: half the format's smallest number, a power of two.

    It is 0 for float64, whose half is no float64.
    """
    return float(jnp.finfo(dtype).smallest_subnormal) / 2


def too_large(dtype: jax.typing.DTypeLike) -> Bound:
    """The threshold above which entries round to a number beyond the format's largest one.

    It lies half a unit in the last place above the largest number. A tie is rounded to the number
    with an even last digit, which is beyond if the digit of the largest number is odd. For float64
    the threshold is infinite.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    unit = 2.0 ** (math.frexp(largest)[1] - 1 - info.nmant)
    return Bound(largest + unit / 2, inclusive=largest / unit % 2 == 1)


class Counted(NamedTuple):
    """How a leaf's entries are counted.

    Attributes:
      patterns: uint32 or uint64, ascending and different: the bit patterns of float32 or float64
        above which entries are counted.
      places: for each of `thresholds`, the place of its pattern among them.
    """

    patterns: np.ndarray[Any, np.dtype[Any]]
    places: np.ndarray[Any, np.dtype[Any]]


@functools.cache
def counted(dtype: jnp.dtype, *, wide: bool) -> Counted:
    """The patterns for a real dtype: those between which the dtype has numbers."""
    is_double = dtype == jnp.float64
    holder = np.dtype(np.float64 if is_double else np.float32)
    sizes = _sizes_up_to([x for x in thresholds(wide=wide) if x != NAN], np.dtype(dtype), holder)
    # The pattern of infinity itself: only those of NaN are above it.
    sizes = np.append(sizes, np.inf).astype(holder)
    of_all = sizes.view(np.uint64 if is_double else np.uint32)
    patterns, places = np.unique(of_all, return_inverse=True)
    return Counted(patterns, places)


def _sizes_up_to(found: list[Bound], dtype: np.dtype[Any], holder: np.dtype[Any]) -> Any:
    """For each threshold the largest number of a dtype that is not above it."""
    values = np.array([x.value for x in found])
    are_inclusive = np.array([x.inclusive for x in found])
    bits = int(jnp.finfo(dtype).bits)
    if bits > 16:
        with np.errstate(over="ignore"):
            nearest = values.astype(holder)
        is_above = (nearest > values) | ((nearest == values) & are_inclusive)
        return np.where(is_above, np.nextafter(nearest, holder.type(0)), nearest)
    patterns = np.arange(2**bits).astype(f"uint{max(bits, 8)}")
    with np.errstate(invalid="ignore"):
        every = np.abs(patterns.view(dtype).astype(np.float64))
    every = np.unique(every[every >= 0])
    places = np.where(
        are_inclusive, np.searchsorted(every, values), np.searchsorted(every, values, side="right")
    )
    return every[places - 1].astype(holder)

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


class BinEdge(NamedTuple):
    """A size, and whether an entry of this very size counts as above it."""

    value: float
    inclusive: bool = False


# A list of numbers, because a later JAX may know more formats, and states must keep their shapes.
OVERFLOW_EDGES = (
    BinEdge(7.0, inclusive=True),  # float4_e2m1fn
    BinEdge(7.75, inclusive=True),  # float6_e2m3fn
    BinEdge(15.75, inclusive=True),  # float8_e3m4
    BinEdge(30.0, inclusive=True),  # float6_e3m2fn
    BinEdge(31.0, inclusive=True),  # float8_e4m3b11fnuz
    BinEdge(248.0, inclusive=True),  # float8_e4m3, float8_e4m3fnuz
    BinEdge(464.0),  # float8_e4m3fn
    BinEdge(61440.0, inclusive=True),  # float8_e5m2, float8_e5m2fnuz
    BinEdge(65520.0, inclusive=True),  # float16
    BinEdge(2.0**128 - 2.0**119, inclusive=True),  # bfloat16
    BinEdge(2.0**128 - 2.0**103, inclusive=True),  # float32
)
"""The sizes above which entries are too large for number formats; for float64 none is."""

INFINITE, NAN = BinEdge(float("inf"), inclusive=True), BinEdge(float("inf"))
ZERO_EDGE = BinEdge(0.0)


def exponents(*, is_float64: bool) -> range:
    """The exponents of the powers of two that float32, or float64, can hold."""
    return range(-1074, 1024) if is_float64 else range(-149, 128)


@functools.cache
def bin_edges(*, is_float64: bool) -> tuple[BinEdge, ...]:
    """The thresholds above which entries are counted, in order, for float32 or float64."""
    powers = (BinEdge(2.0**k) for k in exponents(is_float64=is_float64))
    # No finite float32 is too large for float32.
    thresholds = OVERFLOW_EDGES if is_float64 else OVERFLOW_EDGES[:-1]
    found = (ZERO_EDGE, *powers, *thresholds, INFINITE, NAN)
    return tuple(sorted(found, key=lambda x: (x.value, not x.inclusive)))


@functools.cache
def bin_exponents(*, is_float64: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each part of the finite sizes above 0 the k of the bin, 2**k to 2**(k + 1), it is of."""
    ends = [
        x.value for x in bin_edges(is_float64=is_float64) if x not in (ZERO_EDGE, INFINITE, NAN)
    ]
    return np.array(
        [exponents(is_float64=is_float64)[0] - 1, *(math.frexp(end)[1] - 1 for end in ends)]
    )


def checked_format(dtype: Any) -> jnp.dtype:
    """A real floating-point format with a sign and 0, checked."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        if isinstance(dtype, str):
            raise ValueError(
                f"dtype must be the name of a number format, such as 'float16', got {dtype!r}"
            ) from None
        found = None
    if found is None:
        raise TypeError(
            f"dtype must be a number format, such as jnp.float16, got {dtype!r:.80}; pass the "
            "format that is to hold the numbers"
        )
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"dtype must be a real floating-point format, such as float16, got {found.name}; of "
            "complex numbers pass the format of the parts"
        )
    if found.name == "float8_e8m0fnu":
        raise ValueError(
            f"dtype must be a format with a sign and 0, got {found.name}, which holds scales "
            "alone; pass the format of the scaled numbers"
        )
    return found


def underflow_threshold(dtype: jax.typing.DTypeLike) -> float:
    """The largest size that rounds to 0: half the format's smallest number, a power of two.

    It is 0 for float64, whose half is no float64.
    """
    return float(jnp.finfo(dtype).smallest_subnormal) / 2


def overflow_threshold(dtype: jax.typing.DTypeLike) -> float:
    """The size above which entries round to a number beyond the format's largest one.

    It lies half a unit in the last place above the largest number; for float64 it is infinite.
    `TOO_LARGE` says where a tie goes: to the number with an even last digit.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    unit = 2.0 ** (math.frexp(largest)[1] - 1 - info.nmant)
    return largest + unit / 2


@functools.cache
def edge_bit_patterns(*, is_float64: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """For each threshold the bit pattern, of float32 or float64, above which those of entries are.

    They are all different, and ascend.
    """
    holder, kind = (np.float64, np.uint64) if is_float64 else (np.float32, np.uint32)
    found = bin_edges(is_float64=is_float64)
    patterns = np.array([x.value for x in found], holder).view(kind)
    return patterns - np.array([x.inclusive for x in found], kind)

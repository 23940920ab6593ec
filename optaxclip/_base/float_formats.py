"""Ranges of number formats, and bin edges for histograms of absolute values.

Half the smallest number of a format rounds to 0, and larger numbers round up. Therefore, bins are
half-open intervals that include their upper power of two.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class BinEdge(NamedTuple):
    """An edge between bins. If `inclusive`, elements equal to the edge are above it."""

    value: float
    inclusive: bool = False


# Literals, because formats in later versions of JAX must not change the shapes of states.
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
"""The absolute values at which number formats overflow, except for float64."""

INFINITE, NAN = BinEdge(float("inf"), inclusive=True), BinEdge(float("inf"))
ZERO_EDGE = BinEdge(0.0)


def exponents(*, is_float64: bool) -> range:
    """Returns the exponents of the powers of two in float32 or float64."""
    return range(-1074, 1024) if is_float64 else range(-149, 128)


@functools.cache
def bin_edges(*, is_float64: bool) -> tuple[BinEdge, ...]:
    """Returns the sorted bin edges for float32 or float64."""
    powers = (BinEdge(2.0**k) for k in exponents(is_float64=is_float64))
    # The last edge is not needed for float32, because no finite float32 is too large for it.
    overflow_edges = OVERFLOW_EDGES if is_float64 else OVERFLOW_EDGES[:-1]
    edges = (ZERO_EDGE, *powers, *overflow_edges, INFINITE, NAN)
    return tuple(sorted(edges, key=lambda x: (x.value, not x.inclusive)))


@functools.cache
def bin_exponents(*, is_float64: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the exponents k of the bins from 2**k to 2**(k + 1), one per interval of edges."""
    finite_edges = [
        x.value for x in bin_edges(is_float64=is_float64) if x not in (ZERO_EDGE, INFINITE, NAN)
    ]
    lowest = exponents(is_float64=is_float64)[0] - 1
    return np.array([lowest, *(math.frexp(edge)[1] - 1 for edge in finite_edges)])


def checked_format(dtype: Any) -> jnp.dtype:
    """Checks that `dtype` is a real floating-point format with a sign and 0."""
    try:
        number_format = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        if isinstance(dtype, str):
            raise ValueError(
                f"dtype must be the name of a numeric dtype, such as 'float16', got {dtype!r}"
            ) from None
        number_format = None
    if number_format is None:
        raise TypeError(
            f"dtype must be a numeric dtype, such as jnp.float16, got {dtype!r:.80}; use the dtype "
            "in which the values are stored"
        )
    if not jnp.issubdtype(number_format, jnp.floating):
        raise ValueError(
            f"dtype must be a real floating-point dtype, got {number_format.name}; use the dtype "
            "of the real and imaginary parts for complex values"
        )
    if number_format.name == "float8_e8m0fnu":
        raise ValueError(
            f"dtype must be signed and able to represent zero, got {number_format.name}; use the "
            "dtype of the scaled values"
        )
    return number_format


def underflow_threshold(dtype: jax.typing.DTypeLike) -> float:
    """Returns the largest absolute value that rounds to 0, or 0 for float64."""
    # Half the smallest float64 is not a float64, so it becomes 0 here.
    return float(jnp.finfo(dtype).smallest_subnormal) / 2


def overflow_threshold(dtype: jax.typing.DTypeLike) -> float:
    """Returns the absolute value above which elements overflow, infinite for float64."""
    info = jnp.finfo(dtype)
    largest = float(info.max)  # The threshold is half an ulp above it.
    unit = 2.0 ** (math.frexp(largest)[1] - 1 - info.nmant)
    return largest + unit / 2


@functools.cache
def edge_bit_patterns(*, is_float64: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the bin edges as ascending bit patterns of float32 or float64."""
    float_type, integer = (np.float64, np.uint64) if is_float64 else (np.float32, np.uint32)
    edges = bin_edges(is_float64=is_float64)
    patterns = np.array([x.value for x in edges], float_type).view(integer)
    # Elements are compared by `>`, so the pattern of an inclusive edge is decreased by 1.
    return patterns - np.array([x.inclusive for x in edges], integer)

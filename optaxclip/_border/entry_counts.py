"""Counts the entries of a leaf whose moduli are above thresholds, on any platform.

All is done on bit patterns: those of positive floats are in the order of the floats, and float
arithmetic would take subnormal numbers for 0 on some platforms.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.cpu as cpu
from optaxclip._base.numerics import fixed_size
from optaxclip._base.ranges import counted, thresholds

WORD = 16
"""Counts are kept in two words, the lower of which has this many bits."""


def num_counts(*, wide: bool) -> int:
    """How many counts a group has: all entries, and those above each threshold."""
    return 1 + len(thresholds(wide=wide))


def counts_above(leaf: Array, axes: tuple[int, ...], size: Any, *, wide: bool) -> Array:
    """How many entries there are, and how many have moduli above each threshold.

    Args:
      leaf: real or complex.
      axes: those over which to count.
      size: how many entries there are over these axes; more than the leaf has if it stands for a
        sparse array. The entries that it lacks are 0.
      wide: whether the thresholds are those of float64.

    Returns:
      uint32[*other axes, 2, counts]: the lower 16 bits, and the rest.
    """
    known = fixed_size(size)
    is_double = jnp.finfo(leaf.dtype).dtype == jnp.float64
    is_huge = known is None or known >= 2**32
    integer = jnp.dtype(jnp.uint64 if is_huge else jnp.uint32)
    with jax.enable_x64(True) if is_double or is_huge else contextlib.nullcontext():
        found = _counts_above(leaf, axes, integer, wide)
        every = jnp.broadcast_to(jnp.asarray(size, integer), (*found.shape[:-1], 1))
        found = lax.concatenate([every, found], found.ndim - 1)
        low = found & integer.type(2**WORD - 1)
        words = [low.astype(jnp.uint32), (found >> integer.type(WORD)).astype(jnp.uint32)]
        return jnp.stack(words, axis=-2)


def carried(words: Array) -> Array:
    """Counts `[..., 2, counts]` with the lower words below 2**16 again, summed along axis 0."""
    low, high = (lax.reduce_sum(lax.index_in_dim(words, i, -2), [0]) for i in range(2))
    rest = low & np.uint32(2**WORD - 1)
    return lax.concatenate([rest, high + (low >> np.uint32(WORD))], low.ndim - 2)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _counts_above(leaf: Array, axes: tuple[int, ...], integer: jnp.dtype, wide: bool) -> Array:
    ways = counted(jnp.finfo(leaf.dtype).dtype, wide=wide)
    static = {"patterns": ways.patterns, "axes": axes, "integer": integer}
    by_scattering, by_comparing = (
        functools.partial(way, **static) for way in (cpu.above_by_scattering, _above_by_comparing)
    )
    found = lax.platform_dependent(_patterns(leaf), cpu=by_scattering, default=by_comparing)
    return found[..., ways.places]


def _above_by_comparing(
    bits: Array, *, patterns: np.ndarray[Any, Any], axes: tuple[int, ...], integer: jnp.dtype
) -> Array:
    """Over some axes, how many bit patterns of positive floats are above each of `patterns`."""
    shape = (*bits.shape, len(patterns))
    of_entries = lax.broadcast_in_dim(bits, shape, range(bits.ndim))
    is_above = lax.gt(of_entries, lax.broadcast_in_dim(patterns, shape, [bits.ndim]))
    return lax.reduce_sum(is_above.astype(integer), axes)


def _patterns(x: Array) -> Array:
    """The bit patterns of the moduli of entries, as float32 or, for 64-bit entries, float64."""
    if jnp.iscomplexobj(x):
        return _modulus(_patterns(x.real), _patterns(x.imag))
    if x.dtype == jnp.bfloat16:
        # Not converted as a float, which may lose subnormal numbers.
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        holder = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        kind = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
        bits = lax.bitcast_convert_type(x.astype(holder), kind)
    return bits & bits.dtype.type(jnp.iinfo(bits.dtype).max >> 1)


def _modulus(x: Array, y: Array) -> Array:
    """The pattern of the modulus of a complex number, from the patterns of its parts.

    No square leaves the range, subnormal parts count, and a modulus beyond the range becomes the
    largest number. It is NaN if a part is NaN.
    """
    integer = x.dtype.type
    info = jnp.finfo(jnp.float64 if x.dtype == jnp.uint64 else jnp.float32)
    real, one = info.dtype.type, integer(1 << info.nmant)
    shift = integer(info.maxexp // 2)
    infinity = integer((2**info.nexp - 1) << info.nmant)
    by = real(2.0 ** (info.minexp - info.nmant + int(shift)))
    large, small = lax.max(x, y), lax.min(x, y)
    is_low, is_high = large < one * shift, large >= infinity - one * shift

    def scaled(bits: Array) -> Array:
        """The number times 2**shift if the larger part is small, times 2**-shift if it is large."""
        of_subnormal = lax.bitcast_convert_type(bits.astype(real) * by, integer)
        up = jnp.where(bits < one, of_subnormal, bits + one * shift)
        down = jnp.where(bits > one * shift, bits - one * shift, integer(0))
        bits = jnp.where(is_low, up, jnp.where(is_high, down, bits))
        return lax.bitcast_convert_type(bits, real)

    length = scaled(large)
    ratio = scaled(small) / jnp.where(length > 0, length, real(1))
    length = length * jnp.sqrt(1 + ratio * ratio)
    bits = lax.bitcast_convert_type(length, integer)
    subnormal = lax.round(length / by, lax.RoundingMethod.TO_NEAREST_EVEN).astype(integer)
    low = jnp.where(bits >= one * (shift + integer(1)), bits - one * shift, subnormal)
    high = lax.min(bits + one * shift, infinity - integer(1))
    found = jnp.where(is_low, low, jnp.where(is_high, high, bits))
    return jnp.where(large >= infinity, large, found)

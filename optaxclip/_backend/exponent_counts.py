"""Counts the elements of a leaf by absolute value, on any platform.

The counts are computed on bit patterns, because float arithmetic may flush subnormals to zero.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._base.float_formats import edge_bit_patterns
from optaxclip._base.numerics import static_size_or_none

WORD_BITS = 16
"""The number of bits of the lower of the two words of a count."""

CHUNK_SIZE = 2**20
"""The approximate number of elements that CPUs and TPUs process together to save memory."""

LANES = 256
"""The number of copies of the counts on GPUs, because threads must wait for a shared count."""


def num_counts(*, wide: bool) -> int:
    """Returns the number of bins, including the bins beyond the first and the last edge."""
    return len(edge_bit_patterns(is_float64=wide)) + 1


def counts_by_size(
    leaf: Array, axes: tuple[int, ...], size: Any, *, wide: bool, in_one_piece: bool
) -> Array:
    """Counts the elements with absolute values above an edge and at most the next edge.

    Args:
      leaf: A real or complex array. Its dtype must not be 64-bit unless `wide` is True.
      axes: The axes to count over.
      size: The number of elements along these axes. If it exceeds that of the leaf, such as for the
        stored values of a sparse array, the missing elements count as 0.
      wide: If True, uses the edges of float64.
      in_one_piece: If True, the compiler does not shard the leaf.

    Returns:
      The lower 16 bits and the remaining bits of the counts, uint32[*kept axes, 2, counts].
    """
    known_size = static_size_or_none(size)
    is_huge = known_size is None or known_size >= 2**31
    integer = jnp.dtype(jnp.uint64 if is_huge else jnp.uint32)
    with jax.enable_x64(True) if wide or is_huge else contextlib.nullcontext():
        # integer[*kept axes, counts]
        counts = _count(leaf, axes, integer, wide, in_one_piece or bool(meshes.manual_axes()))
        num_missing = size - math.prod(leaf.shape[axis] for axis in axes)
        if static_size_or_none(num_missing) != 0:
            counts = counts.at[..., 0].add(jnp.asarray(num_missing, integer))
        low = (counts & integer.type(2**WORD_BITS - 1)).astype(jnp.uint32)
        high = (counts >> integer.type(WORD_BITS)).astype(jnp.uint32)
        return meshes.stack([low, high], axis=counts.ndim - 1)


def propagate_carry(words: Array) -> Array:
    """Sums counts `[..., 2, counts]` along axis 0, and keeps the lower words below 2**16."""
    low, high = (lax.reduce_sum(lax.index_in_dim(words, i, -2), [0]) for i in range(2))
    remainder = low & np.uint32(2**WORD_BITS - 1)
    carry = low >> np.uint32(WORD_BITS)
    return lax.concatenate([remainder, high + carry], low.ndim - 2)


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _count(
    leaf: Array, axes: tuple[int, ...], integer: jnp.dtype, wide: bool, is_whole: bool
) -> Array:
    """Counts the elements of a leaf with the fastest method of each platform.

    CPUs and GPUs add elements to the counts of their bins faster than they compare them with all
    edges. TPUs add elements one after another. On a TPU v5e, a product of two one-hot encodings is
    estimated to take 1/40 of the cycles of comparisons (as of JAX 0.10.2).
    """
    # Devices have few elements of a sharded leaf.
    lanes = LANES if is_whole else LANES // 8
    scatter = functools.partial(_count_by_scatter, axes=axes, integer=integer, wide=wide)
    on_gpu = functools.partial(scatter, lanes=lanes)
    on_cpu = functools.partial(scatter, lanes=1)
    is_narrow = not wide and integer == jnp.uint32
    default_fn = _count_by_matmul if is_narrow else _count_by_comparison
    default = functools.partial(default_fn, axes=axes, integer=integer, wide=wide)
    if is_whole:
        on_cpu, default = (
            functools.partial(_count_in_chunks, count=count, axes=axes, chunk=CHUNK_SIZE)
            for count in (on_cpu, default)
        )
    return lax.platform_dependent(leaf, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=default)


def _count_in_chunks(
    leaf: Array, *, count: Callable[[Array], Array], axes: tuple[int, ...], chunk: int
) -> Array:
    """Counts about `chunk` elements at a time."""
    size = static_size_or_none(math.prod(leaf.shape))
    if size is None or size <= chunk or not axes:
        return count(leaf)
    axis = max(axes, key=lambda axis: leaf.shape[axis])
    length, step = leaf.shape[axis], max(leaf.shape[axis] * chunk // size, 1)
    step -= step % 128 if step > 128 else 0  # rows of a TPU's memory
    num_chunks = length // step

    def add_chunk(i: Any, counts: Array) -> Array:
        return counts + count(lax.dynamic_slice_in_dim(leaf, i * step, step, axis))

    remainder = count(lax.slice_in_dim(leaf, num_chunks * step, length, axis=axis))
    start = meshes.pvary(remainder, meshes.varying_axes(leaf))
    return lax.fori_loop(0, num_chunks, add_chunk, start)


def _count_by_scatter(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool, lanes: int
) -> Array:
    """Adds elements to the counts of their bins, in several copies of the counts."""
    kept = [axis for axis in range(leaf.ndim) if axis not in axes]
    shape, num_bins = [leaf.shape[axis] for axis in kept], num_counts(wide=wide)
    group = jnp.zeros(leaf.shape, jnp.int32)  # position of the group along the kept axes
    for axis in kept:
        group = group * leaf.shape[axis] + lax.broadcasted_iota(jnp.int32, leaf.shape, axis)
    # With many lanes, the counts of few elements would use more memory than the leaf.
    num_elements = static_size_or_none(math.prod(leaf.shape[axis] for axis in axes)) or 0
    lanes = 2 ** max(min(lanes, num_elements >> 14).bit_length() - 1, 0)
    position = group * num_bins + _bin_index(leaf, wide=wide)
    if lanes > 1:
        # Neighboring elements, which a GPU processes together, use neighboring lanes.
        indices = [lax.broadcasted_iota(jnp.int32, leaf.shape, axis) for axis in axes]
        lane = functools.reduce(operator.add, indices) & np.int32(lanes - 1)
        position = position * lanes + lane
    counts = jnp.zeros((math.prod(shape) * num_bins * lanes,), integer)
    counts = counts.at[position].add(1, mode="promise_in_bounds")
    counts = counts.reshape((*shape, num_bins, lanes))  # integer[*kept axes, bins, lanes]
    return lax.reduce_sum(counts, [counts.ndim - 1])


def _count_by_matmul(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool
) -> Array:
    """Multiplies one-hot encodings of the two digits of the bins, in base 32."""
    bins, bits = _bin_index(leaf, wide=wide), np.int32(5)
    base = 1 << int(bits)
    shape = (base, *leaf.shape)
    encodings = []
    for digit in (bins >> bits, bins & np.int32(base - 1)):
        broadcast = lax.broadcast_in_dim(digit, shape, range(1, len(shape)))
        is_digit = lax.eq(broadcast, lax.broadcasted_iota(jnp.int32, shape, 0))
        encodings.append(is_digit.astype(jnp.int8))  # int8[32, *leaf.shape]
    summed = tuple(axis + 1 for axis in axes)
    batch = tuple(axis + 1 for axis in range(leaf.ndim) if axis not in axes)
    numbers = ((summed, summed), (batch, batch))
    high, low = encodings
    # int32[*kept axes, 32, 32]
    counts = lax.dot_general(high, low, numbers, preferred_element_type=jnp.int32)
    counts = counts.reshape((*counts.shape[:-2], base**2))[..., : num_counts(wide=wide)]
    return counts.astype(integer)


def _count_by_comparison(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool
) -> Array:
    """Compares elements with all bins."""
    shape = (*leaf.shape, num_counts(wide=wide))
    # int32[*leaf.shape, bins]
    bins = lax.broadcast_in_dim(_bin_index(leaf, wide=wide), shape, range(leaf.ndim))
    is_in_bin = lax.eq(bins, lax.broadcasted_iota(jnp.int32, shape, leaf.ndim))
    return lax.reduce_sum(is_in_bin.astype(integer), axes)


def _bin_index(leaf: Array, *, wide: bool) -> Array:
    """Returns the number of edges below each element, int32."""
    bits = _magnitude_bits(leaf, wide=wide)
    integer, num_digits = bits.dtype.type, jnp.finfo(jnp.float64 if wide else jnp.float32).nmant
    edges = edge_bit_patterns(is_float64=wide)
    is_subnormal_power = (edges < 2**num_digits) & (edges & (edges - integer(1)) == 0)
    is_power = is_subnormal_power | (edges % integer(2**num_digits) == 0)
    # The exponent determines how many of 0, the powers of two and infinity are below the element.
    before = bits - integer(1)
    length = integer(8 * bits.dtype.itemsize) - lax.clz(before)
    index = integer(1) + lax.min(length, integer(num_digits)) + (before >> integer(num_digits))
    index = jnp.where(bits > 0, index, 0).astype(jnp.int32)
    for edge in edges[~is_power]:
        index = index + (bits > edge).astype(jnp.int32)
    return index


def _magnitude_bits(x: Array, *, wide: bool) -> Array:
    """Returns the bits of absolute values as float32, or as float64 if `wide`."""
    integer = jnp.uint64 if wide else jnp.uint32
    if jnp.iscomplexobj(x):
        return _complex_abs_bits(
            _magnitude_bits(x.real, wide=wide), _magnitude_bits(x.imag, wide=wide)
        )
    if x.dtype == jnp.float64:
        return lax.bitcast_convert_type(x, integer) & np.uint64(2**63 - 1)
    if x.dtype == jnp.bfloat16:
        # A conversion of floats may flush subnormal numbers to zero.
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = bits & np.uint32(2**31 - 1)
    if not wide:
        return bits
    normal = lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float64)
    subnormal = bits.astype(jnp.float64) * np.float64(2.0**-149)
    return lax.bitcast_convert_type(jnp.where(bits < 2**23, subnormal, normal), integer)


def _complex_abs_bits(x: Array, y: Array) -> Array:
    """Returns the bits of the absolute values of complex numbers, from the bits of their parts.

    Squares do not overflow or underflow, and subnormal parts are included. Absolute values beyond
    the range of the dtype become the largest number. The result is NaN if a part is NaN.
    """
    integer = x.dtype.type
    info = jnp.finfo(jnp.float64 if x.dtype == jnp.uint64 else jnp.float32)
    real, one = info.dtype.type, integer(1 << info.nmant)
    shift = integer(info.maxexp // 2)
    infinity = integer((2**info.nexp - 1) << info.nmant)
    by = real(2.0 ** (info.minexp - info.nmant + int(shift)))
    large, small = lax.max(x, y), lax.min(x, y)
    is_low, is_high = large < one * shift, large >= infinity - one * shift

    def rescale(bits: Array) -> Array:
        # Multiplies by 2**shift if the larger part is small, and by 2**-shift if it is large.
        subnormal = lax.bitcast_convert_type(bits.astype(real) * by, integer)
        up = jnp.where(bits < one, subnormal, bits + one * shift)
        down = jnp.where(bits > one * shift, bits - one * shift, integer(0))
        bits = jnp.where(is_low, up, jnp.where(is_high, down, bits))
        return lax.bitcast_convert_type(bits, real)

    length = rescale(large)
    ratio = rescale(small) / jnp.where(length > 0, length, real(1))
    length = length * jnp.sqrt(1 + ratio * ratio)
    bits = lax.bitcast_convert_type(length, integer)
    subnormal = lax.round(length / by, lax.RoundingMethod.TO_NEAREST_EVEN).astype(integer)
    low = jnp.where(bits >= one * (shift + integer(1)), bits - one * shift, subnormal)
    high = lax.min(bits + one * shift, infinity - integer(1))
    bits = jnp.where(is_low, low, jnp.where(is_high, high, bits))
    return jnp.where(large >= infinity, large, bits)

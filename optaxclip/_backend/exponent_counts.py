"""Counts the entries of a leaf whose moduli are above thresholds, on any platform.

All is done on bit patterns: those of positive floats are in the order of the floats, and float
arithmetic would take subnormal numbers for 0 on some platforms.
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
"""Counts are kept in two words, the lower of which has this many bits."""


def num_counts(*, wide: bool) -> int:
    """How many counts a group has: one for each part between two thresholds, and at the ends."""
    return len(edge_bit_patterns(is_float64=wide)) + 1


def counts_by_size(
    leaf: Array, axes: tuple[int, ...], size: Any, *, wide: bool, in_one_piece: bool
) -> Array:
    """How many entries have moduli between two thresholds, above one and at most the next.

    Args:
      leaf: real or complex; of 64-bit only if `wide`.
      axes: those over which to count.
      size: how many entries there are over these axes; more than the leaf has if it stands for a
        sparse array. The entries that it lacks are 0.
      wide: whether the thresholds are those of float64.
      in_one_piece: whether it is certain that the compiler does not split the leaf over devices.

    Returns:
      uint32[*other axes, 2, counts]: the lower 16 bits, and the rest.
    """
    known = static_size_or_none(size)
    is_huge = known is None or known >= 2**31
    integer = jnp.dtype(jnp.uint64 if is_huge else jnp.uint32)
    with jax.enable_x64(True) if wide or is_huge else contextlib.nullcontext():
        found = _counts(leaf, axes, integer, wide, in_one_piece or bool(meshes.manual_axes()))
        lacking = size - math.prod(leaf.shape[axis] for axis in axes)
        if static_size_or_none(lacking) != 0:
            found = found.at[..., 0].add(jnp.asarray(lacking, integer))
        low = (found & integer.type(2**WORD_BITS - 1)).astype(jnp.uint32)
        high = (found >> integer.type(WORD_BITS)).astype(jnp.uint32)
        return meshes.stack([low, high], axis=found.ndim - 1)


def propagate_carry(words: Array) -> Array:
    """Counts `[..., 2, counts]`, summed along axis 0, with the lower words below 2**16 again."""
    low, high = (lax.reduce_sum(lax.index_in_dim(words, i, -2), [0]) for i in range(2))
    rest = low & np.uint32(2**WORD_BITS - 1)
    return lax.concatenate([rest, high + (low >> np.uint32(WORD_BITS))], low.ndim - 2)


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _counts(
    leaf: Array, axes: tuple[int, ...], integer: jnp.dtype, wide: bool, is_whole: bool
) -> Array:
    """The counts of the entries that there are, in the way that is best on each platform.

    Adding each entry to the count of its part takes a CPU and a GPU less time than comparing it
    with each threshold. A TPU adds one by one; as compiled by XLA (JAX 0.10.2) for a v5e, a
    product of two arrays of zeros and ones takes a fortieth of the cycles of comparing.
    """

    def strategy(
        count: Callable[..., Array], chunk: int | None, **more: Any
    ) -> Callable[..., Array]:
        count = functools.partial(count, axes=axes, integer=integer, wide=wide, **more)
        return functools.partial(_count_in_chunks, count=count, axes=axes, chunk=chunk)

    chunk = CHUNK_SIZE if is_whole else None
    # Of a leaf that many devices share each has few entries.
    lanes = LANES if is_whole else LANES // 8
    on_cpu, on_gpu = (
        strategy(_count_by_scatter, chunk, lanes=1),
        strategy(_count_by_scatter, None, lanes=lanes),
    )
    is_narrow = not wide and integer == jnp.uint32
    elsewhere = strategy(_count_by_matmul if is_narrow else _count_by_comparison, chunk)
    return lax.platform_dependent(leaf, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=elsewhere)


CHUNK_SIZE = 2**20
"""About how many entries a CPU and a TPU take at a time, so that what is made of them is small."""
LANES = 256
"""On a GPU so many counts of each part are kept, because threads wait to add to the same one."""


def _count_in_chunks(
    leaf: Array, *, count: Callable[[Array], Array], axes: tuple[int, ...], chunk: int | None
) -> Array:
    """The counts of a leaf, about `chunk` entries at a time; of all at once if that is None."""
    size = static_size_or_none(math.prod(leaf.shape))
    if chunk is None or size is None or size <= chunk or not axes:
        return count(leaf)
    axis = max(axes, key=lambda axis: leaf.shape[axis])
    length, step = leaf.shape[axis], max(leaf.shape[axis] * chunk // size, 1)
    step -= step % 128 if step > 128 else 0  # rows of a TPU's memory
    num_chunks = length // step

    def add_chunk(i: Any, counts: Array) -> Array:
        return counts + count(lax.dynamic_slice_in_dim(leaf, i * step, step, axis))

    rest = count(lax.slice_in_dim(leaf, num_chunks * step, length, axis=axis))
    return lax.fori_loop(0, num_chunks, add_chunk, meshes.pvary(rest, meshes.varying_axes(leaf)))


def _count_by_scatter(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool, lanes: int
) -> Array:
    """The counts over some axes: adds each entry to that of its part, in one of several lanes."""
    kept = [axis for axis in range(leaf.ndim) if axis not in axes]
    shape, parts = [leaf.shape[axis] for axis in kept], num_counts(wide=wide)
    group = jnp.zeros(leaf.shape, jnp.int32)
    for axis in kept:
        group = group * leaf.shape[axis] + lax.broadcasted_iota(jnp.int32, leaf.shape, axis)
    # Few entries get few lanes, whose memory would else be more than that of the leaf.
    many = static_size_or_none(math.prod(leaf.shape[axis] for axis in axes)) or 0
    lanes = 2 ** max(min(lanes, many >> 14).bit_length() - 1, 0)
    place = group * parts + _bin_index(leaf, wide=wide)
    if lanes > 1:
        # Neighbouring entries, which a GPU takes at once, get neighbouring lanes.
        of_axes = [lax.broadcasted_iota(jnp.int32, leaf.shape, axis) for axis in axes]
        lane = functools.reduce(operator.add, of_axes) & np.int32(lanes - 1)
        place = place * lanes + lane
    counts = jnp.zeros((math.prod(shape) * parts * lanes,), integer)
    counts = counts.at[place].add(1, mode="promise_in_bounds").reshape(*shape, parts, lanes)
    return lax.reduce_sum(counts, [counts.ndim - 1])


def _count_by_matmul(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool
) -> Array:
    """The same: a part has two digits, and each entry a one at each of its two digits."""
    part, bits = _bin_index(leaf, wide=wide), np.int32(5)
    base = 1 << int(bits)
    digits = [part >> bits, part & np.int32(base - 1)]
    kept = [axis for axis in range(leaf.ndim) if axis not in axes]

    def one_hot(digit: Array) -> Array:
        shape = (base, *digit.shape)
        of_entries = lax.broadcast_in_dim(digit, shape, range(1, len(shape)))
        return lax.eq(of_entries, lax.broadcasted_iota(jnp.int32, shape, 0)).astype(jnp.int8)

    summed, batch = (tuple(axis + 1 for axis in each) for each in (axes, kept))
    numbers = ((summed, summed), (batch, batch))
    high, low = map(one_hot, digits)
    counts = lax.dot_general(high, low, numbers, preferred_element_type=jnp.int32)
    counts = counts.reshape(*counts.shape[:-2], base**2)[..., : num_counts(wide=wide)]
    return counts.astype(integer)


def _count_by_comparison(
    leaf: Array, *, axes: tuple[int, ...], integer: jnp.dtype, wide: bool
) -> Array:
    """The same: compares each entry with each part."""
    shape = (*leaf.shape, num_counts(wide=wide))
    of_entries = lax.broadcast_in_dim(_bin_index(leaf, wide=wide), shape, range(leaf.ndim))
    is_there = lax.eq(of_entries, lax.broadcasted_iota(jnp.int32, shape, leaf.ndim))
    return lax.reduce_sum(is_there.astype(integer), axes)


def _bin_index(leaf: Array, *, wide: bool) -> Array:
    """For each entry the number of its part, which is how many thresholds it is above: int32."""
    bits = _magnitude_bits(leaf, wide=wide)
    integer, digits = bits.dtype.type, jnp.finfo(jnp.float64 if wide else jnp.float32).nmant
    patterns = edge_bit_patterns(is_float64=wide)
    is_subnormal_power = (patterns < 2**digits) & (patterns & (patterns - integer(1)) == 0)
    is_power = is_subnormal_power | (patterns % integer(2**digits) == 0)
    # How many of 0, the powers of two and infinity there are below follows from the exponent.
    before = bits - integer(1)
    length = integer(8 * bits.dtype.itemsize) - lax.clz(before)
    place = integer(1) + lax.min(length, integer(digits)) + (before >> integer(digits))
    place = jnp.where(bits > 0, place, 0).astype(jnp.int32)
    for bound in patterns[~is_power]:
        place = place + (bits > bound).astype(jnp.int32)
    return place


def _magnitude_bits(x: Array, *, wide: bool) -> Array:
    """The bit patterns of the moduli of entries, as float32, or as float64 if `wide`."""
    kind = jnp.uint64 if wide else jnp.uint32
    if jnp.iscomplexobj(x):
        return _complex_abs_bits(
            _magnitude_bits(x.real, wide=wide), _magnitude_bits(x.imag, wide=wide)
        )
    if x.dtype == jnp.float64:
        return lax.bitcast_convert_type(x, kind) & np.uint64(2**63 - 1)
    if x.dtype == jnp.bfloat16:
        # Not converted as a float, which may lose subnormal numbers.
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = bits & np.uint32(2**31 - 1)
    if not wide:
        return bits
    normal = lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.float64)
    subnormal = bits.astype(jnp.float64) * np.float64(2.0**-149)
    return lax.bitcast_convert_type(jnp.where(bits < 2**23, subnormal, normal), kind)


def _complex_abs_bits(x: Array, y: Array) -> Array:
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

    def rescale(bits: Array) -> Array:
        """The number times 2**shift if the larger part is small, times 2**-shift if it is large."""
        of_subnormal = lax.bitcast_convert_type(bits.astype(real) * by, integer)
        up = jnp.where(bits < one, of_subnormal, bits + one * shift)
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
    found = jnp.where(is_low, low, jnp.where(is_high, high, bits))
    return jnp.where(large >= infinity, large, found)

"""Kernels for XLA on CPUs and GPUs, with measurements of their benefit (as of JAX 0.10.2).

A sum in float64 covers the range of the sums at all three scales, and is exact for float32 norms.

On CPUs, XLA calls a library for plain sums and compiles other reductions itself, which makes them 5
to 10 times slower. A sum in float64 that uses this library takes 1.5 to 2 times as long as in
float32. Three sums are only as fast as one sum on accelerators, where memory bandwidth is the
limit.

On GPUs, a variadic reduction over all axes of a leaf is one kernel. However, XLA materializes the
summands of a variadic reduction over some of the axes, and runs three plain sums as several
kernels. If the compiler shards the leaf, a variadic reduction first gathers it on all devices. One
sum in float64 avoids this. For a transformer with 4 layers of 2048 units on an H100, AGC reads the
gradients 2.02 times, instead of 4.05 times with three sums. On an automatic mesh of eight devices,
the global norm adds 70 kernels (62 in Optax), and three sums would add about 100 more.

An H100 computes in float64 at half the speed of float32, so all float32 norms use this sum there.
It uses 7 instructions per element (13 for three sums, 5 in Optax) and compiles as fast as Optax
(three sums take 1.3 times as long). On GPUs with slow float64, such as the B300, the sum may take
longer than reading the leaf, so they use it only where three sums have the problems above.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import cast_elements, static_size_or_none
from optaxclip.norms import Norm, l2

_MAX_FOLDED_COLUMNS = 1536
"""The number of columns from which XLA does not materialize converted elements on an H100."""

_SMALL, _BATCH_SIZE = 2**16, 16
"""Leaves with fewer than `_SMALL` elements share a kernel, in batches of up to `_BATCH_SIZE`."""


@dataclasses.dataclass(frozen=True)
class Float64Sums:
    """Sums in float64 for a platform, for calls with 64-bit types enabled.

    Attributes:
      sums_in_float64: Sums the powers of the elements of leaves. Its keywords are `axes`, `groups`
        (the group numbers of the leaves), `norm`, and `in_one_piece`.
      sum_leading_axis: Sums an array along its first axis.
    """

    sums_in_float64: Callable[..., list[Array]]
    sum_leading_axis: Callable[[Array], Array]


def _sum_on_cpu(
    leaves: Sequence[Array],
    *,
    axes: Sequence[tuple[int, ...]],
    groups: Sequence[int],
    norm: Norm,
    in_one_piece: bool,
) -> list[Array]:
    del groups, in_one_piece
    return [_sum_powers_on_cpu(x, over, norm) for x, over in zip(leaves, axes, strict=True)]


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum_powers_on_cpu(leaf: Array, axes: tuple[int, ...], norm: Norm) -> Array:
    # The L2 norm converts different values than the other norms, because XLA on CPUs materializes a
    # shared conversion. All statistics of a step then take six times as long (as of JAX 0.10.2).
    is_direct = norm.degree == 2 or jnp.iscomplexobj(leaf)
    powers = norm.map(cast_elements(leaf, jnp.float64 if is_direct else jnp.float32))
    if norm.degree == 0:
        # XLA on CPUs materializes comparisons (as of JAX 0.10.2), so they use one byte each.
        powers = (powers != 0).astype(jnp.int8)
    return lax.reduce_sum(powers.astype(jnp.float64), axes)


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames="axes")
def max_abs_on_cpu(x: Array, *, axes: tuple[int, ...]) -> Array:
    """Returns the largest absolute value of float32 elements, or NaN if an element is NaN."""
    # XLA on CPUs computes extremes of floats with a library, four times as fast as extremes of
    # integers, but ignores NaN (as of JAX 0.10.2). The sum that detects NaN is shared with the L2
    # norm. Absolute values are not computed, because XLA would materialize them.
    largest = lax.reduce(x, jnp.float32(0), lax.max, axes)
    smallest = lax.reduce(x, jnp.float32(0), lax.min, axes)
    with jax.enable_x64(True):
        has_nan = jnp.isnan(lax.reduce_sum(l2.map(cast_elements(x, jnp.float64)), axes))
    return jnp.where(has_nan, jnp.nan, lax.max(largest, lax.neg(smallest)))


def _sum_on_gpu(
    leaves: Sequence[Array],
    *,
    axes: Sequence[tuple[int, ...]],
    groups: Sequence[int],
    norm: Norm,
    in_one_piece: bool,
) -> list[Array]:
    """Sums powers, and adds small leaves of a group with equal shapes before they are reduced."""
    # The result of the first of these leaves is their total, and the other results are 0. For 16
    # leaves, this uses 2 kernels instead of 16.
    batches = collections.defaultdict[Any, list[int]](list)
    for i, x in enumerate(leaves):
        is_small = (static_size_or_none(x.size) or _SMALL) < _SMALL
        is_small = is_small and in_one_piece and len(axes[i]) == x.ndim
        batches[(groups[i], x.shape, x.dtype) if is_small else i].append(i)
    sums = [jnp.zeros(())] * len(leaves)
    for members in batches.values():
        for start in range(0, len(members), _BATCH_SIZE):
            first, batch = members[start], members[start : start + _BATCH_SIZE]
            similar = tuple(leaves[i] for i in batch)
            sums[first] = _sum_powers_on_gpu(similar, axes[first], norm, in_one_piece)
    return sums


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sum_powers_on_gpu(
    leaves: tuple[Array, ...], axes: tuple[int, ...], norm: Norm, in_one_piece: bool
) -> Array:
    """Sums the powers of all elements of leaves with equal shapes and dtypes."""
    dtype = leaves[0].dtype
    # `abs` does not change powers, but avoids intermediate results. Without it, 256 per-example
    # gradients on an H100 use 31.8 reads and writes instead of 29.6 (as of JAX 0.10.2).
    wide = (
        jnp.abs(leaf).astype(jnp.float64)
        if dtype == jnp.float32
        else cast_elements(leaf, jnp.float64)
        for leaf in leaves
    )
    # The generator keeps the conversion of a leaf next to its powers.
    powers = functools.reduce(lax.add, [norm.map(x) for x in wide])  # f64[*leaf.shape]
    if jnp.finfo(dtype).bits < 32:
        powers = _fold_rows(powers, axes, in_one_piece)
    return lax.reduce_sum(powers, axes)


def _fold_rows(x: Array, axes: tuple[int, ...], in_one_piece: bool) -> Array:
    """Sums groups of up to 256 elements along the last reduced axes, if there are few columns."""
    # Otherwise, XLA materializes the converted elements of low-precision dtypes (as of JAX 0.10.2).
    # AGC of bfloat16 matrices `[4096, 1024]` then moves 18 times the size of the gradients, not 2.1
    # times.
    last = max(axes, default=-1)
    columns = x.shape[last + 1 :]
    if static_size_or_none(x.size) is None or not (axes and columns):
        return x
    if math.prod(columns) >= _MAX_FOLDED_COLUMNS:
        return x
    first = last
    # Adjacent axes count as one axis unless they may be sharded, because convolutions have few
    # channels. AGC of a ResNet-50 then moves 2.28 times the size of the gradients, not 2.46 times.
    while in_one_piece and first - 1 in axes:
        first -= 1
    front, count = x.shape[:first], math.prod(x.shape[first : last + 1])
    # Partial sums of fewer than 64 elements would use too much memory. The partial sums of a leaf
    # that may be sharded must be a multiple of eight devices.
    least, multiple = (min(count, 64), 1) if in_one_piece else (8, 8)
    size = max((n for n in range(least, 257) if count % (multiple * n) == 0), default=1)
    if size == 1:
        return x
    rows = x.reshape((*front, count // size, size, *columns))  # [*front, sums, size, *columns]
    partial_sums = lax.reduce_sum(rows, [first + 1])  # [*front, count // size, *columns]
    shape = (*front, *(1,) * (last - first), count // size, *columns)
    return lax.optimization_barrier(partial_sums.reshape(shape))


# XLA on CPUs repeats a plain sum for all uses of the result, but not a cumulative sum (as of JAX
# 0.10.2). With `jnp.sum`, clipping 200 leaves by their global norm takes twice as long to compile.
CPU_SUMS = Float64Sums(_sum_on_cpu, lambda x: lax.cumsum(x)[-1])
GPU_SUMS = Float64Sums(_sum_on_gpu, functools.partial(lax.reduce_sum, axes=[0]))


@functools.cache
def has_fast_float64() -> bool:
    """Returns `True` if a local GPU computes in float64 at half the speed of float32."""
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return False
    # Data center GPUs from P100 to B200. Consumer GPUs and the B300 are much slower in float64.
    return gpu.compute_capability in ("6.0", "7.0", "8.0", "9.0", "10.0")


def force_row_major_on_cpu(leaves: list[Array]) -> list[Array]:
    """Stores leaves in the order of their first axis."""
    # Otherwise, XLA on CPUs stores gradients of weights, which are outer products, with a different
    # order of axes, and copies them in all branches that use them (as of JAX 0.10.2).
    rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = lax.optimization_barrier(rows)  # [examples, elements]
    return [row.reshape(leaf.shape) for row, leaf in zip(rows, leaves, strict=True)]


def scale_bfloat16_on_cpu(x: Array, power: Array, ratio: Array, *, strict: bool) -> Array:
    """Computes `x * power * ratio` on the bit patterns of bfloat16."""
    # XLA on CPUs materializes conversions such as `x.astype(jnp.float32)`, but fuses operations on
    # bits (as of JAX 0.10.2). With conversions, clipping in a step of AdamW takes twice as long.
    half = jnp.uint32(16)
    wide = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << half  # bits of float32
    product = lax.bitcast_convert_type(wide, jnp.float32) * power * ratio
    bits = lax.bitcast_convert_type(product, jnp.uint32)
    if not strict:
        # Rounds to the nearest number, and ties to the even number.
        bits = bits + jnp.uint32(0x7FFF) + ((bits >> half) & jnp.uint32(1))
    # A NaN with payload bits only in the lower half would become infinity.
    bits = jnp.where(jnp.isnan(product), jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type((bits >> half).astype(jnp.uint16), jnp.bfloat16)


@custom_jvp()
def select_bfloat16_on_cpu(flag: Array, x: Array, y: Array) -> Array:
    """Selects `x` where `flag` is True, and `y` otherwise. The flags broadcast to `x`."""
    # XLA on CPUs converts bfloat16 for `lax.select`, which loses subnormals (as of JAX 0.10.2).
    bits, other_bits = (lax.bitcast_convert_type(array, jnp.uint16) for array in (x, y))
    selected = lax.select(jnp.broadcast_to(flag, x.shape), bits, other_bits)
    return lax.bitcast_convert_type(selected, x.dtype)


@select_bfloat16_on_cpu.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (flag, x, y), (_, dx, dy) = primals, tangents
    return select_bfloat16_on_cpu(flag, x, y), jnp.where(flag, dx, dy)

"""Sums of powers of entries, for one leaf (with code for each platform) and for groups.

In float32 a sum of squares is exact up to rounding for norms from 2**-31 to 2**64, whatever the
number of entries. For smaller norms the entries are multiplied by 2**88 before they are squared,
for larger ones by 2**-88.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.devices as devices
import optaxclip._engine.gpu as gpu
from optaxclip._base.devices import Axes
from optaxclip._base.grouping import Group
from optaxclip._base.numerics import fixed_size, select
from optaxclip._base.trees import data_of
from optaxclip._engine.entries import entries, times
from optaxclip._engine.groups import Groups
from optaxclip._engine.placement import Placement
from optaxclip.norms import Norm

AtScales = tuple[Array, ...]
"""For each scale the sum of powers of a leaf, of a group, or of an array of groups."""


def distance(dtype: jax.typing.DTypeLike) -> float:
    """The power of two between two scales: 2**88 in float32, 2**704 in float64."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


def scales(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """The powers of two by which entries are multiplied before the norm maps them.

    The first is 1; the second keeps sums from overflow; a third keeps squares from underflow.
    Counts of entries (degree 0) need only the scale 1.
    """
    up = distance(dtype)
    by_degree: dict[float, tuple[float, ...]] = {0: (1.0,), 1: (1.0, 1 / up), 2: (1.0, 1 / up, up)}
    return by_degree[norm.degree]


# Compiled by themselves so that they are traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def at_once(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> AtScales:
    """The sums at all scales in one variadic reduction, which a GPU runs as one kernel."""
    powers, axes = _summands(leaf, axes, norm, dtype)
    return tuple(lax.reduce(powers, (dtype.type(0),) * len(powers), _added, axes))


@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def one_by_one(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> AtScales:
    """The sums at all scales, as one plain sum per scale.

    A TPU computes several in one pass where their results are small, and the compiler can split
    them over devices.
    """
    powers, axes = _summands(leaf, axes, norm, dtype)
    return tuple(lax.reduce_sum(x, axes) for x in powers)


def _summands(
    leaf: Any, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> tuple[AtScales, tuple[int, ...]]:
    """The summands at each scale, and the axes to sum over."""
    x = entries(leaf, dtype)
    if fixed_size(x.size) == 1:
        # A zero is appended: for a single number XLA (JAX 0.10.2) computes
        # `x * x * (scale * scale)`, whose second product overflows.
        x = devices.stack([x, jnp.zeros_like(x)])
        axes = (0, *(axis + 1 for axis in axes))
    powers = (norm.map(times(x, by)) for by in scales(norm, dtype))
    # A norm's `map` may return several summands per entry (`monitor/cosines.py`).
    return tuple(jax.tree.leaves(tuple(powers))), axes


def _added(sums: AtScales, more: AtScales) -> AtScales:
    return tuple(x + y for x, y in zip(sums, more, strict=True))


def at_scales(
    leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, groups: Groups
) -> AtScales:
    """The sums of a leaf at all scales, on any platform.

    With norms in float32, a leaf that is summed over all axes, and is whole or a shard inside
    `shard_map`, takes one variadic reduction. Any other takes one plain sum per scale; on a GPU,
    one sum in float64. With norms in float64 each leaf takes plain sums.
    """
    options = {"axes": axes, "norm": norm, "dtype": dtype}
    if dtype != jnp.float32:
        return one_by_one(leaf, **options)
    over_all = len(axes) == np.ndim(data_of(leaf))
    if over_all and (groups.placement.in_one_piece or devices.manual_axes()):
        return at_once(leaf, **options)
    return _by_platform(leaf, axes, norm, groups.placement.in_one_piece)


# Compiled by itself so that all branches are traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _by_platform(leaf: Any, axes: tuple[int, ...], norm: Norm, in_one_piece: bool) -> AtScales:
    """The float32 sums by `gpu.sum_of_columns` on a GPU, by `one_by_one` elsewhere."""
    dtype = jnp.dtype(jnp.float32)
    pieces = {"scales": scales(norm, dtype), "in_one_piece": in_one_piece}
    on_gpu = functools.partial(gpu.sum_of_columns, axes=axes, norm=norm, **pieces)
    elsewhere = functools.partial(one_by_one, axes=axes, norm=norm, dtype=dtype)
    return lax.platform_dependent(leaf, cuda=on_gpu, rocm=on_gpu, default=elsewhere)


# Compiled by itself so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("by", "axes", "dtype"))
def largest_bits(leaf: Any, *, by: float, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The largest modulus, times a constant, as an integer.

    The bits of floats of at least 0 are in the order of the floats, with NaN above infinity. So the
    maximum over devices keeps a NaN, which `lax.pmax` of floats loses on a CPU (JAX 0.10.2).
    """
    x = times(entries(leaf, dtype), by)
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    # The mask clears the sign bit, which a NaN may have.
    bits = lax.bitcast_convert_type(jnp.abs(x), integer) & integer.type(jnp.iinfo(integer).max)
    return lax.reduce(bits, integer.type(0), lax.max, axes)


def in_range(found: AtScales) -> tuple[Array, Array]:
    """The sum of each group at the scale at which it neither overflowed nor lost small summands.

    Returns:
      The sums, and the powers of two by which to multiply the norms computed from them.
    """
    plain, *others = found
    if not others:
        return plain, jnp.ones_like(plain)
    down, *up = others
    info, scale = jnp.finfo(plain.dtype), distance(plain.dtype)
    is_high = ~(plain <= info.max)
    total = select(is_high, down, plain)
    unit = select(is_high, scale, jnp.ones_like(plain))
    if up:
        is_low = (plain < lowest(plain.dtype)) & (up[0] > 0)
        total, unit = select(is_low, up[0], total), select(is_low, 1 / scale, unit)
    return total, unit


VERY_MANY = 2.0**40
"""An upper bound on the number of entries that one sum takes."""


def lowest(dtype: jax.typing.DTypeLike) -> float:
    """The bound below which summands that underflowed may matter to a sum of positive numbers."""
    info = jnp.finfo(dtype)
    return VERY_MANY * float(info.tiny) / float(info.eps)


def of_groups(
    parts: Sequence[AtScales],
    groups: Groups,
    *,
    by_max: bool = False,
    add: Callable[[Array], Array] = lambda x: lax.reduce_sum(x, [0]),
) -> AtScales:
    """From the sums of leaves to those of groups: over a group's leaves, then over devices.

    Args:
      parts: for each leaf the sums of what this device holds.
      groups: the groups.
      by_max: whether the largest counts, not the sum.
      add: how the sums of a group's leaves are added along the first axis.

    Returns:
      The sums of all groups at all scales.
    """
    placement = groups.placement
    parts = [_on_all_devices(part, placement) for part in parts]
    over = Axes().union(*(placement.axes_of(i) for i in range(len(parts))))
    # A tree without leaves has one sum, of nothing.
    like = parts[0] if parts else (jnp.zeros(()),)

    def of_group(k: int, group: Group) -> Array:
        if not group.members:
            return jnp.zeros(group.shape, like[k].dtype)
        spread = [(i, placement.spread(i, parts[i][k], group.shape)) for i in group.members]
        shares = [_share(x, over - placement.axes_of(i), by_max) for i, x in spread]
        if len(shares) == 1:
            return shares[0]
        # In one operation, because XLA (JAX 0.10.2) repeats a chain of additions for each use of
        # its result.
        rows = devices.stack(shares)
        return lax.reduce_max(rows, [0]) if by_max else add(rows)

    sums = tuple(
        groups.pack([of_group(k, group) for group in groups.grouping.groups])
        for k in range(len(like))
    )
    sums = _over_devices(sums, over, by_max) if over else sums
    chex.assert_shape(sums, groups.shape)
    return sums


def _on_all_devices(sums: AtScales, placement: Placement) -> AtScales:
    """The sums of a leaf, copied to all devices in one operation.

    The compiler would leave them split as the leaf is.
    """
    if placement.automatic_mesh is None or sums[0].ndim == 0:
        return sums
    return tuple(placement.on_all_devices(devices.stack(sums)))


def _share(of_leaf: Array, replicated: Axes, by_max: bool) -> Array:
    """What this device adds to a sum over devices, or to a maximum, for one of its leaves.

    Where several devices have the same leaf, its sum is divided by their number, and so counts
    once.
    """
    replicas = 1 if by_max else devices.num_devices(replicated)
    return of_leaf if replicas == 1 else of_leaf / replicas


def _over_devices(sums: AtScales, axes: Axes, by_max: bool) -> AtScales:
    """The sums over the devices along these axes, at all scales in one collective."""
    combine = devices.largest if by_max else devices.sum_over_devices
    varying = axes & devices.manual_axes()
    found = combine(devices.stack([devices.vary(x, varying) for x in sums]), axes)
    return tuple(found[k] for k in range(len(sums)))

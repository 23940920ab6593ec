"""From the sums of leaves to those of groups, over all devices, and the scale that is in range."""

from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.grouping import Group
from optaxclip._base.numerics import select
from optaxclip._border.devices import Axes
from optaxclip._border.leaf_sums import AtScales, distance
from optaxclip._engine.groups import Groups


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
    parts = [placement.together(part) for part in parts]
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

"""Norms of groups that are split over devices: local totals, one collective, the same norm on all.

Where a leaf is replicated along an axis over which others of its group are split, its total is
divided by the number of replicas, so that one sum over all devices counts everything once. Totals
travel at three scales, so that no second collective is needed for those that leave the range.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

import optaxclip._base.devices as collectives
from optaxclip._base.devices import Axes
from optaxclip._base.sums import largest_of
from optaxclip._engine.alike import alike
from optaxclip._engine.groups import Groups, at_most
from optaxclip._engine.placement import of_slots
from optaxclip._engine.rescaled import is_any_out, norms_of
from optaxclip.norms import Norm
from optaxclip.scopes import Slot


def norms_across(groups: Groups) -> tuple[list[Array], list[Array]]:
    """The norms of all blocks over all devices, as mantissas and units.

    Args:
      groups: what this device holds of the leaves.
    """
    return norms_of(groups, _over_devices, _of_three_scales)


def _of_three_scales(groups: Groups) -> tuple[list[Array], list[Array]]:
    scaled = _over_devices(groups, _at_three_scales(groups), scales=(3,))
    blocks = zip(scaled, groups.least(), strict=True)
    chosen = [_at_best_scale(groups.norm, *block) for block in blocks]
    return groups.norms([total for total, _ in chosen]), [unit for _, unit in chosen]


def _at_three_scales(groups: Groups) -> list[Array]:
    """For each leaf `[3, ...]`, its total of entries as they are, divided and multiplied by far."""
    totals = groups.parts()
    sizes = [at_most(groups.sizes[slot]) for slot in groups.grouping.slot_of_leaf()]
    least = [groups.norm.least(size, groups.dtype) for size in sizes]
    scales = [groups.norm.rescaling(*pair) for pair in zip(totals, least, strict=True)]
    again = list(totals)
    # What a branch returns varies wherever its condition does: one for each way of being split.
    for some in alike([collectives.varying_axes(total) for total in totals]):
        found = _rescued(groups, some, scales, totals)
        for i, total in zip(some, found, strict=True):
            again[i] = total
    return [_spread(groups.norm, *leaf) for leaf in zip(again, scales, strict=True)]


def _rescued(
    groups: Groups, some: list[int], scales: list[Array], totals: list[Array]
) -> list[Array]:
    """The totals of some leaves, of entries multiplied by the scales if one of these is not 1."""
    plain = [totals[i] for i in some]
    own = [scales[i] for i in some]
    return lax.cond(is_any_out(own), lambda: groups.some_scaled(some, own, plain), lambda: plain)


def _spread(norm: Norm, total: Array, scale: Array) -> Array:
    """`[3, ...]`, a total of entries that were multiplied by `scale`, at 1, 1 / far and far.

    Where it leaves the range at one of them it is infinite or 0 there, and another will be used.
    """
    plain = jnp.where(
        scale < 1, norm.at_unit(total, up=True), jnp.where(scale > 1, norm.at_unit(total), total)
    )
    down = jnp.where(scale < 1, total, norm.at_unit(plain))
    up = jnp.where(scale > 1, total, norm.at_unit(plain, up=True))
    return jnp.stack([plain, down, up])


def _at_best_scale(norm: Norm, scaled: Array, least: Any) -> tuple[Array, Array]:
    """The totals of a block and their units, from the totals at three scales."""
    plain, down, up = scaled
    scale = norm.rescaling(plain, least)
    return jnp.where(scale == 1, plain, jnp.where(scale < 1, down, up)), norm.unit_of(scale)


def _over_devices(
    groups: Groups, parts: list[Array], *, scales: tuple[int, ...] = (), by_max: bool = False
) -> list[Array]:
    """One total for each block from the local ones of each leaf, single groups in one collective.

    Args:
      groups: the leaves.
      parts: for each leaf, its totals `[*scales, ...]`.
      scales: the leading axes.
      by_max: whether totals combine by maximum; by sum otherwise.
    """
    slots, split = groups.grouping.slots, groups.split
    combine = collectives.largest if by_max else collectives.total
    join = largest_of if by_max else groups.norm.join
    over = zip(slots, of_slots(groups.grouping, split), strict=True)
    everywhere = Axes().union(*(axes for slot, axes in over if slot.shape == ()))

    def of_slot(slot: Slot) -> Array:
        if not slot.members:
            return jnp.zeros((*scales, *slot.shape), groups.dtype)
        if slot.shape != ():
            (i,) = slot.members
            return combine(parts[i], split[i])
        leaves = ((parts[i], everywhere - split[i]) for i in slot.members)
        return join([_shared(*leaf, everywhere, by_max=by_max) for leaf in leaves])

    def is_pending(slot: Slot) -> bool:
        return slot.shape == () and bool(slot.members)

    found = groups.blocks.gather([of_slot(slot) for slot in slots])
    pending = [any(is_pending(slots[n]) for n in block) for block in groups.blocks.slots]
    return [combine(x, everywhere) if more else x for x, more in zip(found, pending, strict=True)]


def _shared(x: Array, replicated: Axes, everywhere: Axes, *, by_max: bool) -> Array:
    """This device's share of a total that is replicated along some axes."""
    share = x if by_max else x / collectives.num_devices(replicated)
    return collectives.vary(share, everywhere & collectives.manual_axes())

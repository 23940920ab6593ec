"""What a clip reports: the record of one step, with running counts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._blocks import Blocks
from optaxclip._collectives import Axes, largest, num_devices, total
from optaxclip._placement import kept_over, of_slots
from optaxclip._scale import Multiplier
from optaxclip._types import ClipInfo, NormTree
from optaxclip.scopes import Grouping


def initial_info(name: str, grouping: Grouping, dtype: jnp.dtype) -> ClipInfo:
    """The record before the first step: no limit, nothing clipped.

    Args:
      name: the transformation's name.
      grouping: the groups.
      dtype: of the norms.
    """
    shape = () if grouping.layout == "scalar" else (len(grouping.names),)
    return ClipInfo(
        name={name: ()},
        names=dict.fromkeys(grouping.names, ()),
        norm=jnp.zeros(shape, dtype),
        limit=jnp.full(shape, jnp.inf, dtype),
        factor=jnp.ones(shape, dtype),
        fraction=jnp.zeros(shape, dtype),
        num_clipped=jnp.zeros(shape, jnp.int32),
        num_nonfinite=jnp.zeros(shape, jnp.int32),
    )


def updated_info(
    old: ClipInfo,
    blocks: Blocks,
    norms: NormTree,
    limits: NormTree,
    multipliers: Sequence[Multiplier],
    bad: Sequence[Array],
) -> ClipInfo:
    """The record after a step.

    Args:
      old: the record before it.
      blocks: the groups; those without leaves at this step keep their record.
      norms: as limit rules see them.
      limits: the norms above which to act, likewise.
      multipliers: what the groups were multiplied by, for each block.
      bad: which groups are not finite, likewise.
    """
    grouping = blocks.grouping
    if not grouping.slots:
        return old
    factors = blocks.pack([by.factor for by in multipliers])
    is_bad = blocks.pack([flags.astype(jnp.float32) for flags in bad])
    columns = jax.tree.map(_columns, norms, limits, factors, is_bad)
    if grouping.layout == "dict":
        slots = zip(grouping.slots, of_slots(grouping, kept_over(grouping)), strict=True)
        summaries = [_summary(axes, *columns[slot.names[0]]) for slot, axes in slots]
        columns = [jnp.stack(column) for column in zip(*summaries, strict=True)]
    columns = [column.astype(old.norm.dtype) for column in columns]
    norm, limit, factor, clipped, nonfinite = _where_present(grouping, columns, old)
    return old._replace(
        norm=norm,
        limit=limit,
        factor=factor,
        fraction=clipped,
        num_clipped=old.num_clipped + (clipped > 0).astype(jnp.int32),
        num_nonfinite=old.num_nonfinite + (nonfinite > 0).astype(jnp.int32),
    )


def _columns(norm: Array, limit: Array, factor: Array, bad: Array) -> tuple[Array, ...]:
    limit = limit.astype(norm.dtype)
    clipped = (norm > limit) & ~(bad > 0)
    return norm, limit, factor, clipped.astype(norm.dtype), bad


def _where_present(grouping: Grouping, new: Sequence[Array], old: ClipInfo) -> list[Array]:
    """The new columns, with the old ones and no event for groups without leaves."""
    present = [bool(slot.members) for slot in grouping.slots for _ in slot.names]
    if grouping.layout == "scalar" or all(present):
        return list(new)
    nothing = jnp.zeros_like(old.fraction)
    before = (old.norm, old.limit, old.factor, nothing, nothing)
    return [jnp.where(jnp.array(present), *pair) for pair in zip(new, before, strict=True)]


def _summary(
    axes: Axes, norm: Array, trigger: Array, factor: Array, clipped: Array, bad: Array
) -> tuple[Array, ...]:
    """One scalar per column for a leaf of many groups: those of its worst group on any device."""
    # Where the limit is 0 or the norm is not finite, nothing is worse.
    usable = (trigger > 0) & jnp.isfinite(norm)
    ratio = jnp.where(usable, norm / jnp.where(usable, trigger, 1), jnp.inf)
    worst = ratio == largest(jnp.max(ratio, initial=0), axes)

    def of_worst(x: Array) -> Array:
        return largest(jnp.max(jnp.where(worst, x, -jnp.inf), initial=-jnp.inf), axes)

    share = total(jnp.sum(clipped), axes) / (max(clipped.size, 1) * num_devices(axes))
    any_bad = largest(jnp.max(bad, initial=0), axes)
    return of_worst(norm), of_worst(trigger), of_worst(factor), share, any_bad

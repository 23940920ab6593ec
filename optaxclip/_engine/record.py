"""What a clip reports: the record of one step, with running counts."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array

from optaxclip._base.counters import increased
from optaxclip._base.devices import Axes, largest, num_devices, total
from optaxclip._base.types import ClipInfo
from optaxclip._engine.blocks import Blocks
from optaxclip._engine.placement import kept_over, of_slots
from optaxclip._engine.scale import Multiplier
from optaxclip.scopes import Grouping

Columns: TypeAlias = tuple[Array, Array, Array, Array, Array]
"""Norms, limits, factors, which were clipped and which are not finite, as numbers."""


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
    norms: Sequence[Array],
    limits: Sequence[Array],
    multipliers: Sequence[Multiplier],
    bad: Sequence[Array],
) -> ClipInfo:
    """The record after a step.

    Args:
      old: the record before it.
      blocks: the groups; those without leaves at this step keep their record.
      norms: for each block.
      limits: the norms above which to act, for each block.
      multipliers: what the groups were multiplied by, for each block.
      bad: which groups are not finite, for each block.
    """
    grouping = blocks.grouping
    if not grouping.slots:
        return old
    factors = [by.factor for by in multipliers]
    columns = [_columns(*block) for block in zip(norms, limits, factors, bad, strict=True)]
    if grouping.layout == "dict":
        columns = _summaries(blocks, columns)
    rows = [blocks.by_name(column) for column in zip(*columns, strict=True)]
    rows = [row.astype(old.norm.dtype) for row in rows]
    norm, limit, factor, clipped, nonfinite = _where_present(grouping, rows, old)
    return old._replace(
        norm=norm,
        limit=limit,
        factor=factor,
        fraction=clipped,
        num_clipped=increased(old.num_clipped, clipped > 0),
        num_nonfinite=increased(old.num_nonfinite, nonfinite > 0),
    )


def _columns(norm: Array, limit: Array, factor: Array, bad: Array) -> Columns:
    # Of a leaf that is missing, limits may know more groups than norms do.
    norm, limit, factor, bad = jnp.broadcast_arrays(norm, limit.astype(norm.dtype), factor, bad)
    clipped = (norm > limit) & ~bad
    return norm, limit, factor, clipped.astype(norm.dtype), bad.astype(norm.dtype)


def _where_present(grouping: Grouping, new: Sequence[Array], old: ClipInfo) -> list[Array]:
    """The new columns, with the old ones and no event for groups without leaves."""
    present = [bool(slot.members) for slot in grouping.slots for _ in slot.names]
    if grouping.layout == "scalar" or all(present):
        return list(new)
    nothing = jnp.zeros_like(old.fraction)
    before = (old.norm, old.limit, old.factor, nothing, nothing)
    return [jnp.where(jnp.array(present), *pair) for pair in zip(new, before, strict=True)]


def _summaries(blocks: Blocks, columns: list[Columns]) -> list[Columns]:
    """Columns with one number for each leaf: those of its worst group on any device."""
    over = of_slots(blocks.grouping, kept_over(blocks.grouping))
    return [_summary(over[slot], *stacks) for slot, stacks in blocks.by_shape(columns)]


def _summary(over: Axes, *columns: Array) -> Columns:
    """The same of leaves alike, whose groups are split over these axes of the mesh.

    Each column is `[leaves, *groups]`.
    """
    norm, trigger, factor, clipped, bad = columns
    axes = tuple(range(1, norm.ndim))
    if not axes:
        return norm, trigger, factor, clipped, bad
    if 0 in norm.shape:
        nothing = jnp.zeros(len(norm), norm.dtype)
        return nothing, nothing + jnp.inf, nothing + 1, nothing, nothing
    # Where the limit is 0 or the norm is not finite, nothing is worse.
    usable = (trigger > 0) & jnp.isfinite(norm)
    ratio = jnp.where(usable, norm / jnp.where(usable, trigger, 1), jnp.inf)
    worst = ratio == largest(jnp.max(ratio, axes, initial=0, keepdims=True), over)

    found = jnp.stack([*(jnp.where(worst, x, -jnp.inf) for x in (norm, trigger, factor)), bad])
    found = largest(jnp.max(found, tuple(axis + 1 for axis in axes), initial=-jnp.inf), over)
    share = total(jnp.sum(clipped, axes), over) / (math.prod(norm.shape[1:]) * num_devices(over))
    return found[0], found[1], found[2], share, found[3]

"""Record: what a step did comes in, its `ClipInfo` with running counts goes out.

in   for the norms of all groups, as `Grouping.joined` has them: norms, limits, factors, flags
out  one number for each name of the grouping, `[]` or `[names]`
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.counters import increased
from optaxclip._base.devices import Axes, largest, num_devices, total
from optaxclip._base.grouping import Grouping
from optaxclip._base.types import ClipInfo
from optaxclip._engine.placement import kept_over, of_groups

Columns: TypeAlias = tuple[Array, ...]
"""Norms, limits, factors, which were clipped and which are not finite, as numbers of one shape."""


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
    grouping: Grouping,
    norms: Sequence[Array],
    limits: Sequence[Array],
    factors: Sequence[Array],
    bad: Sequence[Array],
) -> ClipInfo:
    """The record after a step.

    Args:
      old: the record before it.
      grouping: the groups; those without leaves at this step keep their record.
      norms: before the step.
      limits: the norms above which to act.
      factors: what the groups were multiplied by.
      bad: which groups are not finite.
    """
    if not grouping.groups:
        return old
    columns = [_columns(*row) for row in zip(norms, limits, factors, bad, strict=True)]
    if grouping.layout == "dict":
        rows = _summaries(grouping, columns)
    else:
        rows = [grouping.tree(column) for column in zip(*columns, strict=True)]
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
    present = [bool(group.members) for group in grouping.groups for _ in group.names]
    if grouping.layout == "scalar" or all(present):
        return list(new)
    nothing = jnp.zeros_like(old.fraction)
    before = (old.norm, old.limit, old.factor, nothing, nothing)
    return [jnp.where(jnp.array(present), *pair) for pair in zip(new, before, strict=True)]


def _summaries(grouping: Grouping, columns: list[Columns]) -> list[Array]:
    """Columns with one number for each leaf: those of its worst group on any device."""
    over = of_groups(grouping, kept_over(grouping))
    rows = [_rows(*column) for column in columns]
    if grouping.flat:
        # Stored once, or they would be computed anew for each leaf.
        rows = lax.optimization_barrier(rows)
    parted = grouping.parted(rows)
    # Leaves alike in one step where they lie in one piece, so that few have to be compiled.
    alike: dict[Any, list[int]] = {}
    for n, group in enumerate(grouping.groups):
        alike.setdefault(group.shape if grouping.flat else n, []).append(n)
    found = [
        _worst(over[some[0]], jnp.stack([parted[n] for n in some], axis=1))
        for some in alike.values()
    ]
    order = np.argsort(np.concatenate(list(alike.values())))
    return [column[order] for column in (jnp.concatenate(row) for row in zip(*found, strict=True))]


def _rows(norm: Array, limit: Array, factor: Array, clipped: Array, bad: Array) -> Array:
    """`[rows, *groups]`: how bad a group is, and what to know of the worst, to be maximized."""
    # Nothing is worse than a norm that is not finite, and then one whose limit is 0.
    most = jnp.finfo(norm.dtype).max
    without = jnp.where(norm > 0, most, 0).astype(norm.dtype)
    ratio = jnp.where(limit > 0, norm / jnp.where(limit > 0, limit, 1), without)
    ratio = jnp.where(jnp.isfinite(norm), jnp.minimum(ratio, most), jnp.inf)
    numbers = [jnp.where(jnp.isnan(x), -jnp.inf, x) for x in (norm, limit, -factor)]
    no_number = [jnp.isnan(x).astype(norm.dtype) for x in (norm, factor)]
    return jnp.stack([ratio, *numbers, *no_number, bad, clipped])


def _worst(over: Axes, rows: Array) -> Columns:
    """Columns `[leaves]` of leaves alike, from rows `[rows, leaves, *groups]`."""
    axes = tuple(range(2, rows.ndim))
    if 0 in rows.shape:
        nothing = jnp.zeros(rows.shape[1], rows.dtype)
        return nothing, nothing + jnp.inf, nothing + 1, nothing, nothing
    ratio, clipped = rows[0], rows[-1]
    if axes:
        groups = math.prod(rows.shape[2:]) * num_devices(over)
        clipped = total(jnp.sum(clipped, [axis - 1 for axis in axes]), over) / groups
        worst = ratio == largest(jnp.max(ratio, [axis - 1 for axis in axes], keepdims=True), over)
        of_worst = jnp.where(jnp.broadcast_to(worst[None], rows[:-2].shape), rows[:-2], -jnp.inf)
        # With "mask", one that is bad need not be the worst.
        rows = largest(jnp.max(jnp.concatenate([of_worst, rows[-2:-1]]), axes), over)
    _, norm, limit, factor, no_norm, no_factor, bad = rows[:7]
    norm, factor = (
        jnp.where(flags > 0, jnp.nan, x) for x, flags in ((norm, no_norm), (-factor, no_factor))
    )
    return norm, limit, factor, clipped, bad

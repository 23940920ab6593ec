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
from optaxclip._base.devices import Axes, largest, num_devices, sum_over_devices
from optaxclip._base.grouping import Grouping, OfGroups
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
    norms: OfGroups,
    limits: OfGroups,
    factors: OfGroups,
    bad: OfGroups,
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
        rows = [grouping.tree(list(column)) for column in zip(*columns, strict=True)]
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
    rows = [jnp.stack([_badness(column[0], column[1]), *column]) for column in columns]
    if grouping.in_one_array:
        # Stored once, or they would be computed anew for each leaf.
        rows = lax.optimization_barrier(rows)
    parted = grouping.parted(rows)
    # Leaves alike in one step where they lie in one array, so that few have to be compiled.
    alike: dict[Any, list[int]] = {}
    for n, group in enumerate(grouping.groups):
        alike.setdefault(group.shape if grouping.in_one_array else n, []).append(n)
    found = [
        _worst(
            jnp.stack([parted[n] for n in some], axis=1),
            at_once=grouping.in_one_array,
            over=over[some[0]],
        )
        for some in alike.values()
    ]
    order = np.argsort(np.concatenate(list(alike.values())))
    return [column[order] for column in (jnp.concatenate(row) for row in zip(*found, strict=True))]


def _badness(norm: Array, limit: Array) -> Array:
    """How far norms are above their limits; NaN is worst, then infinity, then a limit of 0."""
    most = jnp.finfo(norm.dtype).max
    without = jnp.where(norm > 0, most, 0).astype(norm.dtype)
    ratio = jnp.where(limit > 0, norm / jnp.where(limit > 0, limit, 1), without)
    ratio = jnp.where(jnp.isinf(norm), most, jnp.minimum(ratio, most / 2))
    return jnp.where(jnp.isnan(norm), jnp.inf, ratio)


def _worst(rows: Array, *, at_once: bool, over: Axes) -> Columns:
    """Columns `[leaves]` of leaves alike, from rows `[badness and columns, leaves, *groups]`."""
    # What leaves without groups have.
    nothing = [rows.dtype.type(x) for x in (-1, 0, jnp.inf, 1, 0, 0)]
    axes, groups = range(1, rows.ndim - 1), math.prod(rows.shape[2:]) * num_devices(over)
    if at_once or not groups:
        found = lax.reduce(tuple(lax.stop_gradient(rows)), tuple(nothing), _worse, axes)
    else:
        found = _by_maxima(rows, tuple(axes), over)
    _, norm, limit, factor, clipped, bad = found
    return norm, limit, factor, clipped / max(groups, 1), bad


def _worse(some: Columns, others: Columns) -> Columns:
    """The worse of two groups, how many were clipped, and whether one is bad."""
    # Of equal ones that with the larger norm, so that no order of the groups matters.
    is_worse = (some[0] > others[0]) | ((some[0] == others[0]) & (some[1] >= others[1]))
    worse = [lax.select(is_worse, *pair) for pair in zip(some[:4], others[:4], strict=True)]
    # With "mask", one that is bad need not be the worst.
    return *worse, some[4] + others[4], jnp.maximum(some[5], others[5])


def _by_maxima(rows: Array, axes: tuple[int, ...], over: Axes) -> Columns:
    """The same in plain reductions, of which devices combine their parts.

    In one piece they would do as well, with 6 kernels more on an H100 (AGC: 99 in the place of 93).
    """
    # As integers, of which no maximum loses a NaN.
    integer = jnp.dtype(f"int{jnp.finfo(rows.dtype).bits}")
    badness = lax.bitcast_convert_type(rows[0], integer)
    is_worst = badness == largest(jnp.max(badness, axes, keepdims=True), over)
    *row, clipped, bad = rows
    bits = lax.bitcast_convert_type(jnp.stack([*row, bad]), integer)
    of_worst = [jnp.where(is_worst, x, jnp.iinfo(integer).min) for x in bits[:-1]]
    bits = largest(jnp.max(jnp.stack([*of_worst, bits[-1]]), [a + 1 for a in axes]), over)
    *row, bad = lax.bitcast_convert_type(bits, rows.dtype)
    return *row, sum_over_devices(jnp.sum(clipped, axes), over), bad

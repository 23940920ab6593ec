"""Record: takes what a step did, and gives its `ClipInfo` with running counts.

in   arrays of the groups: norms, limits, factors, flags
out  one number for each name of the grouping, `[]` or `[names]`
"""

import itertools
import math
from typing import Any, TypeAlias

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import narrowed
from optaxclip._base.states import Names, increased
from optaxclip._base.types import ClipInfo
from optaxclip._engine.plan import Plan

Columns: TypeAlias = tuple[Array, ...]
"""Arrays of one shape: norms, limits, factors, and flags for clipped and for non-finite groups.

During the search for the worst group, the groups' scores (`_badness`) come first.
"""


def initial_info(name: str, grouping: Grouping, dtype: Any = jnp.float32) -> ClipInfo:
    """The record before the first step: no limit, and nothing clipped; norms are in `dtype`."""
    shape = () if grouping.layout == "scalar" else (len(grouping.names),)
    return ClipInfo(
        name=Names((name,)),
        names=grouping.names,
        norm=jnp.zeros(shape, dtype),
        limit=jnp.full(shape, jnp.inf, dtype),
        factor=jnp.ones(shape, dtype),
        fraction=jnp.zeros(shape, dtype),
        num_clipped=jnp.zeros(shape, jnp.int32),
        num_nonfinite=jnp.zeros(shape, jnp.int32),
    )


def updated_info(
    old: ClipInfo, plan: Plan, norm: Array, limit: Array, factor: Array, bad: Array
) -> ClipInfo:
    """The record after a step; groups without leaves at this step keep their record.

    Norms are those before the clip, limits the norms above which it acts.
    """
    chex.assert_shape([norm, limit, factor, bad], plan.shape)
    grouping = plan.grouping
    if not grouping.groups:
        return old
    columns = _columns(norm, limit, factor, bad)
    if grouping.layout == "dict":
        columns = _of_worst(plan, columns)
    chex.assert_equal_shape([*columns, old.norm])
    columns = [narrowed(column, old.norm.dtype) for column in columns]
    if grouping.layout != "scalar" and not all(grouping.present):
        nothing = jnp.zeros_like(old.fraction)
        before = (old.norm, old.limit, old.factor, nothing, nothing)
        present = jnp.asarray(grouping.present)
        with_old = zip(columns, before, strict=True)
        columns = [lax.select(present, column, kept) for column, kept in with_old]
    norm, limit, factor, clipped, nonfinite = columns
    new = old._replace(
        names=grouping.names,
        norm=norm,
        limit=limit,
        factor=factor,
        fraction=clipped,
        num_clipped=increased(old.num_clipped, clipped > 0),
        num_nonfinite=increased(old.num_nonfinite, nonfinite > 0),
    )
    return devices.in_place_of(old, new)


def _columns(norm: Array, limit: Array, factor: Array, bad: Array) -> Columns:
    limit = limit.astype(norm.dtype)
    clipped = (norm > limit) & ~bad
    return norm, limit, factor, clipped.astype(norm.dtype), bad.astype(norm.dtype)


def _of_worst(plan: Plan, columns: Columns) -> Columns:
    """Columns with one number for each leaf: the number of its worst group."""
    norm, limit, *_ = columns
    columns = (_badness(norm, limit), *columns)
    # The barrier makes XLA (JAX 0.10.2) store the columns; without it, XLA computes them again for
    # each reduction.
    stored = lax.optimization_barrier(devices.stack(columns))
    found, start = [], 0
    # All leaves of one shape share a reduction, so that few reductions are compiled.
    for shape, alike in itertools.groupby(plan.ordered, key=lambda group: group.shape):
        count, size = len(list(alike)), math.prod(shape)
        part = lax.slice_in_dim(stored, start, start + count * size, axis=1)
        found.append(_in_one_reduction(tuple(part.reshape(len(columns), count, size)), (1,)))
        start += count * size
    worst = tuple(map(jnp.concatenate, zip(*found, strict=True)))
    order = np.argsort(plan.order)
    is_sorted = list(order) == list(range(len(order)))
    return worst if is_sorted else tuple(column[order] for column in worst)


def _badness(norm: Array, limit: Array) -> Array:
    """Norm / limit, to find the worst group: NaN is worst, then infinity, then a limit of 0."""
    most = jnp.finfo(norm.dtype).max
    without = jnp.where(norm > 0, most, 0).astype(norm.dtype)
    ratio = jnp.where(limit > 0, norm / jnp.where(limit > 0, limit, 1), without)
    ratio = jnp.where(jnp.isinf(norm), most, jnp.minimum(ratio, most / 2))
    return jnp.where(jnp.isnan(norm), jnp.inf, ratio)


def _in_one_reduction(columns: Columns, axes: tuple[int, ...]) -> Columns:
    """The columns of the worst group along these axes; the first column holds the scores."""
    # The result for a leaf without groups.
    nothing = tuple(columns[0].dtype.type(x) for x in (-1, 0, jnp.inf, 1, 0, 0))
    found = lax.reduce(lax.stop_gradient(columns), nothing, _worse, axes)
    _, norm, limit, factor, clipped, bad = found
    # The number of clipped groups becomes their share.
    size = math.prod(columns[0].shape[axis] for axis in axes)
    return norm, limit, factor, clipped / max(size, 1), bad


def _worse(some: Columns, others: Columns) -> Columns:
    """The worse of two groups, how many of them were clipped, and whether one is bad."""
    # Of equal scores the larger norm wins, so that the order of groups does not matter.
    is_worse = (some[0] > others[0]) | ((some[0] == others[0]) & (some[1] >= others[1]))
    worse = [lax.select(is_worse, x, y) for x, y in zip(some[:4], others[:4], strict=True)]
    # With the policy "mask", a group with bad entries need not be the worst.
    return *worse, some[4] + others[4], jnp.maximum(some[5], others[5])

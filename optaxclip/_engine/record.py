"""Record: takes what a step did, and gives its `ClipInfo` with running counts.

in   arrays of the groups: norms, thresholds, factors, flags
out  one number for each name of the grouping, `[]` or `[names]`
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import StaticNames, safe_increment
from optaxclip._base.trees import Grouping
from optaxclip._base.types import ClipInfo
from optaxclip._engine.plan import Plan


class _Row(NamedTuple):
    """What a step did to each group; the flags are 0 or 1. All arrays have one shape and dtype."""

    norm: Array
    threshold: Array
    factor: Array
    clipped: Array
    nonfinite: Array
    score: Any = None
    """How bad a group is, while the worst is searched for."""

    @classmethod
    def create(cls, norm: Array, threshold: Array, factor: Array, bad: Array) -> "_Row":
        """The row of groups whose norms are not finite where `bad`."""
        threshold = threshold.astype(norm.dtype)
        clipped = (norm > threshold) & ~bad
        return cls(norm, threshold, factor, clipped.astype(norm.dtype), bad.astype(norm.dtype))


def initial_info(name: str, grouping: Grouping, dtype: Any = jnp.float32) -> ClipInfo:
    """The record before the first step: no threshold, and nothing clipped; norms are in `dtype`."""
    shape = () if grouping.layout == "scalar" else (len(grouping.names),)
    return ClipInfo(
        name=StaticNames((name,)),
        names=grouping.names,
        norm=jnp.zeros(shape, dtype),
        threshold=jnp.full(shape, jnp.inf, dtype),
        factor=jnp.ones(shape, dtype),
        fraction=jnp.zeros(shape, dtype),
        num_clipped=jnp.zeros(shape, jnp.int32),
        num_nonfinite=jnp.zeros(shape, jnp.int32),
    )


def update_info(
    old: ClipInfo, plan: Plan, norm: Array, threshold: Array, factor: Array, is_nonfinite: Array
) -> ClipInfo:
    """The record after a step; groups without leaves at this step keep their record.

    Norms are those before the clip, thresholds the norms above which it acts.
    """
    chex.assert_shape([norm, threshold, factor, is_nonfinite], plan.shape)
    grouping = plan.grouping
    if not grouping.groups:
        return old
    row = _Row.create(norm, threshold, factor, is_nonfinite)
    if grouping.layout == "dict":
        row = _worst_of_each_leaf(plan, row)
    chex.assert_equal_shape([*row[:-1], old.norm])
    row = jax.tree.map(lambda x: saturating_cast(x, old.norm.dtype), row)
    if grouping.layout != "scalar" and not all(grouping.has_leaves):
        zeros = jnp.zeros_like(old.fraction)
        before = _Row(old.norm, old.threshold, old.factor, clipped=zeros, nonfinite=zeros)
        present = jnp.asarray(grouping.has_leaves)
        row = jax.tree.map(functools.partial(lax.select, present), row, before)
    new = old._replace(
        names=grouping.names,
        norm=row.norm,
        threshold=row.threshold,
        factor=row.factor,
        fraction=row.clipped,
        num_clipped=safe_increment(old.num_clipped, row.clipped > 0),
        num_nonfinite=safe_increment(old.num_nonfinite, row.nonfinite > 0),
    )
    return meshes.reuse_buffers(old, new)


def _worst_of_each_leaf(plan: Plan, row: _Row) -> _Row:
    """A row with one number for each leaf: the number of its worst group."""
    row = row._replace(score=_severity(row.norm, row.threshold))
    # The barrier makes XLA (JAX 0.10.2) store the row; without it, XLA computes it again for each
    # reduction.
    leaves, structure = jax.tree.flatten(row)
    stored = lax.optimization_barrier(meshes.stack(leaves))
    found, start = [], 0
    # All leaves of one shape share a reduction, so that few reductions are compiled.
    for shape, alike in itertools.groupby(plan.stored_groups, key=lambda group: group.shape):
        count, size = len(list(alike)), math.prod(shape)
        part = lax.slice_in_dim(stored, start, start + count * size, axis=1)
        part = structure.unflatten(part.reshape(len(leaves), count, size))
        found.append(_reduce_to_worst(part))
        start += count * size
    worst = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)._replace(score=None)
    order = np.argsort(plan.order)
    is_sorted = list(order) == list(range(len(order)))
    return worst if is_sorted else jax.tree.map(lambda x: x[order], worst)


def _severity(norm: Array, threshold: Array) -> Array:
    """Norm / threshold, to find the worst group: NaN is worst, then infinity, then a threshold of 0."""
    most = jnp.finfo(norm.dtype).max
    without = jnp.where(norm > 0, most, 0).astype(norm.dtype)
    ratio = jnp.where(threshold > 0, norm / jnp.where(threshold > 0, threshold, 1), without)
    ratio = jnp.where(jnp.isinf(norm), most, jnp.minimum(ratio, most / 2))
    return jnp.where(jnp.isnan(norm), jnp.inf, ratio)


def _reduce_to_worst(groups: _Row) -> _Row:
    """The row of the worst group along the last axis; `clipped` becomes the share of groups."""
    dtype = groups.norm.dtype.type
    # The result for a leaf without groups.
    empty = _Row(*map(dtype, (0, jnp.inf, 1, 0, 0, -1)))
    row = lax.reduce(lax.stop_gradient(groups), empty, _worse, (1,))
    return row._replace(clipped=row.clipped / max(groups.norm.shape[1], 1))


def _worse(one: _Row, other: _Row) -> _Row:
    """The worse of two groups, how many of them were clipped, and whether one is not finite."""
    # Of equal scores the larger norm wins, so that the order of groups does not matter.
    is_worse = (one.score > other.score) | ((one.score == other.score) & (one.norm >= other.norm))
    # With the policy "mask", a group with bad entries need not be the worst.
    return jax.tree.map(functools.partial(lax.select, is_worse), one, other)._replace(
        clipped=one.clipped + other.clipped, nonfinite=jnp.maximum(one.nonfinite, other.nonfinite)
    )

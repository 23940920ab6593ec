"""Records: computes the `ClipInfo` of a step with running counts."""

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
    """The results of a step for all groups. All arrays have the same shape and dtype."""

    norm: Array
    threshold: Array
    factor: Array
    clipped: Array
    nonfinite: Array
    score: Any = None
    """The severity of a group, which determines the worst group of a leaf."""


def initial_info(name: str, grouping: Grouping, dtype: Any = jnp.float32) -> ClipInfo:
    """Returns the record before the first step, with norms in `dtype`."""
    shape = () if grouping.layout == "scalar" else (len(grouping.names),)  # [names]
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
    """Updates the record of groups with leaves on this step."""
    chex.assert_shape([norm, threshold, factor, is_nonfinite], plan.shape)
    grouping = plan.grouping
    if not grouping.groups:
        return old
    threshold = threshold.astype(norm.dtype)
    clipped = ((norm > threshold) & ~is_nonfinite).astype(norm.dtype)
    row = _Row(norm, threshold, factor, clipped, is_nonfinite.astype(norm.dtype))
    if grouping.layout == "dict":
        row = _worst_by_leaf(plan, row)  # [groups] to [names]
    chex.assert_equal_shape([*row[:-1], old.norm])
    # The record keeps its dtype, for example in a state that was cast to bfloat16.
    row = jax.tree.map(lambda x: saturating_cast(x, old.norm.dtype), row)
    if grouping.layout != "scalar" and not all(grouping.has_leaves):
        zeros = jnp.zeros_like(old.fraction)
        before = _Row(old.norm, old.threshold, old.factor, clipped=zeros, nonfinite=zeros)
        present = jnp.asarray(grouping.has_leaves)  # bool[names]
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


def _worst_by_leaf(plan: Plan, row: _Row) -> _Row:
    """Reduces a row to the worst groups of the leaves, `[names]`.

    The score is norm / threshold. The worst norm is NaN, followed by infinity and norms with a
    threshold of 0. The field `clipped` becomes the fraction of clipped groups.
    """
    largest, dtype = jnp.finfo(row.norm.dtype).max, row.norm.dtype.type
    has_threshold = row.threshold > 0
    without_threshold = jnp.where(row.norm > 0, largest, 0).astype(row.norm.dtype)
    ratio = row.norm / jnp.where(has_threshold, row.threshold, 1)
    ratio = jnp.where(has_threshold, ratio, without_threshold)
    ratio = jnp.where(jnp.isinf(row.norm), largest, jnp.minimum(ratio, largest / 2))
    row = row._replace(score=jnp.where(jnp.isnan(row.norm), jnp.inf, ratio))  # [groups]
    # Without the barrier, XLA computes the row again for each reduction (as of JAX 0.10.2).
    fields, structure = jax.tree.flatten(row)
    stored = lax.optimization_barrier(meshes.stack(fields))  # [fields, groups]
    empty = _Row(*map(dtype, (0, jnp.inf, 1, 0, 0, -1)))  # for leaves without groups
    reduced, start = [], 0
    # To save kernels, all leaves with the same shape share a reduction.
    for shape, same_shape in itertools.groupby(plan.stored_groups, key=lambda group: group.shape):
        count, size = len(list(same_shape)), math.prod(shape)
        part = lax.slice_in_dim(stored, start, start + count * size, axis=1)
        part = structure.unflatten(part.reshape(len(fields), count, size))  # [leaves, groups]
        worst = lax.reduce(lax.stop_gradient(part), empty, _worse, (1,))  # [leaves]
        reduced.append(worst._replace(clipped=worst.clipped / max(size, 1)))
        start += count * size
    worst = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reduced)._replace(score=None)
    order = np.argsort(plan.order)  # from the order of storage to the order of names
    is_sorted = list(order) == list(range(len(order)))
    return worst if is_sorted else jax.tree.map(lambda x: x[order], worst)


def _worse(one: _Row, other: _Row) -> _Row:
    """Selects the worse of two groups, and combines their flags."""
    # If scores are equal, the larger norm is worse, so the result does not depend on the order.
    is_worse = (one.score > other.score) | ((one.score == other.score) & (one.norm >= other.norm))
    # With the policy "mask", a group with non-finite elements may not be the worst.
    return jax.tree.map(functools.partial(lax.select, is_worse), one, other)._replace(
        clipped=one.clipped + other.clipped, nonfinite=jnp.maximum(one.nonfinite, other.nonfinite)
    )

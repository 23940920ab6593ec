"""Histograms: counts elements of groups by absolute value, over all leaves and devices.

  leaves [...] (floating-point, complex or `BCOO`), Plan  ->  u32[names, 2, counts]

The two words of a count are in the second axis.
"""

import dataclasses
import math
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.exponent_counts as exponent_counts
from optaxclip._backend.elementwise import dense_values
from optaxclip._base.numerics import norm_dtype
from optaxclip._engine.plan import Plan


def compute_group_histograms(leaves: list[Any], plan: Plan, *, wide: bool) -> Array:
    """Counts the elements of all groups, over all devices.

    In the layout "dict", which has very many groups, leaves are counted instead of groups.

    Args:
      leaves: The leaves of the plan.
      plan: The groups and their shardings.
      wide: If True, the bin edges are those of float64.
    """
    plan = _histogram_plan(leaves, plan, wide=wide)
    shape = (len(plan.grouping.names), 2, exponent_counts.num_counts(wide=wide))
    if not leaves:
        return jnp.zeros(shape, jnp.uint32)
    dtype, in_one_piece = norm_dtype([x.dtype for x in leaves]), plan.placement.is_unsharded

    def count_shard(leaves: list[Any]) -> Array:
        parts = []
        for leaf, axes in zip(leaves, plan.grouping.axes, strict=True):
            x, over = dense_values(leaf, axes, dtype)
            size = math.prod([np.shape(leaf)[axis] for axis in axes])
            counts = exponent_counts.counts_by_size(  # [..., 2, counts]
                x, over, size, wide=wide, in_one_piece=in_one_piece
            )
            parts.append((counts,))
        (totals,) = plan.reduce_groups(parts, add=exponent_counts.propagate_carry)
        return lax.reshape(totals, shape)

    histograms = plan.placement.map_shards(count_shard)(leaves)
    chex.assert_shape(histograms, shape)
    return histograms


def _histogram_plan(leaves: list[Any], plan: Plan, *, wide: bool) -> Plan:
    """Appends the axes of the counts, `[2, counts]`, to the shapes of the groups."""
    grouping, placement = plan.grouping, plan.placement
    groups, trailing = grouping.groups, (2, exponent_counts.num_counts(wide=wide))
    if grouping.layout == "dict":
        groups = tuple(dataclasses.replace(group, shape=()) for group in groups)
        # A leaf becomes a single group, whose counts are summed over all axes of the leaf.
        all_axes = tuple(tuple(range(np.ndim(leaf))) for leaf in leaves)
        grouping = dataclasses.replace(grouping, axes=all_axes, layout="vector")
        placement = placement.with_whole_leaves()
    groups = tuple(dataclasses.replace(x, shape=(*x.shape, *trailing)) for x in groups)
    grouping = dataclasses.replace(grouping, groups=groups)
    return Plan(grouping, placement.with_trailing_axes(len(trailing)))

"""Counts of a group's entries by their size, over the group's leaves and over all devices.

in   leaves `[...]`, floating or complex (or `BCOO`), and which of their entries belong together
out  uint32[names, 2, counts], for each name the two words of its counts
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
    """The counts of all groups, over all devices.

    The layout "dict" divides leaves into very many groups, so there each leaf counts as one.

    Args:
      leaves: those of the plan.
      plan: the groups, and where they lie.
      wide: whether the thresholds are those of float64.
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
            found = exponent_counts.counts_by_size(
                x, over, size, wide=wide, in_one_piece=in_one_piece
            )
            parts.append((found,))
        (found,) = plan.reduce_groups(parts, add=exponent_counts.propagate_carry)
        return lax.reshape(found, shape)

    found = plan.placement.map_shards(count_shard)(leaves)
    chex.assert_shape(found, shape)
    return found


def _histogram_plan(leaves: list[Any], plan: Plan, *, wide: bool) -> Plan:
    """The plan with an array of counts in the place of each number."""
    grouping, placement = plan.grouping, plan.placement
    groups, behind = grouping.groups, (2, exponent_counts.num_counts(wide=wide))
    if grouping.layout == "dict":
        groups = tuple(dataclasses.replace(group, shape=()) for group in groups)
        whole = tuple(tuple(range(np.ndim(leaf))) for leaf in leaves)
        grouping = dataclasses.replace(grouping, axes=whole, layout="vector")
        placement = placement.with_whole_leaves()
    groups = tuple(dataclasses.replace(x, shape=(*x.shape, *behind)) for x in groups)
    grouping = dataclasses.replace(grouping, groups=groups)
    return Plan(grouping, placement.with_trailing_axes(len(behind)))

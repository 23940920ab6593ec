"""The plan of a step: its groups, where these lie, and how their numbers are stored.

The plan is fixed before there are numbers. The norms of all groups are in one array, and so are
thresholds and factors. An operation on such an array is compiled once, and takes few kernels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._backend.leaf_shardings import LeafShardings, apply_scope, infer_shardings
from optaxclip._backend.packing import arrange_by_layout, ravel_and_concatenate, split_and_reshape
from optaxclip._backend.reductions import ScaledSums
from optaxclip._base.state import StaticNames
from optaxclip._base.trees import FlatTree, Group, Grouping, align_params
from optaxclip._base.types import NormTree, PyTree
from optaxclip._engine.options import Options
from optaxclip.scopes import Scope


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which entries share a norm, and where they lie; static. Messages may need names."""

    grouping: Grouping
    placement: LeafShardings
    leaf_names: tuple[str, ...] = ()

    @functools.cached_property
    def order(self) -> list[int]:
        """The positions of the groups in the order in which they are stored: sorted by shape."""
        groups = self.grouping.groups
        if self.grouping.layout != "dict":
            return list(range(len(groups)))
        return sorted(range(len(groups)), key=lambda n: (groups[n].shape, n))

    @functools.cached_property
    def stored_groups(self) -> list[Group]:
        """The groups in that order."""
        return [self.grouping.groups[n] for n in self.order]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [group.shape for group in self.stored_groups]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with a number for each group: `[groups]`, or `[]` for one tree."""
        if self.grouping.layout == "scalar":
            return self.grouping.groups[0].shape
        return (sum(map(math.prod, self._shapes)),)

    def pack(self, arrays: Sequence[Array]) -> Array:
        """One array, made from an array for each group in the grouping's order."""
        ordered = [arrays[n] for n in self.order]
        chex.assert_shape(ordered, self._shapes)
        return ordered[0] if self.grouping.layout == "scalar" else ravel_and_concatenate(ordered)

    def unpack(self, packed: Array) -> list[Array]:
        """An array for each group, in the order of the grouping; undoes `pack`."""
        if self.grouping.layout == "scalar":
            return [packed]
        pieces = split_and_reshape(packed, self._shapes)
        return [
            x for _, x in sorted(zip(self.order, pieces, strict=True), key=lambda pair: pair[0])
        ]

    def reduce_groups(
        self,
        parts: Sequence[ScaledSums],
        *,
        use_max: bool = False,
        add: Callable[[Array], Array] | None = None,
    ) -> ScaledSums:
        """The sums of groups, from those of leaves: over a group's leaves, then over devices.

        With `by_max` they are maxima. `add` adds up the sums of a group's leaves along the first
        axis.
        """
        groups = self.grouping.groups
        shapes = self.grouping.broadcast_to_leaves([group.shape for group in groups])
        parts = self.placement.local_sums(parts, shapes, use_max=use_max)
        # A tree without leaves has one sum, which is empty.
        like = parts[0] if parts else (jnp.zeros(()),)

        def reduce_group(group: Group, k: int) -> Array:
            if not group.leaf_indices:
                return jnp.zeros(group.shape, like[k].dtype)
            if len(group.leaf_indices) == 1:
                return parts[group.leaf_indices[0]][k]
            # One operation, because XLA (JAX 0.10.2) repeats a chain of additions for each use of
            # its result.
            members = meshes.stack([parts[i][k] for i in group.leaf_indices])
            if use_max:
                return lax.reduce_max(members, [0])
            return add(members) if add else lax.reduce_sum(members, [0])

        sums = [self.pack([reduce_group(group, k) for group in groups]) for k in range(len(like))]
        sums = self.placement.all_reduce(sums, use_max=use_max)
        chex.assert_shape(sums, self.shape)
        return tuple(sums)

    def slice_for_leaves(self, packed: Array, leaves: Sequence[Any]) -> list[Array]:
        """For each measured leaf, its group's part of `packed`.

        Inside `shard_map`, it is the part for what this device holds of the leaf. Axes in front of
        the groups' axes stay.
        """
        of_leaves = self.grouping.broadcast_to_leaves(self.unpack(packed))
        return self.placement.local_slices(of_leaves, leaves, self.grouping.axes)

    def get_named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of each entry that a threshold rule sees, in order."""
        if self.grouping.layout == "dict":
            return [(group.names[0], group.shape) for group in self.stored_groups]
        return [(name, ()) for name in self.grouping.names]

    def broadcast_constants(self, of_groups: Sequence[Any]) -> Any:
        """A number for each group, in the shape of `pack`; one number, if all are the same."""
        ordered = [of_groups[n] for n in self.order]
        if len(set(ordered)) == 1:
            return ordered[0]
        sizes = list(map(math.prod, self._shapes))
        if all(isinstance(number, (int, float)) for number in ordered):
            return np.repeat(np.asarray(ordered, np.float64), sizes)
        # In `jax.export` a number may be symbolic.
        with_sizes = zip(ordered, sizes, strict=True)
        return jnp.concatenate([jnp.broadcast_to(jnp.asarray(x, float), n) for x, n in with_sizes])

    def zeros(self, dtype: jnp.dtype) -> Array:
        """Zeros in the form in which norms are stored, made without concatenating."""
        return jnp.zeros(self.shape, dtype)

    def has_leaves(self) -> Array:
        """Which groups have leaves at this step.

        The single group of the scope `tree` always counts as having leaves.
        """
        groups, is_tree = self.grouping.groups, self.grouping.layout == "scalar"
        return self.pack([jnp.full(x.shape, bool(x.leaf_indices) or is_tree) for x in groups])

    def arrange_by_layout(self, packed: Array) -> NormTree:
        """The form that users see: a scalar, `[names]`, or a dict of arrays."""
        is_dict = self.grouping.layout == "dict"
        return arrange_by_layout(self.unpack(packed), self.grouping) if is_dict else packed

    def pack_layout(self, tree: NormTree) -> Array:
        """One array, from the form that users see: a scalar, `[names]`, or a dict of arrays."""
        is_dict = self.grouping.layout == "dict"
        return self.pack([tree[x.names[0]] for x in self.grouping.groups]) if is_dict else tree


def make_plan(
    flat: FlatTree,
    scope: Scope,
    options: Options,
    state_names: StaticNames | None = None,
    size: int = 0,
) -> Plan:
    """The plan of a tree, with empty groups for names in the state that the tree lacks.

    The state has `size` groups, and their names are `stored`.
    """
    flat = flat if state_names is None else flat.match_name_style(state_names)
    grouping = apply_scope(scope, flat, options.sharding_hints)
    placement = infer_shardings(grouping, flat, options.sharding_hints)
    if state_names is not None:
        grouping = grouping.align_with_state(state_names, size, options.name)
    return Plan(grouping, placement)


def get_param_leaves(
    flat: FlatTree, params: PyTree, plan: Plan, options: Options
) -> tuple[list[Any], Plan]:
    """The parameters of the measured leaves, and the plan with the parameters' placement.

    Parameters may be split differently from the updates.
    """
    found = align_params(flat, params, options.name)
    placement = infer_shardings(plan.grouping, found, options.sharding_hints)
    return found.inexact_leaves(), dataclasses.replace(plan, placement=placement)

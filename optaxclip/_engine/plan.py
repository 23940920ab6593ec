"""The plan of a step: its groups, where these lie, and how their numbers are stored.

The plan is fixed before there are numbers. The norms of all groups are in one array, and so are
limits and factors. An operation on such an array is compiled once, and takes few kernels.
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

import optaxclip._border.devices as devices
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.states import Names
from optaxclip._base.trees import FlatTree, matching_params
from optaxclip._base.types import NormTree, PyTree
from optaxclip._border.leaf_sums import AtScales
from optaxclip._border.packing import concatenated, in_layout, split_up
from optaxclip._border.placement import Placement, grouped, located
from optaxclip._engine.options import Options
from optaxclip.scopes import Scope


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which entries share a norm, and where they lie; static. Messages may need names."""

    grouping: Grouping
    placement: Placement
    leaf_names: tuple[str, ...] = ()

    @functools.cached_property
    def order(self) -> list[int]:
        """The positions of the groups in the order in which they are stored: sorted by shape."""
        groups = self.grouping.groups
        if self.grouping.layout != "dict":
            return list(range(len(groups)))
        return sorted(range(len(groups)), key=lambda n: (groups[n].shape, n))

    @functools.cached_property
    def ordered(self) -> list[Group]:
        """The groups in that order."""
        return [self.grouping.groups[n] for n in self.order]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [group.shape for group in self.ordered]

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
        return ordered[0] if self.grouping.layout == "scalar" else concatenated(ordered)

    def unpack(self, packed: Array) -> list[Array]:
        """An array for each group, in the order of the grouping; undoes `pack`."""
        if self.grouping.layout == "scalar":
            return [packed]
        pieces = split_up(packed, self._shapes)
        return [
            x for _, x in sorted(zip(self.order, pieces, strict=True), key=lambda pair: pair[0])
        ]

    def totals(
        self,
        parts: Sequence[AtScales],
        *,
        by_max: bool = False,
        add: Callable[[Array], Array] | None = None,
    ) -> AtScales:
        """The sums of groups, from those of leaves: over a group's leaves, then over devices.

        With `by_max` they are maxima. `add` adds up the sums of a group's leaves along the first
        axis.
        """
        groups = self.grouping.groups
        shapes = self.grouping.by_leaf([group.shape for group in groups])
        parts = self.placement.shares(parts, shapes, by_max=by_max)
        # A tree without leaves has one sum, which is empty.
        like = parts[0] if parts else (jnp.zeros(()),)

        def of_group(group: Group, k: int) -> Array:
            if not group.members:
                return jnp.zeros(group.shape, like[k].dtype)
            if len(group.members) == 1:
                return parts[group.members[0]][k]
            # One operation, because XLA (JAX 0.10.2) repeats a chain of additions for each use of
            # its result.
            members = devices.stack([parts[i][k] for i in group.members])
            if by_max:
                return lax.reduce_max(members, [0])
            return add(members) if add else lax.reduce_sum(members, [0])

        sums = [self.pack([of_group(group, k) for group in groups]) for k in range(len(like))]
        sums = self.placement.totals(sums, by_max=by_max)
        chex.assert_shape(sums, self.shape)
        return tuple(sums)

    def by_leaf(self, packed: Array, leaves: Sequence[Any]) -> list[Array]:
        """For each measured leaf, its group's part of `packed`.

        Inside `shard_map`, it is the part for what this device holds of the leaf. Axes in front of
        the groups' axes stay.
        """
        of_leaves = self.grouping.by_leaf(self.unpack(packed))
        return self.placement.own_parts(of_leaves, leaves, self.grouping.axes)

    def entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of each entry that a limit rule sees, in order."""
        if self.grouping.layout == "dict":
            return [(group.names[0], group.shape) for group in self.ordered]
        return [(name, ()) for name in self.grouping.names]

    def repeated(self, of_groups: Sequence[Any]) -> Any:
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

    def have_leaves(self) -> Array:
        """Which groups have leaves at this step.

        The single group of the scope `tree` always counts as having leaves.
        """
        groups, is_tree = self.grouping.groups, self.grouping.layout == "scalar"
        return self.pack([jnp.full(x.shape, bool(x.members) or is_tree) for x in groups])

    def as_tree(self, packed: Array) -> NormTree:
        """The form that users see: a scalar, `[names]`, or a dict of arrays."""
        is_dict = self.grouping.layout == "dict"
        return in_layout(self.unpack(packed), self.grouping) if is_dict else packed

    def from_tree(self, tree: NormTree) -> Array:
        """One array, from the form that users see: a scalar, `[names]`, or a dict of arrays."""
        is_dict = self.grouping.layout == "dict"
        return self.pack([tree[x.names[0]] for x in self.grouping.groups]) if is_dict else tree


def plan_of(
    flat: FlatTree, scope: Scope, options: Options, stored: Names | None = None, size: int = 0
) -> Plan:
    """The plan of a tree, with empty groups for names in the state that the tree lacks.

    The state has `size` groups, and their names are `stored`.
    """
    flat = flat if stored is None else flat.named_like(stored)
    grouping = grouped(scope, flat, options.told)
    placement = located(grouping, flat, options.told)
    if stored is not None:
        grouping = grouping.with_groups_of_state(stored, size, options.name)
    return Plan(grouping, placement)


def weights_beside(
    flat: FlatTree, params: PyTree, plan: Plan, options: Options
) -> tuple[list[Any], Plan]:
    """The parameters of the measured leaves, and the plan with the parameters' placement.

    Parameters may be split differently from the updates.
    """
    found = matching_params(flat, params, options.name)
    placement = located(plan.grouping, found, options.told)
    return found.measured_leaves(), dataclasses.replace(plan, placement=placement)

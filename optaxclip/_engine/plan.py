"""Plans: the groups of a step, the shardings of leaves, and the order in which norms are stored.

Plans are static. The norms of all groups are stored in a single array, and so are thresholds and
factors. Therefore, operations on them are compiled once and use only a few kernels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._backend.leaf_shardings import LeafShardings, apply_scope, infer_shardings
from optaxclip._backend.packing import arrange_by_layout, ravel_and_concatenate, split_and_reshape
from optaxclip._backend.reductions import ScaledSums
from optaxclip._base.state import StaticNames
from optaxclip._base.trees import FlatTree, Group, Grouping, align_params, tree_scope
from optaxclip._base.types import NormTree, PyTree
from optaxclip._base.validation import accepts_args, check_called, short_repr
from optaxclip._engine.options import Options
from optaxclip.scopes import Scope


@dataclasses.dataclass(frozen=True)
class Plan:
    """The groups and the shardings of the leaves. `leaf_names` are only used in messages."""

    grouping: Grouping
    placement: LeafShardings
    leaf_names: tuple[str, ...] = ()

    @functools.cached_property
    def order(self) -> list[int]:
        """The positions of the groups, sorted by shape, which is the order of storage."""
        groups = self.grouping.groups
        if self.grouping.layout != "dict":
            return list(range(len(groups)))
        return sorted(range(len(groups)), key=lambda n: (groups[n].shape, n))

    @functools.cached_property
    def stored_groups(self) -> list[Group]:
        """The groups in the order of storage."""
        return [self.grouping.groups[n] for n in self.order]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [group.shape for group in self.stored_groups]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of packed norms: `[groups]`, or `[]` for the scope `tree`."""
        if self.grouping.layout == "scalar":
            return self.grouping.groups[0].shape
        return (sum(map(math.prod, self._shapes)),)

    def pack(self, arrays: Sequence[Array]) -> Array:
        """Concatenates the arrays of the groups to an array with the shape `shape`."""
        ordered = [arrays[n] for n in self.order]
        chex.assert_shape(ordered, self._shapes)
        return ordered[0] if self.grouping.layout == "scalar" else ravel_and_concatenate(ordered)

    def unpack(self, packed: Array) -> list[Array]:
        """Splits an array into the arrays of the groups, in the order of the grouping."""
        if self.grouping.layout == "scalar":
            return [packed]
        pieces = dict(zip(self.order, split_and_reshape(packed, self._shapes), strict=True))
        return [pieces[n] for n in range(len(pieces))]

    def reduce_groups(
        self,
        parts: Sequence[ScaledSums],
        *,
        use_max: bool = False,
        add: Callable[[Array], Array] | None = None,
    ) -> ScaledSums:
        """Sums over the leaves of the groups and over devices, or computes the maxima."""
        groups = self.grouping.groups
        shapes = self.grouping.broadcast_to_leaves([group.shape for group in groups])
        parts = self.placement.local_sums(parts, shapes, use_max=use_max)  # of this device
        like = parts[0] if parts else (jnp.zeros(()),)

        def reduce_group(group: Group, k: int) -> Array:
            if not group.leaf_indices:
                return jnp.zeros(group.shape, like[k].dtype)  # No leaf on this step.
            if len(group.leaf_indices) == 1:
                return parts[group.leaf_indices[0]][k]
            # A single operation, because XLA repeats a chain of additions for all uses of its
            # result (as of JAX 0.10.2).
            members = meshes.stack([parts[i][k] for i in group.leaf_indices])  # [leaves, ...]
            if use_max:
                return lax.reduce_max(members, [0])
            return add(members) if add else lax.reduce_sum(members, [0])

        sums = [self.pack([reduce_group(group, k) for group in groups]) for k in range(len(like))]
        # One collective for all scales, f32[groups] per scale.
        sums = self.placement.all_reduce(sums, use_max=use_max)
        chex.assert_shape(sums, self.shape)
        return tuple(sums)

    def slice_for_leaves(self, packed: Array, leaves: Sequence[Any]) -> list[Array]:
        """Returns the parts of `[..., groups]` for the measured leaves, or for their shards."""
        by_leaf = self.grouping.broadcast_to_leaves(self.unpack(packed))  # [..., *group.shape]
        return self.placement.local_slices(by_leaf, leaves, self.grouping.axes)

    def get_named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the names and shapes of the norms that a threshold rule receives."""
        if self.grouping.layout == "dict":
            return [(group.names[0], group.shape) for group in self.stored_groups]
        return [(name, ()) for name in self.grouping.names]

    def broadcast_constants(self, numbers: Sequence[Any]) -> Any:
        """Repeats the numbers of the groups to `[groups]`, or returns a number if all are equal."""
        ordered = [numbers[n] for n in self.order]
        if len(set(ordered)) == 1:
            return ordered[0]
        sizes = list(map(math.prod, self._shapes))
        if all(isinstance(number, (int, float)) for number in ordered):
            return np.repeat(np.asarray(ordered, np.float64), sizes)  # [groups]
        # Numbers may be symbolic in `jax.export`, which NumPy does not support.
        with_sizes = zip(ordered, sizes, strict=True)
        return jnp.concatenate([jnp.broadcast_to(jnp.asarray(x, float), n) for x, n in with_sizes])

    def has_leaves(self) -> Array:
        """Returns the groups with leaves on this step as `bool[groups]`, or True for a scalar."""
        groups, is_tree = self.grouping.groups, self.grouping.layout == "scalar"
        return self.pack([jnp.full(x.shape, bool(x.leaf_indices) or is_tree) for x in groups])

    def arrange_by_layout(self, packed: Array) -> NormTree:
        """Converts packed norms to the layout of the API: a scalar, `[names]`, or a dict."""
        is_dict = self.grouping.layout == "dict"
        return arrange_by_layout(self.unpack(packed), self.grouping) if is_dict else packed

    def pack_layout(self, tree: NormTree) -> Array:
        """Packs norms in the layout of the API: a scalar, `[names]`, or a dict."""
        is_dict = self.grouping.layout == "dict"
        return self.pack([tree[x.names[0]] for x in self.grouping.groups]) if is_dict else tree


def make_plan(
    flat: FlatTree,
    scope: Scope,
    options: Options,
    state_names: StaticNames | None = None,
    size: int = 0,
) -> Plan:
    """Makes the plan of a tree, with empty groups for names in the state that the tree lacks."""
    flat = flat if state_names is None else flat.match_name_style(state_names)
    grouping = apply_scope(scope, flat, options.sharding_hints)
    placement = infer_shardings(grouping, flat, options.sharding_hints)
    if state_names is not None:
        grouping = grouping.align_with_state(state_names, size, options.name)
    return Plan(grouping, placement)


def get_param_leaves(
    flat: FlatTree, params: PyTree, plan: Plan, options: Options
) -> tuple[list[Any], Plan]:
    """Returns the parameters of the measured leaves, and the plan with their shardings."""
    # Parameters can be sharded differently than their updates.
    flat_params = align_params(flat, params, options.name)
    placement = infer_shardings(plan.grouping, flat_params, options.sharding_hints)
    return flat_params.inexact_leaves(), dataclasses.replace(plan, placement=placement)


def resolve_scope(scope: Scope) -> Scope:
    """Checks that a scope is a function that is not a factory, and wraps user-defined scopes."""
    if not callable(scope):
        raise TypeError(
            f"scope must come from optaxclip.scopes, got {scope!r:.80} of type "
            f"{type(scope).__name__}; pass a scope, as in clip_by(scopes.leaf(), 1.0)"
        )
    check_called(scope, "optaxclip.scopes", "scope", "scopes")
    # Scopes of this package return valid groupings.
    if str(getattr(scope, "__module__", "")).startswith("optaxclip."):
        return scope
    if accepts_args(scope, "path", None) and not accepts_args(scope, "tree"):
        raise TypeError(
            f"scope must come from optaxclip.scopes, got {short_repr(scope)}, which takes two "
            "arguments; if it maps (path, leaf) to a label, use scopes.group(fn)"
        )
    return _UserScope(scope)


@dataclasses.dataclass(frozen=True)
class _UserScope:
    """A user-defined scope with checked results. Two scopes are equal if their functions are."""

    scope: Scope

    def __call__(self, flat: FlatTree) -> Grouping:
        return _check_grouping(tree_scope(self.scope)(flat), flat)


def _check_grouping(grouping: Any, flat: FlatTree) -> Grouping:
    """Checks the result of a user-defined scope, and sorts the groups by their names."""
    if not isinstance(grouping, Grouping):
        raise TypeError(
            f"a scope must return a scopes.Grouping, but this one returned {short_repr(grouping)} "
            f"of type {type(grouping).__name__}; if it returns labels, use scopes.group(fn)"
        )
    layouts = get_args(get_type_hints(Grouping)["layout"])
    if grouping.layout not in layouts:
        raise ValueError(f"Grouping.layout must be one of {layouts}, got {grouping.layout!r}")
    for group in grouping.groups:
        if not isinstance(group, Group):
            raise TypeError(
                f"Grouping.groups must contain only scopes.Group, got {short_repr(group)}"
            )
    shapes, names = flat.shapes(), flat.names()
    # A partition of the leaves contains all indices exactly once.
    members = sorted(i for group in grouping.groups for i in group.leaf_indices)
    if len(grouping.axes) != len(shapes) or members != list(range(len(shapes))):
        raise ValueError(
            f"a scope must return groups and axes for all {len(shapes)} floating-point leaves, but "
            f"returned groups of the leaves {members} and axes for {len(grouping.axes)} leaves"
        )
    for group in grouping.groups:
        for i in group.leaf_indices:
            rest = tuple(n for k, n in enumerate(shapes[i]) if k not in grouping.axes[i])
            if rest != group.shape or not {*grouping.axes[i]} <= {*range(len(shapes[i]))}:
                raise ValueError(
                    f"for leaf '{names[i]}' with shape {shapes[i]} and axes {grouping.axes[i]}, "
                    f"group {group.names} must have shape {rest}, but has shape {group.shape}"
                )
        # In the other layouts, a group has a single name.
        number = int(np.prod(group.shape)) if grouping.layout == "vector" else 1
        if len(group.names) != number:
            raise ValueError(f"Group.names must have length {number}, got {group.names}")
    if grouping.layout == "scalar" and (len(grouping.groups) != 1 or grouping.groups[0].shape):
        raise ValueError(
            'a Grouping with layout="scalar" must have exactly one group with shape (), but has '
            f"groups with shapes {[group.shape for group in grouping.groups]}"
        )
    groups = tuple(sorted(grouping.groups, key=lambda group: group.names))
    return Grouping(groups, tuple(map(tuple, grouping.axes)), grouping.layout, grouping.has_labels)

"""Where the entries of a group lie: which leaves are split over devices, and how."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

import optaxclip._base.devices as devices
from optaxclip._base.devices import Axes
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import known_size
from optaxclip._base.trees import FlatTree, is_sparse, per_leaf
from optaxclip._base.types import PyTree
from optaxclip.scopes import Scope


def as_axis_names(axis_name: Any) -> tuple[str, ...] | None:
    """`axis_name`, checked, as a tuple.

    Raises:
      TypeError: if it is neither a name nor a sequence of names.
    """
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a name or a sequence of names, got {axis_name!r}")
    return tuple(names)


_MANY = 2**20
"""So many norms are held in one array at most, as what is told of each (how many entries it has) is
a constant of the program: gigabytes for AGC of Llama 3 8B with stacked layers."""


def grouped(
    scope: Scope, flat: FlatTree, axis_names: tuple[str, ...] | None = None, specs: PyTree = None
) -> Grouping:
    """What a scope makes of a tree, together with what is known of devices.

    Args:
      scope: from `optaxclip.scopes`.
      flat: the tree.
      axis_names: the mapped axes over which every leaf is split, if the user says so.
      specs: a pytree prefix of the tree with the leaves' specs, if the user says so.

    Raises:
      TypeError: if a leaf of `specs` is neither a `PartitionSpec` nor a `NamedSharding`.
      ValueError: if `specs` is not a prefix of the tree, or a spec has more entries than axes; if
        groups have names that are not in order.
    """
    leaves = flat.picked()
    known = None if specs is None else _checked_specs(specs, flat)
    whole = _whole_shapes(leaves, frozenset(axis_names or ()), known)
    grouping = scope(flat._replace(whole=whole))
    names = grouping.names
    if names != tuple(sorted(set(names))):
        raise ValueError(
            f"the names of the groups must differ and be sorted, which a leaf named like a layer "
            f"of a stacked one prevents; rename it: {names}"
        )
    is_known = all(known_size(size) is not None for leaf in leaves for size in np.shape(leaf))
    one_piece = known is None and not axis_names and devices.in_one_piece(leaves)
    several = len(grouping.groups) > 1
    few = is_known and sum(math.prod(group.shape) for group in grouping.groups) <= _MANY
    return dataclasses.replace(
        grouping, in_one_array=several and few and one_piece, axis_names=axis_names, specs=known
    )


def _checked_specs(specs: PyTree, flat: FlatTree) -> tuple[Any, ...]:
    found = per_leaf(specs, flat, "specs")
    for spec, leaf in zip(found, flat.picked(), strict=True):
        if not isinstance(spec, (PartitionSpec, NamedSharding)):
            raise TypeError(
                f"specs must be a pytree of PartitionSpec or NamedSharding, got {spec!r}"
            )
        if len(as_spec(spec)) > np.ndim(leaf):
            raise ValueError(f"specs has {spec} for a leaf of shape {np.shape(leaf)}")
    return tuple(found)


def _whole_shapes(
    leaves: Sequence[Any], names: Axes, specs: Sequence[Any] | None
) -> list[tuple[int, ...] | None]:
    """The shapes of what all devices hold of each leaf; None where that cannot be known."""
    manual = devices.manual_axes()
    if not manual and not names:
        return []
    tracked = bool(manual) and devices.tracks(manual)

    def whole(position: int, leaf: Any) -> tuple[int, ...] | None:
        shape = np.shape(leaf)
        if specs is not None:
            split = [devices.spec_axes(entry) & manual for entry in as_spec(specs[position])]
            split += [Axes()] * (len(shape) - len(split))
            return tuple(n * devices.num_devices(s) for n, s in zip(shape, split, strict=True))
        is_whole = tracked and not names - manual and not devices.varying_axes(leaf)
        return shape if is_whole else None

    return [whole(*row) for row in enumerate(leaves)]


def as_spec(spec: Any) -> PartitionSpec:
    """The spec of a sharding, or the spec itself."""
    return spec.spec if isinstance(spec, NamedSharding) else spec


def run(
    fn: Callable[..., Any], *operands: Any, grouping: Grouping, how: Any, inline: bool = False
) -> Any:
    """`fn(*operands, grouping=, how=)`: in eager mode one cached call, else part of the trace.

    Args:
      fn: a function of a module, as it is part of the cache's key.
      *operands: pytrees of arrays.
      grouping: the groups.
      how: what else it has to know, hashable.
      inline: whether it is no compiled call in eager mode either.
    """
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))
    call = fn if inline or is_traced else functools.partial(_compiled, fn)
    return call(*operands, grouping=grouping, how=how)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("grouping", "how"))
def _compiled(fn: Callable[..., Any], *operands: Any, grouping: Grouping, how: Any) -> Any:
    return fn(*operands, grouping=grouping, how=how)


def on_explicit_mesh(
    steps: Callable[..., Any],
    out_specs: Callable[[Grouping], PyTree],
    leaves: Sequence[Any],
    grouping: Grouping,
) -> Callable[..., Any]:
    """`steps` for leaves that may be split over an explicit mesh, as their types then say.

    There it runs as on an automatic mesh with these specs: one way for both.

    Args:
      steps: a function with the keyword `grouping`.
      out_specs: how what it returns is split, from the grouping with all leaves' `PartitionSpec`s.
      leaves: the measured leaves.
      grouping: their groups.

    Raises:
      ValueError: for a leaf that is a partial sum.
    """
    dense = [leaf for leaf in leaves if not is_sparse(leaf)]
    for leaf in dense:
        devices.refuse_partial_sum(leaf)
    mesh = devices.explicit_mesh(dense)
    if mesh is None or len(dense) < len(leaves) or devices.manual_axes() or grouping.axis_names:
        return functools.partial(steps, grouping=grouping)
    grouping = dataclasses.replace(grouping, specs=tuple(map(devices.spec_of, leaves)))
    run = functools.partial(steps, grouping=grouping)
    return devices.automatic(run, mesh, out_specs(grouping))


def on_each_device(
    steps: Callable[..., Any],
    out_specs: Callable[[Grouping], PyTree],
    leaves: Sequence[Any],
    grouping: Grouping,
) -> Any:
    """`steps(leaves, grouping=)` on what each device holds, where it is known how leaves are split.

    Then there is one collective in the place of the compiler's many. Leaves in one piece, those in
    a manual region, and those of which only the compiler knows it go through as they are.

    Args:
      steps: a function of leaves with the keyword `grouping`.
      out_specs: how what it returns is split, from the grouping with all leaves' `PartitionSpec`s.
      leaves: the measured leaves.
      grouping: with the specs, if any.

    Raises:
      ValueError: for specs without a mesh.
    """
    is_hidden = grouping.axis_names or any(map(is_sparse, leaves))
    if grouping.specs is None or is_hidden or devices.manual_axes():
        return steps(leaves, grouping=grouping)
    mesh = devices.mesh_of(grouping.specs)
    if mesh is None:
        raise ValueError("specs= needs a mesh: pass NamedShardings, or use jax.set_mesh")
    specs = tuple(as_spec(spec) for spec in grouping.specs)
    grouping = dataclasses.replace(grouping, specs=specs)
    local = functools.partial(steps, grouping=grouping)
    return devices.region(local, mesh, (list(specs),), out_specs(grouping))(leaves)


def norm_specs(grouping: Grouping) -> list[PartitionSpec]:
    """How the norms of each group are split: as the axes of the leaf that are not reduced."""
    specs = []
    for group in grouping.groups:
        kept: list[Any] = []
        if group.shape:
            (leaf,) = group.members
            entries = enumerate(grouping.specs[leaf] if grouping.specs else ())
            kept = [entry for axis, entry in entries if axis not in grouping.axes[leaf]]
        specs.append(PartitionSpec(*kept))
    return specs


def norm_tree_specs(grouping: Grouping) -> PyTree:
    """The same as limit rules see norms."""
    if grouping.layout != "dict":
        return PartitionSpec()
    rows = zip(grouping.groups, norm_specs(grouping), strict=True)
    return {group.names[0]: spec for group, spec in rows}


def split_over(leaves: Sequence[Any], grouping: Grouping) -> list[Axes]:
    """For each leaf the manual axes over which the entries that share its norm are split.

    Raises:
      ValueError: where that cannot be known.
    """
    manual = devices.manual_axes()
    names = frozenset(grouping.axis_names or ())
    if not manual:
        return [names] * len(leaves)
    # An axis of a surrounding `vmap` has no type to ask.
    outside = names - manual
    if devices.tracks(manual):
        return [outside | _tracked(leaf, grouping, i) for i, leaf in enumerate(leaves)]
    if grouping.specs is not None:
        return [outside | _by_spec(grouping, i)[0] & manual for i in range(len(leaves))]
    if grouping.axis_names is None:
        raise ValueError(
            "inside pmap or shard_map(check_vma=False) nothing tells how leaves are split over "
            f"the devices along {sorted(manual)}; pass axis_name= (every leaf is split over it) or "
            "specs= (a pytree of PartitionSpec), or clip outside of it"
        )
    return [names] * len(leaves)


def kept_over(grouping: Grouping) -> list[Axes]:
    """For each leaf the manual axes over which its axes that are not reduced are split."""
    manual = devices.manual_axes()
    return [_by_spec(grouping, i)[1] & manual for i in range(len(grouping.axes))]


def of_groups(grouping: Grouping, of_leaves: Sequence[Axes]) -> list[Axes]:
    """For each group the mesh axes of all its leaves."""
    return [Axes().union(*(of_leaves[i] for i in group.members)) for group in grouping.groups]


def _tracked(leaf: Any, grouping: Grouping, position: int) -> Axes:
    """What the leaf's type says, together with its spec where both reduced and kept axes exist."""
    varying = devices.varying_axes(leaf)
    is_whole = len(grouping.axes[position]) == np.ndim(leaf)
    if not varying or (is_whole and grouping.specs is None):
        return varying
    if grouping.specs is None:
        if grouping.axis_names is not None:
            return varying & frozenset(grouping.axis_names)
        raise ValueError(
            f"a leaf of type {jax.typeof(leaf)} is split over {sorted(varying)}, and its type does "
            "not say along which of its axes, only some of which share a norm; pass specs= (a "
            "pytree of PartitionSpec)"
        )
    reduced, kept = _by_spec(grouping, position)
    unknown = varying - reduced - kept
    if unknown:
        raise ValueError(
            f"specs has {grouping.specs[position]} for a leaf of type {jax.typeof(leaf)}, which "
            f"also varies over {sorted(unknown)}; sum it over them first, or correct the spec"
        )
    return varying & reduced


def _by_spec(grouping: Grouping, position: int) -> tuple[Axes, Axes]:
    """The mesh axes that split the reduced axes of a leaf, and those that split the others."""
    reduced: Axes = frozenset()
    kept: Axes = frozenset()
    spec = PartitionSpec() if grouping.specs is None else as_spec(grouping.specs[position])
    for axis, entry in enumerate(spec):
        if axis in grouping.axes[position]:
            reduced |= devices.spec_axes(entry)
        else:
            kept |= devices.spec_axes(entry)
    return reduced, kept

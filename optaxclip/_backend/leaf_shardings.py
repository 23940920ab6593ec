"""Finds where the entries of an update lie: which leaves are split over devices, and how.

This is found once for an update, from what the user says (`axis_name=`, `specs=`) and from the
types of the leaves. Inside of `shard_map` and `pmap` a leaf is what one device holds. There each
device writes the sums of its leaves into an array with places for all groups, and these arrays are
added up over the devices: so norms, thresholds, multipliers and records are the same on all devices.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.meshes import Axes
from optaxclip._backend.reductions import ScaledSums
from optaxclip._base.trees import FlatTree, Grouping, broadcast_prefix, is_sparse
from optaxclip._base.types import PyTree
from optaxclip.scopes import Scope

KeptAxes = tuple[tuple[str, ...], ...]
"""For each axis of an array of norms, the mapped axes that split it."""


@dataclasses.dataclass(frozen=True)
class LeafShardings:
    """How the leaves of one update lie on devices; static, part of a compiled function's key.

    Attributes:
      reduced: for each leaf, the mapped axes over which entries that share a norm are split.
      kept: for each leaf, the mapped axes that split each axis over which norms are not taken, in
        the order of these axes. A device measures only the norms of its own part of such an axis.
      in_one_piece: whether neither types nor arguments say that a leaf is split.
      mesh: the mesh over which norms are measured device by device; None inside of `shard_map`, and
        if only the compiler knows how leaves are split.
      specs: for each leaf, how it is split over `mesh`, if that is not None.
      explicit_mesh: the mesh on which the leaves' types say that they are split.
      automatic_mesh: the mesh over which the compiler may split leaves without showing it in types.
    """

    reduced_mesh_axes: tuple[Axes, ...]
    kept_mesh_axes: tuple[KeptAxes, ...]
    is_unsharded: bool
    mesh: Any = None
    specs: tuple[PartitionSpec, ...] = ()
    explicit_mesh: Any = None
    automatic_mesh: Any = None

    @classmethod
    def unsharded(cls, leaves: Sequence[Any]) -> "LeafShardings":
        """The placement of leaves of which no group is split over devices."""
        nothing: Axes = frozenset()
        in_one_piece = meshes.is_unsharded(leaves)
        return cls((nothing,) * len(leaves), ((),) * len(leaves), in_one_piece)

    def map_shards(self, fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`fn`, called with what each device holds of the leaves, if that is known.

        Otherwise it gets the leaves as they are. Its results are the same on all devices.
        """
        if self.mesh is None:
            return fn
        # Types do not show automatic axes, over which the compiler may split leaves.
        shown = meshes.has_mixed_axis_types(self.explicit_mesh)
        return jax.shard_map(
            fn,
            mesh=self._mesh,
            in_specs=(list(self.specs),),
            out_specs=PartitionSpec(),
            axis_names=meshes.union_axes(map(meshes.axes_of, self.specs)) if shown else Axes(),
        )

    def replicate(self, x: Array) -> Array:
        """`x`, of which every device keeps a copy.

        Without this, XLA splits the multipliers of all leaves as it splits one leaf, so devices
        send each other the parts that others need: AGC on eight H100s takes 82 collective permutes.
        """
        mesh = self.automatic_mesh if self.mesh is None else self._mesh
        return x if mesh is None else meshes.constrain_replicated(x, mesh)

    @property
    def _mesh(self) -> Any:
        # A step on an explicit mesh runs with the mesh's axes made automatic, and with this mesh as
        # the current one.
        return self.mesh if self.explicit_mesh is None else meshes.current_mesh()

    def local_sums(
        self, sums: Sequence[ScaledSums], shapes: Sequence[tuple[int, ...]], *, use_max: bool
    ) -> Sequence[ScaledSums]:
        """For each leaf, what this device adds to the sums, or the maxima, over devices.

        The sums are of what this device holds; those of whole leaves have the given shapes. If
        several devices hold the same leaf, its sum is divided by their number, so that it counts
        once.
        """
        if self.automatic_mesh is not None:
            sums = list(map(self._replicate_stacked, sums))
        if not self.all_axes:
            return sums

        def share(leaf: int) -> ScaledSums:
            replicated = self.all_axes - self.axes_of(leaf)
            replicas = 1 if use_max else meshes.axis_size(replicated)
            spread = tuple(self._pad_to_global(leaf, x, shapes[leaf]) for x in sums[leaf])
            if replicas == 1:
                return spread
            return tuple(meshes.share_among_replicas(x, replicated) for x in spread)

        return list(map(share, range(len(sums))))

    def all_reduce(self, sums: Sequence[Array], *, use_max: bool) -> Sequence[Array]:
        """The sums or maxima over devices of arrays of one shape, in one collective."""
        if not self.all_axes:
            return sums
        combine = meshes.pmax if use_max else meshes.psum
        varying = self.all_axes & meshes.manual_axes()
        found = combine(meshes.stack([meshes.pvary(x, varying) for x in sums]), self.all_axes)
        return [found[k] for k in range(len(sums))]

    def _replicate_stacked(self, sums: ScaledSums) -> ScaledSums:
        """The sums of one leaf, which every device gets in one operation.

        Without this, the compiler would leave the sums split as the leaf is.
        """
        return tuple(self.replicate(meshes.stack(sums))) if sums[0].ndim else sums

    def num_shards(self, leaf: int) -> int:
        """How many parts the groups of a leaf are split into; a device holds one part."""
        is_whole = self.mesh is not None and not meshes.manual_axes()
        return 1 if is_whole else meshes.axis_size(self.reduced_mesh_axes[leaf])

    @functools.cached_property
    def all_axes(self) -> Axes:
        """All mapped axes over which some leaf is split."""
        return meshes.union_axes(map(self.axes_of, range(len(self.reduced_mesh_axes))))

    def axes_of(self, leaf: int) -> Axes:
        """All mapped axes over which a leaf is split."""
        return self.reduced_mesh_axes[leaf] | meshes.union_axes(self.kept_mesh_axes[leaf])

    def _pad_to_global(self, leaf: int, sums: Array, shape: tuple[int, ...]) -> Array:
        """The sums of all groups of a leaf, with 0 for groups that this device does not hold."""
        if not any(self.kept_mesh_axes[leaf]):
            return sums
        start = self._local_offset(leaf, sums.shape)
        return lax.dynamic_update_slice(jnp.zeros(shape, sums.dtype), sums, start)

    def local_slices(
        self, arrays: Sequence[Array], leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]
    ) -> list[Array]:
        """This device's parts of arrays, each of which has an entry for each group of a leaf.

        `axes` are those of the leaf that its groups lack. Axes in front of the groups' axes are not
        cut.
        """
        if not self.all_axes or not meshes.manual_axes():
            return list(arrays)

        def own_part(leaf: int, x: Array) -> Array:
            if not any(self.kept_mesh_axes[leaf]):
                return x
            sizes = enumerate(np.shape(leaves[leaf]))
            shape = tuple(size for axis, size in sizes if axis not in axes[leaf])
            front = x.shape[: x.ndim - len(shape)]
            start = [np.int32(0)] * len(front) + self._local_offset(leaf, shape)
            return lax.dynamic_slice(x, start, front + shape)

        return list(map(own_part, range(len(arrays)), arrays))

    def _local_offset(self, leaf: int, shape: tuple[int, ...]) -> list[Any]:
        with_sizes = zip(self.kept_mesh_axes[leaf], shape, strict=True)
        # int32 throughout, because with 64-bit types enabled the dtypes would be mixed.
        return [lax.axis_index(axes) * size if axes else np.int32(0) for axes, size in with_sizes]


class ShardingHints(NamedTuple):
    """What the user says of how leaves are split: all over these axes, or by specs."""

    axis_names: tuple[str, ...] | None
    specs: PyTree


def apply_scope(scope: Scope, flat: FlatTree, sharding_hints: ShardingHints) -> Grouping:
    """The groups that a scope finds in a tree, of which each device may hold a part."""
    names = frozenset(sharding_hints.axis_names or ())
    if meshes.manual_axes() or names:
        split = (
            None if sharding_hints.specs is None else _resolve_specs(flat, sharding_hints.specs)[1]
        )
        flat = flat._replace(global_shapes=_global_shapes(flat.inexact_leaves(), names, split))
    grouping = scope(flat)
    all_names = tuple(grouping.names)
    if all_names != tuple(sorted(set(all_names))):
        raise ValueError(
            f"a leaf must not have the name of a layer of a stacked leaf, because groups need "
            f"different names; rename the leaf: {all_names}"
        )
    return grouping


def infer_shardings(
    grouping: Grouping, flat: FlatTree, sharding_hints: ShardingHints
) -> LeafShardings:
    """How the leaves of a tree with these groups lie on devices."""
    leaves, manual = flat.inexact_leaves(), meshes.manual_axes()
    axis_names, specs = sharding_hints
    meshes.check_axis_names_bound(axis_names or ())
    types = meshes.unique_avals(leaves)
    meshes.check_not_unreduced(types)
    # Types show neither how a sparse array is split, nor the axis of a surrounding `vmap`.
    is_untyped = bool(axis_names) or any(map(is_sparse, leaves))
    typed_mesh = meshes.explicit_mesh(types)
    automatic_mesh = None if manual else meshes.automatic_mesh(types)
    explicit_mesh = None if is_untyped else typed_mesh
    mesh, found = None, None
    if specs is not None:
        mesh, found = _resolve_specs(flat, specs)
        if mesh is None and leaves and not is_untyped:
            raise ValueError("specs= needs a mesh: pass NamedShardings, or use jax.set_mesh")
    elif explicit_mesh is not None and not manual:
        split = [meshes.spec_of(leaf) for leaf in leaves]
        # XLA (JAX 0.10.2) refuses a sum over an axis of one device under `vmap` over another axis.
        if any(explicit_mesh.shape[axis] > 1 for spec in split for axis in meshes.axes_of(spec)):
            mesh, found = explicit_mesh, split
    mesh = None if manual or is_untyped else mesh
    find = _AxisResolver(grouping, manual, axis_names, found, mesh)
    split_over = [find.axes_of(i, leaf) for i, leaf in enumerate(leaves)]
    return LeafShardings(
        reduced_mesh_axes=tuple(reduced for reduced, _ in split_over),
        kept_mesh_axes=tuple(kept for _, kept in split_over),
        is_unsharded=not (axis_names or manual) and found is None and automatic_mesh is None,
        mesh=mesh,
        specs=tuple(found) if found and mesh is not None else (),
        explicit_mesh=explicit_mesh,
        automatic_mesh=automatic_mesh if mesh is None and typed_mesh is None else None,
    )


class ExampleSpecs(NamedTuple):
    """Specs of results over a batch of examples on an explicit mesh.

    Attributes:
      sums: The specs of sums over the examples, one for each parameter.
      norms: The spec of arrays with a leading example axis.
      counts: The spec of replicated results.
    """

    sums: list[PartitionSpec]
    norms: PartitionSpec
    counts: PartitionSpec


def example_out_specs(examples: PyTree, params: Sequence[Any] | None = None) -> ExampleSpecs:
    """Returns the specs of sums sharded like the parameters, and norms sharded like the examples.

    Args:
      examples: Arrays with a leading example axis.
      params: The parameters. If None, the examples are per-example gradients, and sums over them
        are sharded like a single example.
    """
    specs = list(map(meshes.spec_of, jax.tree.leaves(examples)))
    first = next((spec[0] for spec in specs if len(spec) and spec[0] is not None), None)
    if params is None:
        sums = [PartitionSpec(*spec[1:]) for spec in specs]
    else:
        sums = list(map(meshes.spec_of, params))
    return ExampleSpecs(sums, PartitionSpec(first), PartitionSpec())


def check_examples_unsharded(
    flat: FlatTree, specs: PyTree, *, of_examples: bool, remedy: str
) -> None:
    """Refuses leaves of which devices hold parts, inside of `shard_map` and `pmap`.

    Leaves `of_examples` have a leading axis of examples, which may be split. `remedy` ends the
    message.
    """
    leaves, manual = flat.inexact_leaves(), meshes.manual_axes()
    tracked = meshes.has_vma_tracking()
    if not manual or not leaves:
        return
    if specs is None and not tracked:
        raise ValueError(
            "inside pmap or shard_map(check_vma=False) JAX does not say whether devices along "
            f"{sorted(manual)} hold parts of one example's gradient. {remedy}"
        )
    given = [PartitionSpec()] * len(leaves) if specs is None else _resolve_specs(flat, specs)[1]
    for name, leaf, spec in zip(flat.names(), leaves, given, strict=True):
        undeclared = meshes.varying_axes(leaf) - meshes.axes_of(spec)
        said = meshes.axes_of(PartitionSpec(*spec[1:] if of_examples else spec))
        split = undeclared | (said & manual)
        if split:
            raise ValueError(
                f"leaf {name!r} differs over the devices along {sorted(split)}, so that a device "
                f"may hold a part of one example's gradient. {remedy}"
            )


def _resolve_specs(flat: FlatTree, specs: PyTree) -> tuple[Any, list[PartitionSpec]]:
    """The mesh, if there is one, and how leaves are split over it, as the user says."""
    given = broadcast_prefix(specs, flat, "specs")
    sharding = next((spec for spec in given if isinstance(spec, NamedSharding)), None)
    mesh = meshes.current_mesh() if sharding is None else sharding.mesh
    with_leaves = zip(given, flat.inexact_leaves(), strict=True)
    return mesh, [_check_spec(spec, leaf, mesh) for spec, leaf in with_leaves]


def _check_spec(spec: Any, leaf: Any, mesh: Any) -> PartitionSpec:
    found = as_spec(spec)
    if len(found) > np.ndim(leaf):
        raise ValueError(f"specs has {found}, too long for a leaf of shape {np.shape(leaf)}")
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in found):
        raise ValueError(
            f"specs has {found}, and UNCONSTRAINED does not say how the leaf is split; name the "
            "axes of the mesh that split it, or None"
        )
    used = meshes.axes_of(found)
    if mesh is not None and not used <= set(mesh.axis_names):
        raise ValueError(
            f"specs has {found}, and the mesh has no axes {sorted(used - set(mesh.axis_names))}, "
            f"only {list(mesh.axis_names)}"
        )
    return found


def as_spec(spec: Any) -> PartitionSpec:
    """The spec of a sharding, or the spec itself."""
    if not isinstance(spec, (PartitionSpec, NamedSharding)):
        raise TypeError(f"specs must be a pytree of PartitionSpec or NamedSharding, got {spec!r}")
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _global_shapes(
    leaves: Sequence[Any], names: Axes, specs: Sequence[PartitionSpec] | None
) -> list[tuple[int, ...] | None]:
    """The shape of each whole leaf over all devices; None if it is unknown."""
    manual, tracked = meshes.manual_axes(), meshes.has_vma_tracking()
    if specs is None:
        # A leaf that does not vary is whole on every device.
        types_tell = tracked and not names - manual
        return [
            np.shape(leaf) if types_tell and not meshes.varying_axes(leaf) else None
            for leaf in leaves
        ]

    def global_shape(leaf: Any, spec: PartitionSpec) -> tuple[int, ...]:
        mapped = meshes.varying_axes(leaf) if tracked else manual
        axes = [mapped.intersection(meshes.spec_names(entry)) for entry in _pad_spec(spec, leaf)]
        return tuple(map(operator.mul, np.shape(leaf), map(meshes.axis_size, axes)))

    return list(map(global_shape, leaves, specs))


def _pad_spec(spec: PartitionSpec, leaf: Any) -> list[Any]:
    """A spec's entry for each axis of a leaf; None for last axes that it leaves out."""
    return [*spec, *[None] * (np.ndim(leaf) - len(spec))]


@dataclasses.dataclass(frozen=True)
class _AxisResolver:
    """Finds the mapped axes that split a leaf's entries: within a norm, and between norms.

    Every leaf is split over `axis_names`, if the user says so; `specs` are of the user or of types.
    Over the mesh norms are measured device by device.
    """

    grouping: Grouping
    manual: Axes
    axis_names: tuple[str, ...] | None
    specs: Sequence[PartitionSpec] | None
    mesh: Any

    def axes_of(self, i: int, leaf: Any) -> tuple[Axes, KeptAxes]:
        """The mapped axes that split the leaf's reduced axes, and those that split other axes."""
        unsplit = ((),) * (np.ndim(leaf) - len(self.grouping.axes[i]))
        names = frozenset(self.axis_names or ())
        # Only `axis_name` can name the axis of a surrounding `vmap`, which types do not show.
        mapped = names - self.manual
        if self.mesh is not None:
            return self._axes_from_spec(i, leaf, frozenset(self.mesh.axis_names))
        if not self.manual:
            return mapped, unsplit
        if meshes.has_vma_tracking():
            if mapped:
                raise ValueError(
                    f"axis_name names {sorted(mapped)}, but only {sorted(self.manual)} are mapped "
                    "axes of the mesh here. If it is the axis of a vmap: inside "
                    "shard_map(check_vma=True) JAX cannot sum over a vmap axis. Clip outside of "
                    "the vmap, or pass check_vma=False and name both axes"
                )
            reduced, kept = self._axes_from_type(i, leaf, unsplit)
        elif self.specs is not None:
            reduced, kept = self._axes_from_spec(i, leaf, self.manual)
        elif self.axis_names is not None:
            return names, unsplit
        else:
            raise ValueError(
                "inside pmap or shard_map(check_vma=False) JAX does not say how leaves are split "
                f"over the devices along {sorted(self.manual)}; where gradients are the same on "
                "all of them, as after pmean, pass specs=PartitionSpec(); else axis_name= (every "
                "leaf is split over it) or specs= (a pytree of PartitionSpec), or clip outside of "
                "pmap or shard_map"
            )
        return reduced | mapped, kept

    def _axes_from_spec(self, i: int, leaf: Any, axes: Axes) -> tuple[Axes, KeptAxes]:
        """The result of `axes_of` from the leaf's spec; only mesh axes among `axes` count."""
        assert self.specs is not None
        split = [
            tuple(name for name in meshes.spec_names(x) if name in axes)
            for x in _pad_spec(self.specs[i], leaf)
        ]
        inside = self.grouping.axes[i]
        reduced = meshes.union_axes(names for axis, names in enumerate(split) if axis in inside)
        return reduced, tuple(names for axis, names in enumerate(split) if axis not in inside)

    def _axes_from_type(self, i: int, leaf: Any, unsplit: KeptAxes) -> tuple[Axes, KeptAxes]:
        """The result of `axes_of` from the leaf's type, and its spec if it has several norms."""
        varying = meshes.varying_axes(leaf)
        if self.axis_names is not None:
            # Along axes that are not named, each device has its own gradients, as in local SGD.
            varying &= frozenset(self.axis_names)
        if self.specs is None:
            if not varying or not unsplit or self.axis_names is not None:
                return varying, unsplit
            raise ValueError(
                f"a leaf of type {jax.typeof(leaf)} is split over {sorted(varying)}, and its type "
                "does not say along which of its axes, only some of which share a norm; pass "
                "specs= (a pytree of PartitionSpec)"
            )
        reduced, kept = self._axes_from_spec(i, leaf, varying)
        unknown = varying - reduced - meshes.union_axes(kept)
        if unknown:
            raise ValueError(
                f"specs has {self.specs[i]} for a leaf of type {jax.typeof(leaf)}, which also "
                f"varies over {sorted(unknown)}; sum it over these first, or correct the spec; if "
                "each device along these has its own gradients, name the other axes in axis_name="
            )
        return reduced, kept

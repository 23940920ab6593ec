"""Infers how the leaves of an update are sharded, and reduces their norms over devices.

The shardings are inferred once per update, from the options `axis_name=` and `specs=` and from the
types of the leaves. Inside `shard_map` and `pmap`, a leaf is the shard of a device. Devices write
the sums of their shards to an array with elements for all groups, and these arrays are summed over
the devices. Therefore, norms, thresholds, multipliers, and records are equal on all devices.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.meshes import Axes, as_spec
from optaxclip._backend.reductions import ScaledSums
from optaxclip._base.trees import FlatTree, Grouping, broadcast_prefix, is_sparse
from optaxclip._base.types import PyTree
from optaxclip.scopes import Scope

KeptAxes = tuple[tuple[str, ...], ...]
"""The mapped axes that shard the axes of an array of norms."""


@dataclasses.dataclass(frozen=True)
class LeafShardings:
    """Leaves that are not sharded, and the base class for sharded leaves.

    Instances are static and part of the cache key of compiled functions.

    Attributes:
      reduced_mesh_axes: For each leaf, the mapped axes that shard elements with a common norm.
      kept_mesh_axes: For each leaf, the mapped axes that shard its remaining axes, in order. A
        device computes only the norms of its shard.
      is_unsharded: True if neither types nor options indicate that a leaf is sharded.
    """

    reduced_mesh_axes: tuple[Axes, ...]
    kept_mesh_axes: tuple[KeptAxes, ...]
    is_unsharded: bool

    @classmethod
    def unsharded(cls, leaves: Sequence[Any]) -> "LeafShardings":
        """Returns the shardings of leaves that are not sharded over mapped axes."""
        return cls((Axes(),) * len(leaves), ((),) * len(leaves), meshes.is_unsharded(leaves))

    def with_trailing_axes(self, number: int, *, whole_leaves: bool) -> "LeafShardings":
        """Returns the shardings for results with `number` more unsharded axes than the norms."""
        reduced, kept = self.reduced_mesh_axes, self.kept_mesh_axes
        if whole_leaves:
            reduced, kept = tuple(map(self.axes_of, range(len(reduced)))), ((),) * len(reduced)
        kept = tuple((*axes, *[()] * number) for axes in kept)
        return dataclasses.replace(self, reduced_mesh_axes=reduced, kept_mesh_axes=kept)

    @functools.cached_property
    def all_axes(self) -> Axes:
        """All mapped axes that shard a leaf."""
        return meshes.union_axes(map(self.axes_of, range(len(self.reduced_mesh_axes))))

    def axes_of(self, leaf: int) -> Axes:
        """Returns all mapped axes that shard a leaf."""
        return self.reduced_mesh_axes[leaf] | meshes.union_axes(self.kept_mesh_axes[leaf])

    def num_shards(self, leaf: int) -> int:
        """Returns the number of shards of the groups of a leaf."""
        return meshes.axis_size(self.reduced_mesh_axes[leaf])

    def map_shards(self, fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns a function of leaves that calls `fn` with their shards if these are known.

        The results of `fn` must be equal on all devices.
        """
        return fn

    def local_sums(
        self, sums: Sequence[ScaledSums], shapes: Sequence[tuple[int, ...]], *, use_max: bool
    ) -> Sequence[ScaledSums]:
        """Returns this device's contributions to sums over devices, in `shapes` of whole leaves."""
        del shapes, use_max
        return sums

    def all_reduce(self, sums: Sequence[Array], *, use_max: bool) -> Sequence[Array]:
        """Sums arrays with equal shapes over devices in one collective, or computes the maxima."""
        del use_max
        return sums

    def local_slices(
        self, arrays: Sequence[Array], leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]
    ) -> list[Array]:
        """Returns the slices of arrays `[..., *groups of a leaf]` for the shards of this device."""
        del leaves, axes
        return list(arrays)

    def replicate(self, x: Array) -> Array:
        """Replicates an array on all devices.

        Otherwise, XLA shards the multipliers of all leaves like one of the leaves, so devices must
        exchange shards (as of JAX 0.10.2). For AGC on eight H100s, this requires 82 collective
        permutes.
        """
        return x


@dataclasses.dataclass(frozen=True)
class MappedShardings(LeafShardings):
    """Leaves that are shards of this device, in `shard_map`, `pmap` or `vmap(axis_name=...)`."""

    def local_sums(
        self, sums: Sequence[ScaledSums], shapes: Sequence[tuple[int, ...]], *, use_max: bool
    ) -> Sequence[ScaledSums]:
        results = []
        for leaf, (arrays, shape) in enumerate(zip(sums, shapes, strict=True)):
            if any(self.kept_mesh_axes[leaf]):
                # Sums are padded with 0 for the groups of other devices.
                start = self._local_offset(leaf, arrays[0].shape)
                arrays = tuple(
                    lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, start) for x in arrays
                )
            replicated = self.all_axes - self.axes_of(leaf)
            replicas = 1 if use_max else meshes.axis_size(replicated)
            if replicas > 1 and jnp.issubdtype(arrays[0].dtype, jnp.inexact):
                arrays = tuple(x / replicas for x in arrays)
            elif replicas > 1:
                # Integers cannot be divided exactly, so only the first replica contributes.
                is_first = [lax.axis_index(axis) == 0 for axis in sorted(replicated)]
                is_first = functools.reduce(operator.and_, is_first)
                arrays = tuple(jnp.where(is_first, x, 0) for x in arrays)
            results.append(arrays)
        return results

    def all_reduce(self, sums: Sequence[Array], *, use_max: bool) -> Sequence[Array]:
        if not self.all_axes:
            return sums
        varying = self.all_axes & meshes.manual_axes()
        # Stacked to use a single collective for all sums.
        stacked = meshes.stack([meshes.pvary(x, varying) for x in sums])  # [scales, groups]
        totals = (meshes.pmax if use_max else meshes.psum)(stacked, self.all_axes)
        return [totals[k] for k in range(len(sums))]

    def local_slices(
        self, arrays: Sequence[Array], leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]
    ) -> list[Array]:
        results = list(arrays)
        if not meshes.manual_axes():
            return results
        for leaf, x in enumerate(arrays):
            if any(self.kept_mesh_axes[leaf]):
                sizes = enumerate(np.shape(leaves[leaf]))
                shape = tuple(size for axis, size in sizes if axis not in axes[leaf])
                front = x.shape[: x.ndim - len(shape)]
                start = [np.int32(0)] * len(front) + self._local_offset(leaf, shape)
                results[leaf] = lax.dynamic_slice(x, start, front + shape)
        return results

    def _local_offset(self, leaf: int, shape: tuple[int, ...]) -> list[Any]:
        """Returns the position of this device's shard in the norms of a leaf."""
        pairs = zip(self.kept_mesh_axes[leaf], shape, strict=True)
        # int32 like the axis index, even if 64-bit types are enabled.
        return [lax.axis_index(axes) * size if axes else np.int32(0) for axes, size in pairs]


@dataclasses.dataclass(frozen=True)
class AutomaticShardings(MappedShardings):
    """Leaves that the compiler may shard over a mesh with automatic axes."""

    mesh: Any

    def local_sums(
        self, sums: Sequence[ScaledSums], shapes: Sequence[tuple[int, ...]], *, use_max: bool
    ) -> Sequence[ScaledSums]:
        # All sums of a leaf are replicated in one operation. Otherwise, the compiler would shard
        # them like the leaf.
        sums = [tuple(self.replicate(meshes.stack(x))) if x[0].ndim else x for x in sums]
        return super().local_sums(sums, shapes, use_max=use_max)

    def replicate(self, x: Array) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class MeshShardings(MappedShardings):
    """Leaves with known specs outside `shard_map`. Their norms are computed in a `shard_map`."""

    mesh: Any
    specs: tuple[PartitionSpec, ...]

    def num_shards(self, leaf: int) -> int:
        return super().num_shards(leaf) if meshes.manual_axes() else 1

    def map_shards(self, fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=(list(self.specs),), out_specs=PartitionSpec()
        )

    def replicate(self, x: Array) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class ExplicitShardings(MeshShardings):
    """Leaves that are sharded over an explicit mesh in their types.

    A step runs with the axes of this mesh made automatic (see `global_view`), so the `shard_map`
    uses the current mesh instead of the mesh in the types.
    """

    def map_shards(self, fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        # The compiler may also shard leaves over automatic axes, which are not in the types. Only
        # the axes in the specs become manual.
        is_mixed = AxisType.Auto in self.mesh.axis_types
        return jax.shard_map(
            fn,
            mesh=meshes.current_mesh(),
            in_specs=(list(self.specs),),
            out_specs=PartitionSpec(),
            axis_names=meshes.union_axes(map(meshes.axes_of, self.specs)) if is_mixed else Axes(),
        )

    def replicate(self, x: Array) -> Array:
        return lax.with_sharding_constraint(
            x, NamedSharding(meshes.current_mesh(), PartitionSpec())
        )


class ShardingHints(NamedTuple):
    """The options `axis_name=`, whose axes shard all leaves, and `specs=`."""

    axis_names: tuple[str, ...] | None
    specs: PyTree


def apply_scope(scope: Scope, flat: FlatTree, sharding_hints: ShardingHints) -> Grouping:
    """Returns the groups of a scope, for a tree with leaves that can be shards."""
    axis_names, specs = sharding_hints
    if meshes.manual_axes() or axis_names:
        leaf_specs = None if specs is None else _resolve_specs(flat, specs)[1]
        shapes = _global_shapes(flat.inexact_leaves(), Axes(axis_names or ()), leaf_specs)
        flat = flat._replace(global_shapes=shapes)
    grouping = scope(flat)
    names = tuple(grouping.names)
    if names != tuple(sorted(set(names))):
        raise ValueError(
            f"leaf names must not clash with names of stacked layers in {names}; rename the leaf"
        )
    return grouping


def _global_shapes(
    leaves: Sequence[Any], names: Axes, specs: Sequence[PartitionSpec] | None
) -> list[tuple[int, ...] | None]:
    """Returns the shapes of whole leaves, with None for unknown shapes."""
    manual, tracked = meshes.manual_axes(), meshes.has_vma_tracking()
    if specs is None:
        # If types contain all mapped axes, a leaf that does not vary is replicated.
        is_known = tracked and names <= manual
        return [np.shape(x) if is_known and not meshes.varying_axes(x) else None for x in leaves]
    shapes = []
    for leaf, spec in zip(leaves, specs, strict=True):
        mapped = meshes.varying_axes(leaf) if tracked else manual
        axes = [mapped.intersection(entry) for entry in meshes.spec_entries(spec, leaf)]
        shapes.append(tuple(map(operator.mul, np.shape(leaf), map(meshes.axis_size, axes))))
    return shapes


def infer_shardings(
    grouping: Grouping, flat: FlatTree, sharding_hints: ShardingHints
) -> LeafShardings:
    """Infers the shardings of the leaves of a tree with these groups."""
    axis_names, specs = sharding_hints
    leaves, names = flat.inexact_leaves(), Axes(axis_names or ())
    meshes.check_axis_names_bound(axis_names or ())
    types = meshes.unique_avals(leaves)
    meshes.check_not_unreduced(types)
    given_mesh, given_specs = (None, None) if specs is None else _resolve_specs(flat, specs)
    explicit_mesh = meshes.explicit_mesh(types)
    automatic_mesh = meshes.find_mesh(AxisType.Auto, types)
    # Types contain neither the sharding of a sparse array, nor the axis of a surrounding `vmap`.
    is_untyped = bool(names) or any(map(is_sparse, leaves))
    mesh, leaf_specs = None, given_specs
    if not meshes.manual_axes() and not is_untyped:
        mesh = given_mesh
        if given_specs and mesh is None:
            raise ValueError(
                "specs must contain NamedShardings if no mesh is set, but contains "
                "PartitionSpecs; set the mesh with jax.set_mesh"
            )
        if given_specs is None and explicit_mesh is not None:
            leaf_specs = list(map(meshes.spec_of, leaves))
            spec_axes = meshes.union_axes(map(meshes.axes_of, leaf_specs))
            # XLA does not support a sum over an axis with one device under `vmap` over another axis
            # (as of JAX 0.10.2).
            mesh = explicit_mesh if any(explicit_mesh.shape[x] > 1 for x in spec_axes) else None
    rows = zip(leaves, grouping.axes, leaf_specs or [None] * len(leaves), strict=True)
    create: Callable[..., LeafShardings]
    if meshes.manual_axes():
        axes = [_infer_mapped_axes(leaf, over, spec, axis_names) for leaf, over, spec in rows]
        create = functools.partial(MappedShardings, is_unsharded=False)
    elif mesh is not None:
        mesh_axes = Axes(mesh.axis_names)
        axes = [meshes.select_spec_axes(leaf, over, spec, mesh_axes) for leaf, over, spec in rows]
        cls = MeshShardings if explicit_mesh is None else ExplicitShardings
        mesh = mesh if explicit_mesh is None else explicit_mesh
        create = functools.partial(
            cls, is_unsharded=False, mesh=mesh, specs=tuple(leaf_specs or ())
        )
    else:
        # The only mapped axes are those of a surrounding `vmap`, which shard all leaves.
        axes = [(names, ((),) * (np.ndim(leaf) - len(over))) for leaf, over, _ in rows]
        is_unsharded = not names and given_specs is None and automatic_mesh is None
        cls = MappedShardings if names else LeafShardings
        create = functools.partial(cls, is_unsharded=is_unsharded)
        if automatic_mesh is not None and explicit_mesh is None:
            create = functools.partial(
                AutomaticShardings, is_unsharded=is_unsharded, mesh=automatic_mesh
            )
    return create(tuple(reduced for reduced, _ in axes), tuple(kept for _, kept in axes))


def _infer_mapped_axes(
    leaf: Any, over: tuple[int, ...], spec: PartitionSpec | None, axis_names: Sequence[str] | None
) -> tuple[Axes, KeptAxes]:
    """Infers the manual axes that shard the reduced axes of a leaf, and those of the other axes."""
    manual, names = meshes.manual_axes(), Axes(axis_names or ())
    unsharded = ((),) * (np.ndim(leaf) - len(over))
    if not meshes.has_vma_tracking():
        # Types do not contain the sharding, so one of the options is required.
        if spec is None and axis_names is None:
            raise ValueError(
                "specs or axis_name is required inside pmap or shard_map(check_vma=False), because "
                f"leaves may be sharded along {sorted(manual)}; pass specs=PartitionSpec() if "
                "gradients are replicated (after pmean), axis_name if these axes shard all leaves, "
                "or a pytree of PartitionSpec as specs"
            )
        if spec is None:
            return names, unsharded
        reduced, kept = meshes.select_spec_axes(leaf, over, spec, manual)
        return reduced | (names - manual), kept
    if names - manual:
        raise ValueError(
            f"axis_name must contain only the axes {sorted(manual)} inside "
            f"shard_map(check_vma=True), got {sorted(names - manual)}; clip outside the vmap, or "
            "use check_vma=False and pass all axes"
        )
    # The type contains the mesh axes, but not the axes of the leaf that they shard.
    varying = meshes.varying_axes(leaf)
    if axis_names is not None:
        varying &= names  # Gradients are independent along other axes, as in local SGD.
    if spec is None:
        if not varying or not unsharded or axis_names is not None:
            return varying, unsharded
        raise ValueError(
            f"specs is required because a leaf of type {jax.typeof(leaf)} varies over "
            f"{sorted(varying)} and has several norms; pass a pytree of PartitionSpec"
        )
    reduced, kept = meshes.select_spec_axes(leaf, over, spec, varying)
    unknown = varying - reduced - meshes.union_axes(kept)
    if unknown:
        raise ValueError(
            f"specs must name all axes over which a leaf varies, got {spec} for a leaf of type "
            f"{jax.typeof(leaf)} that also varies over {sorted(unknown)}; correct the spec, sum "
            "the leaf over these axes, or pass only the axes that shard it as axis_name"
        )
    return reduced, kept


def _resolve_specs(flat: FlatTree, specs: PyTree) -> tuple[Any, list[PartitionSpec]]:
    """Returns the mesh, or None, and the specs of the leaves, from the option `specs=`."""
    given = broadcast_prefix(specs, flat, "specs")
    sharding = next((spec for spec in given if isinstance(spec, NamedSharding)), None)
    mesh = meshes.current_mesh() if sharding is None else sharding.mesh
    leaf_specs = list(map(as_spec, given))
    for leaf, spec in zip(flat.inexact_leaves(), leaf_specs, strict=True):
        if len(spec) > np.ndim(leaf):
            raise ValueError(
                f"specs must have at most one entry per axis, got {spec} for shape {np.shape(leaf)}"
            )
        if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            raise ValueError(
                f"specs must not contain UNCONSTRAINED, got {spec}; name the mesh axes that "
                "shard the leaf, and use None for unsharded axes"
            )
        if mesh is not None and (unknown := meshes.axes_of(spec) - {*mesh.axis_names}):
            raise ValueError(
                f"specs must use only the mesh axes {list(mesh.axis_names)}, got "
                f"{sorted(unknown)} in {spec}"
            )
    return mesh, leaf_specs


def check_examples_unsharded(
    flat: FlatTree, specs: PyTree, *, of_examples: bool, remedy: str
) -> None:
    """Checks that per-example gradients are not sharded within an example."""
    leaves, manual = flat.inexact_leaves(), meshes.manual_axes()
    if not manual or not leaves:
        return
    if specs is None and not meshes.has_vma_tracking():
        raise ValueError(
            "specs is required inside pmap or shard_map(check_vma=False), because gradients may "
            f"be sharded along {sorted(manual)}; {remedy}"
        )
    unsharded = [PartitionSpec()] * len(leaves)
    leaf_specs = unsharded if specs is None else _resolve_specs(flat, specs)[1]
    for name, leaf, spec in zip(flat.names(), leaves, leaf_specs, strict=True):
        undeclared = meshes.varying_axes(leaf) - meshes.axes_of(spec)
        declared = meshes.union_axes(map(meshes.spec_names, spec[1:] if of_examples else spec))
        if sharded := undeclared | (declared & manual):
            raise ValueError(
                f"leaf {name!r} must not be sharded within an example, but varies over "
                f"{sorted(sharded)}; {remedy}"
            )

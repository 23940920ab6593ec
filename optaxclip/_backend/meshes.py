"""Reads meshes, mesh axes and shardings from JAX's types. Other packages leave this to this module.

Inside `shard_map`, some mesh axes are manual, and an array is the shard of a device. With
`check_vma=True`, the types of arrays contain the manual axes over which they vary. Inside `pmap`
and `shard_map(check_vma=False)`, they do not. Outside `shard_map`, types contain the sharding over
an explicit mesh.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.types import PyTree

try:
    from jax.experimental.shard_alike import shard_alike
except ImportError:  # removed in JAX 0.11
    shard_alike = None

Axes = frozenset[str]
"""Names of mesh axes."""


def union_axes(sets: Iterable[Iterable[str]]) -> Axes:
    """Returns the union of sets of axes."""
    return Axes(itertools.chain.from_iterable(sets))


def manual_axes() -> Axes:
    """Returns the manual axes of the current mesh, or the axis of a `pmap`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: Any) -> Axes:
    """Returns the manual axes over which a value varies according to its type."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def tree_varying_axes(tree: PyTree) -> Axes:
    """Returns the manual axes over which any leaf of a tree varies according to its type."""
    return union_axes(map(varying_axes, jax.tree.leaves(tree)))


def collective_primitives(program: Any) -> frozenset[str]:
    """Returns the names of a program's operations that communicate over manual axes."""
    primitives = frozenset[str]()
    for eqn in program.eqns:
        # Collectives name their axes in one of two parameters (as of JAX 0.10.2).
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = frozenset(axes if isinstance(axes, tuple) else (axes,))
        if names & manual_axes() and eqn.primitive.name not in ("axis_index", "pvary", "pcast"):
            primitives |= {eqn.primitive.name}
        values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
        primitives |= union_axes(collective_primitives(x) for x in values if hasattr(x, "eqns"))
    return primitives


def check_replicated_scalar(x: Any, axis_names: Iterable[str] | None, what: str) -> None:
    """Checks that the number `what` does not vary over devices that share a norm."""
    shared = manual_axes() if axis_names is None else frozenset(axis_names)
    if varying := sorted(varying_axes(x) & shared):
        raise ValueError(
            f"{what} must have the same value on all devices that share a norm, but varies over "
            f"{varying}; use lax.pmean({what}, {varying}) or exclude axes with independent "
            "gradients from axis_name"
        )


@functools.cache
def _jaxpr_tracer_type() -> type:
    # The class of arrays in a program that is traced has no public name (as of JAX 0.10.2).
    types = []
    jax.make_jaxpr(lambda x: types.append(type(x)))(0.0)
    return types[0]


def is_being_staged(traced: Sequence[Any]) -> bool:
    """Returns `True` if there are traced arrays and all are staged, for example by `jit`."""
    return bool(traced) and all(isinstance(x, _jaxpr_tracer_type()) for x in traced)


def unique_avals(arrays: PyTree) -> list[Any]:
    """Returns the distinct types of arrays. Reuse them, because `jax.typeof` is slow."""
    return list(dict.fromkeys(map(jax.typeof, jax.tree.leaves(arrays))))


def check_not_unreduced(types: Iterable[Any]) -> None:
    """Checks that no type is that of a partial sum, which must be reduced before it has a norm."""
    for aval in types:
        spec = getattr(getattr(aval, "sharding", None), "spec", None)
        kinds = (aval.manual_axis_type, spec)
        unreduced = {axis for kind in kinds for axis in getattr(kind, "unreduced", None) or ()}
        if unreduced:
            raise ValueError(
                f"leaves must be fully reduced before clipping, but a leaf of type {aval} is a "
                f"partial sum over {sorted(unreduced)}; reduce it with jax.lax.psum or jax.reshard"
            )


def shard_like(x: Array, like: Array) -> Array:
    """Makes the compiler shard `x` like another array, unless types already determine this."""
    sharding = getattr(jax.typeof(like), "sharding", None)
    types = () if sharding is None else sharding.mesh.axis_types
    if manual_axes() or any(kind != AxisType.Auto for kind in types):
        return x
    if shard_alike is not None:
        return shard_alike(like, x)[1]
    # `x` is always selected, but the barrier hides this, so both arrays must be sharded equally.
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return lax.select(never, like.astype(x.dtype), x)


def has_vma_tracking() -> bool:
    """Returns `True` if there are manual axes, and types show which arrays vary over them."""
    axes = manual_axes()
    # JAX has no public function for this (as of JAX 0.10.2).
    return bool(axes) and varying_axes(pvary(jnp.zeros(()), axes)) == axes


def pvary(x: Array, axes: Axes) -> Array:
    """Marks `x` as varying over manual axes in its type."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def pvary_like(batch: PyTree, tree: PyTree) -> PyTree:
    """Marks a tree in its types as varying over the manual axes of a batch."""
    # Otherwise, JAX would sum gradients with respect to replicated parameters over the devices, and
    # thus sum examples before they are clipped.
    axes = tree_varying_axes(batch)
    return jax.tree.map(lambda x: pvary(jnp.asarray(x), axes), tree) if axes else tree


def check_axis_names_bound(axis_names: Iterable[str]) -> None:
    """Checks that the caller is mapped over these axes."""
    for name in axis_names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name must name a mapped axis, got {name!r}; wrap the call in pmap, "
                "shard_map, or vmap(axis_name=...), or omit axis_name"
            ) from None


def axis_size(axes: Iterable[str]) -> int:
    """Returns the number of devices along axes."""
    return math.prod(map(lax.axis_size, axes))


def psum(x: Array, axes: Axes) -> Array:
    """Sums over the devices along axes."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x


@custom_jvp(nondiff_argnums=(1,))
def pmax(x: Array, axes: Axes) -> Array:
    """Computes the maximum over the devices along axes, for arrays without NaN."""
    # `lax.pmax` does not propagate NaN on CPUs (as of JAX 0.10.2).
    return lax.pmax(x, tuple(sorted(axes))) if axes else x


@pmax.defjvp
def _(axes: Axes, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    maximum = pmax(x, axes)
    is_maximum = (x == maximum).astype(x.dtype)
    # Devices with equal maxima share the derivative.
    weight = is_maximum / jnp.maximum(psum(is_maximum, axes), 1)
    return maximum, psum(weight * dx, axes)


def explicit_sharding(aval: Any) -> tuple[Any, PartitionSpec] | None:
    """Returns the mesh and the spec in the type of a sharded array, or None."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not axes_of(sharding.spec):
        return None
    return sharding.mesh, sharding.spec


def is_unsharded(arrays: PyTree) -> bool:
    """Returns `True` if the types of arrays rule out that they are sharded."""
    types = unique_avals(arrays)
    return not (
        manual_axes() or find_mesh(AxisType.Auto, types) or any(map(explicit_sharding, types))
    )


def find_mesh(kind: AxisType, types: Iterable[Any]) -> Any:
    """Returns the first mesh in these types that has axes of a kind, or None."""
    for aval in types:
        sharding = getattr(aval, "sharding", None)
        if sharding is not None and kind in sharding.mesh.axis_types:
            return sharding.mesh
    return None


def explicit_mesh(types: Iterable[Any]) -> Any:
    """Returns the only mesh over which arrays of these types are sharded, or None."""
    meshes = {sharding[0] for sharding in map(explicit_sharding, types) if sharding}
    return meshes.pop() if len(meshes) == 1 else None


def replicate(x: Any) -> Any:
    """Replicates an array on the explicit mesh in its type."""
    # JAX cannot sort along a sharded axis or write a row into it (as of JAX 0.10.2).
    sharding = explicit_sharding(jax.typeof(x))
    if sharding is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding[0], PartitionSpec()))


def use_operand_mesh(types: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Sets the explicit mesh in the types of traced arrays, if no mesh is set."""
    # Otherwise, JAX cannot stack arrays under `vmap` on an explicit mesh (as of JAX 0.10.2).
    mesh = None if current_mesh() else find_mesh(AxisType.Explicit, types)
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def place_on_mesh_of(tree: PyTree, like: PyTree) -> PyTree:
    """Marks the arrays of a tree as replicated on the explicit mesh of traced arrays."""
    # Otherwise, JAX can neither combine mapped and unmapped arrays under `vmap` over an axis of the
    # mesh, nor use an unmapped array as the first carry of a `scan` (as of JAX 0.10.2).
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(like))
    mesh = find_mesh(AxisType.Explicit, unique_avals(like)) if is_traced else None
    return tree if mesh is None else jax.tree.map(lambda x: place_on_mesh(x, mesh), tree)


def retyped_like(like: PyTree, tree: PyTree) -> PyTree:
    """Reshards a tree over the explicit meshes in the types of `like`."""

    def reshard_leaf(like: Array, x: Array) -> Array:
        sharding = getattr(jax.typeof(like), "sharding", None)
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types or manual_axes():
            return x
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, sharding.spec))

    return jax.tree.map(reshard_leaf, like, tree)


def place_on_mesh(x: Any, mesh: Any) -> Any:
    """Marks an array without a mesh as replicated on an explicit mesh."""
    if not isinstance(x, Array) or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def zeros_like_aval(aval: Any, leading_axes: Sequence[int] = ()) -> Array:
    """Returns zeros with the shape, dtype, and explicit sharding of a type, after leading axes."""
    zeros = jnp.zeros((*leading_axes, *aval.shape), aval.dtype)
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return zeros
    spec = PartitionSpec(*[None] * len(leading_axes), *sharding.spec)
    return jax.sharding.reshard(zeros, NamedSharding(sharding.mesh, spec))


# Jitted so that the sums at all scales share one trace.
@functools.partial(jax.jit, static_argnames="axis")
def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Stacks arrays with equal shapes along a new axis."""
    # `jnp.stack` fails on explicit meshes if `vmap` maps only some arrays (as of JAX 0.10.2).
    shape = (*arrays[0].shape[:axis], 1, *arrays[0].shape[axis:])
    kept = [i for i in range(len(shape)) if i != axis]
    # `expand_dims` takes twice as long to trace as `broadcast_in_dim` (as of JAX 0.10.2).
    return lax.concatenate([lax.broadcast_in_dim(x, shape, kept) for x in arrays], axis)


def reuse_buffers(old: PyTree, new: PyTree) -> PyTree:
    """Returns `new`, and lets `jit` store its leaves in the donated buffers of `old`.

    `jit` drops unused arguments, so a state that is only written would move to a different buffer
    on every step, and XLA on GPUs would prepare all kernels that use it again (as of JAX 0.11.2).
    For AdamW with 50 million elements on an H100, clipping by the global norm would add 0.9 ms
    instead of 0.4 ms. XLA removes the selection.
    """
    # Uses the structure of `new`, because the old state may have lost its names.
    return jax.tree.map(
        lambda x, y: lax.select(np.True_, x, y) if isinstance(y, Tracer) else x, new, old
    )


def use_auto_axes(fn: Callable[..., Any], mesh: Any, out_specs: PyTree) -> Callable[..., Any]:
    """Makes the explicit axes of the mesh automatic in `fn`, so the compiler shards arrays."""
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), out_specs)
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
    # Without `jit`, `auto_axes` fails in eager mode inside `shard_map` (as of JAX 0.10.2).
    return jax.jit(jax.sharding.auto_axes(fn, out_sharding=shardings, axes=axes))


def spec_of(x: Any) -> PartitionSpec:
    """Returns the spec of an array on an explicit mesh. A spec is returned unchanged."""
    if isinstance(x, PartitionSpec):
        return x
    sharding = explicit_sharding(jax.typeof(x))
    return PartitionSpec() if sharding is None else sharding[1]


def spec_names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a spec, in order."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: PartitionSpec) -> Axes:
    """Returns the mesh axes in a spec."""
    return union_axes(map(spec_names, spec))


def select_spec_axes(
    leaf: Any, over: tuple[int, ...], spec: PartitionSpec | None, mapped: Axes
) -> tuple[Axes, tuple[tuple[str, ...], ...]]:
    """Returns the mapped axes in a spec that shard reduced axes, and those that shard kept axes."""
    entries = [tuple(x for x in names if x in mapped) for names in spec_entries(spec, leaf)]
    reduced = union_axes(names for axis, names in enumerate(entries) if axis in over)
    return reduced, tuple(names for axis, names in enumerate(entries) if axis not in over)


def spec_entries(spec: PartitionSpec | None, leaf: Any) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard the axes of a leaf."""
    entries = tuple(spec or ())
    # Axes at the end may be omitted from a spec.
    return list(map(spec_names, entries + (None,) * (np.ndim(leaf) - len(entries))))


def as_spec(spec: Any) -> PartitionSpec:
    """Returns the spec of a `NamedSharding`. A `PartitionSpec` is returned unchanged."""
    if not isinstance(spec, (PartitionSpec, NamedSharding)):
        raise TypeError(
            f"specs must be a pytree of PartitionSpec or NamedSharding, got {spec!r}; use "
            "PartitionSpec instead of tuples"
        )
    return spec.spec if isinstance(spec, NamedSharding) else spec


def select_spec_entries(
    spec: PartitionSpec | NamedSharding, axes: Sequence[int], rank: int
) -> PartitionSpec | NamedSharding:
    """Selects the spec entries of some non-negative axes, for an array with `rank` axes."""
    entries = [*as_spec(spec), *[None] * rank]
    selected = PartitionSpec(*(entries[axis] for axis in axes))
    return NamedSharding(spec.mesh, selected) if isinstance(spec, NamedSharding) else selected


def current_mesh() -> Any:
    """Returns the current mesh, for example of a surrounding `shard_map`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


class ExampleSpecs(NamedTuple):
    """The specs of sums per parameter, of norms per example, and of replicated counts."""

    sums: list[PartitionSpec]
    norms: PartitionSpec
    counts: PartitionSpec


def example_out_specs(examples: PyTree, params: Sequence[Any] | None = None) -> ExampleSpecs:
    """Returns the specs of sums sharded like the parameters, and norms sharded like the examples.

    The examples must have a leading example axis. Without parameters, they must be per-example
    gradients, and sums are sharded like an individual example.
    """
    specs = list(map(spec_of, jax.tree.leaves(examples)))
    first = next((spec[0] for spec in specs if len(spec) and spec[0] is not None), None)
    of_one = [PartitionSpec(*spec[1:]) for spec in specs]
    sums = of_one if params is None else list(map(spec_of, params))
    return ExampleSpecs(sums, PartitionSpec(first), PartitionSpec())

"""Meshes, axes and memories, as JAX's types describe them; no other file asks JAX for these.

Inside `shard_map` some axes of the mesh are manual: an array is what one device holds. With
`check_vma=True`, JAX tracks over which manual axes an array varies, and the array's type says so;
otherwise, and inside `pmap`, the type does not say it. Outside of `shard_map`, the type says how an
array is split over an explicit mesh.
"""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optaxclip._base.numerics import custom_jvp
from optaxclip._base.types import PyTree

try:
    from jax.experimental.shard_alike import shard_alike
except ImportError:  # from JAX 0.11 on
    shard_alike = None

Axes = frozenset[str]


def union_axes(sets: Iterable[Iterable[str]]) -> Axes:
    """The axes that are in some of these sets."""
    return Axes(itertools.chain.from_iterable(sets))


def manual_axes() -> Axes:
    """The axes of the mesh that are manual here; inside `pmap`, the axis of the `pmap`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: Any) -> Axes:
    """The manual axes over which JAX tracks that a value differs from device to device."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def tree_varying_axes(tree: PyTree) -> Axes:
    """The manual axes over which JAX tracks that some leaf differs from device to device."""
    return union_axes(map(varying_axes, jax.tree.leaves(tree)))


def collective_primitives(program: Any) -> frozenset[str]:
    """The names of the operations of a program that exchange data between devices here."""
    found = frozenset[str]()
    for eqn in program.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = frozenset(axes if isinstance(axes, tuple) else (axes,))
        if names & manual_axes() and eqn.primitive.name not in ("axis_index", "pvary", "pcast"):
            found |= {eqn.primitive.name}
        values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
        found |= union_axes(collective_primitives(x) for x in values if hasattr(x, "eqns"))
    return found


def check_replicated(x: Any, axes: Iterable[str], argument: str) -> None:
    """Refuses a number whose type says that it differs over devices along one of these axes."""
    different = sorted(varying_axes(x) & frozenset(axes))
    if different:
        raise ValueError(
            f"{argument} differs over the devices along {different}, which share one norm and must "
            f"do the same with it: pass what is the same on all of them, as lax.pmean({argument}, "
            f"{different}) is. If each device has gradients of its own, name in axis_name= only "
            "the axes over which these are split"
        )


def norm_axes(axis_names: Iterable[str] | None) -> Axes:
    """The manual axes along which devices share a norm, as far as the user says it."""
    return manual_axes() if axis_names is None else frozenset(axis_names)


@functools.cache
def _jaxpr_tracer_type() -> type:
    """The class of arrays of a program that is being traced; it has no public name (JAX 0.10.2)."""
    found = []
    jax.make_jaxpr(lambda x: found.append(type(x)))(0.0)
    return found[0]


def is_being_staged(traced: Sequence[Any]) -> bool:
    """Whether there are traced arrays, all of a program that is being traced, as by `jit`."""
    return bool(traced) and all(isinstance(x, _jaxpr_tracer_type()) for x in traced)


def unique_avals(arrays: PyTree) -> list[Any]:
    """The types of these arrays, each once.

    Callers pass the types on, because `jax.typeof` is slow.
    """
    return list(dict.fromkeys(map(jax.typeof, jax.tree.leaves(arrays))))


def check_not_unreduced(types: Iterable[Any]) -> None:
    """Refuses types of values that must be summed over devices before they have a norm."""
    for aval in types:
        spec = getattr(getattr(aval, "sharding", None), "spec", None)
        kinds = (aval.manual_axis_type, spec)
        unreduced = {axis for kind in kinds for axis in getattr(kind, "unreduced", None) or ()}
        if unreduced:
            raise ValueError(
                f"a leaf of type {aval} is a partial sum over {sorted(unreduced)}; sum it over the "
                "devices (jax.lax.psum, or jax.reshard to a spec without them) before it is clipped"
            )


def shard_like(x: Array, like: Array) -> Array:
    """`x`, which the compiler splits over devices in the same way as `like`.

    If types or the user decide how arrays are split, `x` is returned unchanged.
    """
    sharding = getattr(jax.typeof(like), "sharding", None)
    types = () if sharding is None else sharding.mesh.axis_types
    if manual_axes() or any(kind != AxisType.Auto for kind in types):
        return x
    if shard_alike is not None:
        return shard_alike(like, x)[1]
    # `x` is always chosen. The barrier hides that from the compiler, which so splits both alike.
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return lax.select(never, like.astype(x.dtype), x)


def has_vma_tracking() -> bool:
    """Whether there are manual axes, and JAX tracks which values vary over them."""
    axes = manual_axes()
    return bool(axes) and varying_axes(pvary(jnp.zeros(()), axes)) == axes


def pvary(x: Array, axes: Axes) -> Array:
    """`x`, typed as varying over these manual axes too."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def pvary_like(batch: PyTree, tree: PyTree) -> PyTree:
    """`tree`, typed inside `shard_map` as varying over the same devices as the batch.

    Without this, JAX would sum gradients over these devices, because the parameters do not vary
    over them: examples would be added up before they are clipped.
    """
    axes = tree_varying_axes(batch)
    return jax.tree.map(lambda x: pvary(jnp.asarray(x), axes), tree) if axes else tree


def check_axis_names_bound(axis_names: Iterable[str]) -> None:
    """Checks that a function is mapped over these axes."""
    for name in axis_names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name names {name!r}, and nothing here is mapped over an axis of this name: "
                "call it inside of pmap, shard_map or vmap(axis_name=), or leave axis_name out"
            ) from None


def axis_size(axes: Iterable[str]) -> int:
    """The number of devices along these axes."""
    return math.prod(map(lax.axis_size, axes))


def share_among_replicas(x: Array, axes: Axes) -> Array:
    """What each device along these axes adds, so that the sum is the `x` that all of them hold."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x / axis_size(axes)
    # An integer has no such parts: the first device adds all.
    is_first = [lax.axis_index(axis) == 0 for axis in sorted(axes)]
    return jnp.where(functools.reduce(operator.and_, is_first), x, 0)


def psum(x: Array, axes: Axes) -> Array:
    """The sum over the devices along these axes."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x


@custom_jvp(nondiff_argnums=(1,))
def pmax(x: Array, axes: Axes) -> Array:
    """The maximum over the devices along these axes, of arrays without NaN.

    Arrays with NaN cannot use it, because `lax.pmax` loses a NaN on a CPU (JAX 0.10.2).
    """
    return lax.pmax(x, tuple(sorted(axes))) if axes else x


@pmax.defjvp
def _largest_jvp(axes: Axes, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    maximum = pmax(x, axes)
    is_there = (x == maximum).astype(x.dtype)
    share = is_there / jnp.maximum(psum(is_there, axes), 1)
    return maximum, psum(share * dx, axes)


def explicit_sharding(x: Any) -> tuple[Any, PartitionSpec] | None:
    """The mesh and the spec in an array's type, if it says that it is split over devices."""
    return _explicit_sharding(jax.typeof(x))


def _explicit_sharding(aval: Any) -> tuple[Any, PartitionSpec] | None:
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not axes_of(sharding.spec):
        return None
    return sharding.mesh, sharding.spec


def is_unsharded(arrays: PyTree) -> bool:
    """Whether no type of these arrays says that it may be split over devices."""
    types = unique_avals(arrays)
    is_split = manual_axes() or automatic_mesh(types) or any(map(_explicit_sharding, types))
    return not is_split


def automatic_mesh(types: Iterable[Any]) -> Any:
    """The mesh in one of these types over which the compiler splits arrays, if there is one."""
    return _find_mesh(AxisType.Auto, types)


def _find_mesh(kind: AxisType, types: Iterable[Any]) -> Any:
    for of_type in types:
        sharding = getattr(of_type, "sharding", None)
        if sharding is not None and kind in sharding.mesh.axis_types:
            return sharding.mesh
    return None


def explicit_mesh(types: Iterable[Any]) -> Any:
    """The explicit mesh over which arrays of these types are split; None if there is none."""
    shardings = map(_explicit_sharding, types)
    meshes = {sharding[0] for sharding in shardings if sharding}
    return meshes.pop() if len(meshes) == 1 else None


def replicate(x: Any) -> Any:
    """`x`, in full on each device of the explicit mesh in its type.

    JAX 0.10.2 can neither sort an array along an axis that is split, nor write a row into it.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding[0], PartitionSpec()))


def use_operand_mesh(types: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Sets the explicit mesh on which traced arrays of these types lie, if no mesh is set.

    Without it, JAX 0.10.2 cannot stack arrays under `vmap` that are split over an explicit mesh.
    """
    mesh = None if current_mesh() else _find_mesh(AxisType.Explicit, types)
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def place_on_mesh_of(tree: PyTree, like: PyTree) -> PyTree:
    """`tree`, with its arrays typed as lying on all devices of the explicit mesh of `like`.

    Without it, JAX 0.10.2 under `vmap` over an axis of the mesh can neither join mapped arrays with
    unmapped ones, nor carry through `scan` what starts unmapped. In eager mode nothing changes.
    """
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(like))
    mesh = _find_mesh(AxisType.Explicit, unique_avals(like)) if is_traced else None
    return (
        tree if mesh is None else jax.tree.map(functools.partial(_place_on_mesh, mesh=mesh), tree)
    )


def retyped_like(like: PyTree, tree: PyTree) -> PyTree:
    """`tree`, split over an explicit mesh as the types of `like` say."""

    def retyped(like: Array, x: Array) -> Array:
        sharding = getattr(jax.typeof(like), "sharding", None)
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types or manual_axes():
            return x
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, sharding.spec))

    return jax.tree.map(retyped, like, tree)


def place_on_current_mesh(x: Array) -> Array:
    """A traced array, typed as lying on all devices of the explicit mesh that is set."""
    mesh = current_mesh()
    is_explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    return _place_on_mesh(x, mesh) if is_explicit and isinstance(x, Tracer) else x


def _place_on_mesh(x: Any, mesh: Any) -> Any:
    if not isinstance(x, Array) or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def zeros_like_aval(aval: Any, leading_axes: Sequence[int] = ()) -> Array:
    """Zeros of a type, with the axes `around` in front, split over an explicit mesh as it says."""
    zeros = jnp.zeros((*leading_axes, *aval.shape), aval.dtype)
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return zeros
    spec = PartitionSpec(*(None for _ in leading_axes), *sharding.spec)
    return jax.sharding.reshard(zeros, NamedSharding(sharding.mesh, spec))


# A compiled function of its own, so that it is traced once for the sums at all scales.
@functools.partial(jax.jit, static_argnames="axis")
def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Stacks arrays of one shape along a new axis."""
    # Not `jnp.stack`, which fails on an explicit mesh (JAX 0.10.2) if `vmap` maps only some of the
    # arrays.
    shape = (*arrays[0].shape[:axis], 1, *arrays[0].shape[axis:])
    kept = [i for i in range(len(shape)) if i != axis]
    # Not `expand_dims`, which takes twice as long to trace.
    return lax.concatenate([lax.broadcast_in_dim(x, shape, kept) for x in arrays], axis)


def reuse_buffers(old: PyTree, new: PyTree) -> PyTree:
    """`new`, each leaf of which `jit` can put where that of `old` is, if that is donated.

    `jit` drops an argument that nothing reads, so a state that is only written would lie elsewhere
    after each step, and on a GPU XLA (JAX 0.11.2) then sets up every kernel that such a change
    touches once more: on an H100, in AdamW's step with 50 million entries, the clip by the global
    norm would add 0.9 ms in the place of 0.4 ms. XLA removes the choice between the two.
    """

    def choose_structure(x: Array, y: Array) -> Array:
        return lax.select(np.True_, x, y) if isinstance(y, Tracer) else x

    # The structure is that of `new`: a state before may have lost its names.
    return jax.tree.map(choose_structure, new, old)


def has_mixed_axis_types(mesh: Any) -> bool:
    """Whether a mesh has explicit axes and automatic ones."""
    return mesh is not None and {AxisType.Explicit, AxisType.Auto} <= set(mesh.axis_types)


def use_auto_axes(fn: Callable[..., Any], mesh: Any, out_specs: PyTree) -> Callable[..., Any]:
    """`fn` with the mesh's explicit axes made automatic, so that the compiler splits arrays.

    Manual axes stay manual. `out_specs` has a `PartitionSpec` for each array that `fn` returns.
    """
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), out_specs)
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
    # In `jit`, because `auto_axes` alone fails in eager mode inside of `shard_map` (JAX 0.10.2).
    return jax.jit(jax.sharding.auto_axes(fn, out_sharding=shardings, axes=axes))


def spec_of(x: Any) -> PartitionSpec:
    """The spec by which an array is split over an explicit mesh; a spec is returned as it is."""
    if isinstance(x, PartitionSpec):
        return x
    sharding = explicit_sharding(x)
    return PartitionSpec() if sharding is None else sharding[1]


def spec_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes over which a spec splits one dimension, in order."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: PartitionSpec) -> Axes:
    """The mesh axes over which a spec splits an array."""
    return union_axes(map(spec_names, spec))


def current_mesh() -> Any:
    """The mesh that was set, or the mesh of the surrounding `shard_map`; None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def constrain_replicated(x: Array, mesh: Any) -> Array:
    """`x`, with a full copy on every device."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))

"""Adapts functions to arrays in any memory space, to any mesh, and to eager mode."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._base.state import check_updates_not_state
from optaxclip._base.types import PyTree

State = TypeVar("State", covariant=True)
Params = ParamSpec("Params")
Result = TypeVar("Result")
_NO_STATE = object()


class Init(Protocol[State]):
    """`init(params) -> state`."""

    def __call__(self, params: PyTree) -> State:
        """Creates the state before the first step."""
        ...


class Update(Protocol[State]):
    """`update(updates, state, params, **extra_args) -> (updates, state)`."""

    def __call__(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        """Returns the new updates and the next state."""
        ...


class Transformation(optax.GradientTransformationExtraArgs, Generic[State]):
    """An Optax transformation with the type of its state, so editors can complete its fields."""

    # Fields of named tuples are never assigned, so their types may be narrower than in the parent.
    init: Init[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State]  # pyright: ignore[reportIncompatibleVariableOverride]


def transformation(init: Init[State], update: Update[State]) -> Transformation[State]:
    """Creates a transformation that accepts arrays in any memory space."""

    @functools.wraps(init)
    def init_fn(params: PyTree) -> State:
        return meshes.place_on_mesh_of(init(params), params)

    @functools.wraps(update)
    def update_fn(
        updates: PyTree, state: Any = _NO_STATE, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        if state is _NO_STATE:
            raise TypeError(
                "update() requires a state; call tx.update(grads, state, params), starting with "
                "state = tx.init(params)"
            )
        # JAX does not compute with arrays in different memory spaces.
        arrays, restore = move_to_device_memory(updates, state, params, extra_args)
        updates, state, params, extra_args = arrays
        new_updates, new_state = restore(*update(updates, state, params, **extra_args))
        return new_updates, new_state

    tx: Any = Transformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
    return tx


def stateless(update: Callable[..., Any]) -> Transformation[Any]:
    """Creates a transformation that returns its state unchanged."""

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_updates_not_state(updates, optax.EmptyState, "update")
        return update(updates, params, **extra_args), state

    return transformation(optax.init_empty_state, update_fn)


def global_view(
    *, out_like: str | tuple[str, ...] | Callable[..., PyTree] | None = None, compiled: bool = True
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorates a function of arrays to work with any sharding.

    Positional arguments are pytrees of arrays, and keyword arguments must be static and hashable.
    If types are sharded over an explicit mesh, its axes are automatic inside the function, so the
    compiler shards intermediate arrays. In eager mode, the function is compiled and cached. Under
    `jit`, it is traced with the surrounding code, because tracing a call is slow.

    Args:
      out_like: The shardings of the results on an explicit mesh: the name of an argument with the
        same types, or a tuple with one name per result. It can also be a function of the positional
        arguments that returns a pytree prefix of the results with arrays or `PartitionSpec`s. By
        default, the results are replicated.
      compiled: If True, compiles the function in eager mode. The function is part of the cache key,
        so it must be defined at the top level of a module.
    """

    def decorate(fn: Callable[Params, Result]) -> Callable[Params, Result]:
        like: Any = out_like
        if like is not None and not callable(like):
            positions = [*inspect.signature(fn).parameters].index
            like = jax.tree.map(positions, like)

        @functools.wraps(fn)
        def call(*operands: Any, **static: Any) -> Any:
            traced = [x for x in jax.tree.leaves(operands) if isinstance(x, Tracer)]
            if traced:
                operands = meshes.place_on_mesh_of(operands, operands)
            if compiled and not meshes.is_being_staged(traced):
                return _compiled(fn, like, tuple(static.items()), operands)
            operands = jax.tree.map(jnp.asarray, operands)
            return _call_on_own_mesh(fn, like, tuple(static.items()), operands)

        return call

    return decorate


def _call_on_own_mesh(
    fn: Callable[..., Any],
    like: int | tuple[int, ...] | Callable[..., PyTree] | None,
    static: tuple[tuple[str, Any], ...],
    operands: tuple[Any, ...],
) -> Any:
    # Static arguments are a tuple of pairs, because a dict is not hashable.
    fn = functools.partial(fn, **dict(static))
    types = meshes.unique_avals(operands)
    with meshes.use_operand_mesh(types):
        mesh = meshes.explicit_mesh(types)
        if mesh is not None:
            if like is None:
                out: Any = PartitionSpec()
            elif callable(like):
                out = like(*operands)
            else:
                out = jax.tree.map(lambda position: operands[position], like)
            fn = meshes.use_auto_axes(fn, mesh, jax.tree.map(meshes.spec_of, out))
        return fn(*operands)


_compiled = jax.jit(_call_on_own_mesh, static_argnums=(0, 1, 2), inline=True)


def scan_on_mesh(body: Callable[..., Any], start: PyTree, xs: PyTree, closed_over: PyTree) -> Any:
    """Calls `lax.scan(body, start, xs)` on any mesh, for a body that also uses `closed_over`."""
    # `lax.scan` fails for seeds that `vmap` shards over an explicit mesh (as of JAX 0.10.2).
    with meshes.use_operand_mesh(meshes.unique_avals(closed_over)):
        return lax.scan(body, meshes.place_on_mesh_of(start, closed_over), xs)


class MeshSharding(NamedTuple):
    """The sharding of an array over an explicit mesh."""

    mesh: Any
    spec: PartitionSpec

    def axes_dividing(self, number: int) -> tuple[str, ...] | None:
        """Returns the mesh axes over which `number` examples can be sharded evenly, or None."""
        names = meshes.spec_names(self.spec[0])
        while number % math.prod(self.mesh.shape[name] for name in names):
            names = names[:-1]
        return names or None


def constrain_out_sharding(
    fn: Callable[..., Array], spec: Callable[[MeshSharding], tuple[Any, ...]], *arrays: Array
) -> Array:
    """Calls `fn(*arrays)`, and shards the result by `spec` if an array has an explicit mesh."""
    sharding = next(filter(None, map(meshes.explicit_sharding, map(jax.typeof, arrays))), None)
    if sharding is not None and not meshes.manual_axes():
        specs = PartitionSpec(*spec(MeshSharding(*sharding)))
        fn = meshes.use_auto_axes(fn, sharding[0], specs)
    return fn(*arrays)


def memory_spaces(tree: PyTree) -> list[Any]:
    """Returns the memory spaces of the leaves, with None for the default memory of a device."""
    return list(map(_memory_space, jax.tree.leaves(tree)))


def _memory_space(x: Any) -> Any:
    if isinstance(x, Tracer):
        # The type of a traced PRNG key has no memory space (as of JAX 0.10.2).
        space = getattr(jax.typeof(x), "memory_space", jax.memory.Space.Device)
        return None if space == jax.memory.Space.Device else space
    is_on_host = isinstance(x, Array) and x.sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if is_on_host else None


def move_to_device_memory(
    *trees: PyTree,
) -> tuple[tuple[PyTree, ...], Callable[..., tuple[PyTree, ...]]]:
    """Moves arrays to the default memory, and returns them with a function to move results back."""
    if set(memory_spaces(trees)) <= {None}:
        return trees, lambda *results: results

    # Results must have the structures of the first trees, except that None moves nothing.
    def restore(*results: PyTree) -> tuple[PyTree, ...]:
        return tuple(
            x if tree is None else put_leaves(x, memory_spaces(tree))
            for x, tree in zip(results, trees, strict=False)
        )

    return tuple(map(put_on_device, trees)), restore


def put_on_device(tree: PyTree) -> PyTree:
    """Moves all arrays to the default memory of their devices."""
    device = jax.memory.Space.Device
    return put_leaves(tree, [None if space is None else device for space in memory_spaces(tree)])


def template_on_device(x: Any) -> Any:
    """Returns `x` or a template for `jnp.zeros_like`, in the default memory of its device."""
    if _memory_space(x) is None or isinstance(x, Tracer):
        return x
    device = next(iter(x.sharding.device_set))
    sharding = x.sharding.with_memory_kind(device.default_memory().kind)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def put_leaves(tree: PyTree, to: Sequence[Any]) -> PyTree:
    """Moves leaves to memory spaces. Leaves with the space None are returned unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, to, strict=True)
    return treedef.unflatten([x if m is None else jax.device_put(x, m) for x, m in pairs])

"""Makes transformations work for arrays in any memory, and calls work on any mesh.

The code that is called from here knows nothing of memories, explicit meshes and eager mode.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

import optaxclip._backend.memory as memory
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
        """The state before the first step."""
        ...


class Update(Protocol[State]):
    """`update(updates, state, params, **extra_args) -> (updates, state)`."""

    def __call__(
        self, updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        """One step."""
        ...


class Transformation(optax.GradientTransformationExtraArgs, Generic[State]):
    """Optax's transformation with the type of its state, for which Optax says only "pytree".

    With it, an editor knows the fields of `state` after `updates, state = tx.update(...)`.
    """

    # A field of a named tuple is never assigned, so its type may be narrower than in the parent.
    init: Init[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State]  # pyright: ignore[reportIncompatibleVariableOverride]


def transformation(init: Init[State], update: Update[State]) -> Transformation[State]:
    """A transformation from its two functions, whose states and arrays may lie anywhere.

    Arrays in other memories are moved to the device's memory for the step, because JAX does not
    compute with arrays in different memories; results are moved back to where the arrays were.
    """

    @functools.wraps(init)
    def init_fn(params: PyTree) -> State:
        return meshes.place_on_mesh_of(init(params), params)

    @functools.wraps(update)
    def update_fn(
        updates: PyTree, state: Any = _NO_STATE, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, State]:
        if state is _NO_STATE:
            raise TypeError(
                "update() needs the state too: updates, state = tx.update(grads, state, params), "
                "where the first state is tx.init(params)"
            )
        arrays, back = memory.move_to_device_memory(updates, state, params, extra_args)
        updates, state, params, extra_args = arrays
        new_updates, new_state = update(updates, state, params, **extra_args)
        new_updates, new_state = back(new_updates, new_state)
        return new_updates, new_state

    tx: Any = Transformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
    return tx


def stateless(update: Callable[..., Any]) -> Transformation[Any]:
    """A transformation without a state, from `update(updates, params, **extra_args) -> updates`.

    Its own update takes any state and returns it as it is.
    """

    def init(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_updates_not_state(updates, optax.EmptyState, "update")
        return update(updates, params, **extra_args), state

    return transformation(init, update_fn)


def global_view(
    *,
    out_like: str | tuple[str, ...] | Callable[..., PyTree] | None = None,
    compiled: bool = True,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """A decorator: makes a function of arrays work wherever these lie.

    Positional arguments are pytrees of arrays, keyword arguments are static and hashable. The
    function sees arrays as if unsplit. In eager mode it is one compiled call, which is cached.
    Under `jit` it is traced like the code around it, because a call takes time to trace for each of
    its arguments. If the types of arrays say that they are split over an explicit mesh, the axes of
    this mesh are automatic inside of the function: there the compiler decides how arrays are split.

    Args:
      out_like: the name of the argument whose types the results get on such a mesh, or of one
        argument for each result; or a function of the positional arguments that gives a pytree
        prefix of the results with arrays or `PartitionSpec`s. With None every device holds the
        results in full.
      compiled: whether to compile in eager mode. The function must then be of a module's top level,
        because it is part of the cache's key.
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
    """`lax.scan(body, start, xs)` for a body that also uses `beside`, on any mesh.

    A plain `lax.scan` fails for seeds that `vmap` splits over an explicit mesh (JAX 0.10.2).
    """
    with meshes.use_operand_mesh(meshes.unique_avals(closed_over)):
        return lax.scan(body, meshes.place_on_mesh_of(start, closed_over), xs)


class MeshSharding(NamedTuple):
    """How an array is split over an explicit mesh."""

    mesh: Any
    spec: PartitionSpec

    def axes_dividing(self, number: int) -> tuple[str, ...] | None:
        """The mesh axes over which `number` examples can be split evenly.

        Of the axes that split the first axis, the last are left out until the split is even.
        """
        names = meshes.spec_names(self.spec[0])
        while number % math.prod(self.mesh.shape[name] for name in names):
            names = names[:-1]
        return names or None


def constrain_out_sharding(
    fn: Callable[..., Array], spec: Callable[[MeshSharding], tuple[Any, ...]], *arrays: Array
) -> Array:
    """`fn(*arrays)`, split as `spec` says if one of the arrays is split over an explicit mesh."""
    sharding = next(filter(None, map(meshes.explicit_sharding, arrays)), None)
    if sharding is None or meshes.manual_axes():
        return fn(*arrays)
    mesh, of_array = sharding
    specs = PartitionSpec(*spec(MeshSharding(mesh, of_array)))
    return meshes.use_auto_axes(fn, mesh, specs)(*arrays)

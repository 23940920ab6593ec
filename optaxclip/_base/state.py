"""State classes: names, counters, registration, and checks."""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.validation import short_repr

_Shapes = tuple[tuple[int, ...], ...]

RESTORE_NAMES_HINT = (
    "restore the names with state = jax.tree.map(lambda _, x: x, tx.init(params), state)"
)
"""The end of messages about a state without names; `tx` is the whole optimizer."""

_STATIC = {"static": True}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StaticNames:
    """A sequence of names that JAX treats as a node without children.

    It is not a tuple, because trainers with their own tree traversal would treat names in a tuple
    as leaves. They support dataclasses, and ignore static fields.

    An empty instance is equal to any other instance, because `optax.tree_map_params` compares the
    structure of a real state with the result of `init` for a tree without leaves. The state that it
    returns has lost its names. The next step restores them, unless the old structure is kept, as in
    `optax.MultiSteps` or in a function that was compiled for a state without names.

    Attributes:
      names: The names.
      shapes: The shapes of the groups by name, or empty if all names denote individual groups.
      is_user_label: If True, the names are labels from the user.
    """

    names: tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)
    shapes: _Shapes = dataclasses.field(default=(), metadata=_STATIC)
    is_user_label: bool = dataclasses.field(default=False, metadata=_STATIC)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, where: int | slice) -> Any:
        return self.names[where]

    def index(self, name: str) -> int:
        """Returns the position of a name."""
        return self.names.index(name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return self.names == other
        if other is None:
            return True  # Trainers with their own tree traversal may replace the names by None.
        if not isinstance(other, StaticNames):
            return NotImplemented
        # Shapes are ignored, because a program of `jax.export` can support several shapes.
        is_same = self.names == other.names and self.is_user_label == other.is_user_label
        return is_same or not self or not other

    def __hash__(self) -> int:
        # An empty instance is equal to any instance, so all hashes must be equal.
        return hash(StaticNames)

    def __repr__(self) -> str:
        return repr(self.names)


def call_on_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act` with a module, now if it is imported, and when it is imported otherwise."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


@dataclasses.dataclass(frozen=True, eq=False)
class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds a module with the remaining finders, and calls `act` once the module is loaded."""

    name: str
    act: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader

        def load_and_act(module: ModuleType) -> None:
            del loader.exec_module  # Restores the method of the class.
            loader.exec_module(module)
            self.act(module)

        if loader is not None:
            loader.exec_module = load_and_act
        return spec


# Flax's serialization does not store `StaticNames`, so a restored state keeps its own names.
call_on_import(
    "flax.serialization",
    lambda flax: flax.register_serialization_state(
        StaticNames, lambda _: {}, lambda names, _: names
    ),
)

Kind = TypeVar("Kind", bound=type)


def register_state(cls: Kind) -> Kind:
    """Registers a named tuple that is a state or part of a state."""
    name = f"optaxclip.{cls.__name__.lstrip('_')}"
    fields: tuple[str, ...] = cls._fields
    # Names become static, because Levanter's checkpointer cannot restore nodes without leaves.
    static = [field for field in fields if cls.__annotations__[field] is StaticNames]
    if not static:
        # JAX already treats named tuples as pytree nodes, so only the serialization is missing.
        return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
    arrays = [field for field in fields if field not in static]
    jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=static)
    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        # Shapes are not stored, because they can be symbolic and comparisons ignore them.
        serialize_auxdata=lambda aux_data: json.dumps(
            [(names.names, names.is_user_label) for names in aux_data]
        ).encode(),
        deserialize_auxdata=lambda stored: tuple(
            StaticNames(tuple(names), (), is_label) for names, is_label in json.loads(stored)
        ),
        from_children=lambda aux_data, children: cls(
            **dict(zip((*arrays, *static), (*children, *aux_data), strict=True))
        ),
    )


@functools.partial(jax.jit, static_argnames="period", inline=True)
def safe_increment(count: Array, where: Array | bool = True, *, period: int = 1) -> Array:
    """Increments non-negative integer counters where `where` is True, without overflow.

    By default, a counter at the largest value of the dtype remains unchanged, as in Optax. If
    `period` is the length of a ring buffer, such a counter is decreased by `period - 1` instead, so
    the position in the buffer, `count % period`, always advances by 1.
    """
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"counters in the state must be integers, but have dtype {count.dtype}; cast only the "
            "floating-point leaves of the state"
        )
    is_full = count == jnp.iinfo(count.dtype).max
    step = jnp.where(is_full, 1 - period, 1)
    # JAX cannot `vmap` a select in a `jit` on an explicit mesh (as of JAX 0.10.2).
    return count + step.astype(count.dtype) * jnp.asarray(where, count.dtype)


def copy_arrays(state: Any) -> Any:
    """Copies the arrays of a state, so it can be donated."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, Array) else x, state)


REINIT_HINT = (
    "initialize a new state if the state comes from another transformation (for the first stage of "
    "a chain, opt_state = (tx.init(params)[0], *old_opt_state[1:]))"
)


def check_state(
    state: Any, cls: type, name: str, remedy: str = REINIT_HINT, updates: Any = None
) -> None:
    """Checks that a state has the type `cls`, and that it was not swapped with the updates."""
    if state is None:
        raise ValueError(
            f"{name}: state must be the state from the previous step, got None; start with "
            "state = tx.init(params) and call updates, state = tx.update(grads, state, params)"
        )
    if not isinstance(state, cls):
        check_updates_not_state(updates, cls, name)
        raise ValueError(
            f"{name}: state must be of type {cls.__name__}, got {short_repr(state)} of type "
            f"{type(state).__name__}; {remedy}"
        )


def check_updates_not_state(updates: Any, cls: type, name: str) -> None:
    """Checks that the updates do not contain a state, which would indicate swapped arguments."""
    nodes = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, cls))
    if any(isinstance(node, cls) for node in nodes):
        raise ValueError(
            f"{name}: updates must be gradients, got a state of type {cls.__name__}; call "
            "update(grads, state, params)"
        )

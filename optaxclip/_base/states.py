"""The parts of states: names, counters, the registration of classes, and checks of states."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.arguments import short
from optaxclip._base.extras import when_imported

_Shapes = tuple[tuple[int, ...], ...]

GIVE_BACK = "restore the names: state = jax.tree.map(lambda _, x: x, tx.init(params), state)"
"""For messages: how to give a state its lost names back; `tx` is the whole optimizer."""

_STATIC = {"static": True}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Names:
    """Names in order, used like a tuple, and for JAX a node without children.

    It is not a tuple: trainers that walk through a state by themselves would go into a tuple, and
    take the names for leaves. They know dataclasses, and leave out static fields.

    An empty `Names` is equal to every other, because `optax.tree_map_params` calls `init` with a
    tree that has no leaves, and so no names, and compares the structure of this state with that of
    a real state. The state that it returns has lost its names, and gets them back at the next step.
    They stay lost in what hands on the old structure: in `optax.MultiSteps`, and in a function that
    was compiled for a state without names, because `jit` takes both structures for one.

    Attributes:
      entries: the names.
      shapes: for each name, the shape of its groups; empty if each name has one group.
      are_labels: whether the names are labels that a user gave.
    """

    entries: tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)
    shapes: _Shapes = dataclasses.field(default=(), metadata=_STATIC)
    are_labels: bool = dataclasses.field(default=False, metadata=_STATIC)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, where: int) -> str: ...
    @overload
    def __getitem__(self, where: slice) -> tuple[str, ...]: ...
    def __getitem__(self, where: int | slice) -> str | tuple[str, ...]:
        return self.entries[where]

    def index(self, name: str) -> int:
        """The place of a name."""
        return self.entries.index(name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return self.entries == other
        if other is None:
            return True  # a copy that a trainer's own walk through a state has made
        if not isinstance(other, Names):
            return NotImplemented
        # Shapes do not count, because one program of `jax.export` may serve all of them.
        are_same = self.entries == other.entries and self.are_labels == other.are_labels
        return are_same or not self or not other

    def __hash__(self) -> int:
        return hash(Names)

    def __repr__(self) -> str:
        return repr(self.entries)


Kind = TypeVar("Kind", bound=type)


def registered_state(kind: Kind) -> Kind:
    """Registers a named tuple that is a state, or part of one.

    Its fields of type `Names` belong to the structure and are not nodes, because Levanter's
    checkpointer cannot restore nodes without leaves. `jax.export` serializes the class under its
    name without a leading underscore.
    """
    name = f"optaxclip.{kind.__name__.lstrip('_')}"
    fields: tuple[str, ...] = kind._fields
    static = [field for field in fields if kind.__annotations__[field] is Names]
    if not static:
        return jax.export.register_namedtuple_serialization(kind, serialized_name=name)
    arrays = [field for field in fields if field not in static]
    jax.tree_util.register_dataclass(kind, data_fields=arrays, meta_fields=static)

    def from_children(aux_data: Any, children: Sequence[Any]) -> Any:
        return kind(**dict(zip((*arrays, *static), (*children, *aux_data), strict=True)))

    return jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=name,
        serialize_auxdata=_to_bytes,
        deserialize_auxdata=_from_bytes,
        from_children=from_children,
    )


def _to_bytes(names: Sequence[Names]) -> bytes:
    # Only the names: sizes may be symbolic, and do not count when structures are compared.
    return json.dumps([(each.entries, each.are_labels) for each in names]).encode()


def _from_bytes(stored: bytes) -> tuple[Names, ...]:
    return tuple(Names(tuple(names), (), labels) for names, labels in json.loads(stored))


@functools.partial(jax.jit, static_argnames="period", inline=True)
def increased(count: Array, where: Array | bool = True, *, period: int = 1) -> Array:
    """Counters plus 1 where `where` is True; they never exceed the largest value of the dtype.

    Args:
      count: signed integers of at least 0.
      where: bool, which counters to increase.
      period: a counter at the dtype's largest value falls by `period - 1` instead of growing. With
        1 it stays at that value, as Optax's counters do. If `period` is the length of a ring
        buffer, the place in the buffer, `count % period`, moves on by one as at any other step.
    """
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"a counter of the state has the dtype {count.dtype}, in which it would stand still; "
            "cast only the floating-point leaves of a state"
        )
    is_full = count == jnp.iinfo(count.dtype).max
    step = jnp.where(is_full, 1 - period, 1)
    # Not `jnp.where`: JAX 0.10.2 cannot `vmap` a select in a `jit` over an explicit mesh.
    return count + step.astype(count.dtype) * jnp.asarray(where, count.dtype)


def own_arrays(state: Any) -> Any:
    """A copy of the state that can be donated, because no other pytree holds its arrays."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, Array) else x, state)


FRESH_STATE = (
    "If it is from a checkpoint of another transformation, begin with a fresh state for this stage "
    "and keep the states of the other stages: where this stage is the first of a chain, "
    "opt_state = (tx.init(params)[0], *old_opt_state[1:])"
)


def check_state(
    state: Any, kind: type, name: str, remedy: str = FRESH_STATE, updates: Any = None
) -> None:
    """Checks that the state passed to a transformation is of the type that it makes.

    The updates that the user passed may be the state by mistake. `remedy` ends the message.
    """
    if state is None:
        raise ValueError(
            f"{name}: got the state None, and with a fresh state at each step it would never learn "
            "of earlier steps, on which its results depend. Begin with state = tx.init(params), "
            "keep the state that each update returns, and pass it to the next: "
            "updates, state = tx.update(grads, state, params)"
        )
    if not isinstance(state, kind):
        refuse_state_as_updates(updates, kind, name)
        raise ValueError(
            f"{name}: the state must be of type {kind.__name__}, got {short(state)} of type "
            f"{type(state).__name__}. {remedy}"
        )


def refuse_state_as_updates(updates: Any, kind: type, name: str) -> None:
    """Refuses updates that are a state, alone or in a chain, because the arguments were swapped."""
    nodes = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, kind))
    if any(isinstance(node, kind) for node in nodes):
        raise ValueError(
            f"{name}: the updates are a {kind.__name__}, so the arguments are in another order: "
            "call update(grads, state, params)"
        )


# Flax's serialization does not store `Names`, so a restored state keeps its own names.
when_imported(
    "flax.serialization",
    lambda flax: flax.register_serialization_state(Names, lambda _: {}, lambda names, _: names),
)

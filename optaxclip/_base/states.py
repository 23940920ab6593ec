"""How classes of states are registered, so that trainers and JAX can treat states as data."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from optaxclip._base.names import Names

Kind = TypeVar("Kind", bound=type)


def registered_state(kind: Kind) -> Kind:
    """Registers a named tuple that is a state, or part of one.

    Its fields of type `Names` belong to the structure: JAX sees no node there, not even one without
    leaves, which Levanter's checkpointer could not restore. `jax.export` serializes the class by
    its public name, without the underscore that it may begin with.
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
    # Sizes may be symbolic, and do not count where structures are compared.
    return json.dumps([(each.entries, each.are_labels) for each in names]).encode()


def _from_bytes(stored: bytes) -> tuple[Names, ...]:
    return tuple(Names(tuple(names), (), labels) for names, labels in json.loads(stored))

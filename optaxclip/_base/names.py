"""Names of groups and leaves, as they are kept in a state: structure, not data."""

import sys
from collections.abc import Iterable

import jax

_Shapes = tuple[tuple[int, ...], ...]


@jax.tree_util.register_static
class Names(tuple[str, ...]):
    """A tuple of names that costs a state nothing: JAX takes it for a node without children.

    `optax.tree_map_params` makes a state from parameters without leaves, and wants it to have the
    structure of a real one. Such a state knows no names. So empty names are equal to all others;
    the state gets its names back at the next step, unless it is inside of a wrapper that keeps the
    structure of the state before (`optax.MultiSteps`).

    Attributes:
      shapes: the shapes of what is named, where they matter; else empty.
      are_labels: whether a user gave them to groups, so that each is of interest by itself.
    """

    shapes: _Shapes
    are_labels: bool

    def __new__(
        cls, names: Iterable[str] = (), shapes: _Shapes = (), are_labels: bool = False
    ) -> "Names":
        """Names, with shapes or without."""
        _register_with_flax()
        self = super().__new__(cls, names)
        self.shapes, self.are_labels = shapes, are_labels
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Names):
            return NotImplemented
        return tuple(self) == tuple(other) or not self or not other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(Names)

    def __reduce__(self) -> tuple[type["Names"], tuple[tuple[str, ...], _Shapes, bool]]:
        return Names, (tuple(self), self.shapes, self.are_labels)


def _register_with_flax() -> None:
    """Flax's serialization must be told of each type of node; it stores nothing of this one.

    Flax is not imported for that: who serializes with it has imported it.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or Names in _REGISTERED:
        return
    _REGISTERED.add(Names)
    serialization.register_serialization_state(Names, lambda _: {}, lambda names, _: names)


_REGISTERED: set[type] = set()

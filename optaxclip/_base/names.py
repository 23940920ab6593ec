"""Names of groups and leaves in a state: they are part of the pytree's structure, not data."""

from collections.abc import Iterable
from types import ModuleType

import jax

from optaxclip._base.imports import when_imported

_Shapes = tuple[tuple[int, ...], ...]

GIVE_BACK = "restore the names: state = jax.tree.map(lambda _, x: x, tx.init(params), state)"
"""What to do about a state that has lost its names, for messages; `tx` is the whole optimizer."""


@jax.tree_util.register_static
class Names(tuple[str, ...]):
    """A tuple of names, which JAX treats as a pytree node without children.

    Empty names equal all others, because `optax.tree_map_params` calls `init` with parameters
    without leaves, which have no names, and compares the structure of that state with a real one.
    A state that lost its names in this way gets them back at the next step, but not inside of a
    wrapper that keeps the old structure (`optax.MultiSteps`). A function compiled for such a state
    returns every state without names, because to `jit` both have one structure.

    Attributes:
      shapes: for each name the shape of its groups; empty where each has one group.
      are_labels: whether the names are labels that a user gave.
    """

    shapes: _Shapes
    are_labels: bool

    def __new__(
        cls, names: Iterable[str] = (), shapes: _Shapes = (), are_labels: bool = False
    ) -> "Names":
        """Names, with shapes or without."""
        self = super().__new__(cls, names)
        self.shapes, self.are_labels = shapes, are_labels
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Names):
            return NotImplemented
        # Shapes do not count: a program of `jax.export` may serve all of them.
        are_same = tuple(self) == tuple(other) and self.are_labels == other.are_labels
        return are_same or not self or not other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(Names)

    def __reduce__(self) -> tuple[type["Names"], tuple[tuple[str, ...], _Shapes, bool]]:
        return Names, (tuple(self), self.shapes, self.are_labels)


def _register(serialization: ModuleType) -> None:
    """Tells Flax's serialization that nothing of `Names` is stored: a restored state keeps its."""
    serialization.register_serialization_state(Names, lambda _: {}, lambda names, _: names)


when_imported("flax.serialization", _register)

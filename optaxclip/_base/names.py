"""Names of groups and leaves in a state: they are part of the pytree's structure, not data."""

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import overload

import jax

from optaxclip._base.imports import when_imported

_Shapes = tuple[tuple[int, ...], ...]

GIVE_BACK = "restore the names: state = jax.tree.map(lambda _, x: x, tx.init(params), state)"
"""What to do about a state that has lost its names, for messages; `tx` is the whole optimizer."""

_STATIC = {"static": True}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Names:
    """Names in order, used as a tuple of them, which JAX treats as a node without children.

    It is no tuple, because trainers that go through a state by hand go into tuples, and would find
    the names as leaves where JAX has none. They know dataclasses and leave out static fields.

    No names at all are equal to any names. `optax.tree_map_params` needs that: it calls `init` with
    a tree that has no leaves, so no names, and compares the structure of this state with that of a
    real one. What it returns has lost its names, and gets them back at the next step. Two things do
    not: a wrapper that keeps the old structure (`optax.MultiSteps`), and a function that was
    compiled for a state without names, as `jit` takes both for one structure.

    Attributes:
      entries: the names.
      shapes: for each name the shape of its groups; empty where each has one group.
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
            return True  # a copy of a state's structure that a walk by hand has made
        if not isinstance(other, Names):
            return NotImplemented
        # Shapes do not count: a program of `jax.export` may serve all of them.
        are_same = self.entries == other.entries and self.are_labels == other.are_labels
        return are_same or not self or not other

    def __hash__(self) -> int:
        return hash(Names)

    def __repr__(self) -> str:
        return repr(self.entries)


def _register(serialization: ModuleType) -> None:
    """Tells Flax's serialization that nothing of `Names` is stored: a restored state keeps its."""
    serialization.register_serialization_state(Names, lambda _: {}, lambda names, _: names)


when_imported("flax.serialization", _register)

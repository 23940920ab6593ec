"""Which entries of which parameter a variable of a program holds, and where it meets data."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array

import optaxclip.per_example.ghost.primitives as primitives


class Move(NamedTuple):
    """An equation that moves entries.

    Attributes:
      depth: how many loops around it slice the parameter.
      eqn: the equation.
      output: which of its outputs holds the entries.
    """

    depth: int
    eqn: Any
    output: int

    def apply(self, x: Array) -> Array:
        """The moved entries; a leading axis for each loop that slices."""

        def moved(x: Array) -> Array:
            return primitives.apply(self.eqn, [x])[self.output]

        for _ in range(self.depth):
            moved = jax.vmap(moved)
        return moved(x)


class Interval(NamedTuple):
    """Where a parameter lies in a concatenation, along one of its axes."""

    axis: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """Which entries of a parameter a variable holds.

    Attributes:
      leaf: the parameter's position.
      moves: how the entries were moved.
      loops: for each `scan` around, from the outermost, whether it slices the parameter.
      interval: where the entries lie in the variable, which is a concatenation; else None.
    """

    leaf: int
    moves: tuple[Move, ...] = ()
    loops: tuple[bool, ...] = ()
    interval: Interval | None = None

    def apply(self, leaf: Array) -> Array:
        """The entries, from the parameter; a leading axis for each loop that slices it."""
        for move in self.moves:
            leaf = move.apply(leaf)
        return leaf

    def moved(self, eqn: Any, output: int) -> "Reference | None":
        """The reference to what this equation moves; None if it cannot be followed."""
        if primitives.stays(eqn):
            return self
        interval = self.interval
        if interval is not None:
            axis = primitives.transposed_axis(eqn, interval.axis)
            if axis is None:
                return None
            interval = interval._replace(axis=axis)
        moves = (*self.moves, Move(sum(self.loops), eqn, output))
        return dataclasses.replace(self, moves=moves, interval=interval)

    def placed(self, axis: int, start: int, size: int) -> "Reference | None":
        """The reference within a concatenation; None if it is in one already."""
        if self.interval is not None:
            return None
        return dataclasses.replace(self, interval=Interval(axis, start, size))

    def inside(self, is_sliced: bool) -> "Reference | None":
        """The reference inside of a loop."""
        interval = self.interval
        if interval is not None and is_sliced:
            if interval.axis == 0:
                return None
            interval = interval._replace(axis=interval.axis - 1)
        return dataclasses.replace(self, loops=(*self.loops, is_sliced), interval=interval)


References = tuple[Reference, ...]
"""Those of one variable: several if it is a concatenation, none if it holds data alone."""


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Where parameters meet data.

    Attributes:
      kind: the operation: `primitives.PRODUCT`, `ROWS` or `CONVOLUTION`.
      eqn: its equation.
      position: which operand holds the parameters.
      references: what that operand holds.
      lengths: those of the loops around, from the outermost.
      is_checkpointed: whether backpropagation would compute the data again.
    """

    kind: str
    eqn: Any
    position: int
    references: References
    lengths: tuple[int, ...]
    is_checkpointed: bool

    @property
    def data(self) -> Any:
        """The type of the data, without loops."""
        return self.eqn.invars[1 - self.position].aval

    @property
    def output(self) -> Any:
        """The type of the output, without loops."""
        return self.eqn.outvars[0].aval

"""References: which entries of which parameter a variable of a program holds."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array

import optaxclip.per_example.ghost.primitives as primitives


class ReshapeOp(NamedTuple):
    """An equation that moves entries; `depth` loops around it slice the parameter."""

    depth: int
    eqn: Any
    output: int

    def apply(self, x: Array) -> Array:
        """The moved entries, with a leading axis for each loop that slices the parameter."""

        def apply_reshape(x: Array) -> Array:
            return primitives.apply(self.eqn, [x])[self.output]

        for _ in range(self.depth):
            apply_reshape = jax.vmap(apply_reshape)
        return apply_reshape(x)


class Interval(NamedTuple):
    """Where a parameter lies in a concatenation, along the axis of the concatenation."""

    axis: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class ParamSlice:
    """Says which entries of a parameter a variable holds.

    Attributes:
      leaf: the parameter's position.
      moves: how the entries were moved.
      loops: for each `scan` around, from the outermost, whether it slices the parameter.
      interval: where the entries lie in the variable, if that is a concatenation; otherwise None.
    """

    leaf: int
    moves: tuple[ReshapeOp, ...] = ()
    loops: tuple[bool, ...] = ()
    interval: Interval | None = None

    def apply(self, leaf: Array) -> Array:
        """The entries, from the parameter, with a leading axis for each loop that slices it."""
        for move in self.moves:
            leaf = move.apply(leaf)
        return leaf

    def follow_reshape(self, eqn: Any, output: int) -> "ParamSlice | None":
        """The reference of this equation's output; None if the entries cannot be followed."""
        if primitives.is_identity(eqn):
            return self
        interval = self.interval
        if interval is not None:
            axis = primitives.transpose_axis(eqn, interval.axis)
            if axis is None:
                return None
            interval = interval._replace(axis=axis)
        moves = (*self.moves, ReshapeOp(sum(self.loops), eqn, output))
        return dataclasses.replace(self, moves=moves, interval=interval)

    def place_inside_concatenate(self, axis: int, start: int, size: int) -> "ParamSlice | None":
        """The reference inside of a concatenation; None if it is inside of one already."""
        if self.interval is not None:
            return None
        return dataclasses.replace(self, interval=Interval(axis, start, size))

    def enter_scan(self, is_sliced: bool) -> "ParamSlice | None":
        """The reference inside of a loop."""
        interval = self.interval
        if interval is not None and is_sliced:
            if interval.axis == 0:
                return None
            interval = interval._replace(axis=interval.axis - 1)
        return dataclasses.replace(self, loops=(*self.loops, is_sliced), interval=interval)


References = tuple[ParamSlice, ...]
"""The references of a variable: several for a concatenation, none if it holds only data."""


@dataclasses.dataclass(frozen=True, eq=False)
class MatmulSite:
    """An operation in which parameters, the operand at `position`, meet data, inside of loops.

    In a checkpoint backpropagation would compute the data again.
    """

    kind: str
    eqn: Any
    position: int
    references: References
    lengths: tuple[int, ...]
    is_checkpointed: bool

    @property
    def data(self) -> Any:
        """The type of the data, without axes for loops."""
        return self.eqn.invars[1 - self.position].aval

    @property
    def output(self) -> Any:
        """The type of the output, without axes for loops."""
        return self.eqn.outvars[0].aval

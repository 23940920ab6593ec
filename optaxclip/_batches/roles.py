"""Tells which arguments of a loss are parameters, which are the batch, and which are neither."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optaxclip._base.types import PyTree

_Numbers: TypeAlias = int | tuple[int, ...]


class LossArguments(NamedTuple):
    """The arguments of a loss, with the positions of its parameters and of its batch."""

    args: tuple[Any, ...]
    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]

    @classmethod
    def split(
        cls,
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        batch_argnums: int | Sequence[int] | None,
    ) -> "LossArguments":
        """The roles of arguments; with `batch_argnums=None`, all but the parameters are batch."""
        count = len(args)
        is_one = isinstance(argnums, int)
        chosen = _positions((argnums,) if is_one else argnums, count, "argnums")
        rest = [i for i in range(count) if i not in chosen]
        named = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
        batch = _positions(rest if named is None else named, count, "batch_argnums")
        if set(batch) & set(chosen) or not batch:
            raise ValueError(
                f"batch_argnums must name arguments other than argnums {chosen}, at least one; got "
                f"{batch} of {count} arguments"
            )
        return cls(args, chosen[0] if is_one else chosen, batch)

    @property
    def params(self) -> PyTree:
        """The arguments that are differentiated: a tuple, or only one if `argnums` is an int."""
        if isinstance(self.argnums, int):
            return self.args[self.argnums]
        return tuple(self.args[i] for i in self.argnums)

    @property
    def batch(self) -> tuple[Any, ...]:
        """The arguments that have an axis of examples."""
        return tuple(self.args[i] for i in self.batch_argnums)

    def merge(self, params: PyTree, batch: tuple[Any, ...]) -> list[Any]:
        """All arguments, with the given parameters and batch in the places of the original ones."""
        args = list(self.args)
        if isinstance(self.argnums, int):
            args[self.argnums] = params
        else:
            for i, value in zip(self.argnums, params, strict=True):
                args[i] = value
        for i, value in zip(self.batch_argnums, batch, strict=True):
            args[i] = value
        return args


def _positions(numbers: Sequence[int], count: int, argument: str) -> tuple[int, ...]:
    positions = tuple(number % count for number in numbers if -count <= number < count)
    if len(set(positions)) < len(numbers):
        raise ValueError(
            f"{argument} {tuple(numbers)} must be positions among {count} arguments, each at most "
            "once"
        )
    return positions


def check_argnums(argnums: Any, batch_argnums: Any) -> tuple[_Numbers, _Numbers | None]:
    """The positions of the parameters and of the batch, which must have none in common."""
    params = normalize_argnums(argnums, "argnums")
    if batch_argnums is None:
        return params, None
    batch = normalize_argnums(batch_argnums, "batch_argnums")
    shared = {*np.atleast_1d(params).tolist()} & {*np.atleast_1d(batch).tolist()}
    if shared:
        raise ValueError(
            f"batch_argnums={batch} and argnums={params} both name the argument {min(shared)}, "
            "which is either differentiated or a batch: name the other arguments in batch_argnums"
        )
    return params, batch


def normalize_argnums(given: Any, argument: str) -> _Numbers:
    """Positions of arguments as Python ints, from ints of Python or NumPy."""
    try:
        if np.ndim(given) == 0:
            return operator.index(given)
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise TypeError(f"{argument} must be an int or several, got {given!r}") from None

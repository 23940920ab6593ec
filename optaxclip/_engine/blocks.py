"""Groups side by side in one array, so that what is done to each of them is compiled once."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import known_size, promoted
from optaxclip._base.types import NormTree
from optaxclip.scopes import Grouping


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The slots of a grouping, as many as possible together.

    Attributes:
      grouping: the groups.
      slots: for each block the positions of its slots, those of one shape in a row. The array of a
        block has the groups of one slot after those of the other `[groups]` or, if there is only
        one, the shape of this slot.
    """

    grouping: Grouping
    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, grouping: Grouping, apart: Container[int] = (), together: Container[int] = ()
    ) -> "Blocks":
        """The blocks of a grouping.

        Args:
          grouping: the groups.
          apart: positions of single groups that are handled in another way than the rest.
          together: positions of measured leaves of several groups that lie in one piece: these
            are put into one block with the single ones.
        """
        positions = range(len(grouping.slots))
        joined = [n for n in positions if _may_join(grouping, n, together)]
        joined.sort(key=lambda n: grouping.slots[n].shape)
        main = tuple(n for n in joined if n not in apart)
        other = tuple(n for n in joined if n in apart)
        alone = [(n,) for n in sorted(set(positions).difference(joined))]
        return cls(grouping, (*filter(None, (main, other)), *alone))

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each block's array."""
        return [self._shape(*b) if len(b) == 1 else (sum(self._sizes(b)),) for b in self.slots]

    def gather(self, arrays: Sequence[Array]) -> list[Array]:
        """One array for each block from one for each slot, which may have more axes in front."""
        return [self._joined([arrays[n] for n in b], b) for b in self.slots]

    def of_slots(self, numbers: Sequence[float]) -> list[Any]:
        """For each block the numbers of its slots, which broadcast against the block's array."""
        return [_repeated([numbers[n] for n in b], self._sizes(b)) for b in self.slots]

    def by_shape(self, trees: Sequence[Any]) -> list[tuple[int, Any]]:
        """What the pytrees of the blocks hold, as arrays `[slots, *shape]` for slots of one shape.

        Returns:
          Each with the position of the first of its slots.
        """
        found = []
        for block, tree in zip(self.slots, trees, strict=True):
            start = 0
            for shape, some in itertools.groupby(block, self._shape):
                slots = list(some)
                stacked = functools.partial(_rows, count=len(slots), shape=shape, start=start)
                found.append((slots[0], jax.tree.map(stacked, tree)))
                start += len(slots) * math.prod(shape)
        return found

    def split(self, block: tuple[int, ...], tree: Any) -> list[Any]:
        """For each slot of a block its part of a pytree of arrays, the first of at least 0."""
        return [tree] if len(block) == 1 else _apart(tree, [self._shape(n) for n in block])

    def per_slot(self, trees: Sequence[Any]) -> list[Any]:
        """The same of the trees of all blocks, for each slot of the grouping."""
        found = {}
        for block, tree in zip(self.slots, trees, strict=True):
            found.update(zip(block, self.split(block, tree), strict=True))
        return [found[n] for n in range(len(found))]

    def per_leaf(self, trees: Sequence[Any]) -> list[Any]:
        """The same, for each measured leaf."""
        by_slot = self.per_slot(trees)
        return [by_slot[slot] for slot in self.grouping.slot_of_leaf()]

    def by_name(self, arrays: Sequence[Array]) -> Array:
        """One array in the order of the names from blocks with one number for each name."""
        if self.grouping.layout == "scalar":
            return arrays[0]
        flat = jnp.concatenate([jnp.ravel(array) for array in arrays])
        return _taken(flat, np.argsort(np.concatenate(self._places())))

    def pack(self, arrays: Sequence[Array]) -> NormTree:
        """One array per block as the pytree that limit rules see; NaN for slots without leaves."""
        if self.grouping.layout != "vector" or not arrays:
            return self.grouping.pack(self.per_slot(arrays))
        present = np.array([bool(s.members) for s in self.grouping.slots for _ in s.names])
        packed = self.by_name(arrays)
        return packed if present.all() else jnp.where(present, packed, jnp.nan)

    def unpack(self, tree: NormTree) -> list[Array]:
        """The inverse of `pack`."""
        if self.grouping.layout != "vector" or not self.slots:
            return self.gather(self.grouping.unpack(tree))
        blocks = zip(self._places(), self.shapes(), strict=True)
        return [_taken(tree, places).reshape(shape) for places, shape in blocks]

    def _joined(self, arrays: list[Array], block: tuple[int, ...]) -> Array:
        if len(block) == 1:
            return arrays[0]
        rows = zip(arrays, block, self._sizes(block), strict=True)
        flat = [x.reshape(*x.shape[: x.ndim - len(self._shape(n))], size) for x, n, size in rows]
        return jnp.concatenate(flat, axis=-1)

    def _places(self) -> list[np.ndarray]:
        """For each block, where its numbers are in an array that follows the names."""
        slots = self.grouping.slots
        ends = np.cumsum([len(slot.names) for slot in slots])
        return [
            np.concatenate([np.arange(ends[n] - len(slots[n].names), ends[n]) for n in block])
            for block in self.slots
        ]

    def _shape(self, slot: int) -> tuple[int, ...]:
        return self.grouping.slots[slot].shape

    def _sizes(self, block: tuple[int, ...]) -> list[int]:
        """How many groups each slot has."""
        return [math.prod(self._shape(n)) for n in block]


def _may_join(grouping: Grouping, slot: int, together: Container[int]) -> bool:
    """Whether a slot's groups may be put beside others.

    Of a leaf that a dict lacks at this step nothing is known, and of symbolic shapes too little.
    """
    one = grouping.slots[slot]
    if one.shape == ():
        return bool(one.members) or grouping.layout == "vector"
    lies_in_one_piece = any(member in together for member in one.members)
    return lies_in_one_piece and all(known_size(size) for size in one.shape)


def _taken(x: Array, places: np.ndarray) -> Array:
    """The entries of an array at these places."""
    return x if np.array_equal(places, np.arange(x.size)) else x[places]


def _repeated(numbers: Sequence[float], sizes: Sequence[int]) -> Any:
    """An array with each number as often as is said; one number where all are equal."""
    if len(set(numbers)) == 1:
        return np.asarray(numbers[0])
    if sum(sizes) <= _MANY:
        return np.repeat(numbers, sizes)
    pairs = zip(sizes, numbers, strict=True)
    return jnp.concatenate([jnp.full(size, number) for size, number in pairs])


_MANY = 2**16
"""Numbers to put into a compiled program."""


def _rows(x: Array, count: int, shape: tuple[int, ...], start: int) -> Array:
    """The rows `[count, *shape]` that begin there; all of a block of a single slot."""
    if x.shape == shape:
        return jnp.expand_dims(x, 0)
    return x[start : start + count * math.prod(shape)].reshape(count, *shape)


def _apart(tree: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The parts of numbers or flags `[n]`, which have these shapes."""
    fields, treedef = jax.tree.flatten(tree)
    stack = jnp.stack(promoted([x.astype(jnp.float32) if x.dtype == bool else x for x in fields]))
    # Compilers merge what is done to each part only if it does not show which of them it is. So the
    # positions are such as they cannot know.
    never = stack[0, 0] < 0
    nowhere, one = jnp.broadcast_to(never, (2,)).astype(jnp.uint32), 1 + never.astype(stack.dtype)
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes[:-1])])
    parts = []
    for start, shape in zip(starts, shapes, strict=True):
        part = _part(stack, np.array([start, 0], np.uint32), nowhere, one, shape=shape)
        pairs = zip(part, fields, strict=True)
        parts.append([x > 0 if y.dtype == bool else x.astype(y.dtype) for x, y in pairs])
    return [treedef.unflatten(part) for part in parts]


# Compiled by itself so that it is traced once for all slots alike.
@functools.partial(jax.jit, static_argnames="shape")
def _part(
    stack: Array, position: Array, nowhere: Array, one: Array, *, shape: tuple[int, ...]
) -> list[Array]:
    start = lax.index_in_dim(position + nowhere, 0, keepdims=False)
    sizes = (len(stack), math.prod(shape))
    # The division keeps it from being looked up over and over wherever it is used.
    part = lax.dynamic_slice(stack, (np.uint32(0), start), sizes) / one
    return [lax.index_in_dim(part, i, keepdims=False).reshape(shape) for i in range(len(stack))]

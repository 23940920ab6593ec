"""Groups side by side in one array, so that what is done to each of them is compiled once."""

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._types import NormTree
from optaxclip.scopes import Grouping


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The slots of a grouping, those of a single group together.

    Attributes:
      grouping: the groups.
      slots: for each block the positions of its slots. The array of a block has one entry for each
        of them or, if there is only one, the shape of this slot.
    """

    grouping: Grouping
    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, grouping: Grouping, apart: Container[int] = ()) -> "Blocks":
        """The blocks of a grouping.

        Args:
          grouping: the groups.
          apart: positions of slots that are to be blocks of their own.
        """
        positions = range(len(grouping.slots))
        together = tuple(n for n in positions if _is_single(grouping, n) and n not in apart)
        alone = tuple((n,) for n in positions if n not in together)
        return cls(grouping, ((together,) if together else ()) + alone)

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each block's array."""
        slots = self.grouping.slots
        return [slots[b[0]].shape if len(b) == 1 else (len(b),) for b in self.slots]

    def gather(self, arrays: Sequence[Array]) -> list[Array]:
        """One array for each block from one for each slot, along a new last axis."""
        return [
            arrays[block[0]] if len(block) == 1 else jnp.stack([arrays[n] for n in block], axis=-1)
            for block in self.slots
        ]

    def per_slot(self, trees: Sequence[Any]) -> list[Any]:
        """For each slot its part of pytrees of arrays of at least 0, one for each block."""
        found = {}
        for block, tree in zip(self.slots, trees, strict=True):
            found.update(zip(block, _apart(tree, len(block)), strict=True))
        return [found[n] for n in range(len(found))]

    def per_leaf(self, trees: Sequence[Any]) -> list[Any]:
        """The same for each measured leaf."""
        by_slot = self.per_slot(trees)
        return [by_slot[slot] for slot in self.grouping.slot_of_leaf()]

    def pack(self, arrays: Sequence[Array]) -> NormTree:
        """One array per block as the pytree that limit rules see; NaN for slots without leaves."""
        if not self._is_vector():
            return self.grouping.pack(self.per_slot(arrays))
        present = [bool(slot.members) for slot in self.grouping.slots]
        return arrays[0] if all(present) else jnp.where(np.array(present), arrays[0], jnp.nan)

    def unpack(self, tree: NormTree) -> list[Array]:
        """The inverse of `pack`."""
        return [tree] if self._is_vector() else self.gather(self.grouping.unpack(tree))

    def _is_vector(self) -> bool:
        """Whether limit rules see the norms as the only block has them."""
        return self.grouping.layout == "vector" and len(self.slots) == 1 < len(self.slots[0])


def _is_single(grouping: Grouping, slot: int) -> bool:
    """Whether a slot is one group; of a leaf that a dict lacks at this step nothing is known."""
    one = grouping.slots[slot]
    return one.shape == () and (bool(one.members) or grouping.layout == "vector")


def _apart(tree: Any, count: int) -> list[Any]:
    """The entries of arrays `[count]`."""
    if count == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    columns = [_entries(leaf, count) for leaf in leaves]
    return [treedef.unflatten(row) for row in zip(*columns, strict=True)]


def _entries(x: Array, count: int) -> list[Array]:
    """The entries of an array of numbers of at least 0.

    Compilers merge what is done to each of them only if it does not show which entry it is. So the
    positions are such as they cannot know, and a division keeps entries from being looked up over
    and over wherever they are used.
    """
    if x.dtype == bool:
        return [entry > 0 for entry in _entries(x.astype(jnp.float32), count)]
    never = x[:1] < 0
    nowhere, one = jnp.broadcast_to(never, (2,)).astype(jnp.int32), 1 + never.astype(x.dtype)
    positions = [np.array([i, 0], np.int32) for i in range(count)]
    return [_entry(x, position, nowhere, one) for position in positions]


@jax.jit
def _entry(x: Array, position: Array, nowhere: Array, one: Array) -> Array:
    (start, _) = position + nowhere
    return lax.squeeze(lax.dynamic_slice(x, (start,), (1,)) / one, (0,))

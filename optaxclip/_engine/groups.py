"""Leaves ready to be reduced to the norms of their groups."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.devices import Axes, is_on_mesh, manual_axes, num_devices
from optaxclip._base.exact import MOST_ENTRIES, MOST_GROUPS
from optaxclip._base.numerics import known_size, real_parts, select
from optaxclip._base.sums import largest_of
from optaxclip._base.trees import has_wide, is_sparse, with_data
from optaxclip._engine.alike import for_each
from optaxclip._engine.blocks import Blocks
from optaxclip._engine.placement import split_over
from optaxclip.norms import Norm
from optaxclip.scopes import Grouping

VERY_MANY = 2**40
"""Stands for a symbolic number of entries where a bound will do."""


class Groups(NamedTuple):
    """Leaves ready to be reduced.

    Attributes:
      leaves: floating or complex arrays, or `BCOO`.
      wide: whether entries are summed in float64; in float32 otherwise.
      axes: for each leaf, the axes to reduce.
      split: for each leaf, the axes of the mesh over which the entries of a group are split.
      sizes: for each slot, how many entries share one norm; symbolic if shapes are.
      small: positions of the slots of a few entries, which are measured to more digits.
      blocks: which groups are handled together.
      norm: the norm.
    """

    leaves: list[Any]
    wide: bool
    axes: list[tuple[int, ...]]
    split: list[Axes]
    sizes: list[Any]
    small: list[int]
    blocks: Blocks
    norm: Norm

    @classmethod
    def of(
        cls, leaves: list[Any], grouping: Grouping, norm: Norm, *, side_by_side: bool = True
    ) -> "Groups":
        """The leaves of a tree, or of what one device holds of it.

        Args:
          leaves: the measured leaves.
          grouping: their groups.
          norm: the norm.
          side_by_side: whether leaves of several groups may share a block.
        """
        wide = has_wide({leaf.dtype for leaf in leaves})
        axes = [
            tuple(range(leaf.data.ndim)) if is_sparse(leaf) else reduced
            for leaf, reduced in zip(leaves, grouping.axes, strict=True)
        ]
        split = split_over(leaves, grouping)
        counts = [
            math.prod(np.shape(leaf)[axis] for axis in reduced) * num_devices(over)
            for leaf, reduced, over in zip(leaves, grouping.axes, split, strict=True)
        ]
        sizes = [sum(counts[i] for i in slot.members) for slot in grouping.slots]
        small = [] if any(split) else _small_slots(grouping, sizes)
        several = (i for slot in grouping.slots if slot.shape != () for i in slot.members)
        whole = {i for i in several if side_by_side and _lies_in_one_piece(leaves[i])}
        blocks = Blocks.of(grouping, apart=small, together=whole)
        return cls(leaves, wide, axes, split, sizes, small, blocks, norm)

    @property
    def grouping(self) -> Grouping:
        """Which leaf belongs where."""
        return self.blocks.grouping

    def entries_of(self, leaf: int) -> Array:
        """The entries of a leaf, in the dtype in which they are summed.

        Converted where they are used: what a branch takes from outside would be stored.
        """
        return _entries(self.leaves[leaf], wide=self.wide)

    def members(self, slot: int) -> list[Array]:
        """The entries of all leaves of a slot."""
        return [self.entries_of(i) for i in self.grouping.slots[slot].members]

    def parts(self) -> list[Array]:
        """The totals of each leaf."""
        rows = [(leaf,) for leaf in self.leaves]
        return for_each(_part, rows, self._statics(range(len(rows))))

    def parts_scaled(self, scales: list[Array], sizes: list[Array] | None = None) -> list[Array]:
        """The totals of each leaf, of entries multiplied by their groups' scales.

        Args:
          scales: for each block, powers of two.
          sizes: for each leaf, any numbers of at least 0 and of the shape of its scale, different
            for each: XLA would compute what leaves of equal shapes are multiplied by once, and
            store it. None where that does not matter.
        """
        per_leaf = self.blocks.per_leaf(scales)
        return self.some_scaled(range(len(per_leaf)), per_leaf, sizes or [None] * len(per_leaf))

    def some_scaled(
        self, some: Sequence[int], scales: Sequence[Array], sizes: Sequence[Array | None]
    ) -> list[Array]:
        """The same of some leaves, for their positions and, for each of them, the others."""
        rows = list(zip([self.leaves[i] for i in some], scales, sizes, strict=True))
        return for_each(_part_scaled, rows, self._statics(some))

    def _statics(self, some: Sequence[int]) -> list[tuple[Any, ...]]:
        return [(self.axes[i], self.norm, self.wide) for i in some]

    def of_sizes(self, function: Callable[[Any], float]) -> list[Any]:
        """For each block, a function of the numbers of entries that share a norm."""
        return self.blocks.of_slots([function(size) for size in self.sizes])

    def least(self) -> list[Any]:
        """For each block, the totals below which too much underflowed."""
        return self.of_sizes(lambda size: self.norm.least(at_most(size), self.dtype))

    def norms(self, totals: list[Array]) -> list[Array]:
        """The norms of all blocks from the totals."""
        if None not in map(known_size, self.sizes):
            counts = self.of_sizes(lambda size: max(size, 1))
        else:
            slots = zip(self.grouping.slots, self.sizes, strict=True)
            counts = self.blocks.gather([jnp.full(s.shape, n, jnp.float32) for s, n in slots])
        return [_finish(*block, norm=self.norm) for block in zip(totals, counts, strict=True)]

    def largest(self) -> list[Array]:
        """For each leaf the largest real or imaginary parts; constant for differentiation."""
        every = range(len(self.leaves))
        still = lax.stop_gradient([jnp.stack(real_parts(self.entries_of(i))) for i in every])
        leaves = zip(still, self.axes, strict=True)
        return [
            jnp.max(jnp.abs(array), axis=(0, *(axis + 1 for axis in reduced)), initial=0)
            for array, reduced in leaves
        ]

    def joined(self, parts: list[Array], *, by_max: bool = False) -> list[Array]:
        """One array for each block from one for each leaf, by maximum or as the norm joins."""
        join = largest_of if by_max else self.norm.join
        by_slot = [
            join([parts[i] for i in slot.members])
            if slot.members
            else jnp.zeros(slot.shape, self.dtype)
            for slot in self.grouping.slots
        ]
        return self.blocks.gather(by_slot)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the norms."""
        return jnp.dtype(jnp.float64 if self.wide else jnp.float32)


def _lies_in_one_piece(leaf: Any) -> bool:
    """Whether nothing says that the leaf is on several devices."""
    return not (manual_axes() or is_on_mesh(leaf))


def is_small(leaf: Any) -> bool:
    """Whether XLA on CPU reduces the leaf in several steps that fuse with nothing."""
    return at_most(leaf.size) < _SMALL


_SMALL = 8192


def at_most(size: Any) -> int:
    """A number of entries, or more where it is symbolic."""
    return known_size(size) or VERY_MANY


def _small_slots(grouping: Grouping, sizes: list[Any]) -> list[int]:
    """The slots of a few entries in one group, if there are few of them."""
    slots = enumerate(zip(grouping.slots, map(at_most, sizes), strict=True))
    small = [i for i, (slot, size) in slots if slot.shape == () and 0 < size <= MOST_ENTRIES]
    return small if len(small) <= MOST_GROUPS else []


def _part(leaf: Any, axes: tuple[int, ...], norm: Norm, wide: bool) -> Array:
    return norm.reduce(_entries(leaf, wide=wide), axes, fused=_is_to_fuse(leaf))


def _part_scaled(
    leaf: Any, scale: Array, size: Array | None, axes: tuple[int, ...], norm: Norm, wide: bool
) -> Array:
    entries = _entries(leaf, wide=wide)
    own = scale if size is None else select(size < 0, 1, scale)
    scaled = entries * broadcast_over(own, axes).astype(entries.dtype)
    return norm.reduce(scaled, axes, fused=_is_to_fuse(leaf))


def _is_to_fuse(leaf: Any) -> bool:
    """Whether the leaf is large, and of a dtype that XLA's library on CPU does not read.

    The entries that it sums in place of them would be stored.
    """
    return leaf.dtype not in (jnp.float32, jnp.float64, jnp.bfloat16) and not is_small(leaf)


# Compiled by itself so that it is traced once for all blocks.
@functools.partial(jax.jit, static_argnames="norm")
def _finish(total: Array, count: Array, *, norm: Norm) -> Array:
    return norm.finish(total, jnp.asarray(count).astype(total.dtype))


def broadcast_over(x: Array, axes: tuple[int, ...]) -> Array:
    """`x` with axes of size 1 where a leaf has those that it lacks."""
    return lax.expand_dims(x, axes) if x.ndim else x


def _entries(leaf: Any, *, wide: bool) -> Array:
    """A leaf's entries in the dtype in which they are summed; duplicate sparse ones are added."""
    if is_sparse(leaf):
        widened = with_data(leaf, _entries(leaf.data, wide=wide))
        return widened.sum_duplicates(nse=leaf.nse).data
    if jnp.iscomplexobj(leaf):
        return leaf.astype(jnp.complex128 if wide else jnp.complex64)
    return leaf.astype(jnp.float64 if wide else jnp.float32)

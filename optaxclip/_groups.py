"""Leaves ready to be reduced to the norms of their groups."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._collectives import Axes, num_devices
from optaxclip._exact import MOST_ENTRIES, MOST_GROUPS
from optaxclip._numerics import known_size, promoted, real_parts
from optaxclip._placement import split_over
from optaxclip._trees import has_wide_leaves, is_sparse, with_data
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
      grouping: which leaf belongs where.
      norm: the norm.
    """

    leaves: list[Any]
    wide: bool
    axes: list[tuple[int, ...]]
    split: list[Axes]
    sizes: list[Any]
    grouping: Grouping
    norm: Norm

    @classmethod
    def of(cls, leaves: list[Any], grouping: Grouping, norm: Norm) -> "Groups":
        """The leaves of a tree, or of what one device holds of it."""
        wide = has_wide_leaves([leaf.dtype for leaf in leaves])
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
        return cls(leaves, wide, axes, split, sizes, grouping, norm)

    def entries(self) -> list[Array]:
        """The entries of each leaf, in the dtype in which they are summed.

        Converted where they are used: what a branch takes from outside would be stored.
        """
        return [self.entries_of(i) for i in range(len(self.leaves))]

    def entries_of(self, leaf: int) -> Array:
        """The same for one of the leaves."""
        return _entries(self.leaves[leaf], wide=self.wide)

    def reduced(self, arrays: list[Array]) -> list[Array]:
        """The totals of each leaf, of these entries."""
        return [self.norm.reduce(*leaf) for leaf in zip(arrays, self.axes, strict=True)]

    def totals(self, arrays: list[Array]) -> list[Array]:
        """The totals of all groups, of these entries."""
        return self.joined(self.reduced(arrays), self.norm.join)

    def bounds(self) -> list[int]:
        """For each slot, how many entries share a norm, or more."""
        return [known_size(size) or VERY_MANY for size in self.sizes]

    def norms(self, totals: list[Array]) -> list[Array]:
        """The norms from the totals."""
        counts = [_at_least_one(size) for size in self.sizes]
        return [_finish(*slot, norm=self.norm) for slot in zip(totals, counts, strict=True)]

    def divided(self, units: list[Array], sizes: list[Array]) -> list[Array]:
        """The entries divided by their groups' units.

        Args:
          units: for each slot.
          sizes: for each leaf any numbers of at least 0 and of its norms' shape, different for each
            leaf: XLA would compute what leaves of equal shapes are divided by once, and store it.
        """
        slots = self.grouping.slot_of_leaf()
        # Multiplied, as the compiler would multiply the divisors of a second derivative.
        own = [jnp.where(x < 0, 1, 1 / units[slot]) for x, slot in zip(sizes, slots, strict=True)]
        leaves = zip(self.entries(), own, self.axes, strict=True)
        return [x * broadcast_over(scale, axes).astype(x.dtype) for x, scale, axes in leaves]

    def largest(self) -> list[Array]:
        """For each leaf the largest real or imaginary parts; constant for differentiation."""
        still = lax.stop_gradient([jnp.stack(real_parts(array)) for array in self.entries()])
        leaves = zip(still, self.axes, strict=True)
        return [
            jnp.max(jnp.abs(array), axis=(0, *(axis + 1 for axis in reduced)), initial=0)
            for array, reduced in leaves
        ]

    def small_slots(self) -> list[int]:
        """The slots of a few entries in one group, if there are few of them."""
        slots = enumerate(zip(self.grouping.slots, self.sizes, strict=True))
        small = [
            i
            for i, (slot, size) in slots
            if slot.shape == () and 0 < (known_size(size) or VERY_MANY) <= MOST_ENTRIES
        ]
        return small if len(small) <= MOST_GROUPS else []

    def joined(self, parts: list[Array], join: Callable[[list[Array]], Array]) -> list[Array]:
        """One array for each slot from one for each leaf."""
        return [
            join(promoted([parts[i] for i in slot.members]))
            if slot.members
            else jnp.zeros(slot.shape)
            for slot in self.grouping.slots
        ]


# Compiled by itself so that it is traced once.
@functools.partial(jax.jit, static_argnames="norm")
def _finish(total: Array, count: Array, *, norm: Norm) -> Array:
    return norm.finish(total, jnp.asarray(count).astype(total.dtype))


def largest_of(arrays: Sequence[Array]) -> Array:
    """The largest numbers of arrays of one shape."""
    return functools.reduce(jnp.maximum, arrays)


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


def _at_least_one(size: Any) -> float | Array:
    return float(max(size, 1)) if known_size(size) is not None else jnp.array(size, jnp.float32)

"""From leaves to one norm per group, exact whatever the range and the number format."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._exact import MOST_ENTRIES, MOST_GROUPS, refined_root
from optaxclip._numerics import (
    known_size,
    power_of_two_below,
    promoted,
    real_parts,
    rounding_slack,
)
from optaxclip._trees import has_wide_leaves, is_sparse, with_data
from optaxclip.norms import Norm
from optaxclip.scopes import Grouping


class Measured(NamedTuple):
    """The norms of a slot's groups, `mantissa * unit`.

    Attributes:
      mantissa: the norms divided by `unit`, of the slot's shape.
      unit: powers of two: 1, but for groups whose powers leave the range of the dtype.
      slack: `[]`, how much factors must be lowered against rounding.
      error: the relative rounding error of `mantissa`, where it is known, in small groups; it
        takes the place of the slack.
    """

    mantissa: Array
    unit: Array
    slack: Array
    error: Array | None = None

    @property
    def norm(self) -> Array:
        """The norms; a finite one that the dtype cannot hold is its largest number."""
        return _product(self.mantissa, self.unit)


def measure(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norms of all groups.

    Leaves are mapped and summed where they lie: nothing is ravelled, concatenated or stored. Where
    a total overflows or underflows, a second reduction, behind `lax.cond`, rescales first.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.

    Returns:
      The norms of each slot, float32 or, with 64-bit leaves, float64.
    """
    groups = _Groups.of(leaves, grouping, norm)
    if norm.is_max:
        mantissas = groups.totals(groups.arrays)
        units = [jnp.ones_like(mantissa) for mantissa in mantissas]
    elif norm.degree in (1, 2):
        mantissas, units = _rescued(groups)
    else:
        # Higher powers leave the range too easily for thresholds: always rescale.
        units = [power_of_two_below(largest) for largest in groups.largest()]
        mantissas = groups.norms(groups.totals(groups.divided(units)))
    small = groups.small_slots()
    slots = enumerate(zip(mantissas, units, strict=True))
    return [_measured(groups, i, *slot, is_refined=i in small) for i, slot in slots]


def already_measured(norm: Array, size: Any) -> list[Measured]:
    """A norm of the whole tree that the caller has, as `measure` would return it.

    Args:
      norm: `[]`, float32 or float64.
      size: the number of entries of the tree.
    """
    unit = power_of_two_below(norm)
    slack = jnp.asarray(rounding_slack(size, norm.dtype)).astype(norm.dtype)
    return [Measured(norm / unit, unit, slack)]


_VERY_MANY = 2**40
"""Stands for a symbolic number of entries where a bound will do."""


class _Groups(NamedTuple):
    """Leaves ready to be reduced.

    Attributes:
      arrays: the entries of each leaf, in the dtype in which they are summed.
      axes: for each leaf, the axes to reduce.
      sizes: for each slot, how many entries share one norm; symbolic if shapes are.
      grouping: which leaf belongs where.
      norm: the norm.
    """

    arrays: list[Array]
    axes: list[tuple[int, ...]]
    sizes: list[Any]
    grouping: Grouping
    norm: Norm

    @classmethod
    def of(cls, leaves: list[Any], grouping: Grouping, norm: Norm) -> "_Groups":
        """The leaves of a tree."""
        wide = has_wide_leaves([leaf.dtype for leaf in leaves])
        arrays = [_entries(leaf, wide=wide) for leaf in leaves]
        axes = [
            tuple(range(array.ndim)) if is_sparse(leaf) else reduced
            for leaf, array, reduced in zip(leaves, arrays, grouping.axes, strict=True)
        ]
        counts = [
            math.prod(np.shape(leaf)[axis] for axis in reduced)
            for leaf, reduced in zip(leaves, grouping.axes, strict=True)
        ]
        sizes = [sum(counts[i] for i in slot.members) for slot in grouping.slots]
        return cls(arrays, axes, sizes, grouping, norm)

    def totals(self, arrays: list[Array]) -> list[Array]:
        """The totals of all groups, of these entries."""
        reduced = zip(arrays, self.axes, strict=True)
        return self._joined([self.norm.reduce(*leaf) for leaf in reduced], self.norm.join)

    def norms(self, totals: list[Array]) -> list[Array]:
        """The norms from the totals."""
        counts = [_at_least_one(size) for size in self.sizes]
        return [_finish(*slot, norm=self.norm) for slot in zip(totals, counts, strict=True)]

    def divided(self, units: list[Array]) -> list[Array]:
        """The entries divided by their groups' units."""
        leaves = zip(self.arrays, self.grouping.slot_of_leaf(), self.axes, strict=True)
        return [
            array / lax.expand_dims(units[slot], reduced).astype(array.dtype)
            for array, slot, reduced in leaves
        ]

    def largest(self) -> list[Array]:
        """The largest real or imaginary part in each group; constant for differentiation."""
        still = lax.stop_gradient([jnp.stack(real_parts(array)) for array in self.arrays])
        leaves = zip(still, self.axes, strict=True)
        parts = [
            jnp.max(jnp.abs(array), axis=(0, *(axis + 1 for axis in reduced)), initial=0)
            for array, reduced in leaves
        ]
        return self._joined(parts, lambda members: functools.reduce(jnp.maximum, members))

    def small_slots(self) -> list[int]:
        """The slots of a few entries in one group, if there are few of them."""
        slots = enumerate(zip(self.grouping.slots, self.sizes, strict=True))
        small = [
            i
            for i, (slot, size) in slots
            if slot.shape == () and 0 < (known_size(size) or _VERY_MANY) <= MOST_ENTRIES
        ]
        return small if len(small) <= MOST_GROUPS else []

    def _joined(self, parts: list[Array], join: Callable[[list[Array]], Array]) -> list[Array]:
        return [
            join(promoted([parts[i] for i in slot.members]))
            if slot.members
            else jnp.zeros(slot.shape)
            for slot in self.grouping.slots
        ]


def _rescued(groups: _Groups) -> tuple[list[Array], list[Array]]:
    """Mantissas and units, with a second look at the groups that left the range of their dtype."""
    totals = groups.totals(groups.arrays)
    bounds = [known_size(size) or _VERY_MANY for size in groups.sizes]
    slots = zip(totals, bounds, strict=True)
    units = [_rescaling(total, bound, norm=groups.norm) for total, bound in slots]

    def plain() -> list[Array]:
        return groups.norms(totals)

    def rescaled() -> list[Array]:
        again = groups.norms(groups.totals(groups.divided(units)))
        # Groups that stayed in range keep their norm bit for bit.
        return [_either(*slot) for slot in zip(units, plain(), again, strict=True)]

    any_is_out = functools.reduce(_or_any_is_out, units, jnp.zeros((), bool))
    return lax.cond(any_is_out, rescaled, plain), units


# Small steps that every slot takes are compiled by themselves, so that each is traced once.


@jax.jit
def _product(mantissa: Array, unit: Array) -> Array:
    norm = jnp.minimum(mantissa * unit, jnp.finfo(mantissa.dtype).max)
    return jnp.where(jnp.isfinite(mantissa), norm, mantissa)


@functools.partial(jax.jit, static_argnames="norm")
def _finish(total: Array, count: Array, *, norm: Norm) -> Array:
    return norm.finish(total, jnp.asarray(count).astype(total.dtype))


@functools.partial(jax.jit, static_argnames=("size", "norm"))
def _rescaling(total: Array, size: int, *, norm: Norm) -> Array:
    return norm.rescaling(total, size)


@jax.jit
def _either(unit: Array, plain: Array, rescaled: Array) -> Array:
    return jnp.where(unit == 1, plain, rescaled)


@jax.jit
def _or_any_is_out(flag: Array, unit: Array) -> Array:
    return flag | jnp.any(unit != 1)


def _measured(
    groups: _Groups, position: int, mantissa: Array, unit: Array, *, is_refined: bool
) -> Measured:
    """A slot's norms, to more digits if asked for."""
    slot, size = groups.grouping.slots[position], groups.sizes[position]
    slack = jnp.asarray(rounding_slack(size, mantissa.dtype)).astype(mantissa.dtype)
    if not is_refined or groups.norm.weight is None:
        return Measured(mantissa, unit, slack)
    members = [groups.arrays[i] for i in slot.members]
    weight = groups.norm.weight(size)
    mantissa, error = refined_root(mantissa, unit, members, weight=weight)
    return Measured(mantissa, unit, slack, error)


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

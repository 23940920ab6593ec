"""From leaves to one norm per group, exact whatever the range and the number format."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._exact import MOST_ENTRIES, refined_root
from optaxclip._numerics import (
    accumulation_dtype,
    known_size,
    power_of_two_below,
    promoted,
    real_parts,
    rounding_slack,
)
from optaxclip._trees import is_sparse, with_data
from optaxclip.norms import Norm
from optaxclip.scopes import Grouping, Slot


class Measured(NamedTuple):
    """The norms of a block of groups, `mantissa * unit`.

    Attributes:
      mantissa: the norms divided by `unit`.
      unit: powers of two: 1, but for groups whose powers leave the range of the dtype.
      slack: how much their factors must be lowered against rounding; 0 where `error` is known.
      error: the relative rounding errors of `mantissa`, known in small groups; None if there are
        none of these.
    """

    mantissa: Array
    unit: Array
    slack: Array
    error: Array | None

    @property
    def norm(self) -> Array:
        """The norms; a finite one that the dtype cannot hold is its largest number."""
        largest = jnp.finfo(self.mantissa.dtype).max
        norm = jnp.minimum(self.mantissa * self.unit, largest)
        return jnp.where(jnp.isfinite(self.mantissa), norm, self.mantissa)


def measure(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norms of all groups.

    Leaves are mapped and summed where they lie: nothing is ravelled, concatenated or stored. Where
    a total overflows or underflows, a second reduction, behind `lax.cond`, rescales first.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.

    Returns:
      The norms in blocks, float32 or, with 64-bit leaves, float64.
    """
    groups = _Groups.of(leaves, grouping, norm)
    if norm.degree in (1, 2) and not norm.is_max:
        mantissas, units = _rescued(groups)
    elif norm.is_max:
        mantissas = groups.totals(groups.arrays)
        units = [jnp.ones_like(mantissa) for mantissa in mantissas]
    else:
        # Higher powers leave the range too easily for thresholds: always rescale.
        units = [power_of_two_below(block) for block in groups.largest()]
        mantissas = groups.norms(groups.totals(groups.divided(units)))
    slacks = grouping.number_blocks(
        [rounding_slack(size, mantissas[0].dtype) for size in groups.sizes]
    )
    blocks = zip(mantissas, units, slacks, strict=True)
    return _refined(
        groups,
        [
            Measured(mantissa, unit, jnp.asarray(slack).astype(mantissa.dtype), None)
            for mantissa, unit, slack in blocks
        ],
    )


def already_measured(norm: Array, size: Any) -> list[Measured]:
    """A norm of the whole tree that the caller has, as `measure` would return it.

    Args:
      norm: `[]`, float32 or float64.
      size: the number of entries of the tree.
    """
    unit = power_of_two_below(norm)
    slack = jnp.asarray(rounding_slack(size, norm.dtype)).astype(norm.dtype)
    return [Measured(norm / unit, unit, slack, None)]


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
        arrays = [_entries(leaf) for leaf in leaves]
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
        counts = self.grouping.number_blocks([_at_least_one(size) for size in self.sizes])
        return [
            self.norm.finish(total, jnp.asarray(count).astype(total.dtype))
            for total, count in zip(totals, counts, strict=True)
        ]

    def divided(self, units: list[Array]) -> list[Array]:
        """The entries divided by their groups' units."""
        by_slot = self.grouping.to_slots(units)
        leaves = zip(self.arrays, self.grouping.slot_of_leaf(), self.axes, strict=True)
        return [
            array / lax.expand_dims(by_slot[slot], reduced).astype(array.dtype)
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

    def _joined(self, parts: list[Array], join: Callable[[list[Array]], Array]) -> list[Array]:
        return self.grouping.to_blocks(
            [
                join(promoted([parts[i] for i in slot.members]))
                if slot.members
                else jnp.zeros(slot.shape)
                for slot in self.grouping.slots
            ]
        )


def _rescued(groups: _Groups) -> tuple[list[Array], list[Array]]:
    """Mantissas and units, with a second look at the groups that left the range of their dtype."""
    totals = groups.totals(groups.arrays)
    bounds = groups.grouping.number_blocks(
        [known_size(size) or _VERY_MANY for size in groups.sizes]
    )
    units = [groups.norm.rescaling(*block) for block in zip(totals, bounds, strict=True)]
    is_out = [jnp.any(unit != 1) for unit in units]

    def plain() -> list[Array]:
        return groups.norms(totals)

    def rescaled() -> list[Array]:
        again = groups.norms(groups.totals(groups.divided(units)))
        blocks = zip(units, plain(), again, strict=True)
        # Groups that stayed in range keep their norm bit for bit.
        return [jnp.where(unit == 1, first, second) for unit, first, second in blocks]

    any_is_out = functools.reduce(jnp.logical_or, is_out, jnp.zeros((), bool))
    return lax.cond(any_is_out, rescaled, plain), units


def _refined(groups: _Groups, measured: list[Measured]) -> list[Measured]:
    """The same norms to more digits in small groups, if the norm is a root of squares."""
    grouping, weight = groups.grouping, groups.norm.weight
    small = [_is_small(*slot) for slot in zip(grouping.slots, groups.sizes, strict=True)]
    if weight is None or not any(small):
        return measured
    mantissas = grouping.to_slots([block.mantissa for block in measured])
    units = grouping.to_slots([block.unit for block in measured])
    errors = [jnp.zeros_like(mantissa) for mantissa in mantissas]
    for i, slot in enumerate(grouping.slots):
        if small[i]:
            members = [groups.arrays[j] for j in slot.members]
            mantissas[i], errors[i] = refined_root(
                mantissas[i], units[i], members, weight(groups.sizes[i])
            )
    is_rough = grouping.number_blocks([float(not flag) for flag in small])
    blocks = zip(
        measured, grouping.to_blocks(mantissas), grouping.to_blocks(errors), is_rough, strict=True
    )
    return [
        block._replace(mantissa=mantissa, error=error, slack=block.slack * rough)
        for block, mantissa, error, rough in blocks
    ]


def _is_small(slot: Slot, size: Any) -> bool:
    known = known_size(size)
    return slot.shape == () and known is not None and 0 < known <= MOST_ENTRIES


def _entries(leaf: Any) -> Array:
    """A leaf's entries in the dtype in which they are summed; duplicate sparse ones are added."""
    if is_sparse(leaf):
        wide = with_data(leaf, _entries(leaf.data))
        return wide.sum_duplicates(nse=leaf.nse).data
    if jnp.iscomplexobj(leaf):
        return leaf  # complex dtypes have at least the accuracy of float32
    return leaf.astype(accumulation_dtype(leaf.dtype))


def _at_least_one(size: Any) -> float | Array:
    return float(max(size, 1)) if known_size(size) is not None else jnp.array(size, jnp.float32)

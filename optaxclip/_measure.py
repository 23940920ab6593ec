"""From leaves to one norm per group, exact whatever the range and the number format."""

import functools
import math
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
    arrays = [_entries(leaf) for leaf in leaves]
    axes = [
        tuple(range(array.ndim)) if is_sparse(leaf) else reduced
        for leaf, array, reduced in zip(leaves, arrays, grouping.axes, strict=True)
    ]
    sizes = _sizes(leaves, grouping)

    def totals(arrays: list[Array]) -> list[Array]:
        parts = [norm.reduce(array, reduced) for array, reduced in zip(arrays, axes, strict=True)]
        slots = [promoted([parts[i] for i in slot.members]) for slot in grouping.slots]
        joined = [
            norm.join(members) if members else jnp.zeros(slot.shape)
            for members, slot in zip(slots, grouping.slots, strict=True)
        ]
        return grouping.to_blocks(joined)

    def norms(totals: list[Array]) -> list[Array]:
        counts = grouping.number_blocks([_at_least_one(size) for size in sizes])
        return [
            norm.finish(total, jnp.asarray(count).astype(total.dtype))
            for total, count in zip(totals, counts, strict=True)
        ]

    def rescaled(units: list[Array]) -> list[Array]:
        by_slot = grouping.to_slots(units)
        return [
            array / lax.expand_dims(by_slot[slot], reduced).astype(array.dtype)
            for array, slot, reduced in zip(arrays, grouping.slot_of_leaf(), axes, strict=True)
        ]

    plain = totals(arrays)
    if norm.is_max:
        mantissas, units = plain, [jnp.ones_like(total) for total in plain]
    elif norm.degree in (1, 2):
        bounds = grouping.number_blocks([known_size(size) or _VERY_MANY for size in sizes])
        units = [norm.rescaling(*block) for block in zip(plain, bounds, strict=True)]
        mantissas = lax.cond(
            _any([unit != 1 for unit in units]),
            lambda: _chosen(units, norms(plain), norms(totals(rescaled(units)))),
            lambda: norms(plain),
        )
    else:
        # Higher powers leave the range too easily for thresholds: always rescale.
        units = [power_of_two_below(block) for block in _largest(arrays, axes, grouping)]
        mantissas = norms(totals(rescaled(units)))
    slacks = [rounding_slack(size, mantissas[0].dtype) for size in sizes]
    plain_measure = [
        Measured(mantissa, unit, jnp.asarray(slack).astype(mantissa.dtype), None)
        for mantissa, unit, slack in zip(
            mantissas, units, grouping.number_blocks(slacks), strict=True
        )
    ]
    return _refined(plain_measure, arrays, grouping, norm, sizes)


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


def _entries(leaf: Any) -> Array:
    """A leaf's entries in the dtype in which they are summed; duplicate sparse ones are added."""
    if is_sparse(leaf):
        wide = with_data(leaf, _entries(leaf.data))
        return wide.sum_duplicates(nse=leaf.nse).data
    if not jnp.iscomplexobj(leaf):
        return leaf.astype(accumulation_dtype(leaf.dtype))
    return leaf  # complex dtypes have at least the accuracy of float32


def _sizes(leaves: list[Any], grouping: Grouping) -> list[Any]:
    """How many entries share one norm, for each slot; symbolic if shapes are."""
    per_leaf = [
        math.prod(np.shape(leaf)[axis] for axis in axes)
        for leaf, axes in zip(leaves, grouping.axes, strict=True)
    ]
    return [sum(per_leaf[i] for i in slot.members) for slot in grouping.slots]


def _at_least_one(size: Any) -> float | Array:
    return float(max(size, 1)) if known_size(size) is not None else jnp.array(size, jnp.float32)


def _any(flags: list[Array]) -> Array:
    return functools.reduce(jnp.logical_or, [jnp.any(flag) for flag in flags], jnp.zeros((), bool))


def _chosen(units: list[Array], plain: list[Array], again: list[Array]) -> list[Array]:
    """The second measure where the first was rescaled; the others keep theirs bit for bit."""
    blocks = zip(units, plain, again, strict=True)
    return [jnp.where(unit == 1, first, second) for unit, first, second in blocks]


def _largest(arrays: list[Array], axes: list[tuple[int, ...]], grouping: Grouping) -> list[Array]:
    """The largest real or imaginary part in each group; constant for differentiation."""
    still = lax.stop_gradient([jnp.stack(real_parts(array)) for array in arrays])
    sizes = [
        jnp.max(jnp.abs(parts), axis=(0, *(axis + 1 for axis in reduced)), initial=0)
        for parts, reduced in zip(still, axes, strict=True)
    ]
    slots = [promoted([sizes[i] for i in slot.members]) for slot in grouping.slots]
    joined = [
        functools.reduce(jnp.maximum, members) if members else jnp.zeros(slot.shape)
        for members, slot in zip(slots, grouping.slots, strict=True)
    ]
    return grouping.to_blocks(joined)


def _refined(
    measured: list[Measured],
    arrays: list[Array],
    grouping: Grouping,
    norm: Norm,
    sizes: list[Any],
) -> list[Measured]:
    """The same norms to more digits in small groups, if the norm is a root of squares."""

    def is_small(slot: Slot, size: Any) -> bool:
        known = known_size(size)
        return slot.shape == () and known is not None and 0 < known <= MOST_ENTRIES

    small = [is_small(*pair) for pair in zip(grouping.slots, sizes, strict=True)]
    if norm.weight is None or not any(small):
        return measured
    mantissas = grouping.to_slots([block.mantissa for block in measured])
    units = grouping.to_slots([block.unit for block in measured])
    errors = [jnp.zeros_like(mantissa) for mantissa in mantissas]
    for i, slot in enumerate(grouping.slots):
        if small[i]:
            members = [arrays[j] for j in slot.members]
            weight = norm.weight(sizes[i])
            mantissas[i], errors[i] = refined_root(mantissas[i], units[i], members, weight)
    is_rough = grouping.number_blocks([float(not flag) for flag in small])
    blocks = zip(
        measured,
        grouping.to_blocks(mantissas),
        grouping.to_blocks(errors),
        is_rough,
        strict=True,
    )
    return [
        block._replace(mantissa=mantissa, error=error, slack=block.slack * rough)
        for block, mantissa, error, rough in blocks
    ]

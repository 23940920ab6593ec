"""From leaves to one norm per group, exact whatever the range and the number format."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._exact import MOST_ENTRIES, refined_root
from optaxclip._numerics import accumulation_dtype, power_of_two_below
from optaxclip._trees import is_sparse
from optaxclip.norms import Norm
from optaxclip.scopes import Grouping


class Measured(NamedTuple):
    """A group's norm, `mantissa * unit`.

    The unit is 1 but for groups whose powers leave the range of the dtype. There it is the power of
    two just below the largest entry, so that dividing by it is exact.

    Attributes:
      mantissa: the norm of the group divided by `unit`; `[...]` over the axes that are left.
      unit: `[...]`, a power of two.
      count: how many entries share one norm.
      error: the relative rounding error of `mantissa`, where it is known: in small groups.
    """

    mantissa: Array
    unit: Array
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    error: Array | None = None

    @property
    def norm(self) -> Array:
        """The norm; a finite one that the dtype cannot hold is its largest number."""
        largest = jnp.finfo(self.mantissa.dtype).max
        norm = jnp.minimum(self.mantissa * self.unit, largest)
        return jnp.where(jnp.isfinite(self.mantissa), norm, self.mantissa)


def entries(leaf: Any) -> Array:
    """A leaf's entries in the dtype in which they are summed; duplicate sparse ones are added."""
    if is_sparse(leaf):
        wide = type(leaf)((_widen(leaf.data), leaf.indices), shape=leaf.shape)
        return wide.sum_duplicates(nse=leaf.nse).data
    return _widen(leaf)


def _widen(x: Array) -> Array:
    real = accumulation_dtype(x.dtype)
    return x.astype(jnp.promote_types(real, jnp.complex64) if jnp.iscomplexobj(x) else real)


def measure(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norm of every group.

    Leaves are mapped and summed where they lie: nothing is ravelled, concatenated or stored. Where
    a total overflows or underflows, a second reduction, behind `lax.cond`, rescales first.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.

    Returns:
      One `Measured` per group, float32 or, if the group has 64-bit leaves, float64.
    """
    counts = _counts(leaves, grouping)
    arrays = [entries(leaf) for leaf in leaves]
    axes = [
        tuple(range(array.ndim)) if is_sparse(leaf) else reduced
        for leaf, array, reduced in zip(leaves, arrays, grouping.axes, strict=True)
    ]
    totals = _totals(arrays, axes, grouping, norm)
    plain = [norm.finish(total, count) for total, count in zip(totals, counts, strict=True)]
    inexact = [
        norm.is_inexact(total, count) | ~jnp.isfinite(value)
        for total, count, value in zip(totals, counts, plain, strict=True)
    ]

    def rescued(arrays: list[Array]) -> tuple[list[Array], list[Array]]:
        units = _units(arrays, axes, grouping)
        scaled = [
            array / lax.expand_dims(units[group], reduced).astype(array.dtype)
            for array, reduced, group in zip(arrays, axes, grouping.index, strict=True)
        ]
        totals = _totals(scaled, axes, grouping, norm)
        again = [norm.finish(total, count) for total, count in zip(totals, counts, strict=True)]
        return (
            [jnp.where(bad, new, old) for bad, new, old in zip(inexact, again, plain, strict=True)],
            [jnp.where(bad, unit, 1) for bad, unit in zip(inexact, units, strict=True)],
        )

    def as_they_are(arrays: list[Array]) -> tuple[list[Array], list[Array]]:
        del arrays
        return plain, [jnp.ones_like(value) for value in plain]

    any_inexact = (
        jnp.stack([jnp.any(bad) for bad in inexact]).any() if inexact else jnp.array(False)
    )
    mantissas, units = lax.cond(any_inexact, rescued, as_they_are, arrays)
    measured = [Measured(*group) for group in zip(mantissas, units, counts, strict=True)]
    return [
        _refined(group, [arrays[i] for i in members], norm)
        for group, members in zip(measured, grouping.members(), strict=True)
    ]


def _refined(group: Measured, arrays: list[Array], norm: Norm) -> Measured:
    """The same norm to more digits, if the group is small and the norm a root of squares."""
    is_small = 0 < sum(array.size for array in arrays) <= MOST_ENTRIES
    if not is_small or norm.weight is None or group.mantissa.ndim:
        return group
    weight = norm.weight(group.count)
    mantissa, error = refined_root(group.mantissa, group.unit, arrays, weight)
    return group._replace(mantissa=mantissa, error=error)


def _counts(leaves: list[Any], grouping: Grouping) -> list[int]:
    counts = [0] * len(grouping.members())
    for leaf, axes, group in zip(leaves, grouping.axes, grouping.index, strict=True):
        counts[group] += int(np.prod([np.shape(leaf)[axis] for axis in axes], dtype=np.int64))
    return counts


def _totals(
    arrays: list[Array], axes: list[tuple[int, ...]], grouping: Grouping, norm: Norm
) -> list[Array]:
    parts = [norm.reduce(array, reduced) for array, reduced in zip(arrays, axes, strict=True)]
    return [norm.join(_promoted([parts[i] for i in group])) for group in grouping.members()]


def _units(arrays: list[Array], axes: list[tuple[int, ...]], grouping: Grouping) -> list[Array]:
    """For each group, a power of two near its largest entry; constant for differentiation."""
    still = [lax.stop_gradient(array) for array in arrays]
    largest = [_largest(array, reduced) for array, reduced in zip(still, axes, strict=True)]
    groups = [_promoted([largest[i] for i in group]) for group in grouping.members()]
    return [power_of_two_below(jnp.max(jnp.stack(group), axis=0)) for group in groups]


def _largest(x: Array, axes: tuple[int, ...]) -> Array:
    size = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)) if jnp.iscomplexobj(x) else jnp.abs(x)
    return jnp.max(size, axis=axes, initial=0)


def _promoted(parts: list[Array]) -> list[Array]:
    if not parts:
        return [jnp.zeros(())]
    dtype = jnp.result_type(*parts) if len({part.dtype for part in parts}) == 1 else jnp.float64
    return [part.astype(dtype) for part in parts]

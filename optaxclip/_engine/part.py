"""Leaves in one piece, or what one device holds of them, and the norms of their groups.

  in   leaves `[...]` and a grouping
  out  mantissas and units, as `Grouping.joined` has the norms of all groups

Every step is over the leaves, then over the groups that they belong to, then over devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.devices as devices
import optaxclip._engine.cpu as cpu
import optaxclip._engine.gpu as gpu
import optaxclip._engine.scales as scales
from optaxclip._base.devices import Axes
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.numerics import (
    accumulation_dtype,
    broadcast_over,
    known_size,
    power_of_two_below,
    rounding_slack,
)
from optaxclip._base.trees import is_sparse, norm_dtype
from optaxclip._engine.placement import of_groups, split_over
from optaxclip._engine.scales import Totals
from optaxclip.norms import Norm


class Part(NamedTuple):
    """Leaves to be measured.

    Attributes:
      leaves: the arrays.
      grouping: which entries share a norm.
      norm: the norm.
      split: for each leaf, the axes of the mesh over which the entries of a group are split.
      dtype: that of the norms.
    """

    leaves: list[Any]
    grouping: Grouping
    norm: Norm
    split: list[Axes]
    dtype: jnp.dtype

    @classmethod
    def of(cls, leaves: list[Any], grouping: Grouping, norm: Norm) -> "Part":
        """These leaves, and what is to be known of them."""
        dtype = norm_dtype({leaf.dtype for leaf in leaves})
        return cls(leaves, grouping, norm, split_over(leaves, grouping), dtype)

    def norms(self) -> tuple[list[Array], list[Array]]:
        """The mantissas and units of all norms."""
        if not self.leaves:
            nothing = [jnp.zeros(group.shape, self.dtype) for group in self.grouping.groups]
            return nothing, [jnp.ones_like(x) for x in nothing]
        if self.norm.is_max:
            return self._largest()
        if self.norm.degree not in (1, 2):
            # Other powers leave the range too easily: their unit is that of the largest entry.
            rows = zip(*self._largest(), strict=True)
            # No further, or the reciprocal would be subnormal.
            most = 1 / float(jnp.finfo(self.dtype).tiny)
            units = [jnp.minimum(power_of_two_below(x) * unit, most) for x, unit in rows]
            units = self.grouping.of_first(units)
            return self.divided(units), units
        rows = zip(self.sizes(), self.grouping.groups, strict=True)
        # What is small beside others needs no second look.
        lows = [scales.least(size, self.dtype) if group.names else 0.0 for size, group in rows]
        lows = self.grouping.numbers(lows)
        lows = [np.asarray(low, self.dtype) for low in lows]
        rows = zip(self._totals(lows), lows, strict=True)
        usable = [scales.usable(found, low) for found, low in rows]
        return self._finished([total for total, _ in usable]), [unit for _, unit in usable]

    def divided(self, units: list[Array]) -> list[Array]:
        """The norms of entries divided by powers of two, in steps that JAX can differentiate."""
        by_leaf = self.grouping.by_leaf([1 / unit for unit in units])
        is_max, parts = self.norm.is_max, list[Totals]()
        for leaf, axes, by in zip(self.leaves, self._axes(), by_leaf, strict=True):
            x = scales.times(scales.entries(leaf, self.dtype), broadcast_over(by, axes))
            mapped = self.norm.map(x)
            total = jnp.max(mapped, axes, initial=0) if is_max else cpu.sum_over(mapped, axes)
            parts.append((total,))
        return self._finished([total for (total,) in self._combined(parts, by_max=is_max)])

    def sizes(self) -> list[Any]:
        """For each group, how many entries share its norm on all devices."""
        rows = zip(self.leaves, self.grouping.axes, self.split, strict=True)
        counts = [
            math.prod(np.shape(leaf)[axis] for axis in axes) * devices.num_devices(over)
            for leaf, axes, over in rows
        ]
        return [sum(counts[i] for i in group.members) for group in self.grouping.groups]

    def slacks(self) -> list[Array]:
        """How much the factors of all groups must be lowered against rounding."""
        leaves, degree = self.leaves, self.norm.degree
        rows = zip(self.sizes(), self.grouping.groups, strict=True)
        found = self.grouping.numbers(
            [rounding_slack(n, degree, _coarsest([leaves[i] for i in g.members])) for n, g in rows]
        )
        return [jnp.asarray(slack).astype(self.dtype) for slack in found]

    def _axes(self) -> list[tuple[int, ...]]:
        """For each leaf the axes to reduce: of a sparse one, those of its stored entries."""
        rows = zip(self.leaves, self.grouping.axes, strict=True)
        return [tuple(range(x.data.ndim)) if is_sparse(x) else axes for x, axes in rows]

    def _finished(self, totals: list[Array]) -> list[Array]:
        sizes = [size if known_size(size) is None else max(size, 1) for size in self.sizes()]
        rows = zip(totals, self.grouping.numbers(sizes), strict=True)
        return [self.norm.finish(x, jnp.asarray(size, x.dtype)) for x, size in rows]

    def _totals(self, lows: list[Any]) -> list[Totals]:
        """The totals of all norms, at all scales."""
        in_one_piece = devices.in_one_piece(self.leaves)
        axes, norm, dtype = self._axes(), self.norm, self.dtype

        def each(leaves: list[Any]) -> list[Totals]:
            rows = zip(leaves, axes, strict=True)
            return self._combined([_totals_of(*row, norm, dtype, in_one_piece) for row in rows])

        if not in_one_piece:
            return each(self.leaves)
        on_cpu = functools.partial(
            cpu.totals, axes=axes, lows=lows, join=self._combined, norm=norm, dtype=dtype
        )
        return lax.platform_dependent(self.leaves, cpu=on_cpu, default=each)

    def _largest(self) -> tuple[list[Array], list[Array]]:
        """The largest moduli, and their units."""
        # The modulus of a finite complex entry may be infinite; half of it is not.
        unit = 2.0 if any(jnp.iscomplexobj(leaf) for leaf in self.leaves) else 1.0
        rows = zip(self.leaves, self._axes(), strict=True)
        bits = [
            (_largest_bits(leaf, 1 / unit, axes=axes, dtype=self.dtype),) for leaf, axes in rows
        ]
        combined = self._combined(bits, by_max=True)
        found = [lax.bitcast_convert_type(x, self.dtype) for (x,) in combined]
        return found, [jnp.full_like(x, unit) for x in found]

    def _combined(self, parts: list[Totals], *, by_max: bool = False) -> list[Totals]:
        """From the totals of leaves to those of all norms: over a group's leaves, then devices."""
        groups = list(zip(self.grouping.groups, of_groups(self.grouping, self.split), strict=True))
        # Single groups go over devices together.
        everywhere = Axes().union(*(axes for group, axes in groups if not group.shape))
        found: list[Totals] = []
        for group, axes in groups:
            over = axes if group.shape else everywhere
            shares = [_share(parts[i], over - self.split[i], over, by_max) for i in group.members]
            found.append(_joined(shares, by_max) if shares else self._nothing(group, parts))
        singles = [n for n, (group, _) in enumerate(groups) if group.members and not group.shape]
        arrays = [([n], axes) for n, (group, axes) in enumerate(groups) if group.shape]
        for some, axes in [(singles, everywhere), *arrays]:
            combined = _over_devices([found[n] for n in some], axes, by_max)
            for n, totals in zip(some, combined, strict=True):
                found[n] = totals
        columns = [self.grouping.joined(column) for column in zip(*found, strict=True)]
        return list(zip(*columns, strict=True))

    def _nothing(self, group: Group, parts: list[Totals]) -> Totals:
        """The totals of a group without leaves."""
        like = parts[0] if parts else (jnp.zeros((), self.dtype),)
        return tuple(jnp.zeros(group.shape, x.dtype) for x in like)


def _coarsest(leaves: list[Any]) -> float:
    """The epsilon of the coarsest dtype in which entries of these leaves are multiplied."""
    dtypes = {accumulation_dtype(leaf.dtype) for leaf in leaves}
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def _joined(shares: list[Totals], by_max: bool) -> Totals:
    combine = lax.max if by_max else lax.add
    return tuple(scales.joined(column, combine) for column in zip(*shares, strict=True))


def _share(totals: Totals, replicated: Axes, over: Axes, by_max: bool) -> Totals:
    """This device's share of totals that will be combined over devices.

    Those that are replicated along some of the axes are divided, so that a sum counts them once.
    """
    replicas = 1 if by_max else devices.num_devices(replicated)
    varying = over & devices.manual_axes()
    return tuple(devices.vary(x if replicas == 1 else x / replicas, varying) for x in totals)


def _over_devices(totals: list[Totals], axes: Axes, by_max: bool) -> list[Totals]:
    """Totals of one shape over the devices along these axes, in one collective."""
    if not axes or not totals:
        return totals
    stack = jnp.stack([jnp.stack(total) for total in totals])
    combined = (devices.largest if by_max else devices.total)(stack, axes)
    return [tuple(row[k] for k in range(len(row))) for row in combined]


def _totals_of(
    leaf: Any, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, in_one_piece: bool
) -> Totals:
    """The totals of a leaf at all scales, in the way that suits the platform."""
    options = {"axes": axes, "norm": norm, "dtype": dtype}
    is_whole = len(axes) == np.ndim(leaf)
    if is_whole and in_one_piece:  # for accelerators: a CPU then has a way of its own
        return _at_once(leaf, **options)
    ways: dict[str, Callable[..., Totals]] = {"cpu": _one_by_one, "default": _one_by_one}
    # Outside of manual regions only the compiler knows how leaves are split.
    if is_whole and devices.manual_axes():
        ways["default"] = _at_once
    elif dtype == jnp.float32:
        ways |= {"cuda": gpu.from_float64, "rocm": gpu.from_float64}
    branches = {name: functools.partial(way, **options) for name, way in ways.items()}
    return lax.platform_dependent(leaf, **branches)


# Compiled by themselves, as `_largest_bits`, so that they are traced once for leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _at_once(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> Totals:
    """In one variadic reduction, which a GPU runs as one kernel."""
    summands = _summands(leaf, norm, dtype)
    return tuple(lax.reduce(summands, (dtype.type(0),) * len(summands), _added, axes))


@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _one_by_one(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> Totals:
    """In plain sums: a TPU takes them in one pass too, and a partitioner adds their parts."""
    return tuple(cpu.sum_over(x, axes) for x in _summands(leaf, norm, dtype))


def _summands(leaf: Any, norm: Norm, dtype: jnp.dtype) -> Totals:
    x = scales.entries(leaf, dtype)
    factors = scales.scales(norm, dtype)
    return tuple(norm.map(x if by == 1 else scales.times(x, by)) for by in factors)


def _added(sums: Totals, more: Totals) -> Totals:
    return tuple(x + y for x, y in zip(sums, more, strict=True))


@functools.partial(jax.jit, static_argnames=("axes", "dtype"))
def _largest_bits(leaf: Any, by: float, *, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The largest modulus as an integer.

    The bits of floats of at least 0 are in the order of the floats, with NaN above infinity: so no
    maximum over devices loses a NaN, as XLA's collective on CPU does with floats.
    """
    modulus = jnp.abs(scales.times(scales.entries(leaf, dtype), by))
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    bits = lax.bitcast_convert_type(modulus, integer) & integer.type(jnp.iinfo(integer).max)
    return jnp.max(bits, axes, initial=0)

"""Measure: leaves come in, the norms of their groups go out, exact whatever the range.

  in   leaves `[...]`, floating or complex (or `BCOO`), and which of their entries share a norm
  out  for each group, or array of groups, of the grouping a `Measured` of its shape

Powers of entries leave float32's range long before norms do. So one pass over a leaf gives its
total at several scales: of the entries as they are, far down and far up. Totals of the leaves of a
group are added, then those of devices, in one collective; the total that neither overflowed nor
lost its small summands is the norm's, with its scale for a unit. Nothing is branched on or stored.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._base.devices as devices
import optaxclip._engine.cpu as cpu
import optaxclip._engine.gpu as gpu
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import (
    broadcast_over,
    coarsest,
    exponent_below,
    known_size,
    norm_dtype,
    power_of_two,
    power_of_two_below,
    rounding_slack,
)
from optaxclip._base.trees import is_sparse
from optaxclip._engine.placement import norm_specs, on_each_device, split_over
from optaxclip._engine.totals import (
    Totals,
    combined,
    entries,
    largest_bits,
    least,
    summands,
    times,
    usable,
)
from optaxclip.norms import Norm


class Measured(NamedTuple):
    """The norms of a group, or of an array of groups, `mantissa * unit`.

    Attributes:
      mantissa: the norms divided by `unit`, of the shape of the groups.
      unit: powers of two, of that shape: 1, but where totals left the range of the dtype.
      slack: how much factors must be lowered against rounding; broadcasts to that shape.
    """

    mantissa: Array
    unit: Array
    slack: Array

    @property
    def norm(self) -> Array:
        """The norms; a finite one that the dtype cannot hold is its largest number."""
        norm = jnp.minimum(self.mantissa * self.unit, jnp.finfo(self.mantissa.dtype).max)
        return jnp.where(jnp.isfinite(self.mantissa), norm, self.mantissa)


def measure(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norms of all groups, over all devices; float64 if a leaf is, else float32.

    Args:
      leaves: floating or complex arrays (or `BCOO`), in the order of the grouping.
      grouping: from a scope.
      norm: the norm.

    Returns:
      One for each array of norms, as `Grouping.joined` has them.
    """

    def out_specs(grouping: Grouping) -> list[Any]:
        rows: list[Any] = [(spec, spec, PartitionSpec()) for spec in norm_specs(grouping)]
        return [Measured(*row) for row in rows]

    steps = functools.partial(_measured, norm=norm)
    return on_each_device(steps, out_specs, leaves, grouping)


def already_measured(given: Array, leaves: list[Any], norm: Norm) -> list[Measured]:
    """A norm of the whole tree that the caller has, float32 or float64 `[]`, as from `measure`."""
    unit = power_of_two_below(given)
    size = sum(math.prod(np.shape(leaf)) for leaf in leaves)
    slack = rounding_slack(size, norm.degree, coarsest(leaf.dtype for leaf in leaves))
    return [Measured(given / unit, unit, jnp.asarray(slack).astype(given.dtype))]


def _measured(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Measured]:
    """The norms of leaves in one piece, or of what each device holds of them."""
    part = _Part.of(leaves, grouping, norm)
    if not leaves:
        nothing = [jnp.zeros(group.shape, part.dtype) for group in grouping.groups]
        return [Measured(x, jnp.ones_like(x), x) for x in nothing]
    rows = zip(*_differentiable(part, leaves), part.slacks(leaves), strict=True)
    return [Measured(*row) for row in rows]


class _Part(NamedTuple):
    """What is known of leaves before they are measured, in one piece or on one device.

    Attributes:
      grouping: which entries share a norm.
      norm: the norm.
      dtype: that of the norms.
      axes: for each leaf the axes to reduce: of a sparse one, those of its stored entries.
      sizes: for each group, how many entries share its norm on all devices.
    """

    grouping: Grouping
    norm: Norm
    dtype: jnp.dtype
    axes: list[tuple[int, ...]]
    sizes: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], grouping: Grouping, norm: Norm) -> "_Part":
        """What is known of these."""
        split = split_over(leaves, grouping)
        rows = list(zip(leaves, grouping.axes, split, strict=True))
        counts = [
            math.prod(np.shape(leaf)[axis] for axis in axes) * devices.num_devices(over)
            for leaf, axes, over in rows
        ]
        sizes = [sum(counts[i] for i in group.members) for group in grouping.groups]
        stored = [tuple(range(x.data.ndim)) if is_sparse(x) else axes for x, axes, _ in rows]
        return cls(grouping, norm, norm_dtype(leaf.dtype for leaf in leaves), stored, sizes)

    def norms(self, leaves: list[Any]) -> tuple[list[Array], list[Array]]:
        """The mantissas and units of all norms."""
        if self.norm.is_max:
            return self.largest(leaves)
        if self.norm.degree in (1, 2):
            return self.by_totals(leaves)
        # Other powers leave the range too easily: their unit is that of the largest entry.
        rows = zip(*self.largest(leaves), strict=True)
        # No further, or the reciprocal would be subnormal.
        most = 1 / float(jnp.finfo(self.dtype).tiny)
        units = [jnp.minimum(power_of_two_below(x) * unit, most) for x, unit in rows]
        return self.divided(leaves, units), units

    def by_totals(self, leaves: list[Any]) -> tuple[list[Array], list[Array]]:
        """The same from totals at several scales."""
        lows = [least(n, self.dtype) if self.norm.degree == 2 else 0.0 for n in self.sizes]
        lows = [np.asarray(low, self.dtype) for low in self.grouping.numbers(lows)]
        found = [usable(*row) for row in zip(self.totals(leaves, lows), lows, strict=True)]
        return self.finished([total for total, _ in found]), [unit for _, unit in found]

    def totals(self, leaves: list[Any], lows: list[Any]) -> list[Totals]:
        """The totals of all norms at all scales, in the way that suits the platform."""
        in_one_piece = devices.in_one_piece(leaves)

        def default(leaves: list[Any]) -> list[Totals]:
            rows = zip(leaves, self.axes, strict=True)
            parts = [_totals_of(*row, self.norm, self.dtype, in_one_piece) for row in rows]
            return combined(parts, self.grouping, leaves)

        if not in_one_piece:
            return default(leaves)
        on_cpu = functools.partial(
            cpu.totals,
            grouping=self.grouping,
            axes=self.axes,
            lows=lows,
            norm=self.norm,
            dtype=self.dtype,
        )
        return lax.platform_dependent(leaves, cpu=on_cpu, default=default)

    def largest(self, leaves: list[Any]) -> tuple[list[Array], list[Array]]:
        """The largest moduli, and their units."""
        # The modulus of a finite complex entry may be infinite; half of it is not.
        unit = 2.0 if any(jnp.iscomplexobj(leaf) for leaf in leaves) else 1.0
        rows = zip(leaves, self.axes, strict=True)
        bits = [(largest_bits(leaf, 1 / unit, axes=axes, dtype=self.dtype),) for leaf, axes in rows]
        found = [
            lax.bitcast_convert_type(x, self.dtype)
            for (x,) in combined(bits, self.grouping, leaves, by_max=True)
        ]
        return found, [jnp.full_like(x, unit) for x in found]

    def divided(self, leaves: list[Any], by: list[Array]) -> list[Array]:
        """The norms of entries divided by powers of two, in steps that JAX can differentiate."""
        by_leaf = self.grouping.by_leaf([1 / x for x in by])
        is_max, parts = self.norm.is_max, list[Totals]()
        for leaf, axes, inverse in zip(leaves, self.axes, by_leaf, strict=True):
            x = times(entries(leaf, self.dtype), broadcast_over(inverse, axes))
            mapped = self.norm.map(x)
            total = jnp.max(mapped, axes, initial=0) if is_max else cpu.sum_over(mapped, axes)
            parts.append((total,))
        found = combined(parts, self.grouping, leaves, by_max=is_max)
        return self.finished([total for (total,) in found])

    def finished(self, totals: list[Array]) -> list[Array]:
        """The norms that totals make."""
        sizes = [size if known_size(size) is None else max(size, 1) for size in self.sizes]
        rows = zip(totals, self.grouping.numbers(sizes), strict=True)
        return [self.norm.finish(x, jnp.asarray(size, x.dtype)) for x, size in rows]

    def slacks(self, leaves: list[Any]) -> list[Array]:
        """How much the factors of all groups must be lowered against rounding."""
        rows = zip(self.sizes, self.grouping.groups, strict=True)
        found = [
            rounding_slack(n, self.norm.degree, coarsest(leaves[i].dtype for i in group.members))
            for n, group in rows
        ]
        return [jnp.asarray(x).astype(self.dtype) for x in self.grouping.numbers(found)]


def _differentiable(part: _Part, leaves: list[Any]) -> tuple[list[Array], list[Array]]:
    """Mantissas and units, whose derivatives are taken of entries divided by a power of two nearby.

    So no derivative of a power leaves the range where that of the norm does not, and however norms
    are found, they have derivatives in both modes. Of `norm = size * norm_of(leaves / size)` the
    size, a power of two next to the norm, is held constant.
    """

    @jax.custom_jvp
    def norms(leaves: list[Any]) -> tuple[list[Array], list[Array]]:
        return part.norms(leaves)

    @norms.defjvp
    def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> Any:
        mantissas, units = norms(*primals)
        # Their derivatives are zero, and would be multiplied by squares that leave the range.
        units = lax.stop_gradient(units)
        sizes = [_product_below(*pair) for pair in zip(mantissas, units, strict=True)]
        _, changes = jax.jvp(lambda leaves: part.divided(leaves, sizes), primals, tangents)
        rows = zip(changes, sizes, units, strict=True)
        changes = [change * size / unit for change, size, unit in rows]
        return (mantissas, units), (changes, [jnp.zeros_like(unit) for unit in units])

    return norms(leaves)


def _product_below(mantissa: Array, unit: Array) -> Array:
    """A power of two next to a product that may leave the range."""
    most = -jnp.finfo(unit.dtype).minexp
    exponent = exponent_below(mantissa) + exponent_below(unit)
    return power_of_two(jnp.clip(exponent, -most, most), unit.dtype)


def _totals_of(
    leaf: Any, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype, in_one_piece: bool
) -> Totals:
    """The totals of a leaf at all scales.

    One that is reduced whole, in one piece or in a manual region, takes one variadic reduction (XLA
    on CPU plain sums, where it comes here: not in one piece). What is reduced over some axes, or
    split as only the compiler knows, takes plain sums, on a GPU one in float64.
    """
    options = {"axes": axes, "norm": norm, "dtype": dtype}
    is_whole = len(axes) == np.ndim(leaf)
    if is_whole and in_one_piece:
        return _at_once(leaf, **options)
    ways: dict[str, Callable[..., Totals]] = {"cpu": _one_by_one, "default": _one_by_one}
    if is_whole and devices.manual_axes():
        ways["default"] = _at_once
    elif dtype == jnp.float32:
        ways |= {"cuda": gpu.from_float64, "rocm": gpu.from_float64}
    branches = {name: functools.partial(way, **options) for name, way in ways.items()}
    return lax.platform_dependent(leaf, **branches)


# Compiled by themselves, so that they are traced once for leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _at_once(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> Totals:
    """In one variadic reduction, which a GPU runs as one kernel."""
    powers = summands(leaf, norm, dtype)
    return tuple(lax.reduce(powers, (dtype.type(0),) * len(powers), _added, axes))


@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _one_by_one(leaf: Any, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype) -> Totals:
    """In plain sums: a TPU takes them in one pass too, and a partitioner adds their parts."""
    return tuple(cpu.sum_over(x, axes) for x in summands(leaf, norm, dtype))


def _added(sums: Totals, more: Totals) -> Totals:
    return tuple(x + y for x, y in zip(sums, more, strict=True))

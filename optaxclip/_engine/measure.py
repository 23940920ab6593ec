"""Measure: takes leaves, and gives the norms of their groups over the dtype's whole range.

  in   leaves `[...]`, floating or complex (or `BCOO`), and which of their entries share a norm
  out  a `Measured` with the norms of all groups

Powers of entries leave float32's range long before norms do. On accelerators, one pass over a leaf
sums its powers at several scales; the sum that neither overflowed nor underflowed is used. On a
CPU, a float32 norm takes one sum in float64, whose range covers all scales. Then the sums of a
group's leaves are added, and the sums of all devices, in one collective. There is no branch.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.leaf_sums as leaf_sums
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import (
    broadcast_over,
    entries,
    fixed_size,
    invertible,
    leading_bit,
    next_above,
    norm_dtype,
    power_of_two_below,
    reciprocal_of_power,
    select,
    slack_of_norm,
)
from optaxclip._base.trees import data_of, with_data
from optaxclip._border.entries import any_entry, in_one_array, select_exactly, times
from optaxclip._engine.plan import Plan
from optaxclip.norms import Norm

SUMMED = (0, 1, 2)
"""The powers that are summed at a few scales, of which one is in range for any entries."""


class Measured(NamedTuple):
    """Norms as products `fraction * size`, because a norm may leave the range of its dtype.

    Attributes:
      fraction: from 1 to below 2, except at the ends of the range and for 0.
      divisor: the fraction, or an upper bound of the true one; 1 for a norm of 0.
      size: a power of two with a reciprocal that is a normal number.
    """

    fraction: Array
    divisor: Array
    size: Array

    @classmethod
    def of(cls, value: Array, unit: Array | float) -> "Measured":
        """The norms `value * unit`, where `unit` is a power of two."""
        is_zero = value == 0
        size = select(is_zero, 1, invertible(leading_bit(value) * unit))
        fraction = value * (unit / size)
        return cls(fraction, select(is_zero, 1, fraction), size)

    @classmethod
    def of_float64(cls, norm: Array, *, from_above: bool) -> "Measured":
        """Float32 norms from norms in float64, with upper bounds if `from_above`."""
        tiny, is_zero = float(jnp.finfo(jnp.float32).tiny), norm == 0
        size = select(is_zero, 1, lax.clamp(tiny, leading_bit(norm), 1 / tiny)).astype(jnp.float32)
        # Not divided: `checkify` compares a divisor with 0, and JAX 0.10.2 then warns of float64.
        fraction = norm * reciprocal_of_power(size).astype(norm.dtype)
        # Norms that are 0 or not finite are never divisors, but derivatives are multiplied by their
        # reciprocals; so they are replaced by 1.
        exact = select(is_zero | ~lax.is_finite(fraction), 1, fraction)
        nearest = divisor = exact.astype(jnp.float32)
        if from_above:
            is_below = nearest.astype(norm.dtype) < exact
            divisor = select(is_below, next_above(nearest), nearest)
        return cls(fraction.astype(jnp.float32), divisor, size)

    @property
    def norm(self) -> Array:
        """The norms; a finite norm too large for the dtype becomes the dtype's largest number."""
        return self._times_size(self.fraction)

    @property
    def bound(self) -> Array:
        """Upper bounds of the true norms, if they were asked for."""
        return self._times_size(select(self.fraction == 0, 0, self.divisor))

    def _times_size(self, fraction: Array) -> Array:
        norm = lax.min(fraction * self.size, jnp.finfo(fraction.dtype).max)
        return select(jnp.isfinite(self.fraction), norm, self.fraction)

    def from_above(self, slack: Any) -> "Measured":
        """The same norms, with upper bounds that allow for a relative error of `slack`."""
        return self._replace(divisor=self.divisor * _constant(1 + slack, self.size.dtype))


def measure(leaves: list[Any], plan: Plan, norm: Norm, *, from_above: bool = False) -> Measured:
    """The norms of all groups, over all devices: float64 if a leaf is 64-bit, else float32.

    With `from_above` they also have upper bounds, which hold despite rounding.
    """
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    found = Measured.of(plan.zeros(dtype), 1.0)
    if leaves:
        with_axes = zip(leaves, plan.grouping.axes, strict=True)
        in_arrays = [in_one_array(leaf, axes, dtype) for leaf, axes in with_axes]
        arrays, axes = zip(*in_arrays, strict=True)
        counts = _num_entries(leaves, plan)
        measurement = _Measurement(plan, norm, dtype, counts, axes, from_above)
        # Measured on each device, the norms take one collective; the compiler might take several.
        norms = plan.placement.on_each_device(measurement.differentiable())
        found = norms(list(arrays))
    chex.assert_shape(list(found), plan.shape)
    chex.assert_type(list(found), dtype)
    if plan.grouping.layout == "scalar" or all(plan.grouping.present):
        return found
    # A group without leaves has the norm NaN, from which no rule learns.
    return found._replace(fraction=select(plan.have_leaves(), found.fraction, jnp.nan))


def slack(leaves: list[Any], plan: Plan, norm: Norm) -> Any:
    """A bound on the relative error of the norms: a number, or one for each group."""
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    return _Measurement(plan, norm, dtype, _num_entries(leaves, plan)).slack(leaves)


def _num_entries(leaves: list[Any], plan: Plan) -> list[Any]:
    """For each group, how many entries share its norm on all devices; symbolic in `jax.export`."""
    counts = [
        math.prod([np.shape(leaf)[axis] for axis in axes]) * plan.placement.num_parts(i)
        for i, (leaf, axes) in enumerate(zip(leaves, plan.grouping.axes, strict=True))
    ]
    return [sum([counts[i] for i in group.members]) for group in plan.grouping.groups]


def with_entries(leaves: list[Any], plan: Plan) -> Any:
    """1.0 for groups that have entries, 0.0 for the others: a number, or one for each group."""
    counts = _num_entries(leaves, plan)
    return plan.repeated([0.0 if fixed_size(n) == 0 else 1.0 for n in counts])


def mask(leaves: list[Any], plan: Plan) -> tuple[list[Any], Array]:
    """For the policy "mask": leaves with 0 for bad entries, and which groups had bad entries."""

    def bad_groups(leaves: list[Any]) -> Array:
        with_axes = zip(leaves, plan.grouping.axes, strict=True)
        bad = [
            (any_entry(leaf, ~jnp.isfinite(data_of(leaf)), axes).astype(jnp.int32),)
            for leaf, axes in with_axes
        ]
        return plan.totals(bad, by_max=True)[0] > 0

    def only_finite(leaf: Any) -> Any:
        x = data_of(leaf)
        return with_data(leaf, select_exactly(jnp.isfinite(x), x, jnp.zeros_like(x)))

    return list(map(only_finite, leaves)), plan.placement.on_each_device(bad_groups)(leaves)


class _Measurement(NamedTuple):
    """How arrays are measured that lie in one piece, or of which this device holds a part.

    Attributes:
      dtype: the dtype of the norms.
      counts: for each group, how many entries share its norm on all devices.
      axes: for each array, the axes over which its entries share a norm.
      from_above: whether upper bounds are needed.
    """

    plan: Plan
    norm: Norm
    dtype: jnp.dtype
    counts: list[Any]
    axes: tuple[tuple[int, ...], ...] = ()
    from_above: bool = False

    def differentiable(self) -> Callable[[list[Array]], Measured]:
        """Norms with a rule for derivatives, which differentiates plain sums or maxima.

        JAX differentiates plain sums in both modes on all platforms. They are sums of entries
        divided by a constant power of two near the norm, so that derivatives of powers stay in
        range if the norm's derivative does.
        """
        norms = custom_jvp()(self.measured)

        @norms.defjvp
        def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> Any:
            found = norms(*primals)
            size = lax.stop_gradient(found.size)
            # Entries that are not finite have no derivative.
            finite = [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in primals[0]]
            _, change = jax.jvp(lambda leaves: self.divided(leaves, size), (finite,), tangents)
            zeros = jnp.zeros_like(change)
            return found, Measured(change, change, zeros)

        return norms

    def measured(self, leaves: list[Array]) -> Measured:
        """The norms, computed in the way that is best on the platform."""
        if self.dtype != jnp.float32 or self.norm.is_max or self.norm.degree not in SUMMED:
            return self.in_own_dtype(leaves)
        in_one_piece = self.plan.placement.in_one_piece
        whole = leaf_sums.are_whole(leaves, self.axes, in_one_piece=in_one_piece)
        way = leaf_sums.either(in_float64=self.in_float64, at_scales=self.in_own_dtype, whole=whole)
        return way(leaves)

    def in_own_dtype(self, leaves: list[Array]) -> Measured:
        """The norms, computed in their own dtype."""
        if self.norm.is_max:
            found = self.largest(leaves)
        elif self.norm.degree in SUMMED:
            found = self.at_scales(leaves)
        else:
            # Other powers overflow easily, so entries are first divided by the size of the largest.
            largest = self.largest(leaves)
            size = invertible(power_of_two_below(largest.fraction) * largest.size)
            found = Measured.of(self.divided(leaves, size), size)
        return found.from_above(self.slack(leaves)) if self.from_above else found

    def slack(self, leaves: list[Array]) -> Any:
        """A bound on the relative error of the norms: a number, or one for each group."""
        eps, degree = float(jnp.finfo(self.dtype).eps), self.norm.degree
        if not self.norm.is_max:
            return self.plan.repeated([slack_of_norm(n, degree, eps) for n in self.counts])
        # The modulus of a complex number is rounded; the modulus of a real number is exact.
        is_rounded = any(map(jnp.iscomplexobj, leaves))
        return self.plan.repeated([2 * eps if is_rounded else 0.0] * len(self.counts))

    def at_scales(self, leaves: list[Array]) -> Measured:
        """The norms from sums at several scales."""
        in_one_piece = self.plan.placement.in_one_piece
        found = [
            leaf_sums.at_scales(
                x, axes=axes, norm=self.norm, dtype=self.dtype, in_one_piece=in_one_piece
            )
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        totals = self.plan.totals(found)
        if self.plan.grouping.layout != "scalar":
            # The barrier makes XLA on GPUs (JAX 0.10.2) store the sums; without it, XLA
            # concatenates them again for each use.
            totals = lax.optimization_barrier(totals)
        total, unit = in_range(totals)
        return Measured.of(self.finished(total), unit)

    def in_float64(self, leaves: list[Array], adder: ModuleType) -> Measured:
        """The norms from one sum in float64."""
        grouping = self.plan.grouping
        sums = adder.sums_in_float64(
            leaves,
            axes=self.axes,
            groups=grouping.by_leaf(range(len(grouping.groups))),
            norm=self.norm,
            in_one_piece=self.plan.placement.in_one_piece,
        )
        (total,) = self.plan.totals([(x,) for x in sums], add=adder.added_up)
        return Measured.of_float64(self.finished(total), from_above=self.from_above)

    def largest(self, leaves: list[Array]) -> Measured:
        """The largest moduli."""
        # Half of it: the modulus of a finite complex entry may be infinite, half of that is finite.
        unit = 2.0 if any(jnp.iscomplexobj(leaf) for leaf in leaves) else 1.0
        bits = [
            (leaf_sums.largest_bits(x, by=1 / unit, axes=axes, dtype=self.dtype),)
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        (found,) = self.plan.totals(bits, by_max=True)
        return Measured.of(lax.bitcast_convert_type(found, self.dtype), unit)

    def divided(self, leaves: list[Array], by: Array) -> Array:
        """The norms of entries divided by powers of two, in steps that JAX can differentiate."""
        factored = zip(leaves, self.plan.by_leaf(1 / by, leaves), self.axes, strict=True)
        parts = [
            (_total_of_products(x, inverse, axes=axes, norm=self.norm, dtype=self.dtype),)
            for x, inverse, axes in factored
        ]
        (total,) = self.plan.totals(parts, by_max=self.norm.is_max)
        return self.finished(total)

    def finished(self, total: Array) -> Array:
        """The norms, from the sums of powers of all groups, or from the largest moduli."""
        sizes = [n if fixed_size(n) is None else float(max(n, 1)) for n in self.counts]
        return self.norm.finish(total, _constant(self.plan.repeated(sizes), total.dtype))


def in_range(found: leaf_sums.AtScales) -> tuple[Array, Array]:
    """For each group, the sum at a scale at which it neither overflowed nor lost small summands.

    With it come the powers of two by which to multiply the norms that are computed from the sums.
    """
    plain, *others = found
    if not others:
        return plain, jnp.ones_like(plain)
    down, *up = others
    info, scale = jnp.finfo(plain.dtype), leaf_sums.distance(plain.dtype)
    is_high = ~(plain <= info.max)
    total = select(is_high, down, plain)
    unit = select(is_high, scale, jnp.ones_like(plain))
    if up:
        is_low = (plain < leaf_sums.lowest(plain.dtype)) & (up[0] > 0)
        total, unit = select(is_low, up[0], total), select(is_low, 1 / scale, unit)
    return total, unit


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _total_of_products(
    leaf: Array, by: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> Array:
    """The sum of powers, or the largest modulus, of a leaf's entries times `by`."""
    mapped = norm.map(times(entries(leaf, dtype), broadcast_over(by, axes)))
    return jnp.max(mapped, axes, initial=0) if norm.is_max else lax.reduce_sum(mapped, axes)


def _constant(number: Any, dtype: jnp.dtype) -> Any:
    """A number, or one for each group, in this dtype; a symbolic number becomes a JAX array."""
    if isinstance(number, (int, float, np.ndarray)):
        return np.asarray(number, dtype)
    return jnp.asarray(number, dtype)

"""Measure: takes leaves, and gives the norms of their groups over the dtype's whole range.

  in   leaves `[...]`, floating or complex (or `BCOO`), and which of their entries share a norm
  out  a `ScaledNorms` with the norms of all groups

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

import optaxclip._backend.reductions as reductions
from optaxclip._backend.elementwise import (
    any_over_axes,
    dense_values,
    scale_by_real,
    select_keep_subnormals,
)
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import (
    cast_elements,
    clamp_pow2,
    expand_dims_at,
    floor_pow2,
    floor_pow2_unclamped,
    nextafter_up,
    norm_dtype,
    norm_relative_error,
    reciprocal_pow2,
    select,
    static_size_or_none,
)
from optaxclip._base.trees import get_stored_values, replace_values
from optaxclip._engine.plan import Plan
from optaxclip.norms import Norm

PRESCALED_DEGREES = (0, 1, 2)
"""The powers that are summed at a few scales, of which one is in range for any entries."""


class ScaledNorms(NamedTuple):
    """Norms as products `fraction * size`, because a norm may leave the range of its dtype.

    Attributes:
      fraction: from 1 to below 2, except at the ends of the range and for 0.
      divisor: the fraction, or an upper bound of the true one; 1 for a norm of 0.
      size: a power of two with a reciprocal that is a normal number.
    """

    mantissa: Array
    divisor: Array
    scale: Array

    @classmethod
    def from_value(cls, value: Array, unit: Array | float) -> "ScaledNorms":
        """The norms `value * unit`, where `unit` is a power of two."""
        is_zero = value == 0
        size = select(is_zero, 1, clamp_pow2(floor_pow2_unclamped(value) * unit))
        fraction = value * (unit / size)
        return cls(fraction, select(is_zero, 1, fraction), size)

    @classmethod
    def from_float64(cls, norm: Array, *, from_above: bool) -> "ScaledNorms":
        """Float32 norms from norms in float64, with upper bounds if `add_error_bound`."""
        tiny, is_zero = float(jnp.finfo(jnp.float32).tiny), norm == 0
        size = select(is_zero, 1, lax.clamp(tiny, floor_pow2_unclamped(norm), 1 / tiny)).astype(
            jnp.float32
        )
        # Not divided: `checkify` compares a divisor with 0, and JAX 0.10.2 then warns of float64.
        fraction = norm * reciprocal_pow2(size).astype(norm.dtype)
        # Norms that are 0 or not finite are never divisors, but derivatives are multiplied by their
        # reciprocals; so they are replaced by 1.
        exact = select(is_zero | ~lax.is_finite(fraction), 1, fraction)
        nearest = divisor = exact.astype(jnp.float32)
        if from_above:
            is_below = nearest.astype(norm.dtype) < exact
            divisor = select(is_below, nextafter_up(nearest), nearest)
        return cls(fraction.astype(jnp.float32), divisor, size)

    @property
    def norm(self) -> Array:
        """The norms; a finite norm too large for the dtype becomes the dtype's largest number."""
        return self._times_size(self.mantissa)

    @property
    def upper_bound(self) -> Array:
        """Upper bounds of the true norms, if they were asked for."""
        return self._times_size(select(self.mantissa == 0, 0, self.divisor))

    def _times_size(self, fraction: Array) -> Array:
        norm = lax.min(fraction * self.scale, jnp.finfo(fraction.dtype).max)
        return select(jnp.isfinite(self.mantissa), norm, self.mantissa)

    def add_error_bound(self, slack: Any) -> "ScaledNorms":
        """The same norms, with upper bounds that allow for a relative error of `slack`."""
        return self._replace(divisor=self.divisor * _as_constant(1 + slack, self.scale.dtype))


def measure(leaves: list[Any], plan: Plan, norm: Norm, *, from_above: bool = False) -> ScaledNorms:
    """The norms of all groups, over all devices: float64 if a leaf is 64-bit, else float32.

    With `add_error_bound` they also have upper bounds, which hold despite rounding.
    """
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    found = ScaledNorms.from_value(plan.zeros(dtype), 1.0)
    if leaves:
        with_axes = zip(leaves, plan.grouping.axes, strict=True)
        in_arrays = [dense_values(leaf, axes, dtype) for leaf, axes in with_axes]
        arrays, axes = zip(*in_arrays, strict=True)
        counts = _num_entries(leaves, plan)
        measurement = _NormFn(plan, norm, dtype, counts, axes, from_above)
        # Measured on each device, the norms take one collective; the compiler might take several.
        norms = plan.placement.map_shards(measurement.differentiable())
        found = norms(list(arrays))
    chex.assert_shape(list(found), plan.shape)
    chex.assert_type(list(found), dtype)
    if plan.grouping.layout == "scalar" or all(plan.grouping.has_leaves):
        return found
    # A group without leaves has the norm NaN, from which no rule learns.
    return found._replace(mantissa=select(plan.has_leaves(), found.mantissa, jnp.nan))


def relative_error(leaves: list[Any], plan: Plan, norm: Norm) -> Any:
    """A bound on the relative error of the norms: a number, or one for each group."""
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    return _NormFn(plan, norm, dtype, _num_entries(leaves, plan)).slack(leaves)


def _num_entries(leaves: list[Any], plan: Plan) -> list[Any]:
    """For each group, how many entries share its norm on all devices; symbolic in `jax.export`."""
    counts = [
        math.prod([np.shape(leaf)[axis] for axis in axes]) * plan.placement.num_shards(i)
        for i, (leaf, axes) in enumerate(zip(leaves, plan.grouping.axes, strict=True))
    ]
    return [sum([counts[i] for i in group.leaf_indices]) for group in plan.grouping.groups]


def with_entries(leaves: list[Any], plan: Plan) -> Any:
    """1.0 for groups that have entries, 0.0 for the others: a number, or one for each group."""
    counts = _num_entries(leaves, plan)
    return plan.broadcast_constants([0.0 if static_size_or_none(n) == 0 else 1.0 for n in counts])


def mask_nonfinite(leaves: list[Any], plan: Plan) -> tuple[list[Any], Array]:
    """For the policy "mask": leaves with 0 for bad entries, and which groups had bad entries."""

    def bad_groups(leaves: list[Any]) -> Array:
        with_axes = zip(leaves, plan.grouping.axes, strict=True)
        bad = [
            (any_over_axes(leaf, ~jnp.isfinite(get_stored_values(leaf)), axes).astype(jnp.int32),)
            for leaf, axes in with_axes
        ]
        return plan.reduce_groups(bad, use_max=True)[0] > 0

    def only_finite(leaf: Any) -> Any:
        x = get_stored_values(leaf)
        return replace_values(leaf, select_keep_subnormals(jnp.isfinite(x), x, jnp.zeros_like(x)))

    return list(map(only_finite, leaves)), plan.placement.map_shards(bad_groups)(leaves)


class _NormFn(NamedTuple):
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

    def differentiable(self) -> Callable[[list[Array]], ScaledNorms]:
        """Norms with a rule for derivatives, which differentiates plain sums or maxima.

        JAX differentiates plain sums in both modes on all platforms. They are sums of entries
        divided by a constant power of two near the norm, so that derivatives of powers stay in
        range if the norm's derivative does.
        """
        norms = custom_jvp()(self.compute)

        @norms.defjvp
        def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> Any:
            found = norms(*primals)
            size = lax.stop_gradient(found.scale)
            # Entries that are not finite have no derivative.
            finite = [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in primals[0]]
            _, change = jax.jvp(
                lambda leaves: self.compute_prescaled(leaves, size), (finite,), tangents
            )
            zeros = jnp.zeros_like(change)
            return found, ScaledNorms(change, change, zeros)

        return norms

    def compute(self, leaves: list[Array]) -> ScaledNorms:
        """The norms, computed in the way that is best on the platform."""
        if (
            self.dtype != jnp.float32
            or self.norm.is_max
            or self.norm.degree not in PRESCALED_DEGREES
        ):
            return self.compute_in_own_dtype(leaves)
        in_one_piece = self.plan.placement.is_unsharded
        whole = reductions.is_full_local_reduction(leaves, self.axes, in_one_piece=in_one_piece)
        way = reductions.dispatch_reduction(
            in_float64=self.compute_in_float64, at_scales=self.compute_in_own_dtype, whole=whole
        )
        return way(leaves)

    def compute_in_own_dtype(self, leaves: list[Array]) -> ScaledNorms:
        """The norms, computed in their own dtype."""
        if self.norm.is_max:
            found = self.compute_max(leaves)
        elif self.norm.degree in PRESCALED_DEGREES:
            found = self.compute_from_scaled_sums(leaves)
        else:
            # Other powers overflow easily, so entries are first divided by the size of the largest.
            largest = self.compute_max(leaves)
            size = clamp_pow2(floor_pow2(largest.mantissa) * largest.scale)
            found = ScaledNorms.from_value(self.compute_prescaled(leaves, size), size)
        return found.add_error_bound(self.slack(leaves)) if self.from_above else found

    def slack(self, leaves: list[Array]) -> Any:
        """A bound on the relative error of the norms: a number, or one for each group."""
        eps, degree = float(jnp.finfo(self.dtype).eps), self.norm.degree
        if not self.norm.is_max:
            return self.plan.broadcast_constants(
                [norm_relative_error(n, degree, eps) for n in self.counts]
            )
        # The modulus of a complex number is rounded; the modulus of a real number is exact.
        is_rounded = any(map(jnp.iscomplexobj, leaves))
        return self.plan.broadcast_constants([2 * eps if is_rounded else 0.0] * len(self.counts))

    def compute_from_scaled_sums(self, leaves: list[Array]) -> ScaledNorms:
        """The norms from sums at several scales."""
        in_one_piece = self.plan.placement.is_unsharded
        found = [
            reductions.compute_scaled_sums(
                x, axes=axes, norm=self.norm, dtype=self.dtype, in_one_piece=in_one_piece
            )
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        totals = self.plan.reduce_groups(found)
        if self.plan.grouping.layout != "scalar":
            # The barrier makes XLA on GPUs (JAX 0.10.2) store the sums; without it, XLA
            # concatenates them again for each use.
            totals = lax.optimization_barrier(totals)
        total, unit = select_in_range(totals)
        return ScaledNorms.from_value(self.finish(total), unit)

    def compute_in_float64(self, leaves: list[Array], platform: ModuleType) -> ScaledNorms:
        """The norms from one sum in float64."""
        grouping = self.plan.grouping
        sums = platform.sums_in_float64(
            leaves,
            axes=self.axes,
            groups=grouping.broadcast_to_leaves(range(len(grouping.groups))),
            norm=self.norm,
            in_one_piece=self.plan.placement.is_unsharded,
        )
        (total,) = self.plan.reduce_groups([(x,) for x in sums], add=platform.sum_leading_axis)
        return ScaledNorms.from_float64(self.finish(total), from_above=self.from_above)

    def compute_max(self, leaves: list[Array]) -> ScaledNorms:
        """The largest moduli."""
        # Half of it: the modulus of a finite complex entry may be infinite, half of that is finite.
        unit = 2.0 if any(jnp.iscomplexobj(leaf) for leaf in leaves) else 1.0
        bits = [
            (reductions.max_abs_bits(x, by=1 / unit, axes=axes, dtype=self.dtype),)
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        (found,) = self.plan.reduce_groups(bits, use_max=True)
        return ScaledNorms.from_value(lax.bitcast_convert_type(found, self.dtype), unit)

    def compute_prescaled(self, leaves: list[Array], by: Array) -> Array:
        """The norms of entries divided by powers of two, in steps that JAX can differentiate."""
        factored = zip(leaves, self.plan.slice_for_leaves(1 / by, leaves), self.axes, strict=True)
        parts = [
            (_total_of_products(x, inverse, axes=axes, norm=self.norm, dtype=self.dtype),)
            for x, inverse, axes in factored
        ]
        (total,) = self.plan.reduce_groups(parts, use_max=self.norm.is_max)
        return self.finish(total)

    def finish(self, total: Array) -> Array:
        """The norms, from the sums of powers of all groups, or from the largest moduli."""
        sizes = [n if static_size_or_none(n) is None else float(max(n, 1)) for n in self.counts]
        return self.norm.finalize(
            total, _as_constant(self.plan.broadcast_constants(sizes), total.dtype)
        )


def select_in_range(found: reductions.ScaledSums) -> tuple[Array, Array]:
    """For each group, the sum at a scale at which it neither overflowed nor lost small summands.

    With it come the powers of two by which to multiply the norms that are computed from the sums.
    """
    plain, *others = found
    if not others:
        return plain, jnp.ones_like(plain)
    down, *up = others
    info, scale = jnp.finfo(plain.dtype), reductions.scale_step(plain.dtype)
    is_high = ~(plain <= info.max)
    total = select(is_high, down, plain)
    unit = select(is_high, scale, jnp.ones_like(plain))
    if up:
        is_low = (plain < reductions.underflow_bound(plain.dtype)) & (up[0] > 0)
        total, unit = select(is_low, up[0], total), select(is_low, 1 / scale, unit)
    return total, unit


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _total_of_products(
    leaf: Array, by: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> Array:
    """The sum of powers, or the largest modulus, of a leaf's entries times `by`."""
    mapped = norm.map(scale_by_real(cast_elements(leaf, dtype), expand_dims_at(by, axes)))
    return jnp.max(mapped, axes, initial=0) if norm.is_max else lax.reduce_sum(mapped, axes)


def _as_constant(number: Any, dtype: jnp.dtype) -> Any:
    """A number, or one for each group, in this dtype; a symbolic number becomes a JAX array."""
    if isinstance(number, (int, float, np.ndarray)):
        return np.asarray(number, dtype)
    return jnp.asarray(number, dtype)

"""Measurements: computes norms and histograms of groups over all leaves and devices.

  leaves [...] (floating-point, complex, or `BCOO`), Plan  ->  ScaledNorms f32[groups]
                                                          ->  counts u32[names, 2, counts]

Powers of elements leave the range of float32 long before norms do. Therefore, accelerators sum the
powers of a leaf at several scales in a single pass, and use the sum that neither overflowed nor
underflowed. On CPUs, a float32 norm uses a single sum in float64, which covers the range of all
scales. The sums are then added over the leaves of the groups, and over all devices in a single
collective. There is no branch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.exponent_counts as exponent_counts
import optaxclip._backend.reductions as reductions
from optaxclip._backend.elementwise import (
    dense_values,
    scale_by_real,
    select_keep_subnormals,
    valid_mask,
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
from optaxclip._base.trees import get_stored_values, is_sparse, replace_values
from optaxclip._engine.plan import Plan
from optaxclip.norms import Norm

PRESCALED_DEGREES = (0, 1, 2)
"""The powers that are summed at a few scales, one of which is in range for all elements."""


class ScaledNorms(NamedTuple):
    """Norms as products `mantissa * scale`, because norms may leave the range of their dtype.

    Attributes:
      mantissa: From 1 to below 2, except for 0 and at the ends of the range.
      divisor: The mantissa, or an upper bound of the exact mantissa. It is 1 for a norm of 0.
      scale: A power of two whose reciprocal is a normal number.
    """

    mantissa: Array
    divisor: Array
    scale: Array

    @classmethod
    def from_value(cls, value: Array, unit: Array | float) -> "ScaledNorms":
        """Returns the norms `value * unit`, where `unit` is a power of two."""
        is_zero = value == 0
        scale = select(is_zero, 1, clamp_pow2(floor_pow2_unclamped(value) * unit))
        mantissa = value * (unit / scale)
        return cls(mantissa, select(is_zero, 1, mantissa), scale)

    @classmethod
    def from_float64(cls, norm: Array, *, from_above: bool) -> "ScaledNorms":
        """Converts norms from float64 to float32, with upper bounds if `from_above`."""
        tiny, is_zero = float(jnp.finfo(jnp.float32).tiny), norm == 0
        scale = select(is_zero, 1, lax.clamp(tiny, floor_pow2_unclamped(norm), 1 / tiny))
        scale = scale.astype(jnp.float32)
        # `checkify` warns about a division in float64 (as of JAX 0.10.2), so this is a product.
        mantissa = norm * reciprocal_pow2(scale).astype(norm.dtype)
        # Norms that are 0 or non-finite become 1, because derivatives use the reciprocal.
        exact = select(is_zero | ~lax.is_finite(mantissa), 1, mantissa)
        nearest = divisor = exact.astype(jnp.float32)
        if from_above:
            is_below = nearest.astype(norm.dtype) < exact
            divisor = select(is_below, nextafter_up(nearest), nearest)
        return cls(mantissa.astype(jnp.float32), divisor, scale)

    @property
    def norm(self) -> Array:
        """The norms. Finite norms are clamped to the finite numbers of the dtype."""
        return self._times_scale(self.mantissa)

    @property
    def upper_bound(self) -> Array:
        """Upper bounds of the exact norms, if they were requested by `from_above`."""
        return self._times_scale(select(self.mantissa == 0, 0, self.divisor))

    def _times_scale(self, mantissa: Array) -> Array:
        norm = lax.min(mantissa * self.scale, jnp.finfo(mantissa.dtype).max)
        return select(jnp.isfinite(self.mantissa), norm, self.mantissa)

    def add_error_bound(self, slack: Any) -> "ScaledNorms":
        """Increases the upper bounds by a relative error of `slack`."""
        return self._replace(divisor=self.divisor * _as_constant(1 + slack, self.scale.dtype))


def measure(leaves: list[Any], plan: Plan, norm: Norm, *, from_above: bool = False) -> ScaledNorms:
    """Computes the norms of all groups over all devices, with upper bounds if `from_above`."""
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    if leaves:
        with_axes = zip(leaves, plan.grouping.axes, strict=True)
        dense = [dense_values(leaf, axes, dtype) for leaf, axes in with_axes]
        arrays, axes = zip(*dense, strict=True)
        norm_fn = _NormFn(plan, norm, dtype, _group_sizes(leaves, plan), axes, from_above)
        # On shards, the norms need a single collective. Otherwise, the compiler may use several.
        found = plan.placement.map_shards(norm_fn.differentiable())(list(arrays))
    else:
        found = ScaledNorms.from_value(jnp.zeros(plan.shape, dtype), 1.0)
    chex.assert_shape(list(found), plan.shape)
    chex.assert_type(list(found), dtype)
    if plan.grouping.layout == "scalar" or all(plan.grouping.has_leaves):
        return found
    # Groups without leaves have the norm NaN, because threshold rules ignore it.
    return found._replace(mantissa=select(plan.has_leaves(), found.mantissa, jnp.nan))


def relative_error(leaves: list[Any], plan: Plan, norm: Norm) -> Any:
    """Bounds the relative error of the norms by a number, or by an array `[groups]`."""
    dtype = norm_dtype([leaf.dtype for leaf in leaves])
    return _NormFn(plan, norm, dtype, _group_sizes(leaves, plan)).slack(leaves)


def _group_sizes(leaves: list[Any], plan: Plan) -> list[Any]:
    """Returns the number of elements per norm over all devices, symbolic in `jax.export`."""
    counts = [
        math.prod([np.shape(leaf)[axis] for axis in axes]) * plan.placement.num_shards(i)
        for i, (leaf, axes) in enumerate(zip(leaves, plan.grouping.axes, strict=True))
    ]
    return [sum([counts[i] for i in group.leaf_indices]) for group in plan.grouping.groups]


def with_entries(leaves: list[Any], plan: Plan) -> Any:
    """Returns 1.0 for groups with elements and 0.0 for empty groups."""
    sizes = _group_sizes(leaves, plan)
    return plan.broadcast_constants([0.0 if static_size_or_none(n) == 0 else 1.0 for n in sizes])


def mask_nonfinite(leaves: list[Any], plan: Plan) -> tuple[list[Any], Array]:
    """Sets non-finite elements to 0, and returns the groups that contained them, `bool[groups]`."""

    def find_bad_groups(leaves: list[Any]) -> Array:
        parts = []
        for leaf, axes in zip(leaves, plan.grouping.axes, strict=True):
            bad = ~jnp.isfinite(get_stored_values(leaf))  # bool[...]
            # The padding of a `BCOO` is not part of the leaf.
            bad = jnp.any(bad & valid_mask(leaf)) if is_sparse(leaf) else jnp.any(bad, axes)
            parts.append((bad.astype(jnp.int32),))
        return plan.reduce_groups(parts, use_max=True)[0] > 0  # bool[groups]

    masked = []
    for leaf in leaves:
        x = get_stored_values(leaf)
        x = select_keep_subnormals(jnp.isfinite(x), x, jnp.zeros_like(x))
        masked.append(replace_values(leaf, x))
    return masked, plan.placement.map_shards(find_bad_groups)(leaves)


def compute_group_histograms(leaves: list[Any], plan: Plan, *, wide: bool) -> Array:
    """Counts the elements of all groups by absolute value, over all devices.

    The two words of a count are in the second axis of the result, u32[names, 2, counts]. In the
    layout "dict", which can have very many groups, leaves are counted instead of groups. If `wide`
    is True, the bin edges are those of float64.
    """
    grouping, groups = plan.grouping, plan.grouping.groups
    trailing = (2, exponent_counts.num_counts(wide=wide))
    shape = (len(grouping.names), *trailing)
    if not leaves:
        return jnp.zeros(shape, jnp.uint32)
    counts_leaves = grouping.layout == "dict"
    if counts_leaves:
        groups = tuple(dataclasses.replace(group, shape=()) for group in groups)
        # A leaf becomes a single group with all axes of the leaf.
        all_axes = tuple(tuple(range(np.ndim(leaf))) for leaf in leaves)
        grouping = dataclasses.replace(grouping, axes=all_axes, layout="vector")
    # The plan of norms becomes a plan of counts, which have two more axes.
    groups = tuple(dataclasses.replace(x, shape=(*x.shape, *trailing)) for x in groups)
    plan = Plan(
        dataclasses.replace(grouping, groups=groups),
        plan.placement.with_trailing_axes(len(trailing), whole_leaves=counts_leaves),
    )
    dtype, in_one_piece = norm_dtype([x.dtype for x in leaves]), plan.placement.is_unsharded

    def count_shard(leaves: list[Any]) -> Array:
        parts = []
        for leaf, axes in zip(leaves, grouping.axes, strict=True):
            x, over = dense_values(leaf, axes, dtype)
            size = math.prod([np.shape(leaf)[axis] for axis in axes])
            counts = exponent_counts.counts_by_size(  # u32[..., 2, counts]
                x, over, size, wide=wide, in_one_piece=in_one_piece
            )
            parts.append((counts,))
        (totals,) = plan.reduce_groups(parts, add=exponent_counts.propagate_carry)
        return lax.reshape(totals, shape)

    histograms = plan.placement.map_shards(count_shard)(leaves)
    chex.assert_shape(histograms, shape)
    return histograms


class _NormFn(NamedTuple):
    """A function from arrays, or from their shards on this device, to the norms of groups.

    Attributes:
      dtype: The dtype of the norms.
      sizes: The number of elements per norm over all devices, for all groups.
      axes: The axes over which norms are computed, for all arrays.
      from_above: If True, upper bounds are computed.
    """

    plan: Plan
    norm: Norm
    dtype: jnp.dtype
    sizes: list[Any]
    axes: tuple[tuple[int, ...], ...] = ()
    from_above: bool = False

    def differentiable(self) -> Callable[[list[Array]], ScaledNorms]:
        """Returns `compute` with a rule that differentiates plain sums or maxima."""
        # Elements are divided by powers of two near the norms, to keep derivatives in range.
        compute = custom_jvp()(self.compute)

        @compute.defjvp
        def _(primals: tuple[list[Any]], tangents: tuple[list[Any]]) -> Any:
            found = compute(*primals)
            scale = lax.stop_gradient(found.scale)
            # Non-finite elements have no derivative.
            finite = [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in primals[0]]
            _, change = jax.jvp(
                lambda leaves: self.compute_prescaled(leaves, scale), (finite,), tangents
            )
            # A scale is constant, so the tangent of the mantissa is the tangent of the norm.
            zeros = jnp.zeros_like(change)
            return found, ScaledNorms(change, change, zeros)

        return compute

    def compute(self, leaves: list[Array]) -> ScaledNorms:
        """Computes the norms with the fastest method of the platform."""
        # There is no dtype wider than float64, and maxima do not need scales.
        is_sum = not self.norm.is_max and self.norm.degree in PRESCALED_DEGREES
        if self.dtype != jnp.float32 or not is_sum:
            return self.compute_in_own_dtype(leaves)
        in_one_piece = self.plan.placement.is_unsharded
        whole = reductions.is_full_local_reduction(leaves, self.axes, in_one_piece=in_one_piece)
        method = reductions.dispatch_reduction(
            in_float64=self.compute_in_float64, at_scales=self.compute_in_own_dtype, whole=whole
        )
        return method(leaves)

    def compute_in_own_dtype(self, leaves: list[Array]) -> ScaledNorms:
        """Computes the norms in their own dtype."""
        if self.norm.is_max:
            found = self.compute_max(leaves)
        elif self.norm.degree in PRESCALED_DEGREES:
            found = self.compute_from_scaled_sums(leaves)
        else:
            # Other powers overflow easily, so elements are divided by the largest one first.
            largest = self.compute_max(leaves)
            scale = clamp_pow2(floor_pow2(largest.mantissa) * largest.scale)
            found = ScaledNorms.from_value(self.compute_prescaled(leaves, scale), scale)
        return found.add_error_bound(self.slack(leaves)) if self.from_above else found

    def compute_from_scaled_sums(self, leaves: list[Array]) -> ScaledNorms:
        """Computes the norms from sums at several scales."""
        in_one_piece = self.plan.placement.is_unsharded
        sums = [
            reductions.compute_scaled_sums(
                x, axes=axes, norm=self.norm, dtype=self.dtype, in_one_piece=in_one_piece
            )
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        totals = self.plan.reduce_groups(sums)  # For each scale f32[groups].
        if self.plan.grouping.layout != "scalar":
            # Without the barrier, XLA on GPUs concatenates the sums again for all of their uses (as
            # of JAX 0.10.2).
            totals = lax.optimization_barrier(totals)
        total, unit = select_in_range(totals)
        return ScaledNorms.from_value(self.finalize(total), unit)

    def compute_in_float64(self, leaves: list[Array], platform: Any) -> ScaledNorms:
        """Computes the norms from a single sum in float64, with the kernels of a platform."""
        grouping = self.plan.grouping
        sums = platform.sums_in_float64(
            leaves,
            axes=self.axes,
            groups=grouping.broadcast_to_leaves(range(len(grouping.groups))),
            norm=self.norm,
            in_one_piece=self.plan.placement.is_unsharded,
        )
        (total,) = self.plan.reduce_groups([(x,) for x in sums], add=platform.sum_leading_axis)
        return ScaledNorms.from_float64(self.finalize(total), from_above=self.from_above)

    def compute_max(self, leaves: list[Array]) -> ScaledNorms:
        """Computes the largest absolute values."""
        # The absolute value of a finite complex element may overflow, but half of it does not.
        unit = 2.0 if any(jnp.iscomplexobj(leaf) for leaf in leaves) else 1.0
        bits = [
            (reductions.max_abs_bits(x, by=1 / unit, axes=axes, dtype=self.dtype),)
            for x, axes in zip(leaves, self.axes, strict=True)
        ]
        (largest,) = self.plan.reduce_groups(bits, use_max=True)  # u32[groups]
        return ScaledNorms.from_value(lax.bitcast_convert_type(largest, self.dtype), unit)

    def compute_prescaled(self, leaves: list[Array], scale: Array) -> Array:
        """Computes the norms of elements divided by `scale`, differentiably."""
        inverses = self.plan.slice_for_leaves(1 / scale, leaves)  # For each leaf f32[...].
        parts = [
            (_reduce_scaled(x, inverse, axes=axes, norm=self.norm, dtype=self.dtype),)
            for x, inverse, axes in zip(leaves, inverses, self.axes, strict=True)
        ]
        (total,) = self.plan.reduce_groups(parts, use_max=self.norm.is_max)  # f32[groups]
        return self.finalize(total)

    def finalize(self, total: Array) -> Array:
        """Computes the norms from sums of powers, or from the largest absolute values."""
        sizes = [n if static_size_or_none(n) is None else float(max(n, 1)) for n in self.sizes]
        constants = _as_constant(self.plan.broadcast_constants(sizes), total.dtype)
        return self.norm.finalize(total, constants)

    def slack(self, leaves: list[Array]) -> Any:
        """Bounds the relative error of the norms by a number, or by an array `[groups]`."""
        eps, degree = float(jnp.finfo(self.dtype).eps), self.norm.degree
        if self.norm.is_max:
            # The absolute values of complex numbers are rounded, unlike those of real numbers.
            is_rounded = any(map(jnp.iscomplexobj, leaves))
            bounds = [2 * eps if is_rounded else 0.0] * len(self.sizes)
        else:
            bounds = [norm_relative_error(n, degree, eps) for n in self.sizes]
        return self.plan.broadcast_constants(bounds)


def select_in_range(totals: reductions.ScaledSums) -> tuple[Array, Array]:
    """Returns sums without overflow or lost summands, and powers of two to multiply norms by."""
    plain, *others = totals
    if not others:
        return plain, jnp.ones_like(plain)
    down, *up = others
    info, scale = jnp.finfo(plain.dtype), reductions.scale_step(plain.dtype)
    is_high = ~(plain <= info.max)  # also for NaN
    total = select(is_high, down, plain)
    unit = select(is_high, scale, jnp.ones_like(plain))
    if up:
        # Elements that all underflow have a positive sum only at the larger scale.
        is_low = (plain < reductions.underflow_bound(plain.dtype)) & (up[0] > 0)
        total, unit = select(is_low, up[0], total), select(is_low, 1 / scale, unit)
    return total, unit


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames=("axes", "norm", "dtype"))
def _reduce_scaled(
    leaf: Array, by: Array, *, axes: tuple[int, ...], norm: Norm, dtype: jnp.dtype
) -> Array:
    """Computes the sum of powers, or the largest absolute value, of elements times `by`."""
    mapped = norm.map(scale_by_real(cast_elements(leaf, dtype), expand_dims_at(by, axes)))
    return jnp.max(mapped, axes, initial=0) if norm.is_max else lax.reduce_sum(mapped, axes)


def _as_constant(number: Any, dtype: jnp.dtype) -> Any:
    """Converts a number or an array to a NumPy array, or to a JAX array if it is symbolic."""
    if isinstance(number, (int, float, np.ndarray)):
        return np.asarray(number, dtype)
    return jnp.asarray(number, dtype)

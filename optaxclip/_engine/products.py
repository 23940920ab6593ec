"""Inner products: computes the cosines of the groups of two trees over the whole dtype range.

  leaves [...] of two trees, Plan  ->  InnerProducts f32[groups]

Products are summed like squares, at several scales, over the leaves of groups and over devices.
This uses one pass over both trees and a single collective. The two norms bound a sum of products,
and therefore determine the scale at which it neither overflowed nor underflowed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.reductions as reductions
from optaxclip._backend.elementwise import pair_values, scale_by_real
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.numerics import (
    divide_no_nan,
    expand_dims_at,
    floor_pow2,
    norm_dtype,
    reciprocal_pow2,
    safe_sqrt,
    select,
    split_complex,
)
from optaxclip._engine.measure import ScaledNorms, select_in_range
from optaxclip._engine.plan import Plan
from optaxclip.norms import l2

_Pairs: TypeAlias = list[tuple[Array, ...]]
"""The elements of both leaves, for all pairs of leaves."""

_KnownNorms: TypeAlias = tuple[Array, Array | None]
"""The norms of both trees, or None if the norms of the second tree are not known."""


class InnerProducts(NamedTuple):
    """Inner products of groups, divided by both norms, because they can leave the dtype range.

    Attributes:
      other_norm: The L2 norms of the second tree.
      cosine: From -1 to 1. It is 0 if a norm is 0, and NaN if a norm is non-finite.
    """

    other_norm: Array
    cosine: Array


def products(
    leaves: list[Any], others: list[Any], plan: Plan, norm: Array, other_norm: Array | None = None
) -> InnerProducts:
    """Computes the inner products of the groups of two trees, or their real parts if complex.

    The L2 norms of `leaves` must be known, and those of `others` too if a leaf is a `BCOO`.
    """
    dtype = norm_dtype([leaf.dtype for leaf in (*leaves, *others)])
    if not leaves:
        zeros = jnp.zeros(plan.shape, dtype)
        return InnerProducts(zeros, zeros)
    rows = [
        pair_values(leaf, other, over, dtype)
        for leaf, other, over in zip(leaves, others, plan.grouping.axes, strict=True)
    ]
    pairs, axes = [(x, y) for x, y, _ in rows], tuple(over for *_, over in rows)
    known = norm.astype(dtype), None if other_norm is None else other_norm.astype(dtype)
    found = _differentiable(plan, axes)(pairs, known)
    chex.assert_shape(list(found), plan.shape)
    return found


def _differentiable(
    plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> Callable[[_Pairs, _KnownNorms], InnerProducts]:
    """Returns `_compute_scaled` with a rule that differentiates plain sums."""

    # Elements are divided by powers of two near the norms, to keep derivatives in range.
    def prescale(
        pairs: _Pairs, known: _KnownNorms, scales: list[Array]
    ) -> tuple[_Pairs, _KnownNorms]:
        inverses = [reciprocal_pow2(scale) for scale in scales]  # 2 x f32[groups]
        by_leaf = [plan.slice_for_leaves(by, [x for x, _ in pairs]) for by in inverses]
        return [
            tuple(
                scale_by_real(x, expand_dims_at(by, over)) for x, by in zip(pair, bys, strict=True)
            )
            for pair, over, *bys in zip(pairs, axes, *by_leaf, strict=True)
        ], (known[0] * inverses[0], None if known[1] is None else known[1] * inverses[1])

    @custom_jvp()
    def compute(pairs: _Pairs, known: _KnownNorms) -> InnerProducts:
        return _compute_scaled(pairs, known, plan, axes)

    @compute.defjvp
    def _(
        primals: tuple[_Pairs, _KnownNorms], tangents: tuple[Any, Any]
    ) -> tuple[InnerProducts, InnerProducts]:
        (pairs, known), (pair_tangents, known_tangents) = primals, tangents
        result = compute(pairs, known)
        norms = known[0], result.other_norm
        scales = [lax.stop_gradient(floor_pow2(norm)) for norm in norms]
        _, change = jax.jvp(
            functools.partial(_compute_unscaled, plan=plan, axes=axes),
            prescale(pairs, known, scales),
            prescale(pair_tangents, known_tangents, scales),
        )
        return result, InnerProducts(change.other_norm * scales[1], change.cosine)

    return compute


def _compute_scaled(
    pairs: _Pairs, known: _KnownNorms, plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> InnerProducts:
    """Computes the products from sums at several scales."""
    norm, other_norm = known

    def sum_shards(pairs: _Pairs) -> reductions.ScaledSums:
        in_one_piece = plan.placement.is_unsharded
        sums = [
            reductions.sum_products(x, y, axes=over, in_one_piece=in_one_piece)
            for (x, y), over in zip(pairs, axes, strict=True)
        ]
        return plan.reduce_groups(sums)

    sums = plan.placement.map_shards(sum_shards)(pairs)
    inner, squares = sums[::2], sums[1::2]  # For each scale f32[groups].
    if other_norm is None:
        total, unit = select_in_range(squares)
        other_norm = ScaledNorms.from_value(safe_sqrt(total), unit).norm
    return InnerProducts(other_norm, _cosine(inner, norm, other_norm))


def _cosine(inner: reductions.ScaledSums, norm: Array, other_norm: Array) -> Array:
    """Computes the cosine from the sum at a scale at which all products are in range."""
    plain, down, up = inner  # f32[groups] at the scales 1, 1 / step and step
    step, highest = reductions.scale_step(plain.dtype), reductions.overflow_bound(plain.dtype)
    bound = safe_sqrt(norm) * safe_sqrt(other_norm)  # f32[groups], the root of the product
    is_finite = jnp.isfinite(bound)
    is_high = bound > highest**0.5
    # A norm that is too large to be multiplied implies that the other norm is very small.
    is_scalable = lax.max(norm, other_norm) < float(jnp.finfo(plain.dtype).max) / step
    is_low = (bound < reductions.underflow_bound(plain.dtype) ** 0.5) & is_scalable
    total = select(is_high, down, select(is_low, up, plain))  # f32[groups]
    bound = bound * select(is_high, 1 / step, select(is_low, step, jnp.ones_like(plain)))
    is_usable = is_finite & (bound > 0)
    bound = select(is_usable, bound, 1)
    # Two divisions, because the square of the bound may overflow.
    cosine = jnp.clip(total / bound / bound, -1, 1)
    return select(is_usable, cosine, select(is_finite, jnp.zeros_like(cosine), jnp.nan))


def _compute_unscaled(
    pairs: _Pairs, known: _KnownNorms, *, plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> InnerProducts:
    """Computes the products of trees with norms near 1, differentiably."""

    def sum_shards(pairs: _Pairs) -> reductions.ScaledSums:
        with_axes = zip(pairs, axes, strict=True)
        return plan.reduce_groups([_plain_sums(x, y, axes=over) for (x, y), over in with_axes])

    norm, other_norm = known
    total, square = plan.placement.map_shards(sum_shards)(pairs)  # f32[groups]
    other_norm = safe_sqrt(square) if other_norm is None else other_norm
    return InnerProducts(other_norm, divide_no_nan(total, norm * other_norm, 0.0))


# Jitted so that leaves with the same shape and dtype share one trace.
@functools.partial(jax.jit, static_argnames="axes")
def _plain_sums(x: Array, y: Array, *, axes: tuple[int, ...]) -> reductions.ScaledSums:
    parts = zip(split_complex(x), split_complex(y), strict=False)
    summands = (sum(u * v for u, v in parts), l2.map(y))  # [...]
    return tuple(jnp.sum(summand, axes) for summand in summands)

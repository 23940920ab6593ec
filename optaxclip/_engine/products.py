"""Inner products of two trees, group by group, over the dtype's whole range.

  in   the leaves `[...]` of both trees, and which of their entries share a norm
  out  `InnerProducts`: the norm of the second tree and the cosine of each group

Products are summed as squares are: at several scales, over a group's leaves and over devices, in
one read of both trees and one collective. The two norms bound a sum of products, so they tell at
which scale it neither overflowed nor underflowed. There is no branch.
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
"""For each leaf, its entries and those of the other tree's leaf."""

_KnownNorms: TypeAlias = tuple[Array, Array | None]
"""The norms of both trees; None for that of the second tree if it is to be measured."""


class InnerProducts(NamedTuple):
    """The inner products of all groups, divided by both norms, because they may leave the range.

    Attributes:
      of_others: the L2 norms of `others`.
      cosine: from -1 to 1; 0 if a norm is 0, NaN if a norm is not finite.
    """

    other_norm: Array
    cosine: Array


def products(
    leaves: list[Any],
    others: list[Any],
    plan: Plan,
    norm: Array,
    of_others: Array | None = None,
) -> InnerProducts:
    """The inner products of each group's entries with the others; the real part, if complex.

    The L2 norms of `leaves` are known. Those of `others` must be known too if a leaf is a `BCOO`,
    because the other leaf is read only where the `BCOO` has entries.
    """
    dtype = norm_dtype([leaf.dtype for leaf in (*leaves, *others)])
    if not leaves:
        zeros = plan.zeros(dtype)
        return InnerProducts(zeros, zeros)
    found = [
        pair_values(leaf, other, over, dtype)
        for leaf, other, over in zip(leaves, others, plan.grouping.axes, strict=True)
    ]
    pairs, axes = [(x, y) for x, y, _ in found], tuple(over for *_, over in found)
    known = norm.astype(dtype), None if of_others is None else of_others.astype(dtype)
    found = _differentiable(plan, axes)(pairs, known)
    chex.assert_shape(list(found), plan.shape)
    return found


def _differentiable(
    plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> Callable[[_Pairs, _KnownNorms], InnerProducts]:
    """The products with a rule for derivatives, which differentiates plain sums.

    They are sums of entries divided by constant powers of two near the norms, so that derivatives
    of sums stay in range.
    """

    def compute_prescaled(
        pairs: _Pairs, known: _KnownNorms, sizes: list[Array]
    ) -> tuple[_Pairs, _KnownNorms]:
        per_size = [reciprocal_pow2(size) for size in sizes]
        of_leaves = [plan.slice_for_leaves(by, [x for x, _ in pairs]) for by in per_size]
        with_factors = zip(pairs, axes, *of_leaves, strict=True)
        return [
            tuple(
                scale_by_real(x, expand_dims_at(by, over)) for x, by in zip(pair, bys, strict=True)
            )
            for pair, over, *bys in with_factors
        ], (known[0] * per_size[0], None if known[1] is None else known[1] * per_size[1])

    @custom_jvp()
    def compute(pairs: _Pairs, known: _KnownNorms) -> InnerProducts:
        return _compute_scaled(pairs, known, plan, axes)

    @compute.defjvp
    def _(
        primals: tuple[_Pairs, _KnownNorms], tangents: tuple[Any, Any]
    ) -> tuple[InnerProducts, InnerProducts]:
        (pairs, known), (changes, of_known) = primals, tangents
        result = compute(pairs, known)
        norms = known[0], result.other_norm
        sizes = [lax.stop_gradient(floor_pow2(norm)) for norm in norms]
        plain = functools.partial(_compute_unscaled, plan=plan, axes=axes)
        near_one = compute_prescaled(pairs, known, sizes)
        _, change = jax.jvp(plain, near_one, compute_prescaled(changes, of_known, sizes))
        return result, InnerProducts(change.other_norm * sizes[1], change.cosine)

    return compute


def _compute_scaled(
    pairs: _Pairs, known: _KnownNorms, plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> InnerProducts:
    """The products from sums at several scales."""
    norm, of_others = known

    def local(pairs: _Pairs) -> reductions.ScaledSums:
        in_one_piece = plan.placement.is_unsharded
        sums = [
            reductions.sum_products(x, y, axes=over, in_one_piece=in_one_piece)
            for (x, y), over in zip(pairs, axes, strict=True)
        ]
        return plan.reduce_groups(sums)

    found = plan.placement.map_shards(local)(pairs)
    sums, squares = found[::2], found[1::2]
    of_others = _sqrt(squares) if of_others is None else of_others
    return InnerProducts(of_others, _cosine(sums, norm, of_others))


def _sqrt(squares: reductions.ScaledSums) -> Array:
    total, unit = select_in_range(squares)
    return ScaledNorms.from_value(safe_sqrt(total), unit).norm


def _cosine(sums: reductions.ScaledSums, norm: Array, of_others: Array) -> Array:
    """The cosine, from the sum at a scale at which no sum of these products leaves the range."""
    plain, down, up = sums
    far, highest = reductions.scale_step(plain.dtype), reductions.overflow_bound(plain.dtype)
    bound = safe_sqrt(norm) * safe_sqrt(of_others)
    is_finite = jnp.isfinite(bound)
    is_high = bound > highest**0.5
    # A norm that is too large to be multiplied stands beside one that is as small as can be.
    is_scalable = lax.max(norm, of_others) < float(jnp.finfo(plain.dtype).max) / far
    is_low = (bound < reductions.underflow_bound(plain.dtype) ** 0.5) & is_scalable
    total = select(is_high, down, select(is_low, up, plain))
    bound = bound * select(is_high, 1 / far, select(is_low, far, jnp.ones_like(plain)))
    is_usable = is_finite & (bound > 0)
    bound = select(is_usable, bound, 1)
    found = jnp.clip(total / bound / bound, -1, 1)
    return select(is_usable, found, select(is_finite, jnp.zeros_like(found), jnp.nan))


def _compute_unscaled(
    pairs: _Pairs, known: _KnownNorms, *, plan: Plan, axes: tuple[tuple[int, ...], ...]
) -> InnerProducts:
    """The products of trees with norms near 1, in steps that JAX can differentiate."""

    def local(pairs: _Pairs) -> reductions.ScaledSums:
        with_axes = zip(pairs, axes, strict=True)
        return plan.reduce_groups([_plain_sums(x, y, axes=over) for (x, y), over in with_axes])

    norm, of_others = known
    total, square = plan.placement.map_shards(local)(pairs)
    of_others = safe_sqrt(square) if of_others is None else of_others
    return InnerProducts(of_others, divide_no_nan(total, norm * of_others, 0.0))


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnames="axes")
def _plain_sums(x: Array, y: Array, *, axes: tuple[int, ...]) -> reductions.ScaledSums:
    parts = zip(split_complex(x), split_complex(y), strict=False)
    summands = (sum(u * v for u, v in parts), l2.map(y))
    return tuple(jnp.sum(each, axes) for each in summands)

"""Upper bounds on the gradient norms of a batch's examples, and the clipped sums."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip.per_example._ghost_rounding_bounds as rounding_bounds
import optaxclip.per_example._ghost_sites as sites
from optaxclip._backend.global_view import global_view
from optaxclip._base.numerics import reciprocal_pow2
from optaxclip._base.trees import FlatTree, Grouping
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._batched_clip import (
    ClippedSums,
    arrange_example_norms,
    compute_example_multipliers,
    compute_weighted_sums,
    sum_dtype,
    sums_specs,
)
from optaxclip.per_example._example_loss import StepResult
from optaxclip.per_example._ghost_norms import Estimate, bound_norms
from optaxclip.per_example._ghost_plan import GhostNormPlan, add_direct_gradients, differentiate
from optaxclip.per_example._ghost_sites import BackpropResult
from optaxclip.per_example._ghost_sums import compute_weighted_sum
from optaxclip.responses import Response

Key = tuple[int, int]  # The position of a parameter, and of one of its terms.


def check_scope(grouping: Grouping, one: FlatTree) -> None:
    """Checks that groups consist of whole leaves."""
    for name, leaf, axes in zip(one.names(), one.inexact_leaves(), grouping.axes, strict=True):
        if len(axes) < len(jnp.shape(leaf)):
            raise ValueError(
                f'scope must not split leaves with method="ghost", but it splits leaf {name!r}; '
                'use scopes.tree(), scopes.leaf(), or scopes.group(), or pass method="vmap"'
            )


def compute_clipped_sums(
    plan: GhostNormPlan,
    measured: list[Any],
    grouping: Grouping,
    thresholds: list[Array],
    response: Response,
    batch: tuple[Any, Array],
) -> StepResult:
    """Computes the clipped sums, the losses, and aux of a microbatch."""
    examples, is_padding = batch  # [size, ...], bool[size]
    backward = differentiate(plan, measured, examples)

    @global_view(out_like=lambda *_: sums_specs(examples, measured), compiled=False)
    def clip_batch(
        backward: BackpropResult, thresholds: list[Array], is_padding: Array
    ) -> ClippedSums:
        norms = Norms.create(plan, backward, grouping, is_padding)
        return norms.clip_and_sum(thresholds, response)

    return clip_batch(backward, thresholds, is_padding), *backward.outputs


def compute_norms(
    plan: GhostNormPlan, measured: list[Any], grouping: Grouping, batch: tuple[Any, Array]
) -> StepResult:
    """Computes the norms, the losses, and aux of a microbatch."""
    examples, is_padding = batch  # [size, ...], bool[size]
    backward = differentiate(plan, measured, examples)

    @global_view(out_like=lambda *_: sums_specs(examples, []), compiled=False)
    def bound_batch(backward: BackpropResult, is_padding: Array) -> ClippedSums:
        norms = Norms.create(plan, backward, grouping, is_padding)
        upper = norms.upper
        if norms.needs_exact:
            # Exact norms take much longer, and typical examples never need them.
            is_any = jnp.any(norms.any_needs_exact)
            upper = lax.cond(is_any, norms.recompute_exact, lambda: norms.upper)
        arranged = arrange_example_norms([own.norm for own in upper], is_padding, grouping)
        return ClippedSums.of_norms(arranged)

    return bound_batch(backward, is_padding), *backward.outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Norms:
    """Upper bounds on norms, including the rounding of the sum (see `rounding_bounds`)."""

    plan: GhostNormPlan
    backward: BackpropResult  # With all gradients that the plan computes.
    grouping: Grouping  # The groups of one example.
    is_padding: Array  # bool[examples]
    estimates: dict[Key, Estimate]  # f32[examples] for all terms.
    needs_exact: dict[Key, Array]  # bool[examples], True if Gram matrices lost too many digits.
    any_needs_exact: Array  # bool[examples]
    upper: list[ScaledNorms]  # f32[examples] for all groups. `divisor` determines the factors.

    @classmethod
    def create(
        cls, plan: GhostNormPlan, backward: BackpropResult, grouping: Grouping, is_padding: Array
    ) -> "Norms":
        """Computes the bounds with the cheap methods, and from the available gradients."""
        backward = add_direct_gradients(plan, backward)
        examples, dtype = is_padding.size, plan.norm_dtype
        estimates = {  # f32[examples] for every field
            (i, k): term.estimate(backward, dtype)
            for i, terms in enumerate(plan.parts)
            for k, term in enumerate(terms)
            if i not in plan.direct
        }
        for i, gradient in backward.gradients.items():
            # [examples, ...] -> f32[examples]
            norm = bound_norms(gradient, tuple(range(1, gradient.ndim)), dtype)
            errors = [term.rounding_error(backward, dtype) for term in plan.parts[i]]
            error = _combine_norms(errors, examples, dtype)
            if i in plan.direct and gradient.dtype == jnp.bfloat16:
                error += rounding_bounds.ROUNDED * norm
            estimates[i, 0] = Estimate(norm, jnp.zeros_like(norm), error, norm + error)
        needs_exact, upper = {}, []
        for group in grouping.groups:
            own = {key: estimates[key] for key in estimates if key[0] in group.leaf_indices}
            upper.append(_bound_group(plan, own, examples, dtype))
            least = [estimate.least for estimate in own.values()]
            norms = _combine_norms(least, examples, dtype)  # f32[examples]
            for (i, k), estimate in own.items():
                if i in backward.gradients or plan.parts[i][k].method not in ("gram", "tied"):
                    continue
                # The negated comparison is also true if squares overflow, but the norms do not.
                is_exact = estimate.cancellation_error <= rounding_bounds.CANCELLATION_LIMIT * norms
                needs_exact[i, k] = ~is_exact & ~is_padding  # bool[examples]
        flags = functools.reduce(jnp.logical_or, needs_exact.values(), jnp.zeros_like(is_padding))
        return cls(plan, backward, grouping, is_padding, estimates, needs_exact, flags, upper)

    def clip_and_sum(self, thresholds: list[Array], response: Response) -> ClippedSums:
        """Clips the examples to the thresholds of the groups, and sums them."""
        dtypes = [sum_dtype(leaf.dtype) for leaf in self.plan.types]
        compute_multipliers = functools.partial(
            compute_example_multipliers,
            # Underflow may increase the contribution of an example.
            thresholds=[jnp.maximum(x - self.plan.underflow(x.dtype), 0) for x in thresholds],
            is_padding=self.is_padding,
            margin=max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0),
            grouping=self.grouping,
            response=response,
        )
        multipliers, counts = compute_multipliers(self.upper)

        def sum_exactly() -> ClippedSums:
            exact, exact_counts = compute_multipliers(self.recompute_exact())
            # Only the multipliers of examples that lost digits change.
            select = functools.partial(jnp.where, self.any_needs_exact)
            selected = jax.tree.map(select, exact, multipliers)
            return exact_counts._replace(leaves=self.sum_weighted(selected, are_ordinary=False))

        if not self.needs_exact:
            return counts._replace(leaves=self.sum_weighted(multipliers, are_ordinary=False))
        # There is a single condition because the host of a GPU waits for conditions.
        return lax.cond(
            jnp.any(self.any_needs_exact | ~self.is_well_scaled(multipliers)),
            sum_exactly,
            lambda: counts._replace(leaves=self.sum_weighted(multipliers, are_ordinary=True)),
        )

    def recompute_exact(self) -> list[ScaledNorms]:
        """Recomputes the upper bounds from gradients for the examples that lost digits."""
        # An example's contribution must not depend on the rest of the batch. Therefore, bounds only
        # change for the selected examples, although all examples are computed.
        estimates, dtype = dict(self.estimates), self.plan.norm_dtype
        for (i, k), flag in self.needs_exact.items():
            term, cheap = self.plan.parts[i][k], self.estimates[i, k]
            data_max, cotangent_max = term.max_moduli(self.backward)  # [examples]
            # For zero and non-finite gradients, exact norms would take time without a benefit.
            is_finite = jnp.isfinite(data_max) & jnp.isfinite(cotangent_max)
            is_selected = flag & is_finite & (cotangent_max > 0)  # bool[examples]
            exact = lax.cond(
                jnp.any(is_selected),
                functools.partial(term.estimate, self.backward, dtype, exact=True),
                lambda cheap=cheap: cheap,
            )
            known = [jnp.where(cotangent_max == 0, 0, x) for x in cheap]
            rows = zip(exact, known, strict=True)
            estimates[i, k] = Estimate(*(jnp.where(is_selected, *row) for row in rows))
        bounds = []
        for group, upper in zip(self.grouping.groups, self.upper, strict=True):
            own = {key: estimates[key] for key in estimates if key[0] in group.leaf_indices}
            exact = _bound_group(self.plan, own, self.is_padding.size, dtype)
            select = functools.partial(jnp.where, self.any_needs_exact)
            bounds.append(ScaledNorms(*map(select, exact, upper)))
        return bounds

    def is_well_scaled(self, multipliers: list[Multiplier]) -> Array:
        """Marks the examples whose numbers and products are in range, bool `[examples]`."""
        info, flags = jnp.finfo(self.plan.norm_dtype), []
        for group, upper, by in zip(self.grouping.groups, self.upper, multipliers, strict=True):
            is_unscaled = (by.ratio == 0) | ((by.power == 1) & (by.ratio == 1))
            for (i, k), estimate in self.estimates.items():
                if i not in group.leaf_indices or i in self.backward.gradients:
                    continue
                _, _, inputs, outputs = self.plan.parts[i][k].sizes
                spread = math.sqrt(outputs) * estimate.data_sum  # f32[examples]
                spread += math.sqrt(inputs) * estimate.cotangent_sum
                # The underflow of products is at most an eighth of a rounding.
                is_in_range = by.factor * spread <= float(info.max) / 256
                is_in_range &= 16 * float(info.tiny / info.eps) * spread <= by.factor * upper.norm
                flags.append(jnp.isfinite(estimate.total) & (is_unscaled | is_in_range))
        return functools.reduce(jnp.logical_and, flags)

    def sum_weighted(self, multipliers: list[Multiplier], *, are_ordinary: bool) -> list[Array]:
        """Sums the gradients of all parameters times the multipliers of their groups."""
        by_leaf, gradients = self.grouping.broadcast_to_leaves(multipliers), self.backward.gradients
        # All elements of a gradient share the factors.
        axes = tuple(tuple(range(gradient.ndim - 1)) for gradient in gradients.values())
        types, parts = self.plan.types, self.plan.parts
        leaves = [x.astype(sum_dtype(types[i].dtype)) for i, x in gradients.items()]
        # [examples, ...] -> [...]
        materialized = compute_weighted_sums(leaves, [by_leaf[i] for i in gradients], axes)
        sums = dict(zip(gradients, materialized, strict=True))
        for i, args in enumerate(zip(types, parts, by_leaf, strict=True)):
            if i not in sums:
                sums[i] = compute_weighted_sum(self.backward, *args, are_ordinary=are_ordinary)
        return [sums[i] for i in range(len(types))]


def _bound_group(
    plan: GhostNormPlan, own: dict[Key, Estimate], examples: int, dtype: Any
) -> ScaledNorms:
    """Returns upper bounds `[examples]` on the norm of a group, and divisors for factors."""
    norms = [_bound_term(plan, key, estimate) for key, estimate in own.items()]
    upper = ScaledNorms.from_value(_combine_norms(norms, examples, dtype), 1.0)
    computed = {*plan.materialized, *plan.direct}
    totals = [x.total for (i, _), x in own.items() if i not in computed]
    total = _combine_norms(totals, examples, dtype)  # f32[examples], A of `rounding_bounds`
    # If the positions of an example cancel, it still adds terms of size A to the sum. Their
    # rounding would depend on the rest of the batch, so the divisor is at least a fraction of A.
    least = rounding_bounds.CANCELLED * total * reciprocal_pow2(upper.scale)
    return upper._replace(divisor=jnp.maximum(upper.divisor, least))


def _bound_term(plan: GhostNormPlan, key: Key, estimate: Estimate) -> Array:
    """Bounds the norm `[examples]` of a term, including the rounding error of its clipped sum."""
    i, k = key
    if i in plan.materialized or i in plan.direct:
        return estimate.bound
    term, unit = plan.parts[i][k], rounding_bounds.unit_roundoff(sum_dtype(plan.types[i].dtype))
    additions = max(sites.block_split(use).additions for use, _ in term.uses)
    slack = 0.0
    types = [x for use, _ in term.uses for x in (use.site.data, use.site.output)]
    if any(x.dtype == jnp.bfloat16 for x in types):
        # A float32 factor of a bfloat16 factor is split into two terms.
        additions, slack = 2 * additions, rounding_bounds.OTHER_ERRORS
    slack += rounding_bounds.relative_error(
        additions + len(term.uses) + rounding_bounds.PRODUCT + 4, unit
    )
    return estimate.bound + slack * estimate.total


def _combine_norms(norms: list[Array], examples: int, dtype: Any) -> Array:
    """Returns an upper bound `[examples]` on the norm of several terms, from their norms."""
    if not norms:
        return jnp.zeros(examples, dtype)
    # [examples, terms] -> [examples]
    return norms[0] if len(norms) == 1 else bound_norms(meshes.stack(norms, 1), (1,), dtype)

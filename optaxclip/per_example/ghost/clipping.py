"""Measures or clips a microbatch of examples without their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._border.devices as devices
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import global_view
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.respond import Multiplier
from optaxclip.per_example.ghost.program import GhostNormPlan, Norms, differentiate
from optaxclip.per_example.ghost.sites import BackpropResult
from optaxclip.per_example.lift import (
    ClippedSums,
    arrange_example_norms,
    compute_example_multipliers,
    out_specs,
)
from optaxclip.per_example.losses import ExampleLoss
from optaxclip.per_example.microbatches import RunningSums
from optaxclip.per_example.weighting import sum_dtype
from optaxclip.responses import Response


def plan_for(loss: ExampleLoss, measured: list[Any], batch: Any) -> GhostNormPlan:
    """The plan for the norms of this loss, for any number of examples."""
    plans = []

    def trace(example: Any) -> None:
        plans.append(GhostNormPlan.create(loss, measured, example))

    jax.eval_shape(jax.vmap(trace, axis_size=loss.examples), batch)
    return plans[0]


def check_scope(grouping: Grouping, one: FlatTree) -> None:
    """Refuses groups that are parts of a leaf."""
    for name, leaf, axes in zip(one.names(), one.inexact_leaves(), grouping.axes, strict=True):
        if len(axes) < len(jnp.shape(leaf)):
            raise ValueError(
                f'method="ghost" has one norm for each leaf, and the scope has several for {name}: '
                'take scopes.tree(), scopes.leaf() or scopes.group(...), or method="vmap"'
            )


def compute_clipped_sums(
    plan: GhostNormPlan,
    loss: ExampleLoss,
    measured: list[Any],
    grouping: Grouping,
    thresholds: list[Array],
    response: Response,
    batch: tuple[Any, Array],
) -> tuple[ClippedSums, Array, PyTree]:
    """The clipped sum of a microbatch, with its losses and auxiliary outputs.

    The batch is the examples, and which of them are padding; there is a threshold for each group.
    """
    examples, is_padding = batch
    backward = differentiate(plan, measured, examples)

    def sums(backward: BackpropResult, thresholds: list[Array], is_padding: Array) -> ClippedSums:
        norms = Norms.create(plan, backward, grouping, is_padding)
        dtypes = [sum_dtype(leaf.dtype) for leaf in plan.types]
        margin = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
        thresholds = [
            jnp.maximum(threshold - plan.underflow(threshold.dtype), 0) for threshold in thresholds
        ]

        def is_ordinary(upper: list[ScaledNorms]) -> tuple[list[Multiplier], ClippedSums]:
            return compute_example_multipliers(
                upper, thresholds, is_padding, margin=margin, grouping=grouping, response=response
            )

        def sum_clipped(
            multipliers: list[Multiplier], judgment: ClippedSums, are_ordinary: bool
        ) -> ClippedSums:
            leaves = norms.sum_weighted(multipliers, are_ordinary=are_ordinary)
            return judgment._replace(leaves=leaves)

        def exact_sums() -> ClippedSums:
            others, judgment = is_ordinary(norms.recompute_exact())
            return sum_clipped(
                jax.tree.map(norms.select_exact, others, multipliers), judgment, False
            )

        multipliers, judgment = is_ordinary(norms.upper)
        if not norms.lost:
            return sum_clipped(multipliers, judgment, False)
        # There is one condition for all, because the host of a GPU waits for each condition.
        return lax.cond(
            jnp.any(norms.have_lost | ~norms.is_well_scaled(multipliers)),
            exact_sums,
            lambda: sum_clipped(multipliers, judgment, True),
        )

    operands = (backward, thresholds, is_padding)
    found = _global_view(sums, examples, measured)(*operands)
    return found, *loss.split(backward.outputs)


def compute_norms(
    plan: GhostNormPlan,
    loss: ExampleLoss,
    measured: list[Any],
    grouping: Grouping,
    batch: tuple[Any, Array],
) -> tuple[ClippedSums, Array, PyTree]:
    """The norms of a microbatch, with its losses and auxiliary outputs."""
    examples, is_padding = batch
    backward = differentiate(plan, measured, examples)

    def table(backward: BackpropResult, is_padding: Array) -> ClippedSums:
        norms = Norms.create(plan, backward, grouping, is_padding)
        upper = norms.upper
        if norms.lost:
            upper = lax.cond(jnp.any(norms.have_lost), norms.recompute_exact, lambda: norms.upper)
        found = arrange_example_norms([each.norm for each in upper], is_padding, grouping)
        return ClippedSums(*RunningSums.empty(), found)

    found = _global_view(table, examples, [])(backward, is_padding)
    return found, *loss.split(backward.outputs)


def _global_view(
    fn: Callable[..., ClippedSums], examples: Any, params: list[Any]
) -> Callable[..., ClippedSums]:
    """`fn` on any mesh: sums are split like the parameters, norms like the examples."""

    def like(*_: Any) -> ClippedSums:
        of_batch = map(devices.spec_of, jax.tree.leaves(examples))
        first = next((spec[0] for spec in of_batch if len(spec) and spec[0] is not None), None)
        found = out_specs([PartitionSpec(first, *devices.spec_of(x)) for x in params])
        return found._replace(norms=PartitionSpec(first))

    return global_view(out_like=like, compiled=False)(fn)

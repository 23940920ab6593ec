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
from optaxclip._engine.measure import Measured
from optaxclip._engine.respond import Multiplier
from optaxclip.per_example.ghost.program import GhostPlan, Norms, differentiate
from optaxclip.per_example.ghost.sites import Backward
from optaxclip.per_example.lift import Sums, multipliers_of, norms_of_examples, out_specs
from optaxclip.per_example.losses import ExampleLoss
from optaxclip.per_example.microbatches import RunningSums
from optaxclip.per_example.weighting import sum_dtype
from optaxclip.responses import Response


def plan_for(loss: ExampleLoss, measured: list[Any], batch: Any) -> GhostPlan:
    """The plan for the norms of this loss, for any number of examples."""
    plans = []

    def trace(example: Any) -> None:
        plans.append(GhostPlan.of(loss, measured, example))

    jax.eval_shape(jax.vmap(trace, axis_size=loss.examples), batch)
    return plans[0]


def check_scope(grouping: Grouping, one: FlatTree) -> None:
    """Refuses groups that are parts of a leaf."""
    for name, leaf, axes in zip(one.names(), one.measured_leaves(), grouping.axes, strict=True):
        if len(axes) < len(jnp.shape(leaf)):
            raise ValueError(
                f'method="ghost" has one norm for each leaf, and the scope has several for {name}: '
                'take scopes.tree(), scopes.leaf() or scopes.group(...), or method="vmap"'
            )


def clipped_sums(
    plan: GhostPlan,
    loss: ExampleLoss,
    measured: list[Any],
    grouping: Grouping,
    limits: list[Array],
    response: Response,
    batch: tuple[Any, Array],
) -> tuple[Sums, Array, PyTree]:
    """The clipped sum of a microbatch, with its losses and auxiliary outputs.

    The batch is the examples, and which of them are padding; there is a limit for each group.
    """
    examples, is_padding = batch
    backward = differentiate(plan, measured, examples)

    def sums(backward: Backward, limits: list[Array], is_padding: Array) -> Sums:
        norms = Norms.of(plan, backward, grouping, is_padding)
        dtypes = [sum_dtype(leaf.dtype) for leaf in plan.types]
        margin = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
        limits = [jnp.maximum(limit - plan.underflow(limit.dtype), 0) for limit in limits]

        def judge(upper: list[Measured]) -> tuple[list[Multiplier], Sums]:
            return multipliers_of(
                upper, limits, is_padding, margin=margin, grouping=grouping, response=response
            )

        def summed(multipliers: list[Multiplier], judgment: Sums, are_ordinary: bool) -> Sums:
            leaves = norms.weighted_sums(multipliers, are_ordinary=are_ordinary)
            return judgment._replace(leaves=leaves)

        def with_care() -> Sums:
            others, judgment = judge(norms.again())
            return summed(jax.tree.map(norms.choose, others, multipliers), judgment, False)

        multipliers, judgment = judge(norms.upper)
        if not norms.lost:
            return summed(multipliers, judgment, False)
        # There is one condition for all, because the host of a GPU waits for each condition.
        return lax.cond(
            jnp.any(norms.have_lost | ~norms.are_ordinary(multipliers)),
            with_care,
            lambda: summed(multipliers, judgment, True),
        )

    operands = (backward, limits, is_padding)
    found = _global_view(sums, examples, measured)(*operands)
    return found, *loss.split(backward.outputs)


def norms(
    plan: GhostPlan,
    loss: ExampleLoss,
    measured: list[Any],
    grouping: Grouping,
    batch: tuple[Any, Array],
) -> tuple[Sums, Array, PyTree]:
    """The norms of a microbatch, with its losses and auxiliary outputs."""
    examples, is_padding = batch
    backward = differentiate(plan, measured, examples)

    def table(backward: Backward, is_padding: Array) -> Sums:
        norms = Norms.of(plan, backward, grouping, is_padding)
        upper = norms.upper
        if norms.lost:
            upper = lax.cond(jnp.any(norms.have_lost), norms.again, lambda: norms.upper)
        found = norms_of_examples([each.norm for each in upper], is_padding, grouping)
        return Sums(*RunningSums.nothing(), found)

    found = _global_view(table, examples, [])(backward, is_padding)
    return found, *loss.split(backward.outputs)


def _global_view(fn: Callable[..., Sums], examples: Any, params: list[Any]) -> Callable[..., Sums]:
    """`fn` on any mesh: sums are split like the parameters, norms like the examples."""

    def like(*_: Any) -> Sums:
        of_batch = map(devices.spec_of, jax.tree.leaves(examples))
        first = next((spec[0] for spec in of_batch if len(spec) and spec[0] is not None), None)
        found = out_specs([PartitionSpec(first, *devices.spec_of(x)) for x in params])
        return found._replace(norms=PartitionSpec(first))

    return global_view(out_like=like, compiled=False)(fn)

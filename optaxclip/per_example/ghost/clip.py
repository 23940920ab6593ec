"""Says how the norms of each parameter are found."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import global_view
from optaxclip._base.trees import FlatTree, Grouping
from optaxclip._base.types import PyTree
from optaxclip._engine.measure import ScaledNorms
from optaxclip._engine.scale import Multiplier
from optaxclip.per_example._batched_clip import (
    ClippedSums,
    arrange_example_norms,
    compute_example_multipliers,
    out_specs,
    sum_dtype,
)
from optaxclip.per_example._example_loss import ExampleLoss, RunningSums
from optaxclip.per_example.ghost.norms import NormTerm
from optaxclip.per_example.ghost.plan import GhostNormPlan, Norms, differentiate
from optaxclip.per_example.ghost.sites import BackpropResult
from optaxclip.responses import Response

_WAYS = {
    "vectors": "norms of its inputs and of their cotangents",
    "gram": "Gram matrices of its inputs and of their cotangents",
    "direct": "gradients of examples, which cost less than Gram matrices",
    "chunks": "gradients of examples, a few at a time",
    "rows": "rows of cotangents, added up where they are of one row",
    "tied": "Gram matrices, and rows of cotangents",
}


def format_plan(plan: GhostNormPlan, names: list[str]) -> str:
    """A table with a line for each parameter."""
    lines = [["parameter", "shape", "norms from", "positions", "memory"]]
    for i, (name, aval) in enumerate(zip(names, plan.types, strict=True)):
        start = [name, str(aval.shape)]
        size = aval.size * aval.dtype.itemsize
        if i in plan.materialized:
            why = f"gradients of examples, as it {plan.materialized[i]}"
            lines.append([*start, why, "-", _format_bytes(size)])
        elif not plan.parts[i]:
            lines.append([*start, "is not used: norm 0", "-", "0 B"])
        lines += [[*start, *_format_term(part)] for part in plan.parts[i]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_row(line, widths) for line in lines)


def _format_term(part: NormTerm) -> list[str]:
    itemsize = np.dtype(np.float32).itemsize
    return [
        _WAYS[part.way],
        str(part.sizes.positions),
        _format_bytes(part.bytes_of(False, itemsize)),
    ]


def _row(line: list[str], widths: list[int]) -> str:
    cells = [text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)]
    return "  ".join([*cells, *(x.rjust(n) for x, n in zip(line[3:], widths[3:], strict=True))])


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


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
        of_batch = map(meshes.spec_of, jax.tree.leaves(examples))
        first = next((spec[0] for spec in of_batch if len(spec) and spec[0] is not None), None)
        found = out_specs([PartitionSpec(first, *meshes.spec_of(x)) for x in params])
        return found._replace(norms=PartitionSpec(first))

    return global_view(out_like=like, compiled=False)(fn)

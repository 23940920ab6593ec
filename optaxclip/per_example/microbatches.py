"""Sums over a batch that is processed one microbatch at a time."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import NormTree, PyTree
from optaxclip._batches.cutting import (
    MicrobatchSplit,
    concatenate_examples,
    remainder,
    restore_batch_order,
)
from optaxclip._border.packing import arrange_by_layout
from optaxclip.per_example.lift import ClippedSums
from optaxclip.per_example.weighting import sum_dtype


class RunningSums(NamedTuple):
    """The fields of `ClippedSums` that are added up over microbatches: all but `norms`."""

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array

    @classmethod
    def start(cls, sums: ClippedSums) -> "RunningSums":
        """The sums of one microbatch."""
        return cls(sums.leaves, sums.num_clipped, sums.num_unclipped, sums.num_dropped)

    @classmethod
    def empty(cls) -> "RunningSums":
        """The sums of a batch for which only the norms are wanted."""
        zero = jnp.zeros((), jnp.int32)
        return cls([], zero, zero, zero)

    @classmethod
    def zeros(cls, params: FlatTree, grouping: Grouping) -> "RunningSums":
        """Zeros; on an explicit mesh the leaves are split as the parameters are."""
        measured = [jnp.asarray(x) for x in params.inexact_leaves()]
        leaves = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in measured]
        zero = jnp.zeros((), jnp.int32)
        counts = [jnp.zeros(group.shape, jnp.int32) for group in grouping.groups]
        # Without groups, the norms in their layout are an empty vector of floats.
        counts = jax.tree.map(lambda x: x.astype(jnp.int32), arrange_by_layout(counts, grouping))
        return cls(leaves, counts, zero, zero)


def scan_microbatches(
    step: Callable[..., tuple[ClippedSums, Array, PyTree]],
    batch: PyTree,
    examples: int,
    size: int | None,
    zeros: RunningSums,
) -> tuple[ClippedSums, Array, PyTree]:
    """The sums over a batch `[examples, ...]`, and losses and aux in its order, by `step`.

    A microbatch has `size` examples, all if that is None; `zeros` are the sums before the first.
    """
    size = min(size or examples, examples)
    if size == examples:
        return step(batch)
    count, rest = divmod(examples, size)
    cut = MicrobatchSplit.split(batch, size, count)

    def body(running: RunningSums, i: Array) -> tuple[RunningSums, PyTree]:
        sums, *each = step(cut.microbatch(i))
        return jax.tree.map(jnp.add, running, RunningSums.start(sums)), (sums.norms, *each)

    running, stacked = lax.scan(body, zeros, jnp.arange(count))
    in_order = jax.tree.map(restore_batch_order, stacked)
    if rest:
        last = jax.tree.map(lambda x: remainder(jnp.asarray(x), rest), batch)
        sums, *each = step(last)
        running = jax.tree.map(jnp.add, running, RunningSums.start(sums))
        in_order = jax.tree.map(concatenate_examples, in_order, (sums.norms, *each))
    norms, losses, aux = in_order
    return ClippedSums(norms=norms, **running._asdict()), losses, aux

"""Microbatches: a step over parts of a batch, one after another, and what it adds up to."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.batches import Cut, appended, in_order_of_batch, last_examples
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import NormTree, PyTree
from optaxclip.per_example.lift import Sums
from optaxclip.per_example.weighting import sum_dtype


class Totals(NamedTuple):
    """Those of `Sums` that are added up."""

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array

    @classmethod
    def of(cls, sums: Sums) -> "Totals":
        """The totals of one step."""
        return cls(sums.leaves, sums.num_clipped, sums.num_unclipped, sums.num_dropped)

    @classmethod
    def zeros(cls, params: FlatTree, grouping: Grouping) -> "Totals":
        """Those of no step; on an explicit mesh leaves are split as the parameters are."""
        picked = [jnp.asarray(x) for x in params.picked()]
        leaves = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in picked]
        zero = jnp.zeros((), jnp.int32)
        counts = grouping.tree([jnp.zeros(group.shape, jnp.int32) for group in grouping.groups])
        return cls(leaves, counts, zero, zero)


def in_microbatches(
    step: Callable[..., tuple[Sums, Array, PyTree]],
    batch: PyTree,
    examples: int,
    size: int | None,
    totals: Totals,
) -> tuple[Sums, Array, PyTree]:
    """The step over microbatches, added to `totals`, all else in the order of the batch.

    Args:
      step: from a part of the batch to its sums, and what there is of each example.
      batch: arrays `[examples, ...]`.
      examples: how many there are.
      size: how many a microbatch has; all of them if None.
      totals: those of no step.
    """
    size = min(size or examples, examples)
    if size == examples:
        return step(batch)
    count, rest = divmod(examples, size)
    cut = Cut.of(batch, size, count)

    def body(totals: Totals, i: Array) -> tuple[Totals, PyTree]:
        sums, *each = step(cut.microbatch(i))
        return jax.tree.map(jnp.add, totals, Totals.of(sums)), (sums.norms, *each)

    totals, stacked = lax.scan(body, totals, jnp.arange(count))
    in_order = jax.tree.map(in_order_of_batch, stacked)
    if rest:
        last = jax.tree.map(lambda x: last_examples(jnp.asarray(x), rest), batch)
        sums, *each = step(last)
        totals = jax.tree.map(jnp.add, totals, Totals.of(sums))
        in_order = jax.tree.map(appended, in_order, (sums.norms, *each))
    norms, losses, aux = in_order
    return Sums(norms=norms, **totals._asdict()), losses, aux

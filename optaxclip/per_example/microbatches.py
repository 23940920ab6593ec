"""Microbatches: a step over parts of a batch, one after another, and what it adds up to."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._base.devices as devices
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
    batch = jax.tree.map(jnp.asarray, batch)
    # Microbatch `i` holds the examples `i`, `i + count`, `i + 2 count`, ...
    strided = jax.tree.map(functools.partial(_strided, size=size, count=count), batch)

    def body(totals: Totals, i: Array) -> tuple[Totals, PyTree]:
        microbatch = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), strided
        )
        sums, *each = step(microbatch)
        return jax.tree.map(jnp.add, totals, Totals.of(sums)), (sums.norms, *each)

    totals, stacked = lax.scan(body, totals, jnp.arange(count))
    in_order = jax.tree.map(_unstrided, stacked)
    if rest:
        sums, *each = step(jax.tree.map(functools.partial(_last, rest=rest), batch))
        totals = jax.tree.map(jnp.add, totals, Totals.of(sums))
        in_order = jax.tree.map(_appended, in_order, (sums.norms, *each))
    norms, losses, aux = in_order
    return Sums(norms=norms, **totals._asdict()), losses, aux


def _strided(x: Array, *, size: int, count: int) -> Array:
    def parted(x: Array) -> Array:
        return x[: count * size].reshape(size, count, *x.shape[1:])

    return _placed(parted, lambda split: (split.examples(size), None, *split.spec[1:]), x)


def _last(x: Array, *, rest: int) -> Array:
    def end(x: Array) -> Array:
        return x[x.shape[0] - rest :]

    return _placed(end, lambda split: (split.examples(rest), *split.spec[1:]), x)


def _unstrided(x: Array) -> Array:
    """`[count, size, ...]`, one row for each microbatch, to the order of the batch."""

    def in_order(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

    return _placed(in_order, lambda split: split.spec[1:], x)


def _appended(x: Array, y: Array) -> Array:
    def both(x: Array, y: Array) -> Array:
        return jnp.concatenate([x, y])

    examples = x.shape[0] + y.shape[0]
    return _placed(both, lambda split: (split.examples(examples), *split.spec[1:]), x, y)


class _Split(NamedTuple):
    """How an array lies on an explicit mesh."""

    mesh: Any
    spec: PartitionSpec

    def examples(self, number: int) -> tuple[str, ...] | None:
        """Of the mesh axes that split the first axis, as many as divide so many examples."""
        entry = self.spec[0]
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        while number % math.prod(self.mesh.shape[name] for name in names):
            names = names[:-1]
        return names or None


def _placed(
    fn: Callable[..., Array], spec: Callable[[_Split], tuple[Any, ...]], *arrays: Array
) -> Array:
    """`fn` of arrays; if one is split over an explicit mesh, the result is as its spec says."""
    known = next(filter(None, map(devices.explicit_sharding, arrays)), None)
    if known is None or devices.manual_axes():
        return fn(*arrays)
    split = _Split(*known)
    return devices.with_automatic_axes(fn, split.mesh, PartitionSpec(*spec(split)))(*arrays)

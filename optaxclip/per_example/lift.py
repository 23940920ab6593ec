"""The engine lifted over examples: one clip for each example of a batch, and the sum of them.

The axis of the examples is lifted into the grouping, not mapped over: every group becomes one group
for each example. So the norms of a whole batch are one reduction of each leaf, the rescue of
norms out of range stays a branch, and scopes and responses are the engine's own.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

import optaxclip._base.devices as collectives
from optaxclip._base.exact import refined_root
from optaxclip._base.numerics import power_of_two_below, real_parts, safe_divide
from optaxclip._base.types import NormTree
from optaxclip._engine.measure import Measured, measure
from optaxclip._engine.scale import Multiplier, multiplier
from optaxclip.norms import l2
from optaxclip.per_example.bounds import GroupLimits, small_slots
from optaxclip.per_example.totals import sum_dtype, totals
from optaxclip.responses import Response
from optaxclip.scopes import Grouping


class Sums(NamedTuple):
    """What a batch of examples adds up to.

    Attributes:
      leaves: the clipped sums of the measured leaves, float32 or wider.
      num_clipped: int32, of how many examples each group exceeded its limit, as limit rules see it.
      num_unclipped: int32[], examples that count and had no group above its limit.
      num_dropped: int32[], examples that are no padding and contributed nothing.
      norms: like `num_clipped`, with a leading axis of examples; 0 for padding.
    """

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array
    norms: NormTree


def clipped_sums(
    leaves: list[Any],
    limits: list[GroupLimits],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> Sums:
    """Clips each example and sums what is left.

    Args:
      leaves: floating or complex arrays `[examples, ...]`.
      limits: for each slot of the grouping, those of one example's groups.
      is_padding: bool `[examples]`, what counts for nothing.
      grouping: the groups of one example.
      response: the new norms; cut off at the limits, whatever it returns.
    """
    operands = ([jnp.asarray(leaf) for leaf in leaves], limits, is_padding)
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))
    run = _clipped_sums if is_traced else _compiled
    return run(*operands, grouping=grouping, response=response)


def _clipped_sums(
    leaves: list[Array],
    limits: list[GroupLimits],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> Sums:
    # Widened, as a product rounded to a narrow dtype could take an example above its limit.
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    leaves = lax.platform_dependent(leaves, cpu=_in_rows, default=lambda leaves: leaves)
    measured = _measured(leaves, grouping, is_padding.size)
    slots = list(zip(measured, limits, strict=True))
    multipliers = [_multiplier(*slot, response=_Bounded(response)) for slot in slots]
    # An example is dropped as a whole, so that no group betrays that another was not finite.
    is_bad = _any([~jnp.isfinite(by.quotient) for by in multipliers], is_padding)
    counts = ~is_bad & ~is_padding
    above = [
        (slot.norm > _for_each(limit.high, slot.norm)) & _beside(counts, slot.norm)
        for slot, limit in slots
    ]
    norms = [jnp.where(_beside(is_padding, slot.norm), 0, slot.norm) for slot in measured]
    pack = jax.vmap(grouping.pack)
    return Sums(
        leaves=totals(leaves, [_only(counts, by) for by in multipliers], grouping),
        num_clipped=jax.tree.map(_count, pack(above)),
        num_unclipped=_count(counts & ~_any(above, is_padding)),
        num_dropped=_count(is_bad & ~is_padding),
        norms=pack(norms),
    )


_compiled = jax.jit(_clipped_sums, static_argnames=("grouping", "response"))


@dataclasses.dataclass(frozen=True)
class _Bounded:
    """A response whose new norm never exceeds the target."""

    response: Response

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        return jnp.minimum(self.response(norm, trigger, target), target)


def _lifted(grouping: Grouping, examples: int) -> Grouping:
    """The same groups for each example, whose axis comes first."""
    slots = tuple(
        dataclasses.replace(slot, shape=(examples, *slot.shape)) for slot in grouping.slots
    )
    axes = tuple(tuple(axis + 1 for axis in reduced) for reduced in grouping.axes)
    manual = tuple(sorted(collectives.manual_axes()))
    # Inside `shard_map` each device has examples of its own, and all of each of them.
    specs = tuple(PartitionSpec(manual) for _ in axes) if manual else None
    return dataclasses.replace(grouping, slots=slots, axes=axes, specs=specs)


def _measured(leaves: list[Array], grouping: Grouping, examples: int) -> list[Measured]:
    """The norms of each slot's groups `[examples, ...]`, those of small groups to more digits."""
    _, measured = measure(leaves, _lifted(grouping, examples), l2, side_by_side=False)
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves]
    small = small_slots(grouping, sizes)
    for i, (slot, norms) in enumerate(zip(grouping.slots, measured, strict=True)):
        if i in small:
            measured[i] = _refined(norms, [leaves[member] for member in slot.members])
        else:
            # Beyond the engine's, as the limit is rounded too when it is lowered.
            more = float(jnp.finfo(norms.slack.dtype).eps)
            measured[i] = norms._replace(slack=norms.slack + more)
    return measured


def _refined(norms: Measured, members: list[Array]) -> Measured:
    refine = jax.vmap(functools.partial(refined_root, weight=1))
    mantissa, error = refine(norms.mantissa, norms.unit, members)
    margin = jnp.where(jax.vmap(_is_exact)(members), 0, 2.0**-6 * jnp.finfo(error.dtype).eps)
    return norms._replace(mantissa=mantissa, error=error + margin)


def _is_exact(members: list[Array]) -> Array:
    """Whether the error of a refined root is known exactly: all entries have but a few bits."""
    parts = [part for member in members for part in real_parts(member)]
    if sum(part.size for part in parts) == 1:
        return jnp.ones((), bool)
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part)) for part in parts])
    unit = power_of_two_below(largest) / 2**7
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.round(part / unit) * unit == part) for part in parts]
    )


def _multiplier(measured: Measured, limits: GroupLimits, *, response: Response) -> Multiplier:
    norm = measured.norm
    high, low = (_for_each(x, norm) for x in limits)
    if measured.error is None:
        # The engine lowers factors against rounding. Here the limit is lowered instead, so that an
        # example whose norm was rounded down to the limit is not let through either.
        lowered = high * (1 - measured.slack) + low
        exact = measured._replace(slack=jnp.zeros_like(measured.slack))
        return multiplier(exact, lowered, lowered, response=response, nonfinite="nan")
    by = multiplier(measured, high, high, response=response, nonfinite="nan")
    return _below(by, measured, measured.error, high, low)


def _below(by: Multiplier, measured: Measured, error: Array, high: Array, low: Array) -> Multiplier:
    """A multiplier of small groups for the limit `high + low`, to more digits than it was made."""
    is_over = (measured.norm - high) + measured.norm * error > low
    correction, after = by.exact or (jnp.zeros_like(error), jnp.ones_like(error))
    correction = correction + by.quotient * safe_divide(low, high, 0)
    before = jnp.where(by.is_identity & is_over, 1, by.before)
    return by._replace(before=before, exact=(correction, after))


def _only(counts: Array, by: Multiplier) -> Multiplier:
    """The multiplier, with zero for examples that do not count."""
    counts = _beside(counts, by.quotient)
    return by._replace(
        before=jnp.where(counts, by.before, 1),
        quotient=jnp.where(counts, by.quotient, 0),
        is_zero=~counts,
    )


def _in_rows(leaves: list[Array]) -> list[Array]:
    """The same leaves, stored example after example.

    Outer products, as the gradients of weights are, XLA stores transposed on CPU if it may, and
    then once more in each branch that reads them.
    """
    rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = lax.optimization_barrier(rows)
    return [row.reshape(leaf.shape) for row, leaf in zip(rows, leaves, strict=True)]


def _for_each(limit: Array, norms: Array) -> Array:
    """The limits of one example's groups in the shape and dtype of all norms."""
    return jnp.broadcast_to(limit.astype(norms.dtype)[None], norms.shape)


def _beside(flags: Array, like: Array) -> Array:
    """Flags of examples, with axes for the groups of each."""
    return lax.expand_dims(flags, range(1, like.ndim))


def _any(flags: list[Array], like: Array) -> Array:
    """Whether an example has the flag anywhere."""
    each = [jnp.any(flag, axis=tuple(range(1, flag.ndim))) for flag in flags]
    return functools.reduce(jnp.logical_or, each, jnp.zeros_like(like))


def _count(flags: Array) -> Array:
    return jnp.sum(flags, axis=0, dtype=jnp.int32)

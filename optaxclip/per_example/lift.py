"""The engine lifted over examples: one clip for each example of a batch, and the sum of them.

The axis of the examples is lifted into the grouping, not mapped over: every group becomes one group
for each example. So the norms of a whole batch are one reduction of each leaf, and scopes and
responses are the engine's own.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._base.devices as devices
from optaxclip._base.grouping import Grouping
from optaxclip._base.types import NormTree
from optaxclip._engine.groups import Groups
from optaxclip._engine.measure import measure
from optaxclip._engine.placement import Placement
from optaxclip._engine.respond import Multiplier, multiplier
from optaxclip._engine.step import run
from optaxclip.norms import l2
from optaxclip.per_example.weighting import sum_dtype, weighted_sums
from optaxclip.responses import Response


class Sums(NamedTuple):
    """What a batch of examples adds up to.

    Attributes:
      leaves: the clipped sums of the measured leaves, float32 or wider.
      num_clipped: int32, of how many examples each group exceeded its limit, as limit rules see it.
      num_unclipped: int32[], examples that count and had no group above its limit.
      num_dropped: int32[], examples that are not padding and contributed nothing.
      norms: like `num_clipped`, with a leading axis of examples; 0 for padding.
    """

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array
    norms: NormTree


def clipped_sums(
    leaves: list[Any],
    limits: list[Array],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> Sums:
    """Clips each example and sums what is left.

    Args:
      leaves: floating or complex arrays `[examples, ...]`.
      limits: for each group of the grouping, those of one example.
      is_padding: bool `[examples]`, what counts for nothing.
      grouping: the groups of one example.
      response: the new norms; cut off at the limits, whatever it returns.
    """
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    operands = (leaves, limits, is_padding)
    return run(_on_any_mesh, *operands, grouping=grouping, response=_Bounded(response))


def _on_any_mesh(leaves: list[Array], *operands: Any, **static: Any) -> Sums:
    steps, mesh = functools.partial(_steps, **static), devices.explicit_mesh(leaves)
    if mesh is not None and not devices.manual_axes():
        out_specs = _out_specs([devices.spec_of(leaf) for leaf in leaves])
        steps = devices.with_automatic_axes(steps, mesh, out_specs)
    return steps(leaves, *operands)


def _out_specs(specs: list[PartitionSpec]) -> Sums:
    """How sums are split over an explicit mesh: as the leaves of one example, norms as examples."""
    examples = (spec[0] for spec in specs if len(spec) and spec[0] is not None)
    leaves: Any = [PartitionSpec(*spec[1:]) for spec in specs]
    everywhere: Any = PartitionSpec()
    norms: Any = PartitionSpec(next(examples, None))
    return Sums(leaves, everywhere, everywhere, everywhere, norms)


def _steps(
    leaves: list[Array],
    limits: list[Array],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> Sums:
    # Widened, as a product rounded to a narrow dtype could take an example above its limit.
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    if devices.manual_axes() or devices.lies_in_one_piece(leaves):
        leaves = lax.platform_dependent(leaves, cpu=_in_rows, default=lambda leaves: leaves)
    groups = _lifted(grouping, leaves, is_padding.size)
    measured = measure(leaves, groups, l2, from_above=True)
    limits = [_for_each(limit, each.norm) for limit, each in zip(limits, measured, strict=True)]
    margin = max((float(jnp.finfo(leaf.dtype).eps) for leaf in leaves), default=0.0)
    how = {"response": response, "nonfinite": "nan", "strict": True}
    # Beside what every strict clip does against rounding, the limit is lowered: it is rounded
    # itself, up to 3 times, as is the multiplier of a leaf that is narrower than its norm.
    lowered = [limit * (1 - margin) for limit in limits]
    rows = zip(measured, lowered, lowered, strict=True)
    multipliers = [multiplier(*row, **how) for row in rows]
    # An example is dropped with all its groups: none shows that another was not finite.
    is_bad = _any([~jnp.isfinite(by.ratio) for by in multipliers], is_padding)
    counts = ~is_bad & ~is_padding
    above = [
        (each.norm > limit * (1 + 8 * margin)) & _beside(counts, each.norm)
        for each, limit in zip(measured, limits, strict=True)
    ]
    norms = [jnp.where(_beside(is_padding, each.norm), 0, each.norm) for each in measured]
    tree = jax.vmap(grouping.tree)
    return Sums(
        leaves=weighted_sums(leaves, [_only(counts, by) for by in multipliers], grouping),
        num_clipped=jax.tree.map(_count, tree(above)),
        num_unclipped=_count(counts & ~_any(above, is_padding)),
        num_dropped=_count(is_bad & ~is_padding),
        norms=tree(norms),
    )


@dataclasses.dataclass(frozen=True)
class _Bounded:
    """A response whose new norm never exceeds the target."""

    response: Response

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        return jnp.minimum(self.response(norm, trigger, target), target)


def _lifted(grouping: Grouping, leaves: list[Array], examples: int) -> Groups:
    """The same groups for each example, whose axis comes first; each device has its own."""
    groups = tuple(
        dataclasses.replace(group, shape=(examples, *group.shape)) for group in grouping.groups
    )
    axes = tuple(tuple(axis + 1 for axis in reduced) for reduced in grouping.axes)
    lifted = dataclasses.replace(grouping, groups=groups, axes=axes, layout="vector")
    nothing = ((frozenset(),) * len(leaves), ((),) * len(leaves))
    placement = Placement(*nothing, in_one_piece=devices.lies_in_one_piece(leaves))
    return Groups(lifted, placement, together=False)


def _only(counts: Array, by: Multiplier) -> Multiplier:
    """The multiplier, with zero for examples that do not count."""
    counts = _beside(counts, by.ratio)
    return Multiplier(jnp.where(counts, by.power, 1), jnp.where(counts, by.ratio, 0))


def _in_rows(leaves: list[Array]) -> list[Array]:
    """The same leaves, stored example after example.

    Outer products, as the gradients of weights are, XLA stores transposed on CPU if it may, and
    then once more in each branch that reads them.
    """
    rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = lax.optimization_barrier(rows)
    return [row.reshape(leaf.shape) for row, leaf in zip(rows, leaves, strict=True)]


def _for_each(limit: Array, norms: Array) -> Array:
    """The limits of one example's groups in the shape of all norms, whose dtype they have."""
    return jnp.broadcast_to(limit[None], norms.shape)


def _beside(flags: Array, like: Array) -> Array:
    """Flags of examples, with axes for the groups of each."""
    return lax.expand_dims(flags, range(1, like.ndim))


def _any(flags: list[Array], like: Array) -> Array:
    """Whether an example has the flag anywhere."""
    each = [jnp.any(flag, axis=tuple(range(1, flag.ndim))) for flag in flags]
    return functools.reduce(jnp.logical_or, each, jnp.zeros_like(like))


def _count(flags: Array) -> Array:
    return jnp.sum(flags, axis=0, dtype=jnp.int32)

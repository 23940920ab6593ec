"""Sums of gradients over examples, each multiplied by its example's factor."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import force_row_major, sum_weighted
from optaxclip._backend.global_view import global_view
from optaxclip._backend.leaf_shardings import LeafShardings
from optaxclip._backend.packing import arrange_by_layout
from optaxclip._base.numerics import accumulation_dtype, split_complex
from optaxclip._base.trees import Grouping
from optaxclip._base.types import NormTree
from optaxclip._engine.measure import ScaledNorms, measure
from optaxclip._engine.plan import Plan
from optaxclip._engine.scale import Multiplier, compute_multiplier, scale
from optaxclip.norms import l2
from optaxclip.responses import Response


def sum_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which leaves are summed: complex leaves' own dtype, else float32 or float64."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(dtype) if is_complex else accumulation_dtype(dtype)


def compute_weighted_sums(
    leaves: list[Array], by_leaf: list[Multiplier], axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums over the examples of each leaf `[examples, ...]` times its multiplier.

    Leaves are in the dtypes in which they are summed. `axes` are those of one example that share a
    multiplier. If a ratio is 0, the example adds nothing, even if it is not finite.
    """
    if not leaves or leaves[0].shape[0] == 0:
        return [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    if not meshes.manual_axes() and not meshes.is_unsharded(leaves):
        return _sum_fused(leaves, by_leaf, axes=axes)
    by_products, fused = (functools.partial(way, axes=axes) for way in (_sum_by_matmul, _sum_fused))
    return sum_weighted(leaves, by_leaf, by_products=by_products, fused=fused)


def _sum_fused(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    return [
        jnp.sum(_scale_leaf(leaf, by, tuple(axis + 1 for axis in reduced)), axis=0)
        for leaf, by, reduced in zip(leaves, multipliers, axes, strict=True)
    ]


def _scale_leaf(leaf: Array, by: Multiplier, axes: tuple[int, ...]) -> Array:
    return scale(leaf, by, axes=axes, strict=False, zero_nonfinite=True)


def _sum_by_matmul(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    if leaves[0].shape[0] == 1:
        return _sum_fused(leaves, multipliers, axes=axes)
    factors = [by.factor for by in multipliers]
    is_plain = [jnp.all(x >= jnp.finfo(x.dtype).tiny) & jnp.all(jnp.isfinite(x)) for x in factors]
    return lax.cond(
        functools.reduce(jnp.logical_and, is_plain),
        functools.partial(_products, axes=axes),
        functools.partial(_sum_by_loop, axes=axes),
        leaves,
        multipliers,
    )


def _products(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums as matrix products; they are right if all factors are finite normal numbers."""
    return [
        _matmul_sum(leaf, by.factor, reduced)
        for leaf, by, reduced in zip(leaves, multipliers, axes, strict=True)
    ]


def _matmul_sum(leaf: Array, factor: Array, reduced: tuple[int, ...]) -> Array:
    kept = [axis + 1 for axis in range(leaf.ndim - 1) if axis not in reduced]
    parts = [
        jnp.einsum(
            factor.astype(part.dtype),
            [0, *kept],
            part,
            list(range(leaf.ndim)),
            list(range(1, leaf.ndim)),
            precision=lax.Precision.HIGHEST,
        )
        for part in split_complex(leaf)
    ]
    return lax.complex(*parts) if jnp.iscomplexobj(leaf) else parts[0]


def _sum_by_loop(
    leaves: list[Array], multipliers: list[Multiplier], *, axes: tuple[tuple[int, ...], ...]
) -> list[Array]:
    """The sums, one example after another, without a second copy of the batch."""

    def scale_example(i: Array | int) -> list[Array]:
        example, by_leaf = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), (leaves, multipliers)
        )
        pairs = zip(example, by_leaf, axes, strict=True)
        return [_scale_leaf(leaf, by, reduced) for leaf, by, reduced in pairs]

    def add(i: Array, totals: list[Array]) -> list[Array]:
        return jax.tree.map(jnp.add, totals, scale_example(i))

    return lax.fori_loop(1, leaves[0].shape[0], add, scale_example(0))


class ClippedSums(NamedTuple):
    """The sum of a batch of clipped examples, and counts.

    Attributes:
      leaves: the sums of the measured leaves, float32 or wider.
      num_clipped: int32, for each group, the number of examples in which it exceeded its threshold, in
        the form in which users see norms.
      num_unclipped: int32[], the number of finite examples without a group above its threshold.
      num_dropped: int32[], the number of examples that were not finite, without padding.
      norms: like `num_clipped`, with a leading axis of examples; 0 for padding.
    """

    leaves: list[Array]
    num_clipped: NormTree
    num_unclipped: Array
    num_dropped: Array
    norms: NormTree


def compute_clipped_sums(
    leaves: list[Any],
    thresholds: list[Array],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> ClippedSums:
    """Clips each example `[examples, ...]` and sums the results.

    The thresholds are those of one example's groups. A new norm above its threshold becomes the threshold.
    """
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    return _clip_and_sum_examples(
        leaves, thresholds, is_padding, grouping=grouping, response=response
    )


def _results(leaves: list[Array], *_: Any) -> ClippedSums:
    return out_specs([meshes.spec_of(leaf) for leaf in leaves])


def out_specs(specs: list[PartitionSpec]) -> ClippedSums:
    """How `ClippedSums` are split over an explicit mesh: sums like the leaves, norms like the examples."""
    examples = (spec[0] for spec in specs if len(spec) and spec[0] is not None)
    sums: Any = [PartitionSpec(*spec[1:]) for spec in specs]
    everywhere: Any = PartitionSpec()
    norms: Any = PartitionSpec(next(examples, None))
    return ClippedSums(sums, everywhere, everywhere, everywhere, norms)


@global_view(out_like=_results)
def _clip_and_sum_examples(
    leaves: list[Array],
    thresholds: list[Array],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
) -> ClippedSums:
    # Converted to a wider dtype, because rounding could bring an example above its threshold.
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    if meshes.manual_axes() or meshes.is_unsharded(leaves):
        leaves = force_row_major(leaves)
    plan = _make_batched_plan(grouping, leaves, is_padding.size)
    measured = zip(*map(plan.unpack, measure(leaves, plan, l2, from_above=True)), strict=True)
    measured = [ScaledNorms(*fields) for fields in measured]
    margin = max((float(jnp.finfo(leaf.dtype).eps) for leaf in leaves), default=0.0)
    multipliers, judgment = compute_example_multipliers(
        measured, thresholds, is_padding, margin=margin, grouping=grouping, response=response
    )
    sums = compute_weighted_sums(leaves, grouping.broadcast_to_leaves(multipliers), grouping.axes)
    chex.assert_shape(sums, [leaf.shape[1:] for leaf in leaves])
    chex.assert_type(sums, [leaf.dtype for leaf in leaves])
    return judgment._replace(leaves=sums)


def compute_example_multipliers(
    measured: list[ScaledNorms],
    thresholds: list[Array],
    is_padding: Array,
    *,
    margin: float,
    grouping: Grouping,
    response: Response,
) -> tuple[list[Multiplier], ClippedSums]:
    """For each group, the multiplier of each example; and the sums, without leaves.

    The measured norms have a leading axis of examples, and upper bounds. The ratio is 0 for
    examples that add nothing. `margin` is the epsilon of the dtype in which a leaf is multiplied.
    """
    with_thresholds = zip(thresholds, measured, strict=True)
    thresholds = [
        jnp.broadcast_to(threshold[None], each.norm.shape) for threshold, each in with_thresholds
    ]
    bounded = _Bounded(response)
    # A strict clip stays below its threshold in spite of rounding. But the threshold itself was rounded, up
    # to 3 times, and a leaf narrower than its norm rounds its multiplier: so thresholds are lowered.
    lowered = [threshold * (1 - margin) for threshold in thresholds]
    multipliers = [
        compute_multiplier(
            each, threshold, threshold, response=bounded, nonfinite="nan", strict=True
        )
        for each, threshold in zip(measured, lowered, strict=True)
    ]
    # If one group of an example is not finite, the whole example is dropped.
    is_bad = _any_group([~jnp.isfinite(by.ratio) for by in multipliers], is_padding)
    counts = ~is_bad & ~is_padding
    above = [
        (each.norm > threshold * (1 + 8 * margin)) & _expand_like(counts, each.norm)
        for each, threshold in zip(measured, thresholds, strict=True)
    ]
    sums = ClippedSums(
        leaves=[],
        num_clipped=jax.tree.map(_count, _batched_layout(above, grouping, is_padding)),
        num_unclipped=_count(counts & ~_any_group(above, is_padding)),
        num_dropped=_count(is_bad & ~is_padding),
        norms=arrange_example_norms([each.norm for each in measured], is_padding, grouping),
    )
    return [_zero_uncounted(counts, by) for by in multipliers], sums


def arrange_example_norms(norms: list[Array], is_padding: Array, grouping: Grouping) -> NormTree:
    """The norms as users see them, with a leading axis of examples; 0 for padding."""
    norms = [jnp.where(_expand_like(is_padding, norm), 0, norm) for norm in norms]
    return _batched_layout(norms, grouping, is_padding)


def _batched_layout(arrays: list[Array], grouping: Grouping, is_padding: Array) -> NormTree:
    # The number of examples is passed, because a tree without leaves may have no groups.
    of_one = functools.partial(arrange_by_layout, grouping=grouping)
    return jax.vmap(of_one, axis_size=is_padding.size)(arrays)


@dataclasses.dataclass(frozen=True)
class _Bounded:
    """A response whose new norms are from 0 to the targets."""

    response: Response

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        # A negative norm would turn the example around, and add more than the target.
        return jnp.minimum(jnp.maximum(self.response(norm, trigger, target), 0), target)


def _make_batched_plan(grouping: Grouping, leaves: list[Array], examples: int) -> Plan:
    """A plan with these groups for each example; the first axis of the norms is the examples'."""
    groups = tuple(
        dataclasses.replace(group, shape=(examples, *group.shape)) for group in grouping.groups
    )
    axes = tuple(tuple(axis + 1 for axis in reduced) for reduced in grouping.axes)
    # Not the layout "dict", for which groups are sorted by shape. The whole tree stays "scalar", so
    # that its norm is 0 if it has no leaves.
    layout = "scalar" if grouping.layout == "scalar" else "vector"
    lifted = dataclasses.replace(grouping, groups=groups, axes=axes, layout=layout)
    return Plan(lifted, LeafShardings.unsharded(leaves))


def _zero_uncounted(is_counted: Array, by: Multiplier) -> Multiplier:
    """The multiplier, with 0 for examples that do not count."""
    is_counted = _expand_like(is_counted, by.ratio)
    return Multiplier(jnp.where(is_counted, by.power, 1), jnp.where(is_counted, by.ratio, 0))


def _expand_like(flags: Array, like: Array) -> Array:
    """Flags of examples, with axes of size 1 for their groups, so that they broadcast to `like`."""
    return lax.expand_dims(flags, range(1, like.ndim))


def _any_group(flags: list[Array], like: Array) -> Array:
    """For each example, whether one of its groups has the flag."""
    each = [jnp.any(flag, axis=tuple(range(1, flag.ndim))) for flag in flags]
    return functools.reduce(jnp.logical_or, each, jnp.zeros_like(like))


def _count(flags: Array) -> Array:
    return jnp.sum(flags, axis=0, dtype=jnp.int32)

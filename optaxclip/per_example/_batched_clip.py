"""Clips the examples of a batch and sums the results."""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import force_row_major, sum_weighted
from optaxclip._backend.global_view import global_view
from optaxclip._backend.leaf_shardings import LeafShardings
from optaxclip._backend.meshes import example_out_specs
from optaxclip._backend.packing import arrange_by_layout
from optaxclip._base.numerics import accumulation_dtype, split_complex
from optaxclip._base.state import register_state
from optaxclip._base.trees import Grouping
from optaxclip._base.types import NormTree, PyTree
from optaxclip._engine.measure import ScaledNorms, measure
from optaxclip._engine.plan import Plan
from optaxclip._engine.scale import Multiplier, compute_multiplier, scale
from optaxclip.norms import l2
from optaxclip.responses import Response

LeafAxes: TypeAlias = tuple[tuple[int, ...], ...]  # The axes that share a multiplier, by leaf.


class ClippedSums(NamedTuple):
    """The sum of a batch of clipped examples, with the counts and norms of `PerExampleResult`."""

    leaves: list[Array]  # The sums of the measured leaves, in float32 or wider.
    num_clipped: NormTree  # i32[groups], in the structure of the public norms.
    num_unclipped: Array  # i32[]
    num_dropped: Array  # i32[]
    norms: NormTree | None  # f32[examples, groups], 0 for padding. None for running sums.

    @classmethod
    def of_norms(cls, norms: NormTree | None = None) -> "ClippedSums":
        """Returns zero sums with these norms."""
        zero = jnp.zeros((), jnp.int32)
        return cls([], zero, zero, zero, norms)


@register_state
class PerExampleResult(NamedTuple):
    """The sum of clipped examples, with norms and counts.

    Only `grads` is bounded. Noise on the sum does not protect the other fields, and even the counts
    are not private.

    Attributes:
      grads: The tree of sums, in float32 or wider.
      num_clipped: The number of examples in which a group exceeded its threshold by more than
        rounding, int32[] for the scope `tree`, int32[groups] for labels and leaves, and a dict of
        arrays for `axes` and `unit`.
      num_dropped: int32[], the number of non-finite examples, which are excluded and not counted as
        clipped or unclipped.
      norms: The norms of the examples before clipping, in float32 or wider, in the structure of
        `num_clipped` with a leading example axis. The norms of padding are 0.
      num_unclipped: int32[], the number of examples in which no group exceeded its threshold.
      losses: The losses `[examples]`, from `clipped_grad`.
      aux: The auxiliary output of the loss with a leading example axis, from `clipped_grad`.
      bound: The maximum norm of an example's contribution to `grads`, `[]`, in float32 or wider.
        None in manually created results.
    """

    grads: PyTree
    num_clipped: NormTree
    num_dropped: Array
    norms: NormTree
    num_unclipped: Array
    losses: Array | None = None
    aux: PyTree = None
    bound: Array | None = None


def result_of(sums: ClippedSums, grads: PyTree) -> PerExampleResult:
    """Returns the public result for sums and the tree of the summed gradients."""
    chex.assert_trees_all_equal_structs(sums.num_clipped, sums.norms)
    chex.assert_shape([sums.num_dropped, sums.num_unclipped], ())
    return PerExampleResult(
        grads, sums.num_clipped, sums.num_dropped, sums.norms, sums.num_unclipped
    )


def sums_specs(examples: Any, params: list[Any] | None = None) -> Any:
    """Returns the specs of `ClippedSums`, as in `example_out_specs`."""
    specs: Any = example_out_specs(examples, params)
    return ClippedSums(specs.sums, specs.counts, specs.counts, specs.counts, specs.norms)


@global_view(out_like=lambda leaves, *_: sums_specs(leaves))
def compute_clipped_sums(
    leaves: list[Array],
    thresholds: list[Array],
    is_padding: Array,
    *,
    grouping: Grouping,
    response: Response,
    are_inputs: bool = False,  # True if the leaves are not computed in the same program.
) -> ClippedSums:
    """Clips the examples of leaves `[examples, ...]` to thresholds `[*group]`, and sums them."""
    # Without this cast, rounding could increase a norm above its threshold.
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]  # [examples, ...]
    # Arrays in memory already have this order. XLA on CPUs would still copy them, which triples the
    # time of a call (as of JAX 0.10.2). It also copies the arguments of a surrounding `jit`.
    # Layouts of `jax.experimental.layout` would avoid this copy but cannot be exported.
    if not are_inputs and (meshes.manual_axes() or meshes.is_unsharded(leaves)):
        leaves = force_row_major(leaves)
    measured = _measure_examples(leaves, grouping, is_padding.size)
    margin = max((float(jnp.finfo(leaf.dtype).eps) for leaf in leaves), default=0.0)
    multipliers, counts = compute_example_multipliers(
        measured, thresholds, is_padding, margin=margin, grouping=grouping, response=response
    )
    # [examples, ...] -> [...]
    sums = compute_weighted_sums(leaves, grouping.broadcast_to_leaves(multipliers), grouping.axes)
    chex.assert_shape(sums, [leaf.shape[1:] for leaf in leaves])
    chex.assert_type(sums, [leaf.dtype for leaf in leaves])
    return counts._replace(leaves=sums)


@global_view(out_like=lambda leaves, *_: sums_specs(leaves).norms)
def compute_example_norms(
    leaves: list[Array], is_padding: Array, *, grouping: Grouping
) -> NormTree:
    """Computes the norms of the examples of leaves `[examples, ...]`, in their public structure."""
    # No memory order is forced. On CPUs, XLA can then compute the outer products of backpropagation
    # inside the sums, which takes half the time (as of JAX 0.10.2).
    leaves = [leaf.astype(sum_dtype(leaf.dtype)) for leaf in leaves]
    measured = _measure_examples(leaves, grouping, is_padding.size)
    return arrange_example_norms([norms.norm for norms in measured], is_padding, grouping)


def sum_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype of sums: float32 or float64, or the original dtype of complex leaves."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(dtype) if is_complex else accumulation_dtype(dtype)


def _measure_examples(leaves: list[Array], grouping: Grouping, examples: int) -> list[ScaledNorms]:
    """Computes the norms of the groups, `[examples, *group]`, with upper bounds."""
    groups = [dataclasses.replace(x, shape=(examples, *x.shape)) for x in grouping.groups]
    axes = tuple(tuple(axis + 1 for axis in reduced) for reduced in grouping.axes)
    # The layout "dict" would sort the groups by shape. The layout "scalar" is kept because its norm
    # is 0 if the tree has no leaves.
    layout = "scalar" if grouping.layout == "scalar" else "vector"
    batched = dataclasses.replace(grouping, groups=tuple(groups), axes=axes, layout=layout)
    plan = Plan(batched, LeafShardings.unsharded(leaves))
    # f32[examples, *group] for all fields and groups
    fields = map(plan.unpack, measure(leaves, plan, l2, from_above=True))
    return [ScaledNorms(*group_fields) for group_fields in zip(*fields, strict=True)]


def compute_example_multipliers(
    measured: list[ScaledNorms],
    thresholds: list[Array],
    is_padding: Array,
    *,
    margin: float,  # The epsilon of the dtype in which leaves are multiplied.
    grouping: Grouping,
    response: Response,
) -> tuple[list[Multiplier], ClippedSums]:
    """Computes the multipliers `[examples, *group]`, and the `ClippedSums` without leaves."""
    rows = zip(thresholds, measured, strict=True)
    # [*group] -> [examples, *group]
    thresholds = [jnp.broadcast_to(threshold[None], norms.norm.shape) for threshold, norms in rows]
    # Strict clipping bounds norms despite rounding. However, the threshold was rounded up to 3
    # times, and a leaf that is narrower than its norm rounds its multiplier. Therefore, the
    # thresholds are lowered.
    lowered = [threshold * (1 - margin) for threshold in thresholds]
    compute = functools.partial(
        compute_multiplier, response=_BoundedResponse(response), nonfinite="nan", strict=True
    )
    multipliers = [*map(compute, measured, lowered, lowered)]
    # A non-finite group drops the whole example.
    is_bad = _any_group([~jnp.isfinite(by.ratio) for by in multipliers], is_padding)
    is_counted = ~is_bad & ~is_padding  # bool[examples]
    is_above = [  # bool[examples, *group]
        (norms.norm > threshold * (1 + 8 * margin)) & expand_like(is_counted, norms.norm)
        for norms, threshold in zip(measured, thresholds, strict=True)
    ]
    # [examples, ...] -> i32[...]
    count = functools.partial(jnp.sum, axis=0, dtype=jnp.int32)
    sums = ClippedSums(
        leaves=[],
        num_clipped=jax.tree.map(count, _arrange_groups(is_above, grouping, is_padding)),
        num_unclipped=count(is_counted & ~_any_group(is_above, is_padding)),
        num_dropped=count(is_bad & ~is_padding),
        norms=arrange_example_norms([norms.norm for norms in measured], is_padding, grouping),
    )
    flags = [expand_like(is_counted, by.ratio) for by in multipliers]  # bool[examples, 1, ...]
    multipliers = [
        Multiplier(jnp.where(flag, by.power, 1), jnp.where(flag, by.ratio, 0))
        for flag, by in zip(flags, multipliers, strict=True)
    ]
    return multipliers, sums


# A dataclass because `compute_multiplier` is traced again for unequal functions.
@dataclasses.dataclass(frozen=True)
class _BoundedResponse:
    """Clips the norms of a response to the range from 0 to the target."""

    response: Response

    def __call__(self, norm: Array, trigger: Array, target: Array) -> Array:
        # A negative norm would reverse the example, which could add more than the target.
        return jnp.minimum(jnp.maximum(self.response(norm, trigger, target), 0), target)


def arrange_example_norms(norms: list[Array], is_padding: Array, grouping: Grouping) -> NormTree:
    """Returns the norms in their public structure, `[examples, ...]`, with 0 for padding."""
    norms = [jnp.where(expand_like(is_padding, norm), 0, norm) for norm in norms]
    return _arrange_groups(norms, grouping, is_padding)


def _arrange_groups(arrays: list[Array], grouping: Grouping, is_padding: Array) -> NormTree:
    # The number of examples is passed because a tree without leaves may have no groups.
    arrange = functools.partial(arrange_by_layout, grouping=grouping)
    return jax.vmap(arrange, axis_size=is_padding.size)(arrays)


def expand_like(x: Array, like: Array, example: int = 0) -> Array:
    """Adds axes of size 1 to an array `[examples]`, up to the rank of `like`."""
    return lax.expand_dims(x, [axis for axis in range(like.ndim) if axis != example])


def _any_group(flags: list[Array], like: Array) -> Array:
    # [examples, *group] -> [examples]
    by_group = [jnp.any(flag, axis=tuple(range(1, flag.ndim))) for flag in flags]
    return functools.reduce(jnp.logical_or, by_group, jnp.zeros_like(like))


_scale = functools.partial(scale, strict=False, zero_nonfinite=True)


def compute_weighted_sums(
    leaves: list[Array], by_leaf: list[Multiplier], axes: LeafAxes
) -> list[Array]:
    """Sums leaves `[examples, ...]` times their multipliers, without examples whose ratio is 0."""
    if not leaves or leaves[0].shape[0] == 0:
        return [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    if not meshes.manual_axes() and not meshes.is_unsharded(leaves):
        return _sum_fused(leaves, by_leaf, axes=axes)
    matmul, fused = (functools.partial(fn, axes=axes) for fn in (_sum_matmul, _sum_fused))
    return sum_weighted(leaves, by_leaf, by_products=matmul, fused=fused)


def _sum_fused(leaves: list[Array], by_leaf: list[Multiplier], *, axes: LeafAxes) -> list[Array]:
    return [  # [examples, ...] -> [...]
        jnp.sum(_scale(leaf, by, axes=tuple(axis + 1 for axis in reduced)), axis=0)
        for leaf, by, reduced in zip(leaves, by_leaf, axes, strict=True)
    ]


def _sum_matmul(leaves: list[Array], by_leaf: list[Multiplier], *, axes: LeafAxes) -> list[Array]:
    """Sums by matrix products if all factors are finite normal numbers, otherwise by a loop."""
    if leaves[0].shape[0] == 1:
        return _sum_fused(leaves, by_leaf, axes=axes)
    factors = [by.factor for by in by_leaf]  # [examples, *group]
    is_plain = [jnp.all(x >= jnp.finfo(x.dtype).tiny) & jnp.all(jnp.isfinite(x)) for x in factors]
    multiply, loop = (functools.partial(fn, axes=axes) for fn in (_multiply, _sum_by_loop))
    return lax.cond(functools.reduce(jnp.logical_and, is_plain), multiply, loop, leaves, by_leaf)


def _multiply(leaves: list[Array], by_leaf: list[Multiplier], *, axes: LeafAxes) -> list[Array]:
    sums, einsum = [], functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    for leaf, by, reduced in zip(leaves, by_leaf, axes, strict=True):
        kept = [axis + 1 for axis in range(leaf.ndim - 1) if axis not in reduced]
        all_axes = [*range(leaf.ndim)]
        parts = [  # [examples, *kept], [examples, ...] -> [...]
            einsum(by.factor.astype(part.dtype), [0, *kept], part, all_axes, all_axes[1:])
            for part in split_complex(leaf)
        ]
        sums.append(lax.complex(*parts) if jnp.iscomplexobj(leaf) else parts[0])
    return sums


def _sum_by_loop(leaves: list[Array], by_leaf: list[Multiplier], *, axes: LeafAxes) -> list[Array]:
    """Sums one example after another, without a second copy of the batch."""

    def add_example(i: Array | int, totals: list[Array] | None) -> list[Array]:
        # [examples, ...] -> [...]
        index = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        example, multipliers = jax.tree.map(index, (leaves, by_leaf))
        rows = zip(example, multipliers, axes, strict=True)
        scaled = [_scale(leaf, by, axes=reduced) for leaf, by, reduced in rows]
        return scaled if totals is None else jax.tree.map(jnp.add, totals, scaled)

    return lax.fori_loop(1, leaves[0].shape[0], add_example, add_example(0, None))

"""The thresholds of an example's groups, from the threshold of the whole example."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip.scopes as scopes
from optaxclip._backend.leaf_shardings import check_examples_unsharded
from optaxclip._backend.packing import ravel_and_concatenate, split_and_reshape
from optaxclip._base.numerics import combine_norms, norm_dtype
from optaxclip._base.state import register_state
from optaxclip._base.trees import FlatTree, Grouping, flatten
from optaxclip._base.types import ArrayLike, NormTree, PyTree
from optaxclip._base.validation import check_bool, check_choice, short_repr
from optaxclip._loss_arguments import get_batch_size
from optaxclip.per_example._batched_clip import ClippedSums, compute_clipped_sums
from optaxclip.per_example._quantile import QuantileThreshold
from optaxclip.responses import Response, as_response
from optaxclip.scopes.leaves import Scope, resolve_scope
from optaxclip.thresholds.constant import resolve_rule
from optaxclip.thresholds.rule import check_threshold_value, update_rule

Split = Literal["uniform", "size"]
ExampleThreshold: TypeAlias = ArrayLike | Mapping[str, ArrayLike]


def check_example_threshold(threshold: Any, argument: str) -> ExampleThreshold:
    """`threshold`, checked to be a number, or a dict of numbers by the names of the groups."""
    if isinstance(threshold, Mapping):
        items = threshold.items()
        return {name: _check_number(value, f"{argument}[{name!r}]") for name, value in items}
    return _check_number(threshold, argument)


def group_thresholds(
    threshold: ExampleThreshold, grouping: Grouping, one: FlatTree, split: Split
) -> tuple[list[Array], Array]:
    """The thresholds of an example's groups, and the threshold of the whole example.

    Args:
      threshold: checked. A number is the threshold of the whole example; the groups get shares of it, so
        that the squares of their thresholds sum to at most its square. Numbers by name are the thresholds
        of groups.
      grouping: the groups of one example.
      one: the tree of one example.
      split: "uniform" gives each of `K` groups `threshold / sqrt(K)`; "size" gives a group with `D_i`
        of all `D` entries `threshold * sqrt(D_i / D)`.

    Returns:
      For each group, or array of groups, thresholds of its shape; and the threshold of the whole example's
      norm, `[]`. All are float64 if a leaf is 64-bit, else float32.
    """
    dtype = norm_dtype({jnp.result_type(leaf) for leaf in one.inexact_leaves()})
    if isinstance(threshold, Mapping):
        thresholds = _thresholds_by_name(dict(threshold), grouping, dtype)
        return thresholds, combine_norms(ravel_and_concatenate(thresholds))
    # A traced threshold may be negative; then it acts as 0.
    bound = jnp.maximum(jnp.asarray(threshold).astype(dtype), 0)
    sizes = [math.prod(np.shape(leaf)) for leaf in one.inexact_leaves()]
    shares = _split_weights(grouping, sizes, split)
    roots = [jnp.asarray(math.sqrt(share)).astype(dtype) for share in shares]
    rows = zip(roots, grouping.groups, strict=True)
    return [jnp.broadcast_to(bound * root, group.shape) for root, group in rows], bound


def sensitivity_factor(relation: Any) -> int:
    """How many thresholds the sum can change by between neighbouring data sets."""
    name = getattr(relation, "name", relation)
    name = name.lower() if isinstance(name, str) else name
    if name not in _CHANGES:
        raise ValueError(f"relation must be one of {list(_CHANGES)}, got {relation!r}")
    return _CHANGES[name]


_CHANGES = {"add_or_remove_one": 1, "replace_special": 1, "replace_one": 2}


def _thresholds_by_name(
    threshold: dict[str, Any], grouping: Grouping, dtype: jnp.dtype
) -> list[Array]:
    if grouping.layout == "dict":
        entries = [(group.names[0], group.shape) for group in grouping.groups]
    else:
        entries = [(name, ()) for name in grouping.names]
    rule, norms = (
        resolve_rule(threshold, entries),
        ravel_and_concatenate([jnp.zeros(x, dtype) for _, x in entries]),
    )
    thresholds, _ = update_rule(rule, rule.init(norms), norms, None, "threshold")
    return split_and_reshape(thresholds.target, [group.shape for group in grouping.groups])


def _split_weights(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """The share of the square of the threshold that each group gets; all shares sum to 1."""
    groups = [math.prod(group.shape) for group in grouping.groups]
    if split == "uniform":
        return [1 / max(sum(groups), 1)] * len(groups)
    # At least 1, so that nothing is divided by 0 for an empty tree or an array without groups.
    counts = [max(count, 1) * max(sum(sizes), 1) for count in groups]
    return [own / count for own, count in zip(_entries(grouping, sizes), counts, strict=True)]


def _entries(grouping: Grouping, sizes: list[int]) -> list[int]:
    """The number of entries of each group."""
    return [sum(sizes[i] for i in group.leaf_indices) for group in grouping.groups]


def _check_number(threshold: Any, argument: str) -> Any:
    if callable(threshold) or isinstance(threshold, QuantileThreshold):
        raise TypeError(
            f"{argument} must be a number or scalar array, got {short_repr(threshold)}: pass its threshold at "
            "this step, or use per_example_clip_and_aggregate, whose threshold may be a schedule or "
            "quantile_threshold()"
        )
    return check_threshold_value(threshold, argument, by_name=True)


_WHOLE_EXAMPLE = scopes.tree()
"""The default scope, with one norm for the whole example."""


@register_state
class PerExampleResult(NamedTuple):
    """The sum of clipped examples, and what happened to the examples.

    Only `grads` is bounded. Noise on the sum does not protect the other fields, which are not
    private; even the counts are not.

    Attributes:
      grads: the tree of the sum, in float32 or wider.
      num_clipped: int32, for each group, in how many examples it exceeded its threshold by more than
        rounding: `[]` for the scope `tree`, `[groups]` for labels and leaves, a dict of arrays for
        `axes` and `unit`.
      num_dropped: int32[], examples that contributed nothing because something in them (or the
        threshold) was not finite. They count neither as clipped nor as unclipped.
      norms: float32 or wider, each example's norms before clipping, in the form of `num_clipped`
        with a leading axis of examples; 0 for padding.
      num_unclipped: int32[], examples without a group above its threshold.
      losses: `[examples]`, from `clipped_grad`.
      aux: the loss's auxiliary output, with a leading axis of examples, from `clipped_grad`.
      bound: float32 or wider, `[]`, the norm that no example's contribution to `grads` exceeds;
        `noisy_mean` computes its noise from it. None in a result that was made by hand.
    """

    grads: PyTree
    num_clipped: NormTree
    num_dropped: Array
    norms: NormTree
    num_unclipped: Array
    losses: Array | None = None
    aux: PyTree = None
    bound: Array | None = None


class ExampleClip(NamedTuple):
    """How each example is clipped, checked. All fields but `threshold` are static under `jit`."""

    threshold: ExampleThreshold
    scope: Scope
    response: Response
    split: Split

    @classmethod
    def create(
        cls, threshold: ExampleThreshold, scope: Scope | None, response: str | Response, split: str
    ) -> "ExampleClip":
        """The clip that a user asked for."""
        threshold = check_example_threshold(threshold, "threshold")
        scope = _WHOLE_EXAMPLE if scope is None else resolve_scope(scope)
        chosen: Split = check_choice(split, get_args(Split), "split")
        return cls(threshold, scope, as_response(response), chosen)

    def compute_thresholds(self, one: FlatTree) -> tuple[Grouping, list[Array], Array]:
        """The groups of one example's tree, their thresholds, and the threshold of the whole example."""
        grouping = self.scope(one)
        return grouping, *group_thresholds(self.threshold, grouping, one, self.split)

    def sums(self, leaves: list[Any], one: FlatTree, is_padding: Array) -> ClippedSums:
        """The clipped sums of measured leaves `[examples, ...]`."""
        grouping, thresholds, _ = self.compute_thresholds(one)
        return compute_clipped_sums(
            leaves, thresholds, is_padding, grouping=grouping, response=self.response
        )


def clip_sum(
    grads: PyTree,
    threshold: ExampleThreshold,
    *,
    scope: Scope | None = None,
    response: str | Response = "clip",
    split: Literal["uniform", "size"] = "uniform",
    is_padding: ArrayLike | None = None,
    specs: PyTree = None,
) -> PerExampleResult:
    """Clips the gradient of each example and sums them.

    Source: Abadi et al., 2016, Deep learning with differential privacy, arXiv 1607.00133; per
    layer, McMahan, Ramage, Talwar and Zhang, 2017, arXiv 1710.06963.

    Guarantees: the L2 norm of one example's contribution to the sum is never above `threshold`, in any
    dtype of the gradients. Norms, products and the sum are in float32 (float64 for 64-bit leaves).
    A group that exceeds its threshold, or might exceed it by rounding, is brought below it, in float32
    by a relative 2e-6 at most. An example with a NaN or infinite entry adds exactly nothing. Other
    examples below their threshold are summed as they are.

    Like all floating-point sums, the sum over many examples is rounded.
    `per_example_clip_and_aggregate` adds noise, and explains what the bound means for privacy.

    Args:
      grads: leaves `[examples, ...]`, real or complex floating-point. `None` leaves stay; integer,
        bool and `float0` leaves do not count, and come back as zeros without the axis of examples.
      threshold: the largest L2 norm of one example's contribution: a number or a scalar array, of which
        each group gets a share by `split`; or a dict from the name of a group to its own threshold. A
        negative traced threshold acts as 0, and so does one below the least normal number (1.2e-38 in
        float32); with a traced NaN every example is dropped.
      scope: which entries of an example share one norm, from `optaxclip.scopes`; all of them if
        None.
      response: "clip", "normalize", "smooth", "auto_s", or a function (see `optaxclip.responses`).
        A new norm above the threshold becomes the threshold, and a negative one becomes 0.
      split: "uniform", `threshold / sqrt(K)` for each of `K` groups, or "size",
        `threshold * sqrt(D_i / D)` for a group of `D_i` of all `D` entries.
      is_padding: bool `[examples]`, which examples are padding and add nothing; None for none.
      specs: needed inside `shard_map` and `pmap` if devices have different gradients:
        `PartitionSpec("x")`, or a pytree prefix of the gradients with such specs, says that the
        devices along "x" have different examples. Gradients that are split otherwise are refused.

    Returns:
      The sum, and what happened to the examples.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar, leaves that do not share an
        axis of examples, or an unknown name; inside `shard_map` and `pmap`, for gradients of which
        a device may hold a part.
      TypeError: if the threshold is not a number, the scope not a scope, or a leaf not a dense array.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import per_example
      >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 1.0]])}
      >>> result = per_example.clip_sum(grads, 1.0)
      >>> print(result.grads["w"].round(5), result.num_clipped, result.num_dropped, result.norms)
      [0.9 1.2] 1 1 [5.  0.5 nan]
    """
    clip = ExampleClip.create(threshold, scope, response, split)
    flat = flatten(grads, "grads")
    sums = _clip_and_sum(flat, clip, specs, is_padding)
    bound = clip.compute_thresholds(example_spec(flat))[2]
    return result_of(sums, sum_tree(flat, sums.leaves))._replace(bound=bound)


def per_example_global_norm_clip(
    grads: PyTree, l2_norm_clip: ArrayLike, *, specs: PyTree = None
) -> tuple[PyTree, Array]:
    """Clips each example by its global norm, and sums: Optax's function of this name.

    Unlike Optax's function it keeps the bound in every dtype, and drops examples that are not
    finite. `clip_sum` explains the guarantees, and also tells how many examples were dropped.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      grads: leaves `[examples, ...]`; integers are summed as float32.
      l2_norm_clip: the largest norm of one example.
      specs: as in `clip_sum`.

    Returns:
      The sum in float32 or wider, and int32[], how many examples were above the threshold.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar, or leaves that do not share an
        axis of examples; inside `shard_map` and `pmap` as `clip_sum`.
      TypeError: if the threshold is not a number, or a leaf is not a dense array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
      >>> total, num_clipped = optaxclip.per_example_global_norm_clip(grads, 1.25)
      >>> print(total[0], num_clipped)
      [1.75 1.75 1.75] 3
    """
    threshold = check_example_threshold(l2_norm_clip, "l2_norm_clip")
    flat = _flatten_as_float(grads)
    sums = _clip_and_sum(
        flat, ExampleClip.create(threshold, scopes.tree(), "clip", "uniform"), specs
    )
    return flat.unflatten(sums.leaves), sums.num_clipped


def per_example_layer_norm_clip(
    grads: PyTree, global_l2_norm_clip: ArrayLike, uniform: bool = True, *, specs: PyTree = None
) -> tuple[PyTree, PyTree]:
    """Clips each leaf of each example by its own norm, and sums: Optax's function of this name.

    Source: McMahan, Ramage, Talwar and Zhang, 2017, arXiv 1710.06963.

    Args:
      grads: leaves `[examples, ...]`; integers are summed as float32.
      global_l2_norm_clip: the largest norm `C` of one example.
      uniform: whether each of `K` leaves may have the norm `C / sqrt(K)`; if False, a leaf of `D_i`
        of all `D` entries may have `C * sqrt(D_i / D)`.
      specs: as in `clip_sum`.

    Returns:
      The sum in float32 or wider, and for each leaf how many examples were above its threshold,
      int32[].

    Raises:
      ValueError: as in `per_example_global_norm_clip`.
      TypeError: as in `per_example_global_norm_clip`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]]), "b": jnp.array([0.1, 2.0])}
      >>> total, num_clipped = optaxclip.per_example_layer_norm_clip(grads, 2.0**0.5)
      >>> print(total["w"], total["b"], num_clipped["w"], num_clipped["b"])
      [0.9 1.2] 1.1 1 1
    """
    threshold = check_example_threshold(global_l2_norm_clip, "global_l2_norm_clip")
    flat = _flatten_as_float(grads)
    split = "uniform" if check_bool(uniform, "uniform") else "size"
    sums = _clip_and_sum(flat, ExampleClip.create(threshold, scopes.leaf(), "clip", split), specs)
    # Counts are in the order of the sorted names, and leaves in the order of the tree.
    names = flat.names()
    counts = [sums.num_clipped[sorted(names).index(name)] for name in names]
    return flat.unflatten(sums.leaves), flat.unflatten(counts)


def result_of(sums: ClippedSums, grads: PyTree) -> PerExampleResult:
    """The result for users, from the sums and the tree of the summed gradients."""
    chex.assert_trees_all_equal_structs(sums.num_clipped, sums.norms)
    chex.assert_shape([sums.num_dropped, sums.num_unclipped], ())
    return PerExampleResult(
        grads, sums.num_clipped, sums.num_dropped, sums.norms, sums.num_unclipped
    )


def padding_flags(is_padding: ArrayLike | None, examples: int) -> Array:
    """Which examples are padding, checked; None means none."""
    flags = jnp.zeros(examples, bool) if is_padding is None else jnp.asarray(is_padding)
    if flags.dtype != jnp.bool_:
        raise TypeError(f"is_padding must be bool, got dtype {flags.dtype}")
    if flags.shape != (examples,):
        raise ValueError(
            f"is_padding must have one entry for each of {examples} examples, got shape "
            f"{flags.shape}"
        )
    return flags


def _clip_and_sum(
    flat: FlatTree, clip: ExampleClip, specs: PyTree, is_padding: ArrayLike | None = None
) -> ClippedSums:
    examples = get_batch_size(flat, "grads")
    check_examples_unsharded(flat, specs, of_examples=True, remedy=_REMEDY)
    return clip.sums(flat.inexact_leaves(), example_spec(flat), padding_flags(is_padding, examples))


def example_spec(flat: FlatTree) -> FlatTree:
    """The tree of one example, whose measured leaves are shapes and dtypes only."""
    leaves = [
        jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf))
        if i in set(flat.inexact_indices)
        else leaf
        for i, leaf in enumerate(flat.leaves)
    ]
    return flat._replace(leaves=leaves)


def sum_tree(flat: FlatTree, measured: list[Array]) -> PyTree:
    """The tree of the sum, with zeros for leaves that are not measured."""
    return flat._replace(leaves=[_zeros_for_unmeasured(leaf) for leaf in flat.leaves]).unflatten(
        measured
    )


def _zeros_for_unmeasured(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    zeros: Callable[..., Any] = np.zeros if dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(np.shape(leaf)[1:], dtype)


def _flatten_as_float(grads: PyTree) -> FlatTree:
    """The flattened tree, with integers as float32, as in Optax."""
    flat = flatten(grads, "grads", integer_policy="measure")
    get_batch_size(flat, "grads")
    return flat._replace(leaves=[_cast_to_floating(leaf) for leaf in flat.leaves])


def _cast_to_floating(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_float else array.astype(jnp.float32)


_REMEDY = (
    "If the devices along an axis have different examples, and whole gradients of them, say so by "
    'specs=PartitionSpec("axis"); or by specs=PartitionSpec() that all devices have the same. For '
    "gradients that are split, clip under jit on an explicit mesh (jax.make_mesh), where the norms "
    "are those of all devices"
)

"""Clips per-example gradients and sums them."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip.per_example._batched_clip as batched_clip
import optaxclip.scopes as scopes
from optaxclip._backend.leaf_shardings import check_examples_unsharded
from optaxclip._backend.packing import ravel_and_concatenate, split_and_reshape
from optaxclip._base.numerics import combine_norms, norm_dtype
from optaxclip._base.trees import FlatTree, Grouping, flatten
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_bool, check_choice, short_repr
from optaxclip._engine.plan import resolve_scope
from optaxclip._loss_arguments import get_batch_size
from optaxclip.per_example._noise import QuantileThreshold
from optaxclip.responses import Response, as_response
from optaxclip.scopes import Scope
from optaxclip.thresholds._constant import check_threshold, resolve_rule
from optaxclip.thresholds._rule import check_threshold_value, update_rule

Split = Literal["uniform", "size"]
ExampleThreshold: TypeAlias = ArrayLike | Mapping[str, ArrayLike]

_WHOLE_EXAMPLE = scopes.tree()


class ExampleClip(NamedTuple):
    """Checked options of per-example clipping. Only `threshold` can be traced under `jit`."""

    threshold: ExampleThreshold
    scope: Scope
    response: Response
    split: Split

    @classmethod
    def create(
        cls, threshold: ExampleThreshold, scope: Scope | None, response: str | Response, split: str
    ) -> "ExampleClip":
        """Checks the options of a call."""
        threshold = check_example_threshold(threshold, "threshold")
        scope = _WHOLE_EXAMPLE if scope is None else resolve_scope(scope)
        checked_split: Split = check_choice(split, get_args(Split), "split")
        return cls(threshold, scope, as_response(response), checked_split)

    def compute_thresholds(self, one: FlatTree) -> tuple[Grouping, list[Array], Array]:
        """Returns the groups, their thresholds `[*group]`, and the threshold `[]` of an example."""
        grouping = self.scope(one)
        dtype = norm_dtype({jnp.result_type(leaf) for leaf in one.inexact_leaves()})
        if isinstance(self.threshold, Mapping):
            thresholds = _compute_named_thresholds(dict(self.threshold), grouping, dtype)
            return grouping, thresholds, combine_norms(ravel_and_concatenate(thresholds))
        # Only a traced threshold can be negative. It is treated as 0.
        bound = jnp.maximum(jnp.asarray(self.threshold).astype(dtype), 0)  # f32[]
        sizes = [math.prod(np.shape(leaf)) for leaf in one.inexact_leaves()]
        fractions = _split_square(grouping, sizes, self.split)
        roots = [jnp.asarray(math.sqrt(fraction)).astype(dtype) for fraction in fractions]
        rows = zip(roots, grouping.groups, strict=True)
        # f32[] -> f32[*group]
        thresholds = [jnp.broadcast_to(bound * root, group.shape) for root, group in rows]
        return grouping, thresholds, bound

    def sums(self, leaves: list[Any], one: FlatTree, is_padding: Array) -> batched_clip.ClippedSums:
        """Clips measured leaves `[examples, ...]` and sums them."""
        grouping, thresholds, _ = self.compute_thresholds(one)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        return batched_clip.compute_clipped_sums(
            arrays,
            thresholds,
            is_padding,
            grouping=grouping,
            response=self.response,
            are_inputs=not any(isinstance(array, Tracer) for array in arrays),
        )


def check_example_threshold(threshold: Any, argument: str) -> ExampleThreshold:
    """Checks that a threshold is a number, or a dict that maps group names to numbers."""
    if isinstance(threshold, Mapping):
        items = threshold.items()
        return {name: _check_number(value, f"{argument}[{name!r}]") for name, value in items}
    return _check_number(threshold, argument)


def _check_number(threshold: Any, argument: str) -> Any:
    if callable(threshold) or isinstance(threshold, QuantileThreshold):
        raise TypeError(
            f"{argument} must be a number or scalar array, got {short_repr(threshold)}; pass the "
            "threshold of the current step, or use per_example_clip_and_aggregate"
        )
    return check_threshold_value(threshold, argument, by_name=True)


def _compute_named_thresholds(
    threshold: dict[str, Any], grouping: Grouping, dtype: jnp.dtype
) -> list[Array]:
    """Returns the thresholds `[*group]` of a dict that maps group names to them."""
    if grouping.layout == "dict":
        names = [(group.names[0], group.shape) for group in grouping.groups]
    else:
        names = [(name, ()) for name in grouping.names]
    rule = resolve_rule(check_threshold(threshold), names)
    norms = ravel_and_concatenate([jnp.zeros(shape, dtype) for _, shape in names])  # f32[groups]
    thresholds, _ = update_rule(rule, rule.init(norms), norms, None, "threshold")
    # f32[groups] -> f32[*group]
    return split_and_reshape(thresholds.target, [group.shape for group in grouping.groups])


def _split_square(grouping: Grouping, sizes: list[int], split: Split) -> list[float]:
    """Returns the groups' fractions of the squared threshold, which sum to 1."""
    counts = [math.prod(group.shape) for group in grouping.groups]
    if split == "uniform":
        return [1 / max(sum(counts), 1)] * len(counts)
    elements = [sum(sizes[i] for i in group.leaf_indices) for group in grouping.groups]
    # Denominators are at least 1 to support empty trees and arrays without groups.
    denominators = [max(count, 1) * max(sum(sizes), 1) for count in counts]
    return [own / total for own, total in zip(elements, denominators, strict=True)]


def clip_sum(
    grads: PyTree,
    threshold: ExampleThreshold,
    *,
    scope: Scope | None = None,
    response: str | Response = "clip",
    split: Literal["uniform", "size"] = "uniform",
    is_padding: ArrayLike | None = None,
    specs: PyTree = None,
) -> batched_clip.PerExampleResult:
    """Clips per-example gradients and sums them.

    The L2 norm of an example's contribution never exceeds `threshold`, in any dtype of the
    gradients. Norms, products, and the sum are computed in float32 (float64 for 64-bit leaves).
    Rounding may reduce norms at the threshold, by a fraction of at most 2e-6 in float32. Examples
    with a NaN or infinite element contribute nothing. Other examples below their threshold are
    summed unchanged. Use `noisy_mean` to make the sum private.

    Sources: Abadi et al., 2016, arXiv 1607.00133. Per leaf: McMahan, Ramage, Talwar, and Zhang,
    2017, arXiv 1710.06963.

    Args:
      grads: Real or complex leaves `[examples, ...]`. `None` leaves are kept. Integer, bool, and
        `float0` leaves are returned as zeros without the example axis.
      threshold: The maximum L2 norm of an example's contribution. A number or scalar array is
        divided between the groups according to `split`. A dict maps group names to their
        thresholds. Traced thresholds that are negative or subnormal (below 1.2e-38 in float32) are
        treated as 0. If a traced threshold is NaN, all examples are dropped.
      scope: A scope from `optaxclip.scopes`, which defines which elements of an example share a
        norm. Defaults to all elements.
      response: "clip", "normalize", "smooth", "auto_s", or a function (see `optaxclip.responses`).
        The returned norms are clipped to the range from 0 to the threshold.
      split: If "uniform", the threshold of each of `K` groups is `threshold / sqrt(K)`. If "size",
        the threshold of a group with `D_i` of `D` elements is `threshold * sqrt(D_i / D)`.
      is_padding: bool `[examples]`, True for padding, which adds nothing. Defaults to no padding.
      specs: A `PartitionSpec`, or a pytree prefix of the gradients with such specs. It is required
        inside `shard_map` and `pmap` if the gradients differ between devices. `PartitionSpec("x")`
        means that devices along "x" have different examples. Examples must not be sharded.

    Returns:
      A `PerExampleResult` with the sum, the norms, and the counts.

    Raises:
      ValueError: If an argument is out of range, if the leaves do not share an example axis, or if
        gradients may be sharded inside `shard_map` or `pmap`.
      TypeError: If an argument has the wrong type, or if a leaf is not a dense array.

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
    return batched_clip.result_of(sums, sum_tree(flat, sums.leaves))._replace(bound=bound)


def per_example_global_norm_clip(
    grads: PyTree, l2_norm_clip: ArrayLike, *, specs: PyTree = None
) -> tuple[PyTree, Array]:
    """Clips examples by global norm and sums them, like Optax's function of the same name.

    Unlike Optax's function, it enforces the bound in all dtypes and drops non-finite examples, like
    `clip_sum` (Abadi et al., 2016, arXiv 1607.00133).

    Args:
      grads: Leaves `[examples, ...]`. Integers are summed as float32.
      l2_norm_clip: The maximum norm of an example.
      specs: The specs of the gradients, as in `clip_sum`.

    Returns:
      The sum in float32 or wider, and the number of examples above the threshold, int32[].

    Raises:
      ValueError: As in `clip_sum`.
      TypeError: As in `clip_sum`.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
      >>> total, num_clipped = optaxclip.per_example_global_norm_clip(grads, 1.25)
      >>> print(total[0], num_clipped)
      [1.75 1.75 1.75] 3
    """
    threshold = check_example_threshold(l2_norm_clip, "l2_norm_clip")
    flat, clip = _flatten_as_float(grads), ExampleClip.create(threshold, None, "clip", "uniform")
    sums = _clip_and_sum(flat, clip, specs)
    return flat.unflatten(sums.leaves), sums.num_clipped


def per_example_layer_norm_clip(
    grads: PyTree, global_l2_norm_clip: ArrayLike, uniform: bool = True, *, specs: PyTree = None
) -> tuple[PyTree, PyTree]:
    """Clips leaves of examples by norm and sums them, like Optax's function of the same name.

    Source: McMahan, Ramage, Talwar, and Zhang, 2017, arXiv 1710.06963.

    Args:
      grads: Leaves `[examples, ...]`. Integers are summed as float32.
      global_l2_norm_clip: The maximum norm of an example.
      uniform: If True, splits the threshold like `split="uniform"` in `clip_sum`. If False, like
        "size".
      specs: The specs of the gradients, as in `clip_sum`.

    Returns:
      The sum in float32 or wider, and a tree with the number of clipped examples per leaf, int32[].

    Raises:
      ValueError: As in `clip_sum`.
      TypeError: As in `clip_sum`.

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


def padding_flags(is_padding: ArrayLike | None, examples: int) -> Array:
    """Checks and returns the flags of padding, bool `[examples]`."""
    flags = jnp.zeros(examples, bool) if is_padding is None else jnp.asarray(is_padding)
    if flags.dtype != jnp.bool_:
        raise TypeError(f"is_padding must have dtype bool, got dtype {flags.dtype}")
    if flags.shape != (examples,):
        raise ValueError(f"is_padding must have shape {(examples,)}, got shape {flags.shape}")
    return flags


def _flatten_as_float(grads: PyTree) -> FlatTree:
    """Flattens a tree and casts integers to float32, like Optax."""
    flat = flatten(grads, "grads", integer_policy="measure")
    get_batch_size(flat, "grads")
    arrays = map(jnp.asarray, flat.leaves)  # [examples, ...]
    return flat._replace(
        leaves=[x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype("float32") for x in arrays]
    )


_HINT = (
    'pass specs=PartitionSpec("axis") if the examples are sharded along an axis, pass '
    "specs=PartitionSpec() if the gradients are replicated, or use jit on an explicit mesh "
    "(jax.make_mesh)"
)


def _clip_and_sum(
    flat: FlatTree, clip: ExampleClip, specs: PyTree, is_padding: ArrayLike | None = None
) -> batched_clip.ClippedSums:
    examples = get_batch_size(flat, "grads")
    check_examples_unsharded(flat, specs, of_examples=True, remedy=_HINT)
    return clip.sums(flat.inexact_leaves(), example_spec(flat), padding_flags(is_padding, examples))


def example_spec(flat: FlatTree) -> FlatTree:
    """Returns the tree of one example, with the shapes and dtypes of the measured leaves."""
    leaves = list(flat.leaves)
    for i in flat.inexact_indices:  # [examples, ...] -> [...]
        leaves[i] = jax.ShapeDtypeStruct(np.shape(leaves[i])[1:], jnp.result_type(leaves[i]))
    return flat._replace(leaves=leaves)


def sum_tree(flat: FlatTree, measured: list[Array]) -> PyTree:
    """Returns the tree of the sum, with zeros for leaves that are not measured."""
    zeros: list[Any] = []
    for leaf in flat.leaves:
        shape, dtype = np.shape(leaf)[1:], jnp.result_type(leaf)  # [examples, ...] -> [...]
        # Arrays of float0 are NumPy arrays, as in the results of `jax.grad`.
        is_float0 = dtype == jax.dtypes.float0
        zeros.append(np.zeros(shape, dtype) if is_float0 else jnp.zeros(shape, dtype))
    return flat._replace(leaves=zeros).unflatten(measured)

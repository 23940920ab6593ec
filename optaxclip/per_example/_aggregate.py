"""Per-example clipping as the first stage of an Optax chain, with Gaussian noise."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._backend.global_view import Transformation, transformation
from optaxclip._base.numerics import is_real
from optaxclip._base.state import check_state, copy_arrays, register_state, safe_increment
from optaxclip._base.trees import FlatTree, flatten, leaf_name
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_called, check_choice, validate_call
from optaxclip._loss_arguments import get_batch_size
from optaxclip.per_example._clip_sum import (
    ExampleClip,
    ExampleThreshold,
    example_spec,
    padding_flags,
    sum_tree,
)
from optaxclip.per_example._noise import add_noise, is_key, is_zero, warn_of_shared_noise
from optaxclip.per_example._quantile import QuantileThreshold, adjust_noise_multiplier
from optaxclip.responses import Response
from optaxclip.scopes import Scope
from optaxclip.thresholds.adaptive import cast_to_float32, check_minimum
from optaxclip.thresholds.rule import check_not_component, check_schedule, check_threshold_value

AggregateThreshold: TypeAlias = ExampleThreshold | Callable[[Array], ArrayLike] | QuantileThreshold
Reduction = Literal["mean", "sum"]


@register_state
class PerExampleState(NamedTuple):
    """State of `per_example_clip_and_aggregate`.

    Attributes:
      steps: int32[], steps so far.
      key: the key of the next step's noise; None without noise.
      threshold: float32[], the threshold of the next step if it follows a quantile; otherwise None.
      num_clipped: int32[], how many examples of the last step were above their threshold. Not private.
      num_dropped: int32[], how many examples of the last step were not finite. Not private.
    """

    steps: Array
    key: Any
    threshold: Any
    num_clipped: Array
    num_dropped: Array


@validate_call(transformation=True, one_shot_call="per_example.clip_sum(grads, 1.0)")
def per_example_clip_and_aggregate(
    threshold: AggregateThreshold,
    noise_multiplier: ArrayLike,
    key: ArrayLike | None = None,
    *,
    reduction: Reduction = "mean",
    batch_size: ArrayLike | None = None,
    scope: Scope | None = None,
    response: str | Response = "clip",
    split: Literal["uniform", "size"] = "uniform",
) -> Transformation[PerExampleState]:
    """Clips each example, sums, adds noise and divides, as DP-SGD does.

    It must be the first stage of a chain, and takes gradients with a leading axis of examples, as
    `optax.contrib.differentially_private_aggregate` does. The guarantees are those of `clip_sum`.
    `optax.MultiSteps` around it is an error, because `MultiSteps` hands on a mean, which has no
    examples; for microbatches, use `clipped_grad` and `noisy_mean`. The noise is Gaussian with a
    standard deviation of `noise_multiplier` times the threshold, drawn and added in float32 or wider;
    results are then rounded to the dtype of the updates.

    How private a run is depends on how batches are sampled and on the number of steps; an
    accountant computes it (see `optaxclip.per_example`). JAX's random generators are not
    cryptographic.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      threshold: the largest L2 norm of one example's contribution, as in `clip_sum`; a schedule
        `count -> threshold`; or `quantile_threshold(...)`, whose threshold is in the state. Its `count_noise`
        must exceed half the noise multiplier; the noise on the sum then follows
        `adjust_noise_multiplier`, which is larger.
      noise_multiplier: the ratio of the noise's standard deviation to the threshold. It has no default:
        0 means no noise, which is not private.
      key: a key from `jax.random`, or an int to make one from; needed for noise. The state keeps a
        key in the form in which it came; from an int, it is made by `jax.random.key`. Flax's
        `to_bytes` cannot store such a key; if you use it, pass `jax.random.PRNGKey(seed)`. Without
        a key `optax.inject_hyperparams` needs `static_args=("noise_multiplier",)`.
      reduction: "mean" or "sum".
      batch_size: the number that a mean divides by; if None, the number of examples that are not
        padding. Under Poisson sampling pass the expected number: the true one is not private.
      scope: which entries of an example share one norm; all of them if None.
      response: as in `clip_sum`.
      split: as in `clip_sum`.

    Returns:
      A transformation with a `PerExampleState`. Its update takes `is_padding=`, bool `[examples]`.

    Raises:
      ValueError: for a threshold or a multiplier that is negative or NaN, noise without a key, an
        unknown name, or a `noise_multiplier` that is not below `2 * count_noise`; in the update,
        for gradients without an axis of examples, and inside `shard_map` or `pmap` for sums that
        differ over devices, as all of them would get the same noise.
      TypeError: for a threshold or a multiplier that is not a number, or a `key` that is not a key.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> def loss_fn(w, x, y):
      ...     return (jnp.dot(w, x) - y) ** 2
      >>> tx = optaxclip.per_example_clip_and_aggregate(1.0, noise_multiplier=1.1, key=0)
      >>> w, x, y = jnp.zeros(2), jnp.ones((64, 2)), jnp.ones(64)
      >>> state = tx.init(w)
      >>> grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(w, x, y)
      >>> updates, state = tx.update(grads, state, w)
      >>> print(updates, state.num_clipped)
      [-0.7 -0.7] 64
    """
    checked = ExampleClip.create(_static_threshold(threshold), scope, response, split)
    rule = threshold if isinstance(threshold, QuantileThreshold) else None
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    if rule is not None:
        sum_multiplier = adjust_noise_multiplier(noise_multiplier, rule.count_noise)
    else:
        sum_multiplier = cast_to_float32(noise_multiplier)
    is_noisy = not is_zero(noise_multiplier) or (rule and not is_zero(rule.count_noise))
    first_key = _check_key(key, is_needed=bool(is_noisy))
    reduction = check_choice(reduction, get_args(Reduction), "reduction")

    def init(params: PyTree) -> PerExampleState:
        warn_of_shared_noise(jax.tree.leaves(params), first_key)
        count, *of_step = (jnp.zeros((), jnp.int32) for _ in range(3))
        state = PerExampleState(count, first_key, rule.init() if rule else None, *of_step)
        return copy_arrays(state)

    if batch_size is not None:
        batch_size = check_minimum(batch_size, 1, "batch_size")

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        is_padding: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PerExampleState]:
        del extra_args
        check_state(state, PerExampleState, "per_example_clip_and_aggregate", updates=updates)
        flat = flatten(updates, "updates")
        _check_example_axis(flat, params)
        _check_sums_replicated(flat)
        flags = padding_flags(is_padding, get_batch_size(flat, "updates", f". {_REMEDY}"))
        one = example_spec(flat)
        now = (
            state.threshold
            if rule
            else threshold(state.steps)
            if callable(threshold)
            else checked.threshold
        )
        clip = checked._replace(threshold=now)
        sums = clip.sums(flat.inexact_leaves(), one, flags)
        examples = jnp.sum(~flags, dtype=jnp.int32)
        size = examples if batch_size is None else batch_size
        next_key, for_sum, for_count, next_threshold = state.key, None, None, None
        if is_noisy:
            next_key, for_sum, for_count = jax.random.split(state.key, 3)
        total = sums.leaves
        if for_sum is not None:
            bound = clip.compute_thresholds(one)[2]
            total = add_noise(
                total, flat.names(), for_sum, sum_multiplier.astype(bound.dtype) * bound
            )
        if rule:
            counts = (sums.num_unclipped, examples)
            next_threshold = rule.update(state.threshold, *counts, for_count, batch_size=size)
        divisor = jnp.maximum(cast_to_float32(size), 1) if reduction == "mean" else jnp.ones(())
        new_state = PerExampleState(
            steps=safe_increment(state.steps),
            key=next_key,
            threshold=next_threshold,
            num_clipped=examples - sums.num_unclipped - sums.num_dropped,
            num_dropped=sums.num_dropped,
        )
        rounded, like = _divide_and_cast(total, divisor, one), one.inexact_leaves()
        chex.assert_shape(rounded, [x.shape for x in like])
        chex.assert_type(rounded, [x.dtype for x in like])
        return sum_tree(flat, rounded), meshes.reuse_buffers(state, new_state)

    return transformation(init, update)


def _static_threshold(threshold: AggregateThreshold) -> ExampleThreshold:
    """The threshold if it is the same at each step, else 0; refuses functions other than schedules."""
    check_called(threshold, "optaxclip.per_example", "threshold", "per_example")
    check_not_component(threshold, "threshold")
    if callable(threshold):
        check_schedule(threshold, "threshold")
    if callable(threshold) or isinstance(threshold, QuantileThreshold):
        return 0.0
    return (
        threshold
        if isinstance(threshold, Mapping)
        else check_threshold_value(threshold, "threshold", schedule=True)
    )


_REMEDY = (
    "Pass the gradients of examples, as jax.vmap(jax.grad(loss_fn), (None, 0)) gives them. "
    "optax.MultiSteps cannot stand around per_example_clip_and_aggregate, because it hands on the "
    "mean of what it got, in which no example can be clipped: for microbatches take "
    "per_example.clipped_grad(microbatch_size=) and per_example.noisy_mean"
)


def _check_example_axis(flat: FlatTree, params: PyTree | None) -> None:
    """Refuses a gradient without examples, because its rows would be taken for examples."""
    if params is None:
        return
    of_params = flatten(params, "params")
    shapes = {of_params.paths[i]: np.shape(of_params.leaves[i]) for i in of_params.inexact_indices}
    for i in flat.inexact_indices:
        shape = np.shape(flat.leaves[i])
        if shapes.get(flat.paths[i]) == shape:
            raise ValueError(
                "updates must have an axis of examples in front of the axes of the parameters; "
                f"leaf {leaf_name(flat.paths[i])!r} has the shape {shape} of its parameter. "
                f"{_REMEDY}"
            )


def _check_sums_replicated(flat: FlatTree) -> None:
    """Refuses sums that differ over devices, because all of them would get the same noise."""
    leaves, manual = flat.inexact_leaves(), meshes.manual_axes()
    different = meshes.tree_varying_axes(leaves) if meshes.has_vma_tracking() else manual
    if different:
        raise ValueError(
            "per_example_clip_and_aggregate would add the noise of one key to the sum of each "
            f"device along {sorted(different)}, which cancels in their differences. Inside of "
            "shard_map and pmap take clipped_grad (or clip_sum), then jax.lax.psum(result.grads, "
            "...), then per_example.noisy_mean; or call this stage under jit, outside of them"
        )


def _divide_and_cast(leaves: list[Array], divisor: Array, example: FlatTree) -> list[Array]:
    """The leaves divided by `divisor`, in the dtypes of the updates."""
    pairs = zip(leaves, example.inexact_leaves(), strict=True)
    return [(x / divisor.astype(x.dtype)).astype(like.dtype) for x, like in pairs]


def _key_from(seed: Any) -> Array:
    """A key from an int, all of whose bits count; JAX 0.10.2 cuts Python ints to 32 bits."""
    if isinstance(seed, Tracer) or -(2**31) <= int(seed) < 2**32:
        return jax.random.key(seed)
    low, rest = int(seed) & 0xFFFFFFFF, int(seed) >> 32
    key = jax.random.key(low)
    while rest not in (0, -1):
        key, rest = jax.random.fold_in(key, np.uint32(rest & 0xFFFFFFFF)), rest >> 32
    return key if int(seed) >= 0 else jax.random.fold_in(key, 0)


def _check_key(key: Any, *, is_needed: bool) -> Array | None:
    if key is None:
        if is_needed:
            raise ValueError(
                "key must be given for noise: a key from jax.random, or an int. (It may be left "
                "out if noise_multiplier is the number 0; with optax.inject_hyperparams pass "
                'static_args=("noise_multiplier",))'
            )
        return None
    if np.shape(key) == () and is_real(key) and jnp.issubdtype(jnp.result_type(key), jnp.integer):
        return _key_from(key)
    if not is_key(key):
        raise TypeError(f"key must be one key from jax.random, or an int, got {key!r}")
    return jnp.asarray(key)

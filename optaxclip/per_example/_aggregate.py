"""Per-example clipping with Gaussian noise, as the first stage of an Optax chain."""

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
from optaxclip.per_example._noise import (
    QuantileThreshold,
    add_noise,
    adjust_noise_multiplier,
    is_key,
    is_zero,
    warn_of_shared_noise,
)
from optaxclip.responses import Response
from optaxclip.scopes import Scope
from optaxclip.thresholds._adaptive import cast_to_float32, check_minimum
from optaxclip.thresholds._rule import check_not_component, check_schedule, check_threshold_value

AggregateThreshold: TypeAlias = ExampleThreshold | Callable[[Array], ArrayLike] | QuantileThreshold
Reduction = Literal["mean", "sum"]


@register_state
class PerExampleState(NamedTuple):
    """The state of `per_example_clip_and_aggregate`. The counts are not private.

    Attributes:
      steps: int32[], the number of steps.
      key: The key for the noise of the next step, or None if there is no noise.
      threshold: float32[], the next threshold if it follows a quantile, and None otherwise.
      num_clipped: int32[], the number of examples above their threshold on the most recent step.
      num_dropped: int32[], the number of non-finite examples on the most recent step.
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
    """Clips examples, sums them, adds noise, and divides by the batch size, as in DP-SGD.

    The transformation must be the first stage of a chain. Like
    `optax.contrib.differentially_private_aggregate`, it requires gradients with a leading example
    axis. Do not wrap it in `optax.MultiSteps`, which passes means without examples. For
    microbatches, use `clipped_grad` and `noisy_mean` instead. `clip_sum` explains the guarantees.

    Gaussian noise is drawn and added in float32 or wider. Its standard deviation is
    `noise_multiplier` times the threshold. The results are then rounded to the dtypes of the
    updates. Note that JAX's random generators are not cryptographic.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      threshold: The maximum L2 norm of an example's contribution, as in `clip_sum`. It can also be
        a schedule `count -> threshold`, or `quantile_threshold(...)`. The `count_noise` of a
        quantile threshold must exceed half the noise multiplier. The noise on the sum is then
        larger (see `adjust_noise_multiplier`).
      noise_multiplier: The ratio of the standard deviation of the noise to the threshold. If it is
        0, the results are not private.
      key: A key from `jax.random`, or an int from which `jax.random.key` creates one. It is
        required for noise. Flax's `to_bytes` cannot store typed keys. If you use it, pass
        `jax.random.PRNGKey(seed)`. If you use `optax.inject_hyperparams` without a key, also pass
        `static_args=("noise_multiplier",)`.
      reduction: "mean" (the default) or "sum".
      batch_size: The divisor of the mean. Defaults to the number of examples without padding. For
        Poisson sampling, use the expected number because the actual number is not private.
      scope: The elements of an example that share a norm, as in `clip_sum`. Defaults to all.
      response: The response to a norm above its threshold, as in `clip_sum`.
      split: How to divide the threshold between the groups, as in `clip_sum`.

    Returns:
      A transformation with a `PerExampleState`. `update` accepts `is_padding=`, bool `[examples]`.

    Raises:
      ValueError: If an argument is out of range, or if noise is requested without a key. Also
        raised by `update` if the gradients have no example axis, or if sums differ across devices
        inside `shard_map` or `pmap`, since all devices add the same noise.
      TypeError: If a threshold or multiplier is not a number, or if `key` is not a key.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.per_example_clip_and_aggregate(1.0, noise_multiplier=1.1, key=0)
      >>> w, x, y = jnp.zeros(2), jnp.ones((64, 2)), jnp.ones(64)
      >>> grad_fn = jax.grad(lambda w, x, y: (jnp.dot(w, x) - y) ** 2)
      >>> grads = jax.vmap(grad_fn, (None, 0, 0))(w, x, y)
      >>> updates, state = tx.update(grads, tx.init(w), w)
      >>> print(updates, state.num_clipped)
      [-0.7 -0.7] 64
    """
    clip = ExampleClip.create(_check_threshold(threshold), scope, response, split)
    rule = threshold if isinstance(threshold, QuantileThreshold) else None
    noise_multiplier = check_minimum(noise_multiplier, 0, "noise_multiplier")
    sum_multiplier, is_noisy = cast_to_float32(noise_multiplier), not is_zero(noise_multiplier)
    if rule is not None:
        sum_multiplier = adjust_noise_multiplier(noise_multiplier, rule.count_noise)
        is_noisy = is_noisy or not is_zero(rule.count_noise)
    init_key = _check_key(key, is_needed=is_noisy)
    reduction = check_choice(reduction, get_args(Reduction), "reduction")
    if batch_size is not None:
        batch_size = check_minimum(batch_size, 1, "batch_size")

    def init(params: PyTree) -> PerExampleState:
        warn_of_shared_noise(jax.tree.leaves(params), init_key)
        steps, *counts = (jnp.zeros((), jnp.int32) for _ in range(3))
        state = PerExampleState(steps, init_key, rule.init() if rule else None, *counts)
        return copy_arrays(state)

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
        flags = padding_flags(is_padding, get_batch_size(flat, "updates", f"; {_HINT}"))
        one = example_spec(flat)
        step_clip = clip
        if rule:
            step_clip = clip._replace(threshold=state.threshold)
        elif callable(threshold):
            step_clip = clip._replace(threshold=threshold(state.steps))
        sums = step_clip.sums(flat.inexact_leaves(), one, flags)  # [examples, ...] -> [...]
        # bool[examples] -> i32[]
        examples = jnp.sum(~flags, dtype=jnp.int32)
        size = examples if batch_size is None else batch_size
        total, next_key, next_threshold, count_key = sums.leaves, state.key, None, None
        if is_noisy:
            next_key, sum_key, count_key = jax.random.split(state.key, 3)
            bound = step_clip.compute_thresholds(one)[2]  # f32[]
            std = sum_multiplier.astype(bound.dtype) * bound
            total = add_noise(total, flat.names(), sum_key, std)
        if rule:
            counts = (sums.num_unclipped, examples)
            next_threshold = rule.update(state.threshold, *counts, count_key, batch_size=size)
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


def _check_threshold(threshold: AggregateThreshold) -> ExampleThreshold:
    """Checks a threshold, and returns 0 for thresholds that depend on the step."""
    check_called(threshold, "optaxclip.per_example", "threshold", "per_example")
    check_not_component(threshold, "threshold")
    if callable(threshold):
        check_schedule(threshold, "threshold")
    if callable(threshold) or isinstance(threshold, QuantileThreshold):
        return 0.0
    if isinstance(threshold, Mapping):
        return threshold
    return check_threshold_value(threshold, "threshold", schedule=True)


def _check_key(key: Any, *, is_needed: bool) -> Array | None:
    """Checks a key, or creates a key from an int."""
    if key is None:
        if is_needed:
            raise ValueError(
                "key is required to add noise; pass a JAX PRNG key or an int seed, or pass "
                "noise_multiplier=0 (under optax.inject_hyperparams, add "
                'static_args=("noise_multiplier",))'
            )
        return None
    if np.shape(key) == () and is_real(key) and jnp.issubdtype(jnp.result_type(key), jnp.integer):
        # JAX truncates seeds to 32 bits (as of JAX 0.10.2), so higher words and the sign are folded
        # in.
        if isinstance(key, Tracer) or -(2**31) <= int(key) < 2**32:
            return jax.random.key(key)
        result, rest = jax.random.key(int(key) & 0xFFFFFFFF), int(key) >> 32
        while rest not in (0, -1):
            result, rest = jax.random.fold_in(result, np.uint32(rest & 0xFFFFFFFF)), rest >> 32
        return result if int(key) >= 0 else jax.random.fold_in(result, 0)
    if not is_key(key):
        raise TypeError(f"key must be a single JAX PRNG key or an int seed, got {key!r}")
    return jnp.asarray(key)


_HINT = (
    "pass per-example gradients, as from jax.vmap(jax.grad(loss_fn), (None, 0)). optax.MultiSteps "
    "cannot wrap per_example_clip_and_aggregate because it passes the mean gradient. For "
    "microbatches, use per_example.clipped_grad with microbatch_size and per_example.noisy_mean"
)


def _check_example_axis(flat: FlatTree, params: PyTree | None) -> None:
    """Checks that gradients do not have the shapes of their parameters, without an example axis."""
    if params is None:
        return
    flat_params = flatten(params, "params")
    indices = flat_params.inexact_indices
    shapes = {flat_params.paths[i]: np.shape(flat_params.leaves[i]) for i in indices}
    for i in flat.inexact_indices:
        shape = np.shape(flat.leaves[i])
        if shapes.get(flat.paths[i]) == shape:
            raise ValueError(
                f"updates must have a leading example axis, but leaf {leaf_name(flat.paths[i])!r} "
                f"has the same shape as its parameter, {shape}; {_HINT}"
            )


def _check_sums_replicated(flat: FlatTree) -> None:
    """Checks that the sums are equal on all devices because all devices add the same noise."""
    leaves, manual = flat.inexact_leaves(), meshes.manual_axes()
    axes = meshes.tree_varying_axes(leaves) if meshes.has_vma_tracking() else manual
    if axes:
        raise ValueError(
            "updates must be the same on all devices because their noise is the same, but may "
            f"differ along {sorted(axes)}; use clipped_grad or clip_sum, jax.lax.psum("
            "result.grads, ...), and per_example.noisy_mean, or call this stage under jit"
        )


def _divide_and_cast(leaves: list[Array], divisor: Array, example: FlatTree) -> list[Array]:
    pairs = zip(leaves, example.inexact_leaves(), strict=True)
    return [(x / divisor.astype(x.dtype)).astype(like.dtype) for x, like in pairs]

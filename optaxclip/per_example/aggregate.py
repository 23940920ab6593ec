"""Per-example clipping as the first stage of an Optax chain, with Gaussian noise."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.arguments import checked_choice, makes_transformation, refuse_uncalled
from optaxclip._base.numerics import is_real
from optaxclip._base.states import check_state, increased, own_arrays, registered_state
from optaxclip._base.trees import FlatTree, flatten, leaf_name
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._batches.cutting import number_of_examples
from optaxclip._border.crossing import Transformation, transformation
from optaxclip.per_example.bounds import ExampleLimit
from optaxclip.per_example.noise import is_key, is_zero, with_noise
from optaxclip.per_example.quantile import QuantileLimit, adjusted_noise_multiplier
from optaxclip.per_example.sums import ExampleClip, one_of, padding_flags, sum_tree
from optaxclip.responses import Response
from optaxclip.scopes import Scope
from optaxclip.thresholds.base import as_float, at_least
from optaxclip.thresholds.calling import checked_schedule
from optaxclip.thresholds.checks import checked_limit, refuse_parts

AggregateLimit: TypeAlias = ExampleLimit | Callable[[Array], ArrayLike] | QuantileLimit
Reduction = Literal["mean", "sum"]


@registered_state
class PerExampleState(NamedTuple):
    """State of `per_example_clip_and_aggregate`.

    Attributes:
      steps: int32[], steps so far.
      key: the key of the next step's noise; None without noise.
      limit: float32[], the limit of the next step if it follows a quantile; otherwise None.
      num_clipped: int32[], how many examples of the last step were above their limit. Not private.
      num_dropped: int32[], how many examples of the last step were not finite. Not private.
    """

    steps: Array
    key: Any
    limit: Any
    num_clipped: Array
    num_dropped: Array


@makes_transformation("per_example.clip_sum(grads, 1.0)")
def per_example_clip_and_aggregate(
    limit: AggregateLimit,
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
    standard deviation of `noise_multiplier` times the limit, drawn and added in float32 or wider;
    results are then rounded to the dtype of the updates.

    How private a run is depends on how batches are sampled and on the number of steps; an
    accountant computes it (see `optaxclip.per_example`). JAX's random generators are not
    cryptographic.

    Source: Abadi et al., 2016, arXiv 1607.00133.

    Args:
      limit: the largest L2 norm of one example's contribution, as in `clip_sum`; a schedule
        `count -> limit`; or `quantile_limit(...)`, whose limit is in the state. Its `count_noise`
        must exceed half the noise multiplier; the noise on the sum then follows
        `adjusted_noise_multiplier`, which is larger.
      noise_multiplier: the ratio of the noise's standard deviation to the limit. It has no default:
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
      ValueError: for a limit or a multiplier that is negative or NaN, noise without a key, an
        unknown name, or a `noise_multiplier` that is not below `2 * count_noise`; in the update,
        for gradients without an axis of examples, and inside `shard_map` or `pmap` for sums that
        differ over devices, as all of them would get the same noise.
      TypeError: for a limit or a multiplier that is not a number, or a `key` that is not a key.

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
    checked = ExampleClip.checked(_fixed(limit), scope, response, split)
    rule = limit if isinstance(limit, QuantileLimit) else None
    noise_multiplier = at_least(noise_multiplier, 0, "noise_multiplier")
    if rule is not None:
        sum_multiplier = adjusted_noise_multiplier(noise_multiplier, rule.count_noise)
    else:
        sum_multiplier = as_float(noise_multiplier)
    is_noisy = not is_zero(noise_multiplier) or (rule and not is_zero(rule.count_noise))
    first_key = _checked_key(key, is_needed=bool(is_noisy))
    reduction = checked_choice(reduction, get_args(Reduction), "reduction")

    def init(params: PyTree) -> PerExampleState:
        del params
        count, *of_step = (jnp.zeros((), jnp.int32) for _ in range(3))
        state = PerExampleState(count, first_key, rule.init() if rule else None, *of_step)
        return own_arrays(state)

    if batch_size is not None:
        batch_size = at_least(batch_size, 1, "batch_size")

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
        _refuse_one_gradient(flat, params)
        _refuse_different_sums(flat)
        flags = padding_flags(is_padding, number_of_examples(flat, "updates", f". {_REMEDY}"))
        one = one_of(flat)
        now = state.limit if rule else limit(state.steps) if callable(limit) else checked.limit
        clip = checked._replace(limit=now)
        sums = clip.sums(flat.measured_leaves(), one, flags)
        examples = jnp.sum(~flags, dtype=jnp.int32)
        size = examples if batch_size is None else batch_size
        next_key, for_sum, for_count, next_limit = state.key, None, None, None
        if is_noisy:
            next_key, for_sum, for_count = jax.random.split(state.key, 3)
        total = sums.leaves
        if for_sum is not None:
            bound = clip.limits(one)[2]
            total = with_noise(total, for_sum, sum_multiplier.astype(bound.dtype) * bound)
        if rule:
            counts = (sums.num_unclipped, examples)
            next_limit = rule.update(state.limit, *counts, for_count, batch_size=size)
        divisor = jnp.maximum(as_float(size), 1) if reduction == "mean" else jnp.ones(())
        new_state = PerExampleState(
            steps=increased(state.steps),
            key=next_key,
            limit=next_limit,
            num_clipped=examples - sums.num_unclipped - sums.num_dropped,
            num_dropped=sums.num_dropped,
        )
        rounded, like = _rounded(total, divisor, one), one.measured_leaves()
        chex.assert_shape(rounded, [x.shape for x in like])
        chex.assert_type(rounded, [x.dtype for x in like])
        return sum_tree(flat, rounded), devices.in_place_of(state, new_state)

    return transformation(init, update)


def _fixed(limit: AggregateLimit) -> ExampleLimit:
    """The limit if it is the same at each step, else 0; refuses functions other than schedules."""
    refuse_uncalled(limit, "optaxclip.per_example", "limit", "per_example")
    refuse_parts(limit, "limit")
    if callable(limit):
        checked_schedule(limit, "limit")
    if callable(limit) or isinstance(limit, QuantileLimit):
        return 0.0
    return limit if isinstance(limit, Mapping) else checked_limit(limit, "limit", schedule=True)


_REMEDY = (
    "Pass the gradients of examples, as jax.vmap(jax.grad(loss_fn), (None, 0)) gives them. "
    "optax.MultiSteps cannot stand around per_example_clip_and_aggregate, because it hands on the "
    "mean of what it got, in which no example can be clipped: for microbatches take "
    "per_example.clipped_grad(microbatch_size=) and per_example.noisy_mean"
)


def _refuse_one_gradient(flat: FlatTree, params: PyTree | None) -> None:
    """Refuses a gradient without examples, because its rows would be taken for examples."""
    if params is None:
        return
    of_params = flatten(params, "params")
    shapes = {of_params.paths[i]: np.shape(of_params.leaves[i]) for i in of_params.measured}
    for i in flat.measured:
        shape = np.shape(flat.leaves[i])
        if shapes.get(flat.paths[i]) == shape:
            raise ValueError(
                "updates must have an axis of examples in front of the axes of the parameters; "
                f"leaf {leaf_name(flat.paths[i])!r} has the shape {shape} of its parameter. "
                f"{_REMEDY}"
            )


def _refuse_different_sums(flat: FlatTree) -> None:
    """Refuses sums that differ over devices, because all of them would get the same noise."""
    leaves, manual = flat.measured_leaves(), devices.manual_axes()
    different = devices.varying_together(leaves) if devices.are_tracked() else manual
    if different:
        raise ValueError(
            "per_example_clip_and_aggregate would add the noise of one key to the sum of each "
            f"device along {sorted(different)}, which cancels in their differences. Inside of "
            "shard_map and pmap take clipped_grad (or clip_sum), then jax.lax.psum(result.grads, "
            "...), then per_example.noisy_mean; or call this stage under jit, outside of them"
        )


def _rounded(leaves: list[Array], divisor: Array, one: FlatTree) -> list[Array]:
    """The leaves divided by `divisor`, in the dtypes of the updates."""
    pairs = zip(leaves, one.measured_leaves(), strict=True)
    return [(x / divisor.astype(x.dtype)).astype(like.dtype) for x, like in pairs]


def _checked_key(key: Any, *, is_needed: bool) -> Array | None:
    if key is None:
        if is_needed:
            raise ValueError(
                "key must be given for noise: a key from jax.random, or an int. (It may be left "
                "out if noise_multiplier is the number 0; with optax.inject_hyperparams pass "
                'static_args=("noise_multiplier",))'
            )
        return None
    if np.shape(key) == () and is_real(key) and jnp.issubdtype(jnp.result_type(key), jnp.integer):
        return jax.random.key(key)
    if not is_key(key):
        raise TypeError(f"key must be one key from jax.random, or an int, got {key!r}")
    return jnp.asarray(key)

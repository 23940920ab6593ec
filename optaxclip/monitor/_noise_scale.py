"""Estimates the gradient noise scale, which indicates whether the batch is large enough."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._backend.global_view import Transformation, transformation
from optaxclip._base.numerics import select
from optaxclip._base.state import StaticNames, check_state, register_state, safe_increment
from optaxclip._base.types import ArrayLike, PyTree
from optaxclip._base.validation import check_name, validate_call
from optaxclip.thresholds._adaptive import cast_to_float32
from optaxclip.thresholds._rule import check_decay


@register_state
class NoiseSums(NamedTuple):
    """Two unbiased estimates from the gradients of microbatches.

    They are squares of norms, so float32 sums overflow for norms above about 1e19 and become 0 for
    norms below about 1e-19. Source: McCandlish et al., 2018, arXiv 1812.06162, appendix A.

    Attributes:
      signal: float[], an estimate of the squared norm of the true gradient, which can be negative.
      variance: float[], an estimate of the trace of the covariance of per-example gradients. The
        examples can be any unit that is counted, such as tokens. For a batch of `n` examples, the
        trace is `variance / n`.
    """

    signal: Array
    variance: Array


@register_state
class NoiseScaleState(NamedTuple):
    """State of `noise_scale`.

    Attributes:
      steps: int32[], the number of steps with finite sums.
      name: The name of the transformation, as a tuple with one element.
      signal: float32[], the average signal of these steps.
      variance: float32[], the average variance of these steps.
    """

    steps: Array
    name: StaticNames
    signal: Array
    variance: Array

    @property
    def scale(self) -> Array:
        """The noise scale, NaN before the first step, or inf if the signal is not positive."""
        return scale_of(self.steps, self.signal, self.variance)


def scale_of(steps: Any, signal: Any, variance: Any) -> Any:
    """Returns the ratio of the averages, for arrays of JAX or NumPy."""
    xp = jnp if isinstance(signal, jax.Array) else np
    has_signal = signal > 0
    ratio = xp.where(has_signal, variance, xp.inf) / xp.where(has_signal, signal, 1)
    return xp.where(steps > 0, xp.maximum(ratio, 0), xp.nan)


@validate_call(transformation=True)
def noise_scale(
    decay: ArrayLike = 0.99, *, name: str = "noise_scale"
) -> Transformation[NoiseScaleState]:
    """Estimates the gradient noise scale, a batch size above which more examples help little.

    If the batch is much smaller than the noise scale, its gradient is mostly noise. If it is much
    larger, the gradient is more accurate than necessary. The estimate is `variance / signal`, the
    ratio of two running averages of the sums from `optaxclip.accumulate`. Updates are returned
    unchanged, so `noise_scale` can be anywhere in a chain.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, 2018, arXiv 1812.06162.

    Args:
      decay: The decay of the averages, at least 0 and below 1. The averages start without bias.
        Average over several hundred steps, because individual estimates are noisy.
      name: The name of the transformation in messages and in `optaxclip.monitor`.

    Returns:
      A transformation with a `NoiseScaleState`. Its `scale` counts examples or tokens, like the
      weights of `optaxclip.accumulate`, and is also returned by `optaxclip.monitor.metrics`. Pass
      the sums to the update as `update(grads, state, params, noise=accumulated.noise)`. Non-finite
      sums are ignored.

    Raises:
      ValueError: If `decay` is out of range. Also raised by `update` if `noise` is missing.
      TypeError: If an argument has the wrong type. Also raised by `update` if `noise` is not a
        `NoiseSums`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import accumulate, monitor
      >>> loss_fn = lambda w, x: jnp.mean((x - w) ** 2)
      >>> grad_fn = accumulate.value_and_grad(loss_fn, microbatch_size=8)
      >>> tx = monitor.noise_scale(0.999)
      >>> def step(state, key):
      ...     _, grads, accumulated = grad_fn(0.0, 1 + 4 * jax.random.normal(key, (64,)))
      ...     return tx.update(grads, state, noise=accumulated.noise)[1], None
      >>> state, _ = jax.lax.scan(step, tx.init(0.0), jax.random.split(jax.random.key(0), 2000))
      >>> print(f"about {state.scale:.0f}")
      about 16
    """
    decay, name = check_decay(decay, "decay"), check_name(name)

    def init(params: PyTree) -> NoiseScaleState:
        del params
        zeros = (jnp.zeros((), jnp.float32) for _ in range(2))
        return NoiseScaleState(jnp.zeros((), jnp.int32), StaticNames((name,)), *zeros)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, NoiseScaleState]:
        del params
        check_state(state, NoiseScaleState, name, updates=updates)
        noise = extra_args.get("noise")
        if noise is None:
            raise ValueError(
                f"{name}: noise is required; pass noise=accumulated.noise, where accumulated is "
                "a result of accumulate.value_and_grad"
            )
        if not isinstance(noise, NoiseSums):
            raise TypeError(
                f"{name}: noise must be the NoiseSums returned by optaxclip.accumulate, got "
                f"{noise!r:.80}"
            )
        sums = [cast_to_float32(x) for x in noise]
        is_finite = jnp.isfinite(sums[0]) & jnp.isfinite(sums[1])
        steps = safe_increment(state.steps, is_finite)
        number = jnp.maximum(steps, 1).astype(jnp.float32)
        # The weight of the newest of `number` estimates is (1 - decay) / (1 - decay**number). Uses
        # expm1, because these differences lose digits in float32 if decay is close to 1.
        log_decay = jnp.log(cast_to_float32(decay))
        weight = jnp.expm1(log_decay) / jnp.expm1(number * log_decay)
        # Replaces non-finite sums first, because `jax_debug_nans` raises an error for NaN.
        signal, variance = (
            old + weight * (jnp.where(is_finite, new, old) - old)
            for old, new in zip((state.signal, state.variance), sums, strict=True)
        )
        return updates, state._replace(steps=steps, signal=signal, variance=variance)

    return transformation(init, update)


def where_or_nan(known: Array, x: Array) -> Array:
    """Returns `x`, or NaN where `known` is False."""
    # NaN means that the value is unknown, so `jax_debug_nans` must not raise an error here.
    with jax.debug_nans(False):
        return select(known, x, jnp.nan)


def nan_like(like: Array) -> Array:
    """Returns NaN with the shape and dtype of `like`, also with `jax_debug_nans`."""
    with jax.debug_nans(False):
        return jnp.full_like(like, jnp.nan)

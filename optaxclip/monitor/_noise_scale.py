"""The gradient noise scale: averages over the steps tell which batch size would be enough."""

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
    """Two estimates from the gradients of the parts of one batch; each is unbiased.

    They are squares of norms, so in float32 they are infinite if the norms of the gradients are
    above about 1e19, and 0 if these are below about 1e-19; float64 holds all squares of float32.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, 2018, arXiv 1812.06162, appendix A.

    Attributes:
      signal: float[], an estimate of the squared norm of the true gradient; from one step it may be
        negative.
      variance: float[], an estimate of the trace of the covariance of single examples' gradients
        (or of whatever else is counted). For the gradient of a batch of `n` it is `variance / n`.
    """

    signal: Array
    variance: Array


@register_state
class NoiseScaleState(NamedTuple):
    """State of `noise_scale`.

    Attributes:
      steps: int32[], how many steps so far had finite sums.
      name: the transformation's name, as a tuple of one.
      signal: float32[], the average of the signals of these steps.
      variance: float32[], the average of their variances.
    """

    steps: Array
    name: StaticNames
    signal: Array
    variance: Array

    @property
    def scale(self) -> Array:
        """The noise scale; NaN before the first step, infinite while the signal is not positive."""
        return scale_of(self.steps, self.signal, self.variance)


def scale_of(steps: Any, signal: Any, variance: Any) -> Any:
    """The ratio of averages of sums, in JAX or, for arrays of NumPy, in NumPy."""
    xp = jnp if isinstance(signal, jax.Array) else np
    has_signal = signal > 0
    ratio = xp.where(has_signal, variance, xp.inf) / xp.where(has_signal, signal, 1)
    return xp.where(steps > 0, xp.maximum(ratio, 0), xp.nan)


@validate_call(transformation=True)
def noise_scale(
    decay: ArrayLike = 0.99, *, name: str = "noise_scale"
) -> Transformation[NoiseScaleState]:
    """Keeps the gradient noise scale: about the batch size above which more examples help little.

    It averages the two sums of `optaxclip.accumulate` over the steps and then divides the averages:
    `variance / signal`, the simple noise scale. The gradient of a much smaller batch is mostly
    noise; a much larger batch makes the gradient more exact than the step needs. Updates pass
    through untouched, so `noise_scale` may stand anywhere in a chain.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, 2018, arXiv 1812.06162.

    Args:
      decay: the share of an average that stays at a step, at least 0 and below 1; the first steps
        are averaged evenly. Sums of single steps are noisy: their ratio needs some hundred of them.
      name: what the transformation is called in messages and by `optaxclip.monitor`.

    Returns:
      A transformation with a `NoiseScaleState`, whose `scale` is in units of the weights: examples,
      or tokens. `optaxclip.monitor.metrics` and `scalars` show it too. Its update needs the sums,
      `update(grads, state, params, noise=accumulated.noise)`; sums that are not finite do not
      count.

    Raises:
      ValueError: if `decay` is not in its range; when used, without `noise=`.
      TypeError: if `decay` is not a number, `name` is not a string or is empty, or `noise` is not a
        `NoiseSums`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optaxclip import accumulate, monitor
      >>> def loss_fn(w, x):
      ...     return jnp.mean((x - w) ** 2)
      >>> grad_fn = accumulate.value_and_grad(loss_fn, microbatch_size=8)
      >>> tx = optax.chain(monitor.noise_scale(0.999), optax.sgd(0.1))
      >>> @jax.jit
      ... def step(state, key):
      ...     x = 1 + 4 * jax.random.normal(key, (64,))
      ...     _, grads, accumulated = grad_fn(0.0, x)
      ...     return tx.update(grads, state, noise=accumulated.noise)[1], None
      >>> state, _ = jax.lax.scan(step, tx.init(0.0), jax.random.split(jax.random.key(0), 2000))
      >>> print(f"about {monitor.scalars(state)['noise_scale/scale']:.0f}")
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
        noise = NoiseSums(*(cast_to_float32(x) for x in _noise_sums_from(extra_args, name)))
        is_finite = jnp.isfinite(noise.signal) & jnp.isfinite(noise.variance)
        steps = safe_increment(state.steps, is_finite)
        number = jnp.maximum(steps, 1).astype(jnp.float32)
        # (1 - decay) / (1 - decay**number): the weight of the newest of `number` estimates.
        share = jnp.expm1(jnp.log(cast_to_float32(decay))) / jnp.expm1(
            number * jnp.log(cast_to_float32(decay))
        )

        def average(old: Array, new: Array) -> Array:
            # A new sum that is not finite is replaced first: `jax_debug_nans` stops at a NaN.
            return old + share * (jnp.where(is_finite, new, old) - old)

        signal, variance = map(average, (state.signal, state.variance), noise)
        return updates, state._replace(steps=steps, signal=signal, variance=variance)

    return transformation(init, update)


def _noise_sums_from(extra_args: dict[str, Any], name: str) -> NoiseSums:
    """The sums among an update's extra arguments."""
    noise = extra_args.get("noise")
    if noise is None:
        raise ValueError(
            f"{name}: the update needs the noise sums, and noise= was not given; pass those of "
            "optaxclip.accumulate: update(grads, state, params, noise=accumulated.noise)"
        )
    if not isinstance(noise, NoiseSums):
        raise TypeError(
            f"{name}: noise must be the NoiseSums of optaxclip.accumulate, got {noise!r:.80}"
        )
    return noise


def where_or_nan(known: Array, x: Array) -> Array:
    """`x`, or NaN where `known` is False.

    `jax_debug_nans` does not stop here in eager mode, because an unknown number is not an error.
    """
    with jax.debug_nans(False):
        return select(known, x, jnp.nan)


def nan_like(like: Array) -> Array:
    """NaN, shaped and typed as `like`; `jax_debug_nans` does not stop at it in eager mode."""
    with jax.debug_nans(False):
        return jnp.full_like(like, jnp.nan)

"""Rules whose thresholds depend on their earlier thresholds."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.numerics import (
    combine_norms_factored,
    divide_by_pow2,
    divide_no_nan,
    lerp,
    scale_by_exp,
)
from optaxclip._base.state import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip._base.validation import check_bool
from optaxclip.thresholds._adaptive import (
    DEFAULT_FLOOR,
    DEFAULT_PATIENCE,
    adaptive,
    cast_to_float32,
    check_minimum,
    check_range,
    rule_factory,
    signed_multiple,
)
from optaxclip.thresholds._averages import Moments, update_moments
from optaxclip.thresholds._rule import check_threshold_value


@rule_factory
def log_tracker(
    decay: ArrayLike = 0.995,
    num_std: ArrayLike = 4.0,
    *,
    min_threshold: ArrayLike = 0.0,
    reject: bool = True,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """Uses a number of standard deviations above the moving mean of `log(1 + norm)`.

    Thresholds are infinite until the weights of the averages sum to 0.75 (277 norms with the
    default decay). Norms above the threshold are recorded as the threshold, so the rule can follow
    a lasting increase.

    Source: Chen et al., 2018, arXiv 1804.09849, the gradient norm tracker in tensorflow/lingvo.

    Args:
      decay: The decay of the mean and the variance.
      num_std: The number of standard deviations above the mean.
      min_threshold: The lower bound on the threshold.
      reject: If True, norms above the threshold are reduced to 0, as in Lingvo. If False, they are
        reduced to the threshold.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The upper bound on thresholds. By default, there is no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.log_tracker()
      >>> thresholds, state = rule.update(jnp.array(1.0), rule.init(jnp.zeros(())), None)
      >>> print(thresholds.trigger)
      inf
    """
    settings = _TrackerSettings(
        check_range(decay, 0, 1, "decay", "; use num_std to pass a number of standard deviations"),
        check_minimum(num_std, 0, "num_std"),
        check_threshold_value(min_threshold, "min_threshold"),
    )
    return adaptive(
        _LogTracker(),
        settings,
        record="raw",
        reject=reject,
        floor=floor,
        patience=None,
        max_norm=max_norm,
    )


@rule_factory
def adagc(
    lambda_rel: ArrayLike = 1.04,
    lambda_abs: ArrayLike = 1.0,
    beta: ArrayLike = 0.99,
    warmup_steps: int = 100,
    *,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """Uses a small multiple of the moving average of the clipped norms, as in AdaGC.

    During warmup, all groups are multiplied by `min(lambda_abs / global norm, 1)`. A group's
    average starts at the smallest of its norms after this clipping. The defaults are those in the
    latest version of the paper.

    If patience is None, a threshold grows by at most a factor of
    `1 + (1 - beta) * (lambda_rel - 1)` per step, so doubling it takes 1734 steps by default.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034, where the groups are leaves.

    Args:
      lambda_rel: The threshold divided by the average.
      lambda_abs: The maximum global norm during the warmup.
      beta: The decay of the average.
      warmup_steps: The number of norms in the warmup.
      floor: A lower bound on thresholds. Norms below it are not recorded. If 0, a zero norm during
        the warmup makes the threshold of its group zero, as in the published rule.
      patience: After this many consecutive norms above the threshold, norms are recorded unclipped.
      max_norm: The upper bound on thresholds. By default, there is no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.adagc(warmup_steps=1)
      >>> norms = jnp.array([3.0, 4.0])
      >>> thresholds, state = rule.update(norms, rule.init(norms), None)
      >>> print(thresholds.target)
      [0.6 0.8]
    """
    settings = _AdaGCSettings(
        check_minimum(lambda_rel, 0, "lambda_rel"),
        check_threshold_value(lambda_abs, "lambda_abs"),
        check_range(beta, 0, 1, "beta"),
        check_minimum(warmup_steps, 0, "warmup_steps"),
    )
    return adaptive(
        _Adagc(), settings, record="clipped", floor=floor, patience=patience, max_norm=max_norm
    )


@rule_factory
def quantile(
    target: ArrayLike = 0.5,
    learning_rate: ArrayLike = 0.2,
    init_threshold: ArrayLike = 0.1,
    *,
    geometric: bool = True,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """Adapts the threshold until the target fraction of norms is at or below it.

    The threshold is multiplied by `exp(-learning_rate * ((norm <= threshold) - target))` per step.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise.

    Args:
      target: The fraction of norms at or below the threshold, from 0 to 1.
      learning_rate: The learning rate of the threshold.
      init_threshold: The threshold on the first step.
      geometric: If True, the threshold is multiplied by the factor above and remains a normal
        float32 number, unless it starts at 0 or infinity. If False, the exponent is added to the
        threshold, which cannot become negative.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The upper bound on thresholds. By default, there is no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.quantile(init_threshold=1.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      0.904837
    """
    settings = _QuantileSettings(
        check_range(target, 0, 1, "target"),
        check_minimum(learning_rate, 0, "learning_rate"),
        check_threshold_value(init_threshold, "init_threshold"),
    )
    statistic = _Quantile(check_bool(geometric, "geometric"))
    return adaptive(
        statistic, settings, record="raw", floor=floor, patience=None, max_norm=max_norm
    )


class _TrackerSettings(NamedTuple):
    decay: Any
    num_std: Any
    min_threshold: Any


@register_state
class _TrackerState(NamedTuple):
    moments: Moments
    weight: Array


@dataclasses.dataclass(frozen=True)
class _LogTracker:
    def init(self, settings: Any, like: Array) -> _TrackerState:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return _TrackerState(Moments(zeros, zeros), zeros)

    def observe(
        self, settings: _TrackerSettings, state: _TrackerState, norm: Array, count: Array
    ) -> _TrackerState:
        del count
        # Record the threshold instead of larger norms, and 0.01 instead of smaller norms.
        capped = jnp.minimum(jnp.log1p(jnp.maximum(norm, 0.01)), _log_threshold(settings, state))
        rest = 1 - cast_to_float32(settings.decay)
        weight = state.weight + rest * (1 - state.weight)
        # Dividing by the sum of the weights makes the averages unbiased.
        fraction = divide_no_nan(rest * jnp.ones_like(weight), weight, 0)
        return _TrackerState(update_moments(state.moments, capped, fraction), weight)

    def compute_thresholds(
        self, settings: _TrackerSettings, state: _TrackerState, norm: Array, count: Array
    ) -> Thresholds:
        del norm, count
        log_threshold = _log_threshold(settings, state)
        is_finite = (state.weight > 0.75) & ~(log_threshold >= _LARGEST_LOG)
        # If `expm1` would overflow, its argument is set to 0 to keep its derivative finite.
        threshold = jnp.where(is_finite, jnp.expm1(jnp.where(is_finite, log_threshold, 0)), jnp.inf)
        return Thresholds(threshold, threshold)


_LARGEST_LOG = np.log1p(np.finfo(np.float32).max)
"""The smallest number for which `expm1` is infinite in float32."""


def _log_threshold(settings: _TrackerSettings, state: _TrackerState) -> Array:
    std = jnp.maximum(state.moments.std, 1e-3)  # even if all norms are equal
    cap = state.moments.mean + signed_multiple(settings.num_std, std)
    return jnp.maximum(cap, jnp.log1p(jnp.maximum(cast_to_float32(settings.min_threshold), 0)))


class _AdaGCSettings(NamedTuple):
    lambda_rel: Any
    lambda_abs: Any
    beta: Any
    warmup_steps: Any


@dataclasses.dataclass(frozen=True)
class _Adagc:
    def init(self, settings: Any, like: Array) -> Array:
        del settings
        return jnp.zeros(like.shape, jnp.float32)

    def observe(self, settings: _AdaGCSettings, state: Array, norm: Array, count: Array) -> Array:
        average = lerp(state, norm, 1 - cast_to_float32(settings.beta))
        # During warmup, the state is the smallest norm.
        new = jnp.where(count < settings.warmup_steps, jnp.minimum(state, norm), average)
        return jnp.where(count == 0, norm, new)

    def compute_thresholds(
        self, settings: _AdaGCSettings, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        # f32[groups] -> f32[]. The global norm is `root * unit`.
        root, unit = combine_norms_factored(norm)
        # Divide the norm first, because `lambda_abs / global_norm` may overflow or be subnormal.
        max_norm = cast_to_float32(settings.lambda_abs)
        fraction = divide_no_nan(divide_by_pow2(norm, unit), root, 1)  # f32[groups]
        # The product must have finite derivatives, even if it is not selected.
        product = jnp.where(jnp.isinf(max_norm), 1, max_norm) * fraction
        # If the global norm does not exceed `lambda_abs`, rounding must not cause clipping.
        is_large = root > divide_by_pow2(max_norm, unit)
        warmup = jnp.where(is_large, product, jnp.maximum(product, norm))
        warmup = jnp.where(jnp.isinf(max_norm), jnp.inf, warmup)
        learned = jnp.where(count == 0, jnp.inf, signed_multiple(settings.lambda_rel, state))
        threshold = jnp.where(count < settings.warmup_steps, warmup, learned)
        return Thresholds(threshold, threshold)


class _QuantileSettings(NamedTuple):
    target: Any
    learning_rate: Any
    init_threshold: Any


@dataclasses.dataclass(frozen=True)
class _Quantile:
    geometric: bool

    def init(self, settings: _QuantileSettings, like: Array) -> Array:
        return jnp.full(like.shape, cast_to_float32(settings.init_threshold))

    def observe(
        self, settings: _QuantileSettings, state: Array, norm: Array, count: Array
    ) -> Array:
        del count
        # f32[groups], the gradient of the quantile loss
        excess = (norm <= state).astype(jnp.float32) - cast_to_float32(settings.target)
        step = -cast_to_float32(settings.learning_rate) * excess
        return scale_by_exp(state, step) if self.geometric else jnp.maximum(state + step, 0)

    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        del settings, norm, count
        return Thresholds(state, state)

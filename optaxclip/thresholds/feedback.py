"""Rules whose thresholds depend on their earlier thresholds: Lingvo's tracker, AdaGC, a quantile."""

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
from optaxclip.thresholds.adaptive import (
    DEFAULT_FLOOR,
    DEFAULT_PATIENCE,
    adaptive,
    cast_to_float32,
    check_minimum,
    check_range,
    rule_factory,
    signed_multiple,
)
from optaxclip.thresholds.averages import Moments, update_moments
from optaxclip.thresholds.rule import check_threshold_value


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
    """A number of standard deviations above the moving mean of `log(1 + norm)`.

    Source: Chen et al., 2018, arXiv 1804.09849, the gradient norm tracker of tensorflow/lingvo.
    There is no threshold until the weights of the averages sum to 0.75, which with the default decay
    takes 277 norms. If a norm is above the threshold, the threshold is recorded in its place, so that the
    rule can follow a lasting rise.

    Args:
      decay: the decay of mean and variance.
      num_std: how many standard deviations above the mean.
      min_threshold: the smallest threshold.
      reject: whether a norm above the threshold is brought to 0, as in Lingvo, instead of to the threshold.
      floor: smaller norms are not recorded, and no threshold is smaller.
      max_norm: a cap on every threshold.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.log_tracker()
      >>> thresholds, state = rule.update(jnp.array(1.0), rule.init(jnp.zeros(())), None)
      >>> print(thresholds.trigger)
      inf
    """
    settings = _TrackerSettings(
        check_range(decay, 0, 1, "decay", "; a number of standard deviations is num_std="),
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
    """A little above the moving average of the clipped norms, after a warm-up by the global norm.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034, where each leaf is a group. In the warm-up
    all groups are multiplied by `min(lambda_abs / global norm, 1)`, and a group's average begins as
    the smallest of its norms after that. The constants are those of the paper's last version.

    The rule records clipped norms, so without patience a threshold grows by a factor of at most
    `1 + (1 - beta) * (lambda_rel - 1)` a step, and needs 1734 steps to double.

    Args:
      lambda_rel: the threshold, divided by the average.
      lambda_abs: the global norm to clip to in the warm-up.
      beta: the decay of the average.
      warmup_steps: how many norms the warm-up lasts.
      floor: smaller norms are not recorded, and no threshold is smaller. With 0, a group whose norm is
        zero in the warm-up never moves again, as in the published rule.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold.

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
        _AdaGC(), settings, record="clipped", floor=floor, patience=patience, max_norm=max_norm
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
    """A threshold that moves until the wanted share of norms is at or below it.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise and with
    one norm a step. At each step the threshold is multiplied by
    `exp(-learning_rate * ((norm <= threshold) - target))`.

    Args:
      target: the share of norms at or below the threshold, from 0 to 1.
      learning_rate: how fast the threshold moves.
      init_threshold: the threshold at the first step.
      geometric: whether each step multiplies the threshold by that factor; if False, it adds the
        factor's exponent to the threshold, which never falls below 0. A threshold that is multiplied stays
        within the normal numbers of float32, unless it begins as 0 or infinity.
      floor: smaller norms are not recorded, and no threshold is smaller.
      max_norm: a cap on every threshold.

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
    return adaptive(
        _Quantile(check_bool(geometric, "geometric")),
        settings,
        record="raw",
        floor=floor,
        patience=None,
        max_norm=max_norm,
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
        capped = jnp.minimum(jnp.log1p(jnp.maximum(norm, 0.01)), _log_threshold(settings, state))
        rest = 1 - cast_to_float32(settings.decay)
        weight = state.weight + rest * (1 - state.weight)
        share = divide_no_nan(rest * jnp.ones_like(weight), weight, 0)
        return _TrackerState(update_moments(state.moments, capped, share), weight)

    def compute_thresholds(
        self, settings: _TrackerSettings, state: _TrackerState, norm: Array, count: Array
    ) -> Thresholds:
        del norm, count
        log_threshold = _log_threshold(settings, state)
        # `expm1` gets 0 where its value would be infinite, because its derivative would be too.
        is_limited = (state.weight > 0.75) & ~(log_threshold >= _LARGEST_LOG)
        threshold = jnp.where(
            is_limited, jnp.expm1(jnp.where(is_limited, log_threshold, 0)), jnp.inf
        )
        return Thresholds(threshold, threshold)


_LARGEST_LOG = np.log1p(np.finfo(np.float32).max)
"""`expm1` of this number, and of larger ones, is infinite in float32."""


def _log_threshold(settings: _TrackerSettings, state: _TrackerState) -> Array:
    std = jnp.maximum(state.moments.std, 1e-3)
    cap = state.moments.mean + signed_multiple(settings.num_std, std)
    return jnp.maximum(cap, jnp.log1p(jnp.maximum(cast_to_float32(settings.min_threshold), 0)))


class _AdaGCSettings(NamedTuple):
    lambda_rel: Any
    lambda_abs: Any
    beta: Any
    warmup_steps: Any


@dataclasses.dataclass(frozen=True)
class _AdaGC:
    def init(self, settings: Any, like: Array) -> Array:
        del settings
        return jnp.zeros(like.shape, jnp.float32)

    def observe(self, settings: _AdaGCSettings, state: Array, norm: Array, count: Array) -> Array:
        average = lerp(state, norm, 1 - cast_to_float32(settings.beta))
        later = jnp.where(count < settings.warmup_steps, jnp.minimum(state, norm), average)
        return jnp.where(count == 0, norm, later)

    def compute_thresholds(
        self, settings: _AdaGCSettings, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        root, unit = combine_norms_factored(norm)
        # First norm / global norm: `lambda_abs / global_norm` may overflow or become subnormal.
        largest = cast_to_float32(settings.lambda_abs)
        share = divide_no_nan(divide_by_pow2(norm, unit), root, 1)
        # Derivatives of the product must be finite even if it is not selected.
        product = jnp.where(jnp.isinf(largest), 1, largest) * share
        # Each group has its share of `lambda_abs` as threshold, also if the global norm is below that.
        shrunk = jnp.where(
            root > divide_by_pow2(largest, unit), product, jnp.maximum(product, norm)
        )
        shrunk = jnp.where(jnp.isinf(largest), jnp.inf, shrunk)
        later = jnp.where(count == 0, jnp.inf, signed_multiple(settings.lambda_rel, state))
        threshold = jnp.where(count < settings.warmup_steps, shrunk, later)
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
        excess = (norm <= state).astype(jnp.float32) - cast_to_float32(settings.target)
        step = -cast_to_float32(settings.learning_rate) * excess
        return scale_by_exp(state, step) if self.geometric else jnp.maximum(state + step, 0)

    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        del settings, norm, count
        return Thresholds(state, state)

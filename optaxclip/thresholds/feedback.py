"""Rules whose limits depend on their earlier limits: Lingvo's tracker, AdaGC, a quantile."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.arguments import checked_bool
from optaxclip._base.numerics import (
    averaged,
    multiplied,
    norm_of_all_in_parts,
    over_power,
    safe_divide,
)
from optaxclip._base.states import registered_state
from optaxclip._base.types import ArrayLike, Limits, Threshold
from optaxclip.thresholds.base import (
    FLOOR,
    PATIENCE,
    adaptive,
    as_float,
    at_least,
    makes_rule,
    multiple,
    within,
)
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.moving import Moments, weighted


@makes_rule
def log_tracker(
    decay: ArrayLike = 0.995,
    num_std: ArrayLike = 4.0,
    *,
    min_limit: ArrayLike = 0.0,
    reject: bool = True,
    floor: float = FLOOR,
    max_norm: ArrayLike | None = None,
) -> Threshold:
    """A number of standard deviations above the moving mean of `log(1 + norm)`.

    Source: Chen et al., 2018, arXiv 1804.09849, the gradient norm tracker of tensorflow/lingvo.
    There is no limit until the weights of the averages sum to 0.75, which with the default decay
    takes 277 norms. If a norm is above the limit, the limit is recorded in its place, so that the
    rule can follow a lasting rise.

    Args:
      decay: the decay of mean and variance.
      num_std: how many standard deviations above the mean.
      min_limit: the smallest limit.
      reject: whether a norm above the limit is brought to 0, as in Lingvo, instead of to the limit.
      floor: smaller norms are not recorded, and no limit is smaller.
      max_norm: a cap on every limit.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.log_tracker()
      >>> limits, state = rule.update(jnp.array(1.0), rule.init(jnp.zeros(())), None)
      >>> print(limits.trigger)
      inf
    """
    settings = _TrackerSettings(
        within(decay, 0, 1, "decay", "; a number of standard deviations is num_std="),
        at_least(num_std, 0, "num_std"),
        checked_limit(min_limit, "min_limit"),
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


@makes_rule
def adagc(
    lambda_rel: ArrayLike = 1.04,
    lambda_abs: ArrayLike = 1.0,
    beta: ArrayLike = 0.99,
    warmup_steps: int = 100,
    *,
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: ArrayLike | None = None,
) -> Threshold:
    """A little above the moving average of the clipped norms, after a warm-up by the global norm.

    Source: Wang et al., 2025, AdaGC, arXiv 2502.11034, where each leaf is a group. In the warm-up
    all groups are multiplied by `min(lambda_abs / global norm, 1)`, and a group's average begins as
    the smallest of its norms after that. The constants are those of the paper's last version.

    The rule records clipped norms, so without patience a limit grows by a factor of at most
    `1 + (1 - beta) * (lambda_rel - 1)` a step, and needs 1734 steps to double.

    Args:
      lambda_rel: the limit, divided by the average.
      lambda_abs: the global norm to clip to in the warm-up.
      beta: the decay of the average.
      warmup_steps: how many norms the warm-up lasts.
      floor: smaller norms are not recorded, and no limit is smaller. With 0, a group whose norm is
        zero in the warm-up never moves again, as in the published rule.
      patience: after this many norms in a row above their limit the raw norm is recorded.
      max_norm: a cap on every limit.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.adagc(warmup_steps=1)
      >>> norms = jnp.array([3.0, 4.0])
      >>> limits, state = rule.update(norms, rule.init(norms), None)
      >>> print(limits.target)
      [0.6 0.8]
    """
    settings = _AdaGCSettings(
        at_least(lambda_rel, 0, "lambda_rel"),
        checked_limit(lambda_abs, "lambda_abs"),
        within(beta, 0, 1, "beta"),
        at_least(warmup_steps, 0, "warmup_steps"),
    )
    return adaptive(
        _Adagc(), settings, record="clipped", floor=floor, patience=patience, max_norm=max_norm
    )


@makes_rule
def quantile(
    target: ArrayLike = 0.5,
    learning_rate: ArrayLike = 0.2,
    init_limit: ArrayLike = 0.1,
    *,
    geometric: bool = True,
    floor: float = FLOOR,
    max_norm: ArrayLike | None = None,
) -> Threshold:
    """A limit that moves until the wanted share of norms is at or below it.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, 2019, arXiv 1905.03871, without noise and with
    one norm a step. At each step the limit is multiplied by
    `exp(-learning_rate * ((norm <= limit) - target))`.

    Args:
      target: the share of norms at or below the limit, from 0 to 1.
      learning_rate: how fast the limit moves.
      init_limit: the limit at the first step.
      geometric: whether each step multiplies the limit by that factor; if False, it adds the
        factor's exponent to the limit, which never falls below 0. A limit that is multiplied stays
        within the normal numbers of float32, unless it begins as 0 or infinity.
      floor: smaller norms are not recorded, and no limit is smaller.
      max_norm: a cap on every limit.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.quantile(init_limit=1.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2):
      ...     limits, state = rule.update(jnp.array(norm), state, None)
      >>> print(limits.trigger)
      0.904837
    """
    settings = _QuantileSettings(
        within(target, 0, 1, "target"),
        at_least(learning_rate, 0, "learning_rate"),
        checked_limit(init_limit, "init_limit"),
    )
    return adaptive(
        _Quantile(checked_bool(geometric, "geometric")),
        settings,
        record="raw",
        floor=floor,
        patience=None,
        max_norm=max_norm,
    )


class _TrackerSettings(NamedTuple):
    decay: Any
    num_std: Any
    min_limit: Any


@registered_state
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
        capped = jnp.minimum(jnp.log1p(jnp.maximum(norm, 0.01)), _log_limit(settings, state))
        rest = 1 - as_float(settings.decay)
        weight = state.weight + rest * (1 - state.weight)
        share = safe_divide(rest * jnp.ones_like(weight), weight, 0)
        return _TrackerState(weighted(state.moments, capped, share), weight)

    def limits(
        self, settings: _TrackerSettings, state: _TrackerState, norm: Array, count: Array
    ) -> Limits:
        del norm, count
        log_limit = _log_limit(settings, state)
        # `expm1` gets 0 where its value would be infinite, because its derivative would be too.
        is_limited = (state.weight > 0.75) & ~(log_limit >= _LARGEST_LOG)
        limit = jnp.where(is_limited, jnp.expm1(jnp.where(is_limited, log_limit, 0)), jnp.inf)
        return Limits(limit, limit)


_LARGEST_LOG = np.log1p(np.finfo(np.float32).max)
"""`expm1` of this number, and of larger ones, is infinite in float32."""


def _log_limit(settings: _TrackerSettings, state: _TrackerState) -> Array:
    std = jnp.maximum(state.moments.std, 1e-3)
    cap = state.moments.mean + multiple(settings.num_std, std)
    return jnp.maximum(cap, jnp.log1p(jnp.maximum(as_float(settings.min_limit), 0)))


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
        average = averaged(state, norm, 1 - as_float(settings.beta))
        later = jnp.where(count < settings.warmup_steps, jnp.minimum(state, norm), average)
        return jnp.where(count == 0, norm, later)

    def limits(self, settings: _AdaGCSettings, state: Array, norm: Array, count: Array) -> Limits:
        root, unit = norm_of_all_in_parts(norm)
        # First norm / global norm: `lambda_abs / global_norm` may overflow or become subnormal.
        largest = as_float(settings.lambda_abs)
        share = safe_divide(over_power(norm, unit), root, 1)
        # Derivatives of the product must be finite even if it is not selected.
        product = jnp.where(jnp.isinf(largest), 1, largest) * share
        shrunk = jnp.where(root > over_power(largest, unit), product, norm)
        later = jnp.where(count == 0, jnp.inf, multiple(settings.lambda_rel, state))
        limit = jnp.where(count < settings.warmup_steps, shrunk, later)
        return Limits(limit, limit)


class _QuantileSettings(NamedTuple):
    target: Any
    learning_rate: Any
    init_limit: Any


@dataclasses.dataclass(frozen=True)
class _Quantile:
    geometric: bool

    def init(self, settings: _QuantileSettings, like: Array) -> Array:
        return jnp.full(like.shape, as_float(settings.init_limit))

    def observe(
        self, settings: _QuantileSettings, state: Array, norm: Array, count: Array
    ) -> Array:
        del count
        excess = (norm <= state).astype(jnp.float32) - as_float(settings.target)
        step = -as_float(settings.learning_rate) * excess
        return multiplied(state, step) if self.geometric else jnp.maximum(state + step, 0)

    def limits(self, settings: Any, state: Array, norm: Array, count: Array) -> Limits:
        del settings, norm, count
        return Limits(state, state)

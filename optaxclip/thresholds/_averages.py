"""Rules based on moving averages: `ema`, `zscore` and `mean_over_rms`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import clamp_to_finite, divide_no_nan, lerp, safe_sqrt
from optaxclip._base.state import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip._base.validation import check_bool, check_choice
from optaxclip.thresholds._adaptive import (
    DEFAULT_FLOOR,
    DEFAULT_PATIENCE,
    Record,
    adaptive,
    cast_to_float32,
    check_minimum,
    check_range,
    rule_factory,
    safe_hypot,
    select_tree,
    signed_multiple,
)

Option = Literal["adaptive", "mean", "percentile"]


@rule_factory
def ema(
    decay: ArrayLike = 0.95,
    ratio: ArrayLike = 2.0,
    *,
    target_decay: ArrayLike | None = None,
    target_ratio: ArrayLike | None = None,
    debias: bool = False,
    skip_steps: int = 0,
    inclusive: bool = False,
    record: Record = "clipped",
    warmup_steps: int = 0,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """Sets the threshold to a multiple of the exponential moving average of past norms.

    The defaults match OLMo's clipping of individual parameters (allenai/OLMo,
    `max_grad_norm_ratio`). PDE-Transformer (tum-pbs/pde-transformer) uses
    `ema(0.99, 2.0, target_decay=0.9, target_ratio=1.1, debias=True)`. To skip steps, axlearn
    (apple/axlearn) uses `ema(0.99, 20.0, debias=True, record="accepted")`.

    Args:
      decay: The decay rate of the average for the trigger (the norm above which to clip).
      ratio: The multiple of this average at which clipping is triggered.
      target_decay: The decay rate of the average for the target (the norm to clip to). Defaults to
        `decay`.
      target_ratio: The multiple of this average to which norms are clipped. Defaults to `ratio`.
      debias: If True, the averages start at zero and are bias-corrected, as in Adam. If False, they
        are initialized to the first norm.
      skip_steps: The number of initial norms to ignore.
      inclusive: If True, the averages for a step include the norm of this step.
      record: The norms to record. See `optaxclip.thresholds.adaptive` for all options below.
      warmup_steps: The number of norms to record before clipping begins.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: After this many consecutive norms above the threshold, norms are recorded unclipped.
      max_norm: An upper bound on thresholds. Defaults to no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.ema(0.5, 2.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.5, 1.0):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      2.5
    """
    shares_average = target_decay is None and target_ratio is None
    target_decay = decay if target_decay is None else target_decay
    target_ratio = ratio if target_ratio is None else target_ratio
    settings = _EmaSettings(
        decay=check_range(decay, 0, 1, "decay", "; use ratio for a multiple of the average"),
        ratio=check_minimum(ratio, 0, "ratio"),
        target_decay=check_range(target_decay, 0, 1, "target_decay"),
        target_ratio=check_minimum(target_ratio, 0, "target_ratio"),
        skip_steps=check_minimum(skip_steps, 0, "skip_steps"),
    )
    return adaptive(
        _Ema(check_bool(debias, "debias"), shares_average),
        settings,
        record=record,
        inclusive=inclusive,
        warmup_steps=warmup_steps,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )


@rule_factory
def zscore(
    alpha: ArrayLike = 0.97,
    z_thresh: ArrayLike = 2.5,
    warmup_steps: int = 25,
    *,
    option: Option = "adaptive",
    debias: bool = False,
    record: Record = "clipped",
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """Sets the threshold to some standard deviations above the moving mean, as in ZClip.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: The decay rate of the moving mean and variance.
      z_thresh: The z-score above which a norm counts as a spike.
      warmup_steps: The number of norms to record before clipping begins. Their mean and variance
        initialize the moving averages.
      option: The target for a spike with z-score `z`. "adaptive" uses
        `mean + z_thresh**2 / z * std`, which is lower for larger spikes. "mean" uses the mean, and
        "percentile" uses the threshold `mean + z_thresh * std`.
      debias: If True, the warmup norms do not initialize the averages, which are debiased instead,
        as in axlearn (apple/axlearn).
      record: The norms to record. See `optaxclip.thresholds.adaptive` for all options below.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: After this many consecutive norms above the threshold, norms are recorded unclipped.
      max_norm: An upper bound on thresholds, including during warmup. Defaults to no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.zscore(warmup_steps=3)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.target)
      1.04042
    """
    option = check_choice(option, get_args(Option), "option")
    settings = _ZScoreSettings(
        check_range(alpha, 0, 1, "alpha", "; use z_thresh to pass a number of standard deviations"),
        check_minimum(z_thresh, 0, "z_thresh"),
        check_minimum(warmup_steps, 0, "warmup_steps"),
    )
    return adaptive(
        _ZScore(option, check_bool(debias, "debias")),
        settings,
        record=record,
        warmup_steps=warmup_steps,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )


@rule_factory
def mean_over_rms(
    mean_decay: ArrayLike = 0.7,
    square_decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    *,
    floor: float = DEFAULT_FLOOR,
) -> ThresholdRule:
    """Sets the threshold to the ratio of the mean norm to the root mean square of the norms.

    Both are debiased moving averages that include the current norm. The threshold is usually about
    1, and drops when the norm spikes. Use this rule with `response="normalize"`.

    Source: Huang et al., 2025, AdaGN in Stable-SPAM (later GradientStabilizer), arXiv 2502.17055.

    Args:
      mean_decay: The decay rate of the moving mean.
      square_decay: The decay rate of the moving mean of squares.
      eps: A small constant to add to the root mean square.
      floor: A lower bound on thresholds. Norms below it are not recorded.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.mean_over_rms()
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.target)
      0.966206
    """
    settings = _HistorySettings(
        check_range(mean_decay, 0, 1, "mean_decay"),
        check_range(square_decay, 0, 1, "square_decay"),
        check_minimum(eps, 0, "eps"),
    )
    return adaptive(
        _MeanOverRms(), settings, record="raw", inclusive=True, floor=floor, patience=None
    )


class _EmaSettings(NamedTuple):
    decay: Any
    ratio: Any
    target_decay: Any
    target_ratio: Any
    skip_steps: Any


@dataclasses.dataclass(frozen=True)
class _TwoAverages:
    """Base class for statistics that keep two averages per group, both initialized to zero."""

    state_type: ClassVar[Callable[[Array, Array], Any]]

    def init(self, settings: Any, like: Array) -> Any:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return self.state_type(zeros, zeros)


@register_state
class _EmaState(NamedTuple):
    trigger: Array
    target: Array


@dataclasses.dataclass(frozen=True)
class _Ema(_TwoAverages):
    any_sign: ClassVar[bool] = True
    state_type = _EmaState
    debias: bool
    shares_average: bool

    def observe(
        self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array
    ) -> _EmaState:
        num_averaged = jnp.maximum(count - settings.skip_steps, 0)
        averages = []  # f32[groups] for the trigger and for the target
        decays = (settings.decay, settings.target_decay)
        for average, decay in zip(state, decays, strict=True):
            new = lerp(average, norm, ema_weight(decay, num_averaged, self.debias))
            averages.append(jnp.where(count >= settings.skip_steps, new, average))
        return _EmaState(*averages)

    def compute_thresholds(
        self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array
    ) -> Thresholds:
        # If there is no average yet, use the norm itself.
        is_first = count <= settings.skip_steps
        # f32[groups]
        trigger = signed_multiple(settings.ratio, jnp.where(is_first, norm, state.trigger))
        if self.shares_average:
            return Thresholds(trigger, trigger)
        target = signed_multiple(settings.target_ratio, jnp.where(is_first, norm, state.target))
        return Thresholds(trigger, target)


class _ZScoreSettings(NamedTuple):
    alpha: Any
    z_thresh: Any
    warmup_steps: Any


@register_state
class Moments(NamedTuple):
    """The float32 mean and standard deviation of one value per group."""

    mean: Array
    std: Array


@dataclasses.dataclass(frozen=True)
class _ZScore(_TwoAverages):
    any_sign: ClassVar[bool] = True
    state_type = Moments
    option: Option
    debias: bool

    def observe(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Moments:
        if self.debias:
            return update_moments(state, norm, ema_weight(settings.alpha, count, debias=True))
        # During warmup, use equal weights for all norms.
        plain = update_moments(state, norm, 1 / (count.astype(jnp.float32) + 1))
        # After warmup, use the weight `1 - alpha`.
        rest = 1 - cast_to_float32(settings.alpha)
        mean = lerp(state.mean, norm, rest)
        # As in the published code, the deviation is measured from the new mean.
        std = safe_hypot(safe_sqrt(1 - rest) * state.std, safe_sqrt(rest) * (norm - mean))
        # The first norm always initializes the mean, even without warmup.
        is_warm = (count > 0) & (count >= settings.warmup_steps)
        return select_tree(is_warm, Moments(mean, std), plain)

    def compute_thresholds(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Thresholds:
        z_thresh, std = cast_to_float32(settings.z_thresh), state.std  # [], [groups]
        distance = jnp.where(count == 0, jnp.inf, signed_multiple(z_thresh, std))
        trigger = state.mean + distance  # f32[groups]
        if self.option == "percentile":
            return Thresholds(trigger, trigger)
        # The published code adds 1e-6 to the standard deviation, except for "percentile".
        trigger = trigger if self.debias else trigger + z_thresh * 1e-6
        if self.option == "mean":
            return Thresholds(trigger, jnp.where(count == 0, jnp.inf, state.mean))
        z = (norm - state.mean) / (std + 1e-6)
        # Divide by a finite number, because infinity / infinity is NaN.
        excess = jnp.maximum(divide_no_nan(z, clamp_to_finite(z_thresh), 1), 1)
        is_infinite = jnp.isinf(distance)
        target = state.mean + jnp.where(is_infinite, 0, distance) / excess
        return Thresholds(trigger, jnp.where(is_infinite, jnp.inf, target))


class _HistorySettings(NamedTuple):
    mean_decay: Any
    square_decay: Any
    eps: Any


@register_state
class _Averages(NamedTuple):
    """The debiased mean and root mean square of the norms, in float32."""

    mean: Array
    rms: Array


@dataclasses.dataclass(frozen=True)
class _MeanOverRms(_TwoAverages):
    state_type = _Averages

    def observe(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> _Averages:
        mean = lerp(state.mean, norm, ema_weight(settings.mean_decay, count, debias=True))
        weight = ema_weight(settings.square_decay, count, debias=True)
        # Squares may overflow in float32, so combine the root mean squares directly.
        rms = safe_hypot(safe_sqrt(1 - weight) * state.rms, safe_sqrt(weight) * norm)
        return _Averages(mean, rms)

    def compute_thresholds(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        # f32[groups]
        ratio = divide_no_nan(state.mean, state.rms + cast_to_float32(settings.eps), 0)
        target = jnp.where(count == 0, jnp.inf, ratio)
        return Thresholds(target, target)


def ema_weight(decay: Any, count: Array, debias: bool) -> Array:
    """Returns the weight of the next value after `count` values. The first value has weight 1."""
    rest = 1 - cast_to_float32(decay)
    if not debias:
        return jnp.where(count == 0, 1, rest)
    # The weights sum to 1 - decay ** (count + 1), as in Adam. If decay is 1, the weight is 0.
    power = cast_to_float32(decay) ** (count.astype(jnp.float32) + 1)
    return divide_no_nan(rest, jnp.maximum(1 - power, rest), (count == 0).astype(jnp.float32))


def update_moments(moments: Moments, value: Array, weight: Array) -> Moments:
    """Updates the mean and standard deviation with a weighted value."""
    # West's update avoids cancellation: var = (1 - weight) * (var + weight * (value - mean)**2)
    std = safe_hypot(moments.std, safe_sqrt(weight) * (value - moments.mean))
    return Moments(lerp(moments.mean, value, weight), safe_sqrt(1 - weight) * std)

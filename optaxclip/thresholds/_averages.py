"""Rules based on moving averages: `ema`, `zscore` and `mean_over_rms`.

Variances are averages of squared deviations from the mean, because the difference between the mean
square and the squared mean would suffer from cancellation in float32.
"""

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
    """Uses a multiple of the exponential moving average of the norms as the threshold.

    By default, the average excludes the current norm and the rule is OLMo's rule for single
    parameters (allenai/OLMo, `max_grad_norm_ratio`). PDE-Transformer (tum-pbs/pde-transformer) uses
    `ema(0.99, 2.0, target_decay=0.9, target_ratio=1.1, debias=True)`. axlearn (apple/axlearn) uses
    `ema(0.99, 20.0, debias=True, record="accepted")` in a skip, such as `optaxclip.skip_above`.

    Args:
      decay: The decay of the average for the trigger.
      ratio: The ratio of the trigger to that average.
      target_decay: The decay of the average for the target. Defaults to `decay`.
      target_ratio: The ratio of the target to that average. Defaults to `ratio`.
      debias: If True, the average starts from zero and is divided by the sum of its weights, as in
        Adam. If False, it starts from the first norm.
      skip_steps: The number of initial norms to ignore.
      inclusive: If True, the average includes the current norm, which is recorded before clipping.
      record: See `optaxclip.thresholds._adaptive` for this option and the following options.
      warmup_steps: The number of recorded norms after which there is a threshold.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      patience: The number of consecutive norms above their threshold after which raw norms are
        recorded. Defaults to 20. Use `None` to disable this.
      max_norm: The upper bound on thresholds. By default, there is no bound.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.ema(0.5, 2.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.5, 1.0):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      2.5
    """
    # The target equals the trigger if both have the same decay and ratio.
    shares_average = target_decay is None and target_ratio is None
    settings = _EmaSettings(
        decay=check_range(decay, 0, 1, "decay", "; use ratio= for a multiple of the average"),
        ratio=check_minimum(ratio, 0, "ratio"),
        target_decay=decay
        if target_decay is None
        else check_range(target_decay, 0, 1, "target_decay"),
        target_ratio=ratio
        if target_ratio is None
        else check_minimum(target_ratio, 0, "target_ratio"),
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
    """Uses the moving mean plus a number of standard deviations as the threshold, as in ZClip.

    Note that the mean and the standard deviation exclude the current norm.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: The decay of the mean and the variance.
      z_thresh: The z-score above which a norm is a spike.
      warmup_steps: The number of recorded norms after which there is a threshold. The moving mean
        and variance start from the mean and variance of these norms.
      option: The target of a spike with z-score `z`. "adaptive" uses
        `mean + z_thresh**2 / z * std`, which decreases with the size of the spike. "mean" uses the
        mean, and "percentile" uses the threshold `mean + z_thresh * std`.
      debias: If True, the mean and variance are debiased averages from the first norm on, as in
        axlearn (apple/axlearn). If False, they start from those of the warmup.
      record: See `optaxclip.thresholds._adaptive` for this option and the following options.
      floor: The lower bound on thresholds. Smaller norms are not recorded.
      patience: The number of consecutive norms above their threshold after which raw norms are
        recorded. Defaults to 20. Use `None` to disable this.
      max_norm: The upper bound on thresholds, including the warmup. By default, there
        is no bound.

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
        check_range(alpha, 0, 1, "alpha", "; use z_thresh= for a number of standard deviations"),
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
    """Uses the mean of the norms divided by their root mean square as the threshold.

    The threshold is about 1, and smaller after a jump of the norm. Both means are debiased moving
    averages that include the current norm. Use it with `response="normalize"`, which then sets
    the first norm to 1.

    Source: Huang et al., 2025, Stable-SPAM's AdaGN, arXiv 2502.17055, later GradientStabilizer.

    Args:
      mean_decay: The decay of the mean.
      square_decay: The decay of the mean square.
      eps: A number to add to the root mean square.
      floor: The lower bound on thresholds. Smaller norms are not recorded.

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
    """The base of statistics with two averages per group, which are initially zero."""

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
        # There is no average yet, so the first norm is compared with a multiple of itself.
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
        # During the warmup, use equal weights for all norms.
        plain = update_moments(state, norm, 1 / (count.astype(jnp.float32) + 1))
        # After the warmup, use the weight `1 - alpha`.
        rest = 1 - cast_to_float32(settings.alpha)
        mean = lerp(state.mean, norm, rest)
        # As in the published code, the deviation is measured from the new mean.
        std = safe_hypot(safe_sqrt(1 - rest) * state.std, safe_sqrt(rest) * (norm - mean))
        # The first norm always initializes the mean, even without a warmup.
        is_warm = (count > 0) & (count >= settings.warmup_steps)
        return select_tree(is_warm, Moments(mean, std), plain)

    def compute_thresholds(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Thresholds:
        z_thresh, std = cast_to_float32(settings.z_thresh), state.std  # [], [groups]
        # Use an infinite threshold before the first recorded norm.
        distance = jnp.where(count == 0, jnp.inf, signed_multiple(z_thresh, std))
        trigger = state.mean + distance  # f32[groups]
        if self.option == "percentile":
            return Thresholds(trigger, trigger)
        # The published code adds 1e-6 to the deviation, except for "percentile".
        trigger = trigger if self.debias else trigger + z_thresh * 1e-6
        if self.option == "mean":
            return Thresholds(trigger, jnp.where(count == 0, jnp.inf, state.mean))
        z = (norm - state.mean) / (std + 1e-6)
        # The divisor is finite because the quotient of two infinities would be NaN.
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
    """The debiased float32 mean and root mean square of the norms."""

    mean: Array
    rms: Array


@dataclasses.dataclass(frozen=True)
class _MeanOverRms(_TwoAverages):
    state_type = _Averages

    def observe(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> _Averages:
        mean_weight = ema_weight(settings.mean_decay, count, debias=True)
        weight = ema_weight(settings.square_decay, count, debias=True)
        return _Averages(
            lerp(state.mean, norm, mean_weight),
            # The square root of an average of squares, which may overflow in float32.
            safe_hypot(safe_sqrt(1 - weight) * state.rms, safe_sqrt(weight) * norm),
        )

    def compute_thresholds(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        # f32[groups]
        ratio = divide_no_nan(state.mean, state.rms + cast_to_float32(settings.eps), 0)
        target = jnp.where(count == 0, jnp.inf, ratio)
        return Thresholds(target, target)


def ema_weight(decay: Any, count: Array, debias: bool) -> Array:
    """Returns the weight of a new value after `count` earlier values, which is 1 for the first."""
    rest = 1 - cast_to_float32(decay)
    if not debias:
        return jnp.where(count == 0, 1, rest)
    # The sum of the weights is 1 - decay ** (count + 1), as in Adam. A decay of 1 has the weight 0.
    power = cast_to_float32(decay) ** (count.astype(jnp.float32) + 1)
    return divide_no_nan(rest, jnp.maximum(1 - power, rest), (count == 0).astype(jnp.float32))


def update_moments(moments: Moments, value: Array, weight: Array) -> Moments:
    """Updates the mean and the standard deviation with a value of this weight."""
    # West's update: var = (1 - weight) * (var + weight * (value - mean)**2)
    std = safe_hypot(moments.std, safe_sqrt(weight) * (value - moments.mean))
    return Moments(lerp(moments.mean, value, weight), safe_sqrt(1 - weight) * std)

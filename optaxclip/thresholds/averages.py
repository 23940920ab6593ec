"""Rules over moving averages: a multiple of the mean, the mean plus deviations.

A variance is computed as an average of squared deviations from the mean. In float32, the difference
between the mean square and the squared mean would lose its digits to cancellation.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import clamp_to_finite, divide_no_nan, lerp, safe_sqrt
from optaxclip._base.state import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip._base.validation import check_bool, check_choice
from optaxclip.thresholds.adaptive import (
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
    """A multiple of the exponential moving average of the norms, by default of the earlier ones.

    The defaults are OLMo's rule for each parameter (allenai/OLMo, `max_grad_norm_ratio`).
    `ema(0.99, 2.0, target_decay=0.9, target_ratio=1.1, debias=True)` is PDE-Transformer's
    (tum-pbs/pde-transformer), and `ema(0.99, 20.0, debias=True, record="accepted")` is axlearn's
    (apple/axlearn), to be used in `optaxclip.skip_above`.

    Args:
      decay: the decay of the average that decides whether a norm is clipped.
      ratio: a norm above `ratio` times that average is clipped.
      target_decay: the decay of the average that sets a clipped norm; `decay` if None.
      target_ratio: a clipped norm becomes `target_ratio` times that average; `ratio` if None.
      debias: whether the average starts from zero and is divided by the sum of its weights, as in
        Adam; if False, it starts from the first norm.
      skip_steps: how many norms are ignored before the first is recorded.
      inclusive: whether a norm counts in the average that judges it; if so, it is recorded raw.
      record: explained in `optaxclip.thresholds.adaptive`, like the options that follow.
      warmup_steps: norms to record before there is a threshold.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.ema(0.5, 2.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.5, 1.0):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      2.5
    """
    same = target_decay is None and target_ratio is None
    settings = _EmaSettings(
        decay=check_range(decay, 0, 1, "decay", "; a multiple of the average is ratio="),
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
        _Ema(check_bool(debias, "debias"), same),
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
    """A number of standard deviations above the moving mean of the norms before this one.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: the decay of mean and variance.
      z_thresh: a norm more than `z_thresh` standard deviations above the mean is a spike.
      warmup_steps: norms to record before there is a threshold; the moving mean and variance start from
        the plain mean and variance of these norms.
      option: which norm a spike of z-score `z` is given: "adaptive" gives it
        `mean + z_thresh**2 / z * std`, which is lower for larger spikes; "mean" gives it the mean;
        "percentile" gives it the threshold, `mean + z_thresh * std`.
      debias: whether mean and variance are debiased averages from the first norm on, as in axlearn
        (apple/axlearn); if False, they start from those of the warm-up.
      record: explained in `optaxclip.thresholds.adaptive`, like the options that follow.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold, in the warm-up too.

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
        check_range(alpha, 0, 1, "alpha", "; a number of standard deviations is z_thresh="),
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


class _EmaSettings(NamedTuple):
    decay: Any
    ratio: Any
    target_decay: Any
    target_ratio: Any
    skip_steps: Any


@register_state
class _EmaState(NamedTuple):
    trigger: Array
    target: Array


@dataclasses.dataclass(frozen=True)
class _Ema:
    any_sign: ClassVar[bool] = True
    debias: bool
    shares_average: bool

    def init(self, settings: Any, like: Array) -> _EmaState:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return _EmaState(zeros, zeros)

    def observe(
        self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array
    ) -> _EmaState:
        seen = jnp.maximum(count - settings.skip_steps, 0)

        def ema_update(average: Array, decay: Any) -> Array:
            new = lerp(average, norm, ema_weight(decay, seen, self.debias))
            return jnp.where(count >= settings.skip_steps, new, average)

        return _EmaState(
            ema_update(state.trigger, settings.decay),
            ema_update(state.target, settings.target_decay),
        )

    def compute_thresholds(
        self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array
    ) -> Thresholds:
        # The first norm is compared with itself.
        is_first = count <= settings.skip_steps
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
    """Mean and standard deviation of one value per group, float32."""

    mean: Array
    std: Array


@dataclasses.dataclass(frozen=True)
class _ZScore:
    any_sign: ClassVar[bool] = True
    option: Option
    debias: bool

    def init(self, settings: Any, like: Array) -> Moments:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return Moments(zeros, zeros)

    def observe(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Moments:
        if self.debias:
            return update_moments(state, norm, ema_weight(settings.alpha, count, debias=True))
        plain = update_moments(state, norm, 1 / (count.astype(jnp.float32) + 1))
        rest = 1 - cast_to_float32(settings.alpha)
        mean = lerp(state.mean, norm, rest)
        # As published, the deviation is taken from the new mean.
        std = safe_hypot(safe_sqrt(1 - rest) * state.std, safe_sqrt(rest) * (norm - mean))
        is_warm = (count > 0) & (count >= settings.warmup_steps)
        return select_tree(is_warm, Moments(mean, std), plain)

    def compute_thresholds(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Thresholds:
        z_thresh, std = cast_to_float32(settings.z_thresh), state.std
        # Until a norm was recorded, there is no threshold.
        distance = jnp.where(count == 0, jnp.inf, signed_multiple(z_thresh, std))
        trigger = state.mean + distance
        if self.option == "percentile":
            return Thresholds(trigger, trigger)
        # The published z-score adds 1e-6 to the deviation; the published "percentile" does not.
        trigger = trigger if self.debias else trigger + z_thresh * 1e-6
        if self.option == "mean":
            return Thresholds(trigger, jnp.where(count == 0, jnp.inf, state.mean))
        z = (norm - state.mean) / (std + 1e-6)
        # Bounded, because the quotient of two infinities would be NaN.
        harder = jnp.maximum(divide_no_nan(z, clamp_to_finite(z_thresh), 1), 1)
        is_open = jnp.isinf(distance)
        target = state.mean + jnp.where(is_open, 0, distance) / harder
        return Thresholds(trigger, jnp.where(is_open, jnp.inf, target))


def ema_weight(decay: Any, count: Array, debias: bool) -> Array:
    """The weight of a new value in a moving average of `count` earlier values; 1 for the first."""
    rest = 1 - cast_to_float32(decay)
    if not debias:
        return jnp.where(count == 0, 1, rest)
    power = cast_to_float32(decay) ** (count.astype(jnp.float32) + 1)
    return divide_no_nan(rest, jnp.maximum(1 - power, rest), (count == 0).astype(jnp.float32))


def update_moments(moments: Moments, value: Array, weight: Array) -> Moments:
    """Mean and deviation after one more value with this weight."""
    std = safe_hypot(moments.std, safe_sqrt(weight) * (value - moments.mean))
    return Moments(lerp(moments.mean, value, weight), safe_sqrt(1 - weight) * std)


@rule_factory
def mean_over_rms(
    mean_decay: ArrayLike = 0.7,
    square_decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    *,
    floor: float = DEFAULT_FLOOR,
) -> ThresholdRule:
    """The mean of the norms so far, divided by their root mean square.

    It is about 1, and smaller after a jump of the norm. Both means are debiased moving averages,
    and the norm of the step counts in them. Use it with `response="normalize"`; the first norm then
    becomes 1.

    Source: Huang et al., 2025, Stable-SPAM's AdaGN, arXiv 2502.17055, later GradientStabilizer.

    Args:
      mean_decay: the decay of the mean.
      square_decay: the decay of the mean square.
      eps: added to the root mean square.
      floor: smaller norms are not recorded, and no threshold is smaller.

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


class _HistorySettings(NamedTuple):
    mean_decay: Any
    square_decay: Any
    eps: Any


@register_state
class _Averages(NamedTuple):
    """Debiased averages of the norms, float32: the mean and the root of the mean square."""

    mean: Array
    rms: Array


@dataclasses.dataclass(frozen=True)
class _MeanOverRms:
    def init(self, settings: _HistorySettings, like: Array) -> _Averages:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return _Averages(zeros, zeros)

    def observe(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> _Averages:
        of_mean, of_square = (
            ema_weight(decay, count, debias=True)
            for decay in (settings.mean_decay, settings.square_decay)
        )
        return _Averages(
            lerp(state.mean, norm, of_mean),
            safe_hypot(safe_sqrt(1 - of_square) * state.rms, safe_sqrt(of_square) * norm),
        )

    def compute_thresholds(
        self, settings: _HistorySettings, state: _Averages, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        ratio = divide_no_nan(state.mean, state.rms + cast_to_float32(settings.eps), 0)
        target = jnp.where(count == 0, jnp.inf, ratio)
        return Thresholds(target, target)

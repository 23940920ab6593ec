"""Rules over moving averages: a multiple of the mean, the mean plus deviations.

A variance is computed as an average of squared deviations from the mean. In float32, the difference
between the mean square and the squared mean would lose its digits to cancellation.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from optaxclip._base.arguments import checked_bool, checked_choice
from optaxclip._base.numerics import averaged, bounded, safe_divide, safe_sqrt
from optaxclip._base.states import registered_state
from optaxclip._base.types import ArrayLike, Limits, Threshold
from optaxclip.thresholds.base import (
    FLOOR,
    PATIENCE,
    Record,
    adaptive,
    as_float,
    at_least,
    makes_rule,
    multiple,
    root_of_squares,
    select_tree,
    within,
)

Option = Literal["adaptive", "mean", "percentile"]


@makes_rule
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
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: ArrayLike | None = None,
) -> Threshold:
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
      record: explained in `optaxclip.thresholds.base`, like the options that follow.
      warmup_steps: norms to record before there is a limit.
      floor: smaller norms are not recorded, and no limit is smaller.
      patience: after this many norms in a row above their limit the raw norm is recorded.
      max_norm: a cap on every limit.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.ema(0.5, 2.0)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.5, 1.0):
      ...     limits, state = rule.update(jnp.array(norm), state, None)
      >>> print(limits.trigger)
      2.5
    """
    same = target_decay is None and target_ratio is None
    settings = _EmaSettings(
        decay=within(decay, 0, 1, "decay", "; a multiple of the average is ratio="),
        ratio=at_least(ratio, 0, "ratio"),
        target_decay=decay if target_decay is None else within(target_decay, 0, 1, "target_decay"),
        target_ratio=ratio if target_ratio is None else at_least(target_ratio, 0, "target_ratio"),
        skip_steps=at_least(skip_steps, 0, "skip_steps"),
    )
    return adaptive(
        _Ema(checked_bool(debias, "debias"), same),
        settings,
        record=record,
        inclusive=inclusive,
        warmup_steps=warmup_steps,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )


@makes_rule
def zscore(
    alpha: ArrayLike = 0.97,
    z_thresh: ArrayLike = 2.5,
    warmup_steps: int = 25,
    *,
    option: Option = "adaptive",
    debias: bool = False,
    record: Record = "clipped",
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: ArrayLike | None = None,
) -> Threshold:
    """A number of standard deviations above the moving mean of the norms before this one.

    Source: Kumar, Owen, Roy Chowdhury and Güra, 2025, ZClip, arXiv 2504.02507.

    Args:
      alpha: the decay of mean and variance.
      z_thresh: a norm more than `z_thresh` standard deviations above the mean is a spike.
      warmup_steps: norms to record before there is a limit; the moving mean and variance start from
        the plain mean and variance of these norms.
      option: which norm a spike of z-score `z` is given: "adaptive" gives it
        `mean + z_thresh**2 / z * std`, which is lower for larger spikes; "mean" gives it the mean;
        "percentile" gives it the limit, `mean + z_thresh * std`.
      debias: whether mean and variance are debiased averages from the first norm on, as in axlearn
        (apple/axlearn); if False, they start from those of the warm-up.
      record: explained in `optaxclip.thresholds.base`, like the options that follow.
      floor: smaller norms are not recorded, and no limit is smaller.
      patience: after this many norms in a row above their limit the raw norm is recorded.
      max_norm: a cap on every limit, in the warm-up too.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.zscore(warmup_steps=3)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8, 1.0, 5.0):
      ...     limits, state = rule.update(jnp.array(norm), state, None)
      >>> print(limits.target)
      1.04042
    """
    option = checked_choice(option, get_args(Option), "option")
    settings = _ZScoreSettings(
        within(alpha, 0, 1, "alpha", "; a number of standard deviations is z_thresh="),
        at_least(z_thresh, 0, "z_thresh"),
        at_least(warmup_steps, 0, "warmup_steps"),
    )
    return adaptive(
        _ZScore(option, checked_bool(debias, "debias")),
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


@registered_state
class _EmaState(NamedTuple):
    trigger: Array
    target: Array


@dataclasses.dataclass(frozen=True)
class _Ema:
    any_sign: ClassVar[bool] = True
    debias: bool
    same: bool

    def init(self, settings: Any, like: Array) -> _EmaState:
        del settings
        zeros = jnp.zeros(like.shape, jnp.float32)
        return _EmaState(zeros, zeros)

    def observe(
        self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array
    ) -> _EmaState:
        seen = jnp.maximum(count - settings.skip_steps, 0)

        def after(average: Array, decay: Any) -> Array:
            new = averaged(average, norm, weight(decay, seen, self.debias))
            return jnp.where(count >= settings.skip_steps, new, average)

        return _EmaState(
            after(state.trigger, settings.decay), after(state.target, settings.target_decay)
        )

    def limits(self, settings: _EmaSettings, state: _EmaState, norm: Array, count: Array) -> Limits:
        # The first norm is compared with itself.
        is_first = count <= settings.skip_steps
        trigger = multiple(settings.ratio, jnp.where(is_first, norm, state.trigger))
        if self.same:
            return Limits(trigger, trigger)
        target = multiple(settings.target_ratio, jnp.where(is_first, norm, state.target))
        return Limits(trigger, target)


class _ZScoreSettings(NamedTuple):
    alpha: Any
    z_thresh: Any
    warmup_steps: Any


@registered_state
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
            return weighted(state, norm, weight(settings.alpha, count, debias=True))
        plain = weighted(state, norm, 1 / (count.astype(jnp.float32) + 1))
        rest = 1 - as_float(settings.alpha)
        mean = averaged(state.mean, norm, rest)
        # As published, the deviation is taken from the new mean.
        std = root_of_squares(safe_sqrt(1 - rest) * state.std, safe_sqrt(rest) * (norm - mean))
        is_warm = (count > 0) & (count >= settings.warmup_steps)
        return select_tree(is_warm, Moments(mean, std), plain)

    def limits(
        self, settings: _ZScoreSettings, state: Moments, norm: Array, count: Array
    ) -> Limits:
        z_thresh, std = as_float(settings.z_thresh), state.std
        # Until a norm was recorded, there is no limit.
        distance = jnp.where(count == 0, jnp.inf, multiple(z_thresh, std))
        trigger = state.mean + distance
        if self.option == "percentile":
            return Limits(trigger, trigger)
        # The published z-score adds 1e-6 to the deviation; the published "percentile" does not.
        trigger = trigger if self.debias else trigger + z_thresh * 1e-6
        if self.option == "mean":
            return Limits(trigger, jnp.where(count == 0, jnp.inf, state.mean))
        z = (norm - state.mean) / (std + 1e-6)
        # Bounded, because the quotient of two infinities would be NaN.
        harder = jnp.maximum(safe_divide(z, bounded(z_thresh), 1), 1)
        is_open = jnp.isinf(distance)
        target = state.mean + jnp.where(is_open, 0, distance) / harder
        return Limits(trigger, jnp.where(is_open, jnp.inf, target))


def weight(decay: Any, count: Array, debias: bool) -> Array:
    """The weight of a new value in a moving average of `count` earlier values; 1 for the first."""
    rest = 1 - as_float(decay)
    if not debias:
        return jnp.where(count == 0, 1, rest)
    power = as_float(decay) ** (count.astype(jnp.float32) + 1)
    return safe_divide(rest, jnp.maximum(1 - power, rest), (count == 0).astype(jnp.float32))


def weighted(moments: Moments, value: Array, weight: Array) -> Moments:
    """Mean and deviation after one more value with this weight."""
    std = root_of_squares(moments.std, safe_sqrt(weight) * (value - moments.mean))
    return Moments(averaged(moments.mean, value, weight), safe_sqrt(1 - weight) * std)

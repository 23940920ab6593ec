"""Rules over a window of past norms: a percentile, the median, the mean plus deviations."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import divide_by_pow2, floor_pow2, safe_sqrt
from optaxclip._base.state import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip._base.validation import check_bool, check_int, warn
from optaxclip.thresholds.adaptive import (
    DEFAULT_FLOOR,
    DEFAULT_PATIENCE,
    Record,
    adaptive,
    cast_to_float32,
    check_minimum,
    check_range,
    rule_factory,
    signed_multiple,
)


@rule_factory
def percentile(
    percentile: ArrayLike = 95.0,
    window: int = 1000,
    *,
    record: Record = "raw",
    inclusive: bool = False,
    warmup_steps: int | None = None,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """A percentile of the last norms, interpolated linearly.

    With the defaults this is the rule of TRELLIS (microsoft/TRELLIS), which judges a norm by
    earlier norms alone. AutoClip (Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469)
    is `percentile(10.0, window, inclusive=True, warmup_steps=0)`.

    Args:
      percentile: from 0 to 100; a number between 0 and 1 gives a warning, because a share may have
        been meant.
      window: how many norms to keep; static, also in `optax.inject_hyperparams`.
      record: explained in `optaxclip.thresholds.adaptive`, like the options that follow.
      inclusive: whether a norm counts in the window that judges it.
      warmup_steps: norms to record before there is a threshold; a full window if None.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.percentile(50.0, window=4, warmup_steps=1)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      1.1
    """
    window = check_int(window, 1, "window")
    return adaptive(
        _Percentile(window),
        _check_percentile(percentile),
        record=record,
        inclusive=inclusive,
        warmup_steps=window if warmup_steps is None else warmup_steps,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )


@rule_factory
def window(
    num_std: ArrayLike = 3.0,
    window: int = 128,
    *,
    ddof: int = 0,
    min_std: float = 1e-6,
    record: Record = "raw",
    inclusive: bool = False,
    warmup_steps: int | None = None,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """The mean of the last norms plus a number of standard deviations.

    With the defaults this is Levanter's rule (marin-community/levanter), which it applies to
    updates. `optaxclip.skip_above` skips whole steps by such a rule for the norm or the loss; its
    documentation has the arguments of OLMo-core, MaxText and Levanter.

    Args:
      num_std: how many standard deviations above the mean.
      window: how many norms to keep; static, also in `optax.inject_hyperparams`.
      ddof: 0 for the deviation of the window itself, 1 for an estimate from it as a sample.
      min_std: a floor under the standard deviation.
      record: explained in `optaxclip.thresholds.adaptive`, like the options that follow.
      inclusive: whether a norm counts in the window that judges it.
      warmup_steps: norms to record before there is a threshold; half a window if None.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: after this many norms in a row above their threshold the raw norm is recorded.
      max_norm: a cap on every threshold.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.window(3.0, window=4)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      1.4
    """
    window = check_int(window, 2, "window")
    check_range(ddof, 0, 1, "ddof")
    return adaptive(
        _Window(window, ddof),
        (check_minimum(num_std, 0, "num_std"), check_minimum(min_std, 0, "min_std")),
        record=record,
        inclusive=inclusive,
        warmup_steps=window // 2 if warmup_steps is None else warmup_steps,
        floor=floor,
        patience=patience,
        max_norm=max_norm,
    )


@rule_factory
def median(
    scale: ArrayLike = 2.0,
    window: int = 100,
    *,
    every_step: bool = False,
    floor: float = DEFAULT_FLOOR,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """A multiple of the median of the last norms.

    As in ScaledAdam (Povey et al., k2-fsa/icefall; Zipformer, arXiv 2310.11230) the threshold is set
    every `window` steps, and at steps 10, 20 and 40 to twice the multiple. A step's norm counts in
    the threshold of that step, but the norm of the first step never counts. With `every_step` the threshold
    is set at each step, from the first one, and all norms in the window count.

    Args:
      scale: the multiple.
      window: how many norms to keep; static, also in `optax.inject_hyperparams`.
      every_step: whether to set the threshold at every step.
      floor: smaller norms are not recorded, and no threshold is smaller. The rule needs no patience,
        because it records raw norms and so follows every lasting rise.
      max_norm: a cap on every threshold.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.median(2.0, window=100, every_step=True)
      >>> state = rule.init(jnp.zeros(()))
      >>> for norm in (1.0, 1.2, 0.8):
      ...     thresholds, state = rule.update(jnp.array(norm), state, None)
      >>> print(thresholds.trigger)
      2.0
    """
    window = check_int(window, 1, "window")
    return adaptive(
        _Median(window) if check_bool(every_step, "every_step") else _PeriodicMedian(window),
        check_minimum(scale, 0, "scale"),
        record="raw",
        inclusive=True,
        floor=floor,
        patience=None,
        max_norm=max_norm,
    )


def _check_percentile(percentile: Any) -> Any:
    """A percentile, checked; warns of a number that looks like a share."""
    percentile = check_range(percentile, 0, 100, "percentile")
    if not isinstance(percentile, jax.Array) and 0 < percentile < 1:
        warn(
            f"percentile is a number from 0 to 100, so {percentile!r} means that fewer than 1 in "
            f"100 norms are below the threshold; for a share of {percentile!r} pass "
            f"{100 * percentile:g}"
        )
    return percentile


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Keeps the last norms, float32[window, ...]; norm number `i` is in place `i % window`."""

    any_sign: ClassVar[bool] = True
    window: int

    def init(self, settings: Any, like: Array) -> Array:
        del settings
        return jnp.zeros((self.window, *like.shape), jnp.float32)

    def observe(self, settings: Any, state: Array, norm: Array, count: Array) -> Array:
        del settings
        return jnp.where(self.slots(count) == (count % self.window)[None], norm[None], state)

    def slots(self, like: Array) -> Array:
        column = jnp.arange(self.window, dtype=jnp.int32).reshape(-1, *(1,) * like.ndim)
        return jnp.broadcast_to(column, (self.window, *like.shape))

    def filled_slots(self, count: Array) -> tuple[Array, Array]:
        """Which places hold a norm after `count` norms, and how many of them do."""
        number = jnp.minimum(count, self.window)
        return self.slots(count) < number[None], number


class _Percentile(_Ring):
    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        is_held, number = self.filled_slots(count)
        ordered = jnp.sort(jnp.where(is_held, state, jnp.finfo(state.dtype).max), axis=0)
        last = jnp.maximum(number - 1, 0)
        position = last.astype(jnp.float32) * (cast_to_float32(settings) / 100)
        below = jnp.floor(position).astype(jnp.int32)
        low, high = _take(ordered, below), _take(ordered, jnp.minimum(below + 1, last))
        share = position - below.astype(jnp.float32)
        threshold = jnp.where(number > 0, low + share * (high - low), jnp.inf)
        return Thresholds(threshold, threshold)


class _Median(_Ring):
    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        median = _Percentile(self.window).compute_thresholds(50.0, state, norm, count).trigger
        threshold = signed_multiple(settings, median)
        return Thresholds(threshold, threshold)


@dataclasses.dataclass(frozen=True)
class _Window(_Ring):
    ddof: int

    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        num_std, min_std = (cast_to_float32(number) for number in settings)
        is_held, number = self.filled_slots(count)
        number = number.astype(jnp.float32)
        ring = jnp.where(is_held, state, 0)
        # Norms are divided by a power of two near the largest, so that no sum or square overflows.
        unit = floor_pow2(jnp.max(jnp.abs(ring), axis=0))
        ring = divide_by_pow2(ring, unit[None])
        mean = jnp.sum(ring, axis=0) / jnp.maximum(number, 1)
        deviations = jnp.where(is_held, ring - mean[None], 0)
        squares = jnp.sum(jnp.square(deviations), axis=0)
        std = unit * safe_sqrt(squares / jnp.maximum(number - self.ddof, 1))
        threshold = unit * mean + signed_multiple(num_std, jnp.maximum(std, min_std))
        threshold = jnp.where(number == 0, jnp.inf, threshold)
        return Thresholds(threshold, threshold)


@register_state
class _PeriodicState(NamedTuple):
    ring: Array
    threshold: Array


@dataclasses.dataclass(frozen=True)
class _PeriodicMedian:
    any_sign: ClassVar[bool] = True
    window: int

    def init(self, settings: Any, like: Array) -> _PeriodicState:
        ring = _Ring(self.window).init(settings, like)
        return _PeriodicState(ring, jnp.full(like.shape, jnp.inf, jnp.float32))

    def observe(
        self, settings: Any, state: _PeriodicState, norm: Array, count: Array
    ) -> _PeriodicState:
        past = _Ring(self.window)
        ring = past.observe(settings, state.ring, norm, count)
        places = past.slots(count)
        # The norm of step 0 never counts.
        is_held = ((places > 0) & (places <= count[None])) | (count >= self.window)[None]
        held = jnp.minimum(count, self.window)
        middle = jnp.clip(held // 4 * 2, 0, jnp.maximum(held - 1, 0))
        median = _take(jnp.sort(jnp.where(is_held, ring, jnp.inf), axis=0), middle)
        threshold = signed_multiple(settings, median)
        is_early = ((count == 10) | (count == 20) | (count == 40)) & (count < self.window)
        is_regular = count % self.window == 0
        threshold = jnp.where(
            is_regular,
            threshold,
            jnp.where(is_early, signed_multiple(2, threshold), state.threshold),
        )
        return _PeriodicState(ring, threshold)

    def compute_thresholds(
        self, settings: Any, state: _PeriodicState, norm: Array, count: Array
    ) -> Thresholds:
        del settings, norm, count
        return Thresholds(state.threshold, state.threshold)


def _take(ordered: Array, place: Array) -> Array:
    return jnp.take_along_axis(ordered, place[None], axis=0)[0]

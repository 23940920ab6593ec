"""Rules based on a window of past norms: `percentile`, `window` and `median`."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import divide_by_pow2, floor_pow2, safe_sqrt
from optaxclip._base.state import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip._base.validation import check_bool, check_int, warn
from optaxclip.thresholds._adaptive import (
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
    """Uses a linearly interpolated percentile of the most recent norms as the threshold.

    The defaults match TRELLIS (microsoft/TRELLIS). For AutoClip (Seetharaman, Wichern, Pardo and
    Le Roux, 2020, arXiv 2007.14469), use
    `percentile(10.0, window, inclusive=True, warmup_steps=0)`.

    Args:
      percentile: The percentile, from 0 to 100. A number between 0 and 1 causes a warning, because
        it is often meant as a fraction.
      window: The number of norms to keep. It must be static in `optax.inject_hyperparams`.
      record: The norms to record. See `optaxclip.thresholds.adaptive` for all options below.
      inclusive: If True, the window includes the current norm.
      warmup_steps: The number of norms before a finite threshold. Defaults to `window`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: After this many consecutive norms above the threshold, norms are recorded unclipped.
      max_norm: The upper bound on thresholds. By default, there is no bound.

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
    number: Any = check_range(percentile, 0, 100, "percentile")
    if not isinstance(number, jax.Array) and 0 < number < 1:
        warn(
            f"percentile is a number from 0 to 100, got {number!r}; pass {100 * number:g} if you "
            f"mean the fraction {number!r}"
        )
    return adaptive(
        _Percentile(window),
        number,
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
    """Uses the mean of the most recent norms plus a number of standard deviations.

    The defaults match Levanter (marin-community/levanter), which applies this rule to updates. To
    skip steps by their norm or loss, use this rule in `optaxclip.skip_above`, which documents the
    arguments of OLMo-core, MaxText and Levanter.

    Args:
      num_std: The number of standard deviations above the mean.
      window: The number of norms to keep. It must be static in `optax.inject_hyperparams`.
      ddof: Use 1 for an unbiased estimate of the variance, as in `numpy.var`.
      min_std: The lower bound on the standard deviation.
      record: The norms to record. See `optaxclip.thresholds.adaptive` for all options below.
      inclusive: If True, the window includes the current norm.
      warmup_steps: The number of norms before a finite threshold. Defaults to half of `window`.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: After this many consecutive norms above the threshold, norms are recorded unclipped.
      max_norm: The upper bound on thresholds. By default, there is no bound.

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
    """Uses a multiple of the median of the most recent norms as the threshold, as in ScaledAdam.

    The threshold is updated every `window` steps. Before the first update, it is set to twice the
    usual multiple at steps 10, 20 and 40. The median includes the current norm, but not the norm of
    the first step.

    Source: Povey et al., k2-fsa/icefall, and Zipformer, arXiv 2310.11230.

    Args:
      scale: The threshold divided by the median.
      window: The number of norms to keep. It must be static in `optax.inject_hyperparams`.
      every_step: If True, the threshold is updated on every step, is never doubled, and uses all
        norms in the window.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      max_norm: The upper bound on thresholds. By default, there is no bound.

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
    scale = check_minimum(scale, 0, "scale")
    ring = (_Median if check_bool(every_step, "every_step") else _PeriodicMedian)(window)
    return adaptive(
        ring, scale, record="raw", inclusive=True, floor=floor, patience=None, max_norm=max_norm
    )


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A ring buffer, float32[window, ...], that stores norm `i` in slot `i % window`."""

    any_sign: ClassVar[bool] = True
    window: int

    def init(self, settings: Any, like: Array) -> Array:
        del settings
        return jnp.zeros((self.window, *like.shape), jnp.float32)

    def observe(self, settings: Any, state: Array, norm: Array, count: Array) -> Array:
        del settings
        # [window, groups] == [1, groups]
        return jnp.where(self.slots(count) == (count % self.window)[None], norm[None], state)

    def slots(self, like: Array) -> Array:
        """Returns the slot numbers, int32[window, ...]."""
        # [window, 1, ...]
        column = jnp.arange(self.window, dtype=jnp.int32).reshape(-1, *(1,) * like.ndim)
        return jnp.broadcast_to(column, (self.window, *like.shape))

    def filled_slots(self, count: Array) -> tuple[Array, Array]:
        """Returns which slots are filled, bool[window, ...], and the number of filled slots."""
        number = jnp.minimum(count, self.window)  # [groups]
        return self.slots(count) < number[None], number


class _Percentile(_Ring):
    def compute_thresholds(
        self, settings: Any, state: Array, norm: Array, count: Array
    ) -> Thresholds:
        del norm
        is_filled, number = self.filled_slots(count)
        # [window, groups], with the empty slots at the end
        ordered = jnp.sort(jnp.where(is_filled, state, jnp.finfo(state.dtype).max), axis=0)
        last = jnp.maximum(number - 1, 0)
        # [groups], from 0 to number - 1
        position = last.astype(jnp.float32) * (cast_to_float32(settings) / 100)
        below = jnp.floor(position).astype(jnp.int32)
        low, high = _take(ordered, below), _take(ordered, jnp.minimum(below + 1, last))
        fraction = position - below.astype(jnp.float32)
        threshold = jnp.where(number > 0, low + fraction * (high - low), jnp.inf)
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
        is_filled, number = self.filled_slots(count)
        number = number.astype(jnp.float32)  # [groups]
        ring = jnp.where(is_filled, state, 0)  # [window, groups]
        # f32[groups], a power of two near the largest norm. It prevents overflow.
        unit = floor_pow2(jnp.max(jnp.abs(ring), axis=0))
        ring = divide_by_pow2(ring, unit[None])
        mean = jnp.sum(ring, axis=0) / jnp.maximum(number, 1)
        deviations = jnp.where(is_filled, ring - mean[None], 0)
        squares = jnp.sum(jnp.square(deviations), axis=0)
        std = unit * safe_sqrt(squares / jnp.maximum(number - self.ddof, 1))
        # f32[groups] in the original units
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
        slots = past.slots(count)  # [window, groups]
        # As in icefall, the norm of step 0 is never included.
        is_filled = ((slots > 0) & (slots <= count[None])) | (count >= self.window)[None]
        number = jnp.minimum(count, self.window)
        # icefall computes the second quartile this way.
        middle = jnp.clip(number // 4 * 2, 0, jnp.maximum(number - 1, 0))
        median = _take(jnp.sort(jnp.where(is_filled, ring, jnp.inf), axis=0), middle)  # [groups]
        threshold = signed_multiple(settings, median)
        # As in icefall, early thresholds are twice as large.
        is_early = ((count == 10) | (count == 20) | (count == 40)) & (count < self.window)
        is_regular = count % self.window == 0  # bool[groups]
        early = jnp.where(is_early, signed_multiple(2, threshold), state.threshold)
        return _PeriodicState(ring, jnp.where(is_regular, threshold, early))

    def compute_thresholds(
        self, settings: Any, state: _PeriodicState, norm: Array, count: Array
    ) -> Thresholds:
        del settings, norm, count
        return Thresholds(state.threshold, state.threshold)


def _take(ordered: Array, index: Array) -> Array:
    # [window, groups] -> [groups]
    return jnp.take_along_axis(ordered, index[None], axis=0)[0]

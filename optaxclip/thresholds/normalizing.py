"""Rules for the response "normalize", which brings every norm to its target, even small norms."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from optaxclip._base.numerics import divide_no_nan, lerp, safe_sqrt
from optaxclip._base.states import register_state
from optaxclip._base.types import ArrayLike, ThresholdRule, Thresholds
from optaxclip.thresholds.base import (
    DEFAULT_FLOOR,
    adaptive,
    cast_to_float32,
    check_minimum,
    check_range,
    rule_factory,
    safe_hypot,
)
from optaxclip.thresholds.moving import ema_weight


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

"""The level, spread and spikes of a sequence of gradient norms.

All are computed from logarithms, so that results do not depend on the norms' scale, and by medians,
so that spikes do not change the level that they are compared with.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from optaxclip.tuning.regimes import OUTLYING, SMALLEST_RATIO, Floats, Regime, regime_of

WINDOW_SHARE, SMALLEST_WINDOW, LARGEST_WINDOW = 0.1, 11, 201
"""The level at a step is the median over a window around it, this share of all steps long."""
LARGEST_RATIO = 8.0
"""Above this multiple of its level each norm is a spike, however heavy the tail of the others."""
FALSE_SHARE = 0.03
"""The share of what is taken for spikes that may be ordinary norms."""
SELDOM = 1 / 400
"""At most this share of ordinary norms is taken for spikes."""
REACH, END = 4.5, 0.9
"""The threshold is so many standard deviations of ordinary norms above the highest level, which this
quantile of all ordinary norms shows. Neither rests on single norms, as an extreme does, so they are
nearly the same without every second step."""
BODY, ALL_BUT_SPIKES = 0.8, 0.97
"""The tail is first fitted up to this quantile, then up to the second one of what is no spike."""
HEAVY, HEAVIEST, HEAVY_WEIGHT = 0.2, 0.25, 13.0
"""The tail of few norms is taken to be as heavy as that of Student's t with 3 degrees."""
SMALLEST_SIDE = 0.25
"""A side of the level is used to estimate the spread only if more than this share lies there."""
LONGEST_WARMUP = 0.25
MAD_TO_STD = 1 / NormalDist().inv_cdf(0.75)


class Shape(NamedTuple):
    """What was found in the logarithms of norms.

    Attributes:
      level: float64[steps], the moving median; after the warm-up of stationary norms their median.
      low: the lowest level after the warm-up, but for a few steps.
      threshold: the best constant threshold.
      spread: the standard deviation of ordinary norms from their level.
      spikes: bool[steps], which norms are spikes.
      warmup: how many of the first steps have a level unlike all later ones.
      regime: how the level moves after the warm-up.
      seldom: the deviation above which one ordinary norm in 300 is, if their tail is as it looks.
    """

    level: Floats
    low: float
    threshold: float
    spread: float
    spikes: np.ndarray[Any, np.dtype[np.bool_]]
    warmup: int
    regime: Regime
    seldom: float = 0.0


def shape_of(logs: Floats) -> Shape:
    """The shape of the logarithms of norms, float64[steps], all finite."""
    level = _rolling_median(logs, _window(len(logs)))
    around = logs - level
    spread = _spread(around)
    warmup = _warmup(level, spread)
    regime = regime_of(logs[warmup:], level[warmup:], spread)
    if regime == "stationary":
        level[warmup:] = np.median(logs[warmup:])
    deviations = logs - level
    border, seldom = _border(np.sort(deviations[warmup:]))
    spikes = deviations > border
    used = warmup + np.flatnonzero(~spikes[warmup:])
    high, std = _end(logs[used], around[used], spread)
    low, _ = _end(-logs[used], -around[used], spread)
    reach = np.clip(REACH * std, math.log(SMALLEST_RATIO), math.log(LARGEST_RATIO))
    threshold = high + min(float(reach), border)
    spread = _spread(deviations[warmup:])
    return Shape(level, -low, threshold, spread, spikes, warmup, regime, seldom)


def _window(steps: int) -> int:
    return min(max(round(steps * WINDOW_SHARE), SMALLEST_WINDOW), LARGEST_WINDOW) | 1


def _rolling_median(values: Floats, window: int) -> Floats:
    from scipy.ndimage import median_filter  # slow to import, and seldom needed

    level = median_filter(values, size=window, mode="mirror")
    # The first windows are smaller, with their steps in the middle, because norms may fall steeply.
    for step in range(window // 2):
        level[step] = np.median(values[: 2 * max(step, 1) + 1])
    return level


def _spread(deviations: Floats) -> float:
    """The standard deviation of ordinary norms.

    It is the larger one of two estimates, from upward and from downward deviations.
    """
    up, down = (side[side > 0] for side in (deviations, -deviations))
    # About half of all norms are on each side of a median. Where most norms equal their level, the
    # few on one side may all be spikes, which say nothing about ordinary norms.
    enough = SMALLEST_SIDE * len(deviations)
    medians = [float(np.median(side)) for side in (up, down) if len(side) > enough]
    return MAD_TO_STD * max(medians, default=0.0)


def _end(logs: Floats, deviations: Floats, spread: float) -> tuple[float, float]:
    """The highest level of ordinary norms, and the standard deviation above their levels."""
    std = math.sqrt(2 * math.pi) * np.mean(np.clip(deviations, 0.0, OUTLYING * spread))
    return float(np.quantile(logs, END) - NormalDist().inv_cdf(END) * std), float(std)


def _border(deviations: Floats) -> tuple[float, float]:
    """The border of spikes, and the deviation that one ordinary norm in 300 exceeds.

    As many norms are spikes as make at most a share of them ordinary ones, after the tail that the
    norms below have (Benjamini and Hochberg, 1995).

    Args:
      deviations: float64[steps], ascending.
    """
    from scipy.special import ndtri

    tail, whole = _tail(deviations, BODY), _tail(deviations, ALL_BUT_SPIKES)
    seldom = float(min(each(ndtri(1 - 1 / 300), -math.inf) for each in (tail, whole)))
    counts = np.arange(len(deviations) // 4, 0, -1)
    scores = ndtri(1 - np.minimum(FALSE_SHARE * counts / len(deviations), SELDOM))
    border = spikes = 0
    for _ in range(2):
        bounds = np.clip(tail(scores, HEAVY), math.log(SMALLEST_RATIO), math.log(LARGEST_RATIO))
        beyond = np.flatnonzero(deviations[-counts] > bounds)
        spikes = int(counts[beyond[0]]) if beyond.size else 0
        # The largest border that leaves out no more of them than may be ordinary norms.
        kept = len(deviations) - np.searchsorted(deviations, bounds, side="right")
        border = float(bounds[kept >= (1 - FALSE_SHARE) * spikes][-1])
        tail = _tail(deviations[: len(deviations) - spikes], ALL_BUT_SPIKES)
    return border, seldom


def _tail(deviations: Floats, quantile: float) -> Callable[[Any, float], Any]:
    """The deviation at a normal score, fitted to the upper deviations up to a quantile.

    It is `scale * score * exp(heaviness * score**2 / 2)`, Tukey's h-distribution, normal if the
    heaviness is 0. The second argument is the heaviness that is expected before a norm is seen.
    """
    from scipy.special import ndtri

    steps = len(deviations)
    used = slice(int(0.6 * steps), max(int(quantile * steps), int(0.6 * steps) + 2))
    scores = ndtri((np.arange(steps)[used] + 0.5) / steps)
    ratios = np.log(np.maximum(deviations[used], 1e-12) / scores)
    x = scores**2 / 2
    slope, weight = (x - x.mean()) @ ratios, (x - x.mean()) @ x

    def at(score: Any, expected: float) -> Any:
        heaviness = (slope + HEAVY_WEIGHT * expected) / (weight + HEAVY_WEIGHT)
        heaviness = min(max(heaviness, 0.0), HEAVIEST)
        return score * np.exp(ratios.mean() + heaviness * (score**2 / 2 - x.mean()))

    return at


def _warmup(level: Floats, spread: float) -> int:
    """The number of first steps whose level is outside of the range of all later levels.

    Behind the first step within the range a run has begun: what leaves it then is no warm-up.
    """
    longest = int(len(level) * LONGEST_WARMUP)
    low, high = level[longest:].min(), level[longest:].max()
    beyond = np.maximum(low - level[:longest], level[:longest] - high)
    warmup = int(np.argmax(np.append(beyond, 0.0) <= spread / 4))
    # The start of a steady drift is also outside of the later range, by a third of that range.
    clearly = max((high - low) / 2, 2 * spread, math.log(SMALLEST_RATIO))
    return warmup if beyond[:warmup].max(initial=0.0) > clearly else 0

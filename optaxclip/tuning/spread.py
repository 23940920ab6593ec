"""The level, spread, spikes and regime of a sequence of gradient norms.

All are computed from logarithms, so that results do not depend on the norms' scale, and by medians,
so that spikes do not change the level that they are compared with.
"""

import math
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Regime: TypeAlias = Literal["stationary", "drifting", "stepped"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

WINDOW_SHARE, SMALLEST_WINDOW, LARGEST_WINDOW = 0.1, 11, 201
"""The level at a step is the median over a window around it, this share of all steps long."""
SPURIOUS = 0.01
"""How many ordinary norms of a run are taken for spikes on average, if they are lognormal."""
SMALLEST_RATIO = 1.5
"""A norm below this multiple of its level is never a spike, however steady other norms are."""
SMALLEST_SIDE = 0.25
"""A side of the level is used to estimate the spread only if more than this share lies there."""
LONGEST_WARMUP = 0.25
MAD_TO_STD = 1 / NormalDist().inv_cdf(0.75)


class Shape(NamedTuple):
    """What was found in the logarithms of norms.

    Attributes:
      level: float64[steps], the moving median.
      reach: the largest deviation of an ordinary norm above its level.
      spread: the standard deviation of ordinary norms from their level.
      spikes: bool[steps], which norms are above their level by more than `reach`.
      warmup: how many of the first steps have a level unlike all later ones.
      regime: how the level moves after the warm-up.
    """

    level: Floats
    reach: float
    spread: float
    spikes: np.ndarray[Any, np.dtype[np.bool_]]
    warmup: int
    regime: Regime


def shape_of(logs: Floats) -> Shape:
    """The shape of the logarithms of norms, float64[steps], all finite."""
    window = _window(len(logs))
    level = _rolling_median(logs, window)
    spread, reach = _spread_and_reach(logs - level)
    warmup = _warmup(level, spread)
    regime = _regime(level[warmup:], spread, window)
    return Shape(level, reach, spread, logs - level > reach, warmup, regime)


def _window(steps: int) -> int:
    return min(max(round(steps * WINDOW_SHARE), SMALLEST_WINDOW), LARGEST_WINDOW) | 1


def _rolling_median(values: Floats, window: int) -> Floats:
    from scipy.ndimage import median_filter  # slow to import, and seldom needed

    level = median_filter(values, size=window, mode="mirror")
    # The first windows are smaller, with their steps in the middle, because norms may fall steeply.
    for step in range(window // 2):
        level[step] = np.median(values[: 2 * max(step, 1) + 1])
    return level


def _spread_and_reach(deviations: Floats) -> tuple[float, float]:
    """The standard deviation of ordinary norms, and the largest deviation that chance explains.

    The spread is the larger one of two estimates, from upward and from downward deviations.
    """
    up, down = (side[side > 0] for side in (deviations, -deviations))
    # About half of all norms are on each side of a median. Where most norms equal their level, the
    # few on one side may all be spikes, which say nothing about ordinary norms.
    enough = SMALLEST_SIDE * len(deviations)
    medians = [float(np.median(side)) for side in (up, down) if len(side) > enough]
    spread = MAD_TO_STD * max(medians, default=0.0)
    chance = NormalDist().inv_cdf(1 - SPURIOUS / len(deviations))
    return spread, max(chance * spread, math.log(SMALLEST_RATIO))


def _warmup(level: Floats, spread: float) -> int:
    """The number of first steps whose level is clearly outside of the range of all later levels."""
    longest = int(len(level) * LONGEST_WARMUP)
    low, high = level[longest:].min(), level[longest:].max()
    beyond = np.maximum(low - level[:longest], level[:longest] - high)
    # The start of a steady drift is also outside of the later range, by a third of that range.
    clearly = max((high - low) / 2, spread, math.log(SMALLEST_RATIO))
    if not (beyond[:1] > clearly).any():
        return 0
    return int(np.flatnonzero(beyond > spread / 4)[-1]) + 1


def _regime(level: Floats, spread: float, window: int) -> Regime:
    moved = np.ptp(level)
    if len(level) < 3 * window or moved <= max(spread, math.log(SMALLEST_RATIO)):
        return "stationary"
    jump = np.abs(level[window:] - level[:-window]).max(initial=0.0)
    return "stepped" if jump > moved / 2 else "drifting"

"""What a sequence of gradient norms looks like: its level, its spread, its spikes, its regime.

All in logarithms, so that nothing depends on the norms' scale, and with medians, so that spikes do
not move what they are measured against.
"""

import math
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Regime: TypeAlias = Literal["stationary", "drifting", "stepped"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

WINDOW_SHARE, LEAST_WINDOW, MOST_WINDOW = 0.1, 11, 201
"""The level at a step is the median of this share of all steps around it."""
SPURIOUS = 0.01
"""How many spikes may be expected among lognormal norms that have none."""
LEAST_RATIO = 1.5
"""No norm is a spike below this multiple of its level, however steady the others are."""
LONGEST_WARMUP = 0.25
MAD_TO_STD = 1 / NormalDist().inv_cdf(0.75)


class Shape(NamedTuple):
    """What was found in the logarithms of norms.

    Attributes:
      level: float64[steps], the local median.
      reach: how far above its level an ordinary norm may lie.
      spread: the standard deviation of the bulk around its level, from the median deviation.
      spikes: bool[steps], those above their level by more than `reach`.
      warmup: how many of the first steps have a level unlike all later ones.
      regime: how the level moves after these steps.
    """

    level: Floats
    reach: float
    spread: float
    spikes: np.ndarray[Any, np.dtype[np.bool_]]
    warmup: int
    regime: Regime


def shape_of(logs: Floats) -> Shape:
    """Takes apart float64[steps], the finite logarithms of norms."""
    window = _window(len(logs))
    level = _rolling_median(logs, window)
    spread, reach = _spread_and_reach(logs - level)
    warmup = _warmup(level, spread)
    regime = _regime(level[warmup:], spread, window)
    return Shape(level, reach, spread, logs - level > reach, warmup, regime)


def _window(steps: int) -> int:
    return min(max(round(steps * WINDOW_SHARE), LEAST_WINDOW), MOST_WINDOW) | 1


def _rolling_median(values: Floats, window: int) -> Floats:
    from scipy.ndimage import median_filter  # slow to import, and seldom needed

    level = median_filter(values, size=window, mode="mirror")
    # Where norms fall steeply at first, only a window with its step in the middle follows them.
    for step in range(min(window // 2, len(values) // 2)):
        level[step] = np.median(values[: 2 * max(step, 1) + 1])
    return level


def _spread_and_reach(deviations: Floats) -> tuple[float, float]:
    """The bulk's standard deviation, and the largest deviation that chance explains.

    Upward and downward deviations have a spread each, of which the larger counts.
    """
    up, down = (side[side > 0] for side in (deviations, -deviations))
    medians = [float(np.median(side)) for side in (up, down) if side.size]
    spread = MAD_TO_STD * max(medians, default=0.0)
    chance = NormalDist().inv_cdf(1 - SPURIOUS / len(deviations))
    return spread, max(chance * spread, math.log(LEAST_RATIO))


def _warmup(level: Floats, spread: float) -> int:
    """The steps at the start, if it is clearly out of the later range, until the level is in it."""
    longest = int(len(level) * LONGEST_WARMUP)
    low, high = level[longest:].min(), level[longest:].max()
    beyond = np.maximum(low - level[:longest], level[:longest] - high)
    # The start of a steady drift is out of the later range too, by a third of that range.
    clearly = max((high - low) / 2, spread, math.log(LEAST_RATIO))
    if not (beyond[:1] > clearly).any():
        return 0
    return int(np.flatnonzero(beyond > spread / 4)[-1]) + 1


def _regime(level: Floats, spread: float, window: int) -> Regime:
    moved = np.ptp(level)
    if len(level) < 3 * window or moved <= max(spread, math.log(LEAST_RATIO)):
        return "stationary"
    jump = np.abs(level[window:] - level[:-window]).max(initial=0.0)
    return "stepped" if jump > moved / 2 else "drifting"

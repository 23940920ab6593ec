"""The local level and scale of gradient norms, in logarithms, and what follows from them.

Logarithms make all results proportional to the norms. Medians keep spikes from changing the level
that they are compared with.
"""

import math
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Regime: TypeAlias = Literal["stationary", "drifting", "stepped"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

SMALLEST_RATIO = 1.5
"""No norm below this multiple of its level is a spike. Levels that move by less are stationary."""
LARGEST_RATIO = 8.0
"""Above this multiple of its level, norms are spikes however heavy the tail is, unless their noise
is so wide that they are within 5 scales."""
FAR = math.log(3.2)
"""A level moves too far for a constant threshold if the 0.03 and 0.97 quantiles of its path are a
factor of 3.2 apart. If it falls steadily by a factor of 4, they are 3.7 apart, and noisy."""
REACH = 4.5
"""The threshold is so many standard deviations of ordinary norms above their level."""
FALSE_RATE = 3e-4
"""The fraction of ordinary norms that the fitted tail expects above the bound of spikes."""
LONGEST_WARMUP = 0.1
"""The largest fraction of the run that may be warm-up."""
CRITICAL_RANGE, FEW = 5.5, 12
"""Means of stationary blocks have a range above 5.5 standard errors in at most 2% of runs, also
if norms are autocorrelated (`benchmarks/suggesting.py`); more, if few of them are independent."""
MAX_BLOCKS, FEWEST_NORMS = 8, 16
MAD_TO_STD = 1.4826


class Shape(NamedTuple):
    """Properties of the logarithms of norms.

    Attributes:
      level: float64[n], the local level.
      spread: the standard deviation of ordinary norms above their level.
      spikes: bool[n], the norms that stand out from their level, also those of the warm-up.
      warmup: the number of first norms whose level is unlike all later levels.
      regime: how the level moves after the warm-up.
      ratio, fall, rise: from the lowest to the highest level after the warm-up, and the largest
        fall and rise of it.
      threshold: the best constant threshold.
    """

    level: Floats
    spread: float
    spikes: Flags
    warmup: int
    regime: Regime
    ratio: float
    fall: float
    rise: float
    threshold: float


def analyze(logs: Floats) -> Shape:
    """Analyzes the logarithms of norms, float64[n], all finite."""
    n = len(logs)
    window = min(max(round(n / 12), 9), 101) | 1
    level = running_median(logs, window)  # f64[n]
    deviations = logs - level
    spread = _upper_spread(deviations)
    # The noise may grow along the run, so each norm has its own scale.
    scales = MAD_TO_STD * running_median(abs(deviations), min(6 * window, max(n // 3, 15)) | 1)
    # The floors are for rounded norms, most of which may equal their level.
    scales = np.maximum(scales, max(0.6 * spread, min(spread, math.log(SMALLEST_RATIO) / 8), 1e-9))
    spikes = _spikes(deviations, scales)
    warmup = _warmup(running_median(logs, 5), spread)
    path, ordinary = level[warmup:], logs[warmup:][~spikes[warmup:]]
    regime = _regime(np.where(spikes, level, logs)[warmup:], spread)
    # Quantiles, so that the ratio does not rest on a few norms.
    low, top, high = np.quantile(path, (0.03, 0.9, 0.97))
    ratio = float(high - low)
    fall, rise = (float(np.max(x - np.minimum.accumulate(x))) for x in (-path, path))
    if regime == "stationary":
        top, ratio = float(np.median(ordinary)), 0.0
        spread = _upper_spread(ordinary - top)
    elif ratio > FAR and fall > FAR:
        regime = "drifting"
    reach = np.clip(REACH * spread, math.log(SMALLEST_RATIO), math.log(LARGEST_RATIO))
    # Far above all ordinary norms, nothing shows what a threshold would do.
    highest = max(ordinary.max() + math.log(1.25), top + math.log(SMALLEST_RATIO))
    threshold = min(float(top + reach), float(highest))
    return Shape(level, spread, spikes, warmup, regime, ratio, fall, rise, threshold)


def running_median(values: Floats, window: int) -> Floats:
    """Computes the running median, with smaller centered windows at both ends."""
    from scipy.ndimage import median_filter  # slow to import

    n, half = len(values), window // 2
    medians = median_filter(values, size=window, mode="nearest")
    for at in range(min(half, n)):
        width = 2 * max(at, 1) + 1
        medians[at] = np.median(values[:width])
        medians[n - 1 - at] = np.median(values[-width:])
    return medians


def _upper_spread(deviations: Floats) -> float:
    """Estimates the standard deviation from upward deviations, by their median."""
    up = deviations[deviations > 0]
    # If most norms equal their level, the few above it may all be spikes.
    used = up if len(up) > len(deviations) / 4 else abs(deviations)
    return MAD_TO_STD * float(np.median(used))


def _spikes(deviations: Floats, scales: Floats) -> Flags:
    """Finds the norms above the tail that the other norms show.

    The upper tail of ordinary deviations is fitted by quantiles: they grow as `log(0.5 / p)**k`,
    where `p` is the probability of larger ones. `k` is 1 for Laplace noise and about 0.75 for
    normal noise.
    """
    spikes = np.zeros(len(deviations), bool)
    for _ in range(2):  # the second fit leaves out the spikes of the first
        up = (deviations / scales)[(deviations > 0) & ~spikes]
        if len(up) < 5:
            break
        middle, high = np.quantile(up, (0.5, 0.9))
        fitted = math.log(high / middle) / math.log(math.log(10) / math.log(2))
        k = (len(up) * fitted + 30) / (len(up) + 30)  # few norms say little about their tail
        bound = middle * (math.log(0.5 / FALSE_RATE) / math.log(2)) ** min(max(k, 0.5), 1.0)
        wide = np.maximum(math.log(LARGEST_RATIO), 5 * scales)
        spikes = deviations > np.maximum(math.log(SMALLEST_RATIO), np.minimum(bound * scales, wide))
    return spikes


def _warmup(level: Floats, spread: float) -> int:
    """Counts the first steps, whose level is unlike all later ones and approaches them fast."""
    longest = int(len(level) * LONGEST_WARMUP)
    low, high = level[longest:].min(), level[longest:].max()
    distance = np.maximum(low - level[:longest], level[:longest] - high)
    # A steady drift also begins outside of the range of later levels, by a ninth of that range.
    if distance.max() <= max(math.log(SMALLEST_RATIO), 2 * spread, (high - low) / 2):
        return 0
    return int(np.argmax(np.append(distance, 0.0) <= distance.max() / 10))


def _regime(logs: Floats, spread: float) -> Regime:
    """Compares the range of block means with chance, then stairs with polynomials."""
    n = len(logs)
    if n < FEWEST_NORMS:
        return "stationary"
    count = min(max(n // 12, 3), MAX_BLOCKS)
    size, means, rest = n / count, [], []
    for block in np.array_split(logs, count):
        # Without its line, so that a steep fall does not look like noise.
        t = np.linspace(-1, 1, len(block))
        middle = np.median(block)
        near = np.clip(block, middle - 3 * spread, middle + 3 * spread)
        means.append(near.mean())
        off_line = block - np.polyval(np.polyfit(t, block, 1), t)
        rest.append(np.clip(off_line, -3 * spread, 3 * spread))
    rest = np.concatenate(rest)  # f64[n]
    squares = float(rest @ rest) + 1e-12
    correlation = float(rest[1:] @ rest[:-1]) / squares
    # Fits make what they leave less correlated than it was (Marriott and Pope, 1954).
    correlation = min(max(correlation + (2 + 4 * max(correlation, 0.0)) / size, 0.0), 0.95)
    variance = squares / (n - 2 * count) * (1 + correlation) / (1 - correlation) / size
    moved = float(np.ptp(means))
    independent = n * (1 - correlation) / (1 + correlation)
    # The variance of few independent norms is uncertain.
    critical = CRITICAL_RANGE * (1 + FEW / independent) * math.sqrt(variance)
    if moved <= max(math.log(SMALLEST_RATIO), critical):
        return "stationary"
    return "stepped" if _is_stepped(logs) else "drifting"


def _is_stepped(logs: Floats) -> bool:
    """Compares the best staircase of up to two steps with polynomials."""
    n = min(40, len(logs) // 4)
    y = np.array([np.median(part) for part in np.array_split(logs, n)])
    t = np.linspace(-1, 1, n)
    fits = [(y - np.polyval(np.polyfit(t, y, d), t), d + 1) for d in (1, 2, 3, 5) if d + 2 < n]
    smooth = min(float(rest @ rest) / (n - params) for rest, params in fits)
    shortest = max(2, n // 12)

    def cost(*bounds: int) -> float:
        return sum(float(np.var(y[a:b]) * (b - a)) for a, b in pairwise(bounds))

    ends = range(shortest, n - shortest + 1)
    one = min((cost(0, i, n) for i in ends), default=math.inf) / (n - 3)
    two = [cost(0, i, j, n) for i in ends for j in ends if j - i >= shortest]
    stairs = min(one, min(two, default=math.inf) / max(n - 5, 1))
    return 1.5 * stairs < smooth

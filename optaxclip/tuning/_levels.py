"""Estimates the level and the scale of the logarithms of gradient norms, and finds spikes."""

import math
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Regime: TypeAlias = Literal["stationary", "drifting", "stepped"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

SMALLEST_RATIO = 1.5
"""Spikes are at least this multiple of their level. Smaller changes of the level are ignored."""
LARGEST_RATIO = 8.0
"""Norms above this multiple of their level are always spikes, unless they are within 5 scales."""
FAR = math.log(3.2)
"""If the 0.03 and 0.97 quantiles of the level differ by more than this factor, a constant threshold
is not suitable. If the level decreases steadily by a factor of 4, they differ by about 3.7."""
REACH = 4.5
"""The distance from the level to the threshold, in standard deviations of typical norms."""
FALSE_RATE = 3e-4
"""The expected fraction of typical norms above the bound for spikes, if the fit is exact."""
LONGEST_WARMUP = 0.1
"""The maximum length of the warm-up, as a fraction of the run."""
CRITICAL_RANGE, FEW = 5.5, 12
"""In at most 2% of stationary runs, the range of the block means exceeds 5.5 standard errors, even
if norms are autocorrelated (`benchmarks/suggesting.py`). With few independent norms, the critical
range is larger."""
MAX_BLOCKS, FEWEST_NORMS = 8, 16
MAD_TO_STD = 1.4826


class Shape(NamedTuple):
    """Properties of the logarithms of norms."""

    level: Floats  # [n], the local level, a running median, which spikes do not affect.
    spread: float  # The standard deviation of typical norms above their level.
    spikes: Flags  # [n], including the warm-up.
    warmup: int  # The number of initial norms with a level outside the range of later levels.
    regime: Regime
    ratio: float  # The difference between the highest and the lowest level after the warm-up.
    fall: float  # The largest decrease of the level.
    rise: float  # The largest increase of the level.
    threshold: float


def analyze(logs: Floats) -> Shape:
    """Analyzes the logarithms of norms, float64[n], which must be finite."""
    n = len(logs)
    window = min(max(round(n / 12), 9), 101) | 1
    level = running_median(logs, window)  # f64[n]
    deviations = logs - level
    spread = _upper_spread(deviations)
    # The noise may increase during the run, so the scale is also a running median.
    scales = MAD_TO_STD * running_median(abs(deviations), min(6 * window, max(n // 3, 15)) | 1)
    # If norms are rounded, most of them may equal their level, so the scale has lower bounds.
    scales = np.maximum(scales, max(0.6 * spread, min(spread, math.log(SMALLEST_RATIO) / 8), 1e-9))
    spikes = _spikes(deviations, scales)
    warmup = _warmup(running_median(logs, 5), spread)
    path, typical = level[warmup:], logs[warmup:][~spikes[warmup:]]
    regime = _regime(np.where(spikes, level, logs)[warmup:], spread)
    # Uses quantiles, so the ratio does not depend on a few norms.
    low, top, high = np.quantile(path, (0.03, 0.9, 0.97))
    ratio = float(high - low)
    fall, rise = (float(np.max(x - np.minimum.accumulate(x))) for x in (-path, path))
    if regime == "stationary":
        top, ratio = float(np.median(typical)), 0.0
        spread = _upper_spread(typical - top)
    elif ratio > FAR and fall > FAR:
        regime = "drifting"
    reach = np.clip(REACH * spread, math.log(SMALLEST_RATIO), math.log(LARGEST_RATIO))
    # The log contains no information about thresholds far above all typical norms.
    highest = max(typical.max() + math.log(1.25), top + math.log(SMALLEST_RATIO))
    threshold = float(min(top + reach, highest))
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
    """Estimates the standard deviation from the median of upward deviations."""
    up = deviations[deviations > 0]
    # If most norms equal their level, all norms above it may be spikes.
    used = up if len(up) > len(deviations) / 4 else abs(deviations)
    return MAD_TO_STD * float(np.median(used))


def _spikes(deviations: Floats, scales: Floats) -> Flags:
    """Finds norms beyond the upper tail of typical norms.

    The tail is fitted to quantiles of the deviations. If larger deviations have the probability
    `p`, the deviation is proportional to `log(0.5 / p)**k`. `k` is 1 for Laplace noise and about
    0.75 for normal noise.
    """
    spikes = np.zeros(len(deviations), bool)
    # The second fit excludes the spikes of the first fit.
    for _ in range(2):
        up = (deviations / scales)[(deviations > 0) & ~spikes]
        if len(up) < 5:
            break
        middle, high = np.quantile(up, (0.5, 0.9))
        fitted = math.log(high / middle) / math.log(math.log(10) / math.log(2))
        # If there are few norms, the fit is unreliable and `k` stays near 1.
        k = (len(up) * fitted + 30) / (len(up) + 30)
        bound = middle * (math.log(0.5 / FALSE_RATE) / math.log(2)) ** min(max(k, 0.5), 1.0)
        wide = np.maximum(math.log(LARGEST_RATIO), 5 * scales)
        spikes = deviations > np.maximum(math.log(SMALLEST_RATIO), np.minimum(bound * scales, wide))
    return spikes


def _warmup(level: Floats, spread: float) -> int:
    """Counts the initial steps with a level outside the range of later levels."""
    longest = int(len(level) * LONGEST_WARMUP)
    low, high = level[longest:].min(), level[longest:].max()
    distance = np.maximum(low - level[:longest], level[:longest] - high)
    # A steady drift also starts outside this range, by about a ninth of the range.
    if distance.max() <= max(math.log(SMALLEST_RATIO), 2 * spread, (high - low) / 2):
        return 0
    return int(np.argmax(np.append(distance, 0.0) <= distance.max() / 10))


def _regime(logs: Floats, spread: float) -> Regime:
    """Tests whether block means differ significantly, and whether the level changes in steps."""
    n = len(logs)
    if n < FEWEST_NORMS:
        return "stationary"
    count = min(max(n // 12, 3), MAX_BLOCKS)
    size, means, rest = n / count, [], []
    for block in np.array_split(logs, count):
        # Subtracts the trend of the block, because a steep decrease would count as noise.
        t = np.linspace(-1, 1, len(block))
        middle = np.median(block)
        near = np.clip(block, middle - 3 * spread, middle + 3 * spread)
        means.append(near.mean())
        off_line = block - np.polyval(np.polyfit(t, block, 1), t)
        rest.append(np.clip(off_line, -3 * spread, 3 * spread))
    rest = np.concatenate(rest)  # f64[n]
    squares = float(rest @ rest) + 1e-12
    correlation = float(rest[1:] @ rest[:-1]) / squares
    # The residuals of a fit are less autocorrelated than the noise (Marriott and Pope, 1954).
    correlation = min(max(correlation + (2 + 4 * max(correlation, 0.0)) / size, 0.0), 0.95)
    variance = squares / (n - 2 * count) * (1 + correlation) / (1 - correlation) / size
    moved = float(np.ptp(means))
    independent = n * (1 - correlation) / (1 + correlation)
    # The variance is uncertain if there are few independent norms.
    critical = CRITICAL_RANGE * (1 + FEW / independent) * math.sqrt(variance)
    if moved <= max(math.log(SMALLEST_RATIO), critical):
        return "stationary"
    return "stepped" if _is_stepped(logs) else "drifting"


def _is_stepped(logs: Floats) -> bool:
    """Returns `True` if a function with one or two steps fits better than polynomials."""
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

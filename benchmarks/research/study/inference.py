"""Computes confidence intervals and p-values for the means of a few numbers."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000
MAX_DIFFERENCES = 20
"""The maximum number of differences for which all signs are enumerated."""


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def compute_interval(values: np.ndarray) -> Interval:
    """Computes the mean of `values` [n] with a bootstrap interval of `LEVEL`.

    Percentile intervals are too narrow for few values. They are expanded so that they match
    Student's t intervals for normal values (Hesterberg, 2015, arXiv:1411.5279).

    Raises:
      ValueError: If there are fewer than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"values must be at least two, got {count}; run more seeds")
    mean = float(np.mean(values))
    if np.ptp(values) == 0:
        return Interval(mean, mean, mean)
    factor = np.sqrt(count / (count - 1)) * stats.t.ppf((1 + LEVEL) / 2, count - 1)
    level = min(2 * stats.norm.cdf(factor) - 1, 1 - 1 / RESAMPLES)
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def run_sign_test(differences: np.ndarray) -> float:
    """Computes the exact p-value of a sign-flip test that the mean is 0.

    All signs of `differences` [n] are enumerated. The smallest p-value is 2 / 2**n.

    Raises:
      ValueError: If there are more than `MOST_SIGNS` differences.
    """
    count = len(differences)
    if count > MAX_DIFFERENCES:
        raise ValueError(f"differences must be at most {MAX_DIFFERENCES}, got {count}")
    sums = np.abs(_enumerate_signs(count) @ differences)
    least = abs(np.sum(differences))
    return float(np.mean(sums >= least - 1e-9 * np.sum(np.abs(differences))))


@functools.cache
def _enumerate_signs(count: int) -> np.ndarray:
    """Returns all signs, [2**count, count]."""
    bits = np.arange(2**count)[:, None] >> np.arange(count)
    return np.where(bits & 1, -1.0, 1.0)


def correct_chances(chances: Sequence[float]) -> list[float]:
    """Corrects p-values for multiple comparisons.

    The probability of any false rejection at 0.05 is at most 0.05 (Holm, 1979, "A simple
    sequentially rejective multiple test procedure").
    """
    order = np.argsort(chances, kind="stable")
    factors = len(chances) - np.arange(len(chances))
    corrected = np.maximum.accumulate(np.asarray(chances)[order] * factors)
    result = np.empty(len(chances))
    result[order] = np.minimum(corrected, 1.0)
    return result.tolist()

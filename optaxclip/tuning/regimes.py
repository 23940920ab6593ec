"""How the level of gradient norms moves: like steps, like a curve, or not more than by chance."""

import math
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

Regime: TypeAlias = Literal["stationary", "drifting", "stepped"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

SMALLEST_RATIO = 1.5
"""Below this multiple of its level no norm is a spike; a level that moves by less is constant."""
BLOCKS = 256
"""The level is judged by the means of at most so many blocks of steps."""
FEWEST_STEPS = 33
"""From fewer norms nothing can be said of how their level moves."""
CHANCE = 6.0
"""Each parameter of a fit hardly takes more than that away by chance of the variance around a
constant, in long-run variances (`benchmarks/suggesting.py`)."""
FEW = 0.05
"""The highest and the lowest level are those that at most this share of the steps is beyond."""
LARGEST_DEGREE, MOST_STEPS = 10, 3
TINY = 1e-12
OUTLYING = 3.0
"""Norms further than this many spreads from their level count as if they were there."""


def regime_of(logs: Floats, level: Floats, spread: float) -> Regime:
    """Whether the level moves as steps or polynomials do, by more than chance explains.

    Each fit is judged by how much of the variance it takes away, in units of the long-run variance
    of what it leaves, which is larger if norms resemble those before them.
    """
    if len(logs) < FEWEST_STEPS:
        return "stationary"
    near = level + np.clip(logs - level, -OUTLYING * spread, OUTLYING * spread)
    edges = np.linspace(0, len(logs), min(BLOCKS, len(logs)) + 1).astype(int)
    means = np.add.reduceat(near - near.mean(), edges[:-1]) / np.diff(edges)
    all_of_it = float(np.sum((means - means.mean()) ** 2))
    found: list[tuple[float, float, float, Regime]] = []
    fits: list[tuple[Regime, int, Iterator[Floats]]] = [
        ("drifting", 1, _polynomials(means)),
        ("stepped", 2, _staircases(means)),  # each step has a place and a height
    ]
    for regime, each, of_orders in fits:
        for order, fit in enumerate(of_orders, start=1):
            chance = CHANCE * each * order
            left = float(np.sum((means - fit) ** 2))
            variance, independent = _long_run(means - fit, order)
            # Of few independent terms the variance is not known well.
            doubt = (1 + 9 * order / independent) * (1 + (30 / independent) ** 2)
            # Not the extremes, which would be others if every second step were left out.
            low, high = np.quantile(fit, (FEW, 1 - FEW))
            is_far = high - low > max(spread, math.log(SMALLEST_RATIO))
            if is_far and all_of_it - left > chance * doubt * variance:
                found.append((variance, left, each * chance, regime))
    if not found:
        return "stationary"
    least = min(variance for variance, *_ in found)
    # In doubt it is a drift: of a curve that both fit, half a log may look like steps by chance.
    return min(found, key=lambda each: each[1] + each[2] * least)[3]


def _polynomials(means: Floats) -> Iterator[Floats]:
    """The best fits of degree 1, 2 and so on."""
    powers = np.linspace(-1, 1, len(means))[:, None] ** np.arange(LARGEST_DEGREE + 1)
    basis = np.linalg.qr(powers)[0]
    parts = basis * (means @ basis)
    return iter(np.cumsum(parts, axis=1).T[1:])


def _staircases(means: Floats) -> Iterator[Floats]:
    """The best fits with one step, with two and so on, none shorter than a twentieth."""
    count, shortest = len(means), max(5, len(means) // 20)
    sums, squares = (np.append(0.0, np.cumsum(x)) for x in (means, means**2))
    starts, ends = np.ogrid[: count + 1, : count + 1]
    lengths = ends - starts
    costs = squares - squares[:, None] - (sums - sums[:, None]) ** 2 / np.maximum(lengths, 1)
    costs[lengths < shortest] = math.inf
    best, before = costs[0], []
    for _ in range(MOST_STEPS):  # the last stair from each start, behind the best ones up to there
        totals = best[:, None] + costs
        before.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
        bounds = [count]
        for starts_of_last in reversed(before):
            bounds.insert(0, int(starts_of_last[bounds[0]]))
        bounds.insert(0, 0)
        if math.isfinite(best[count]):
            lengths_of = np.diff(bounds)
            yield np.repeat(np.diff(sums[bounds]) / lengths_of, lengths_of)


def _long_run(rest: Floats, order: int) -> tuple[float, float]:
    """The variance of sums of what a fit leaves, for each term, and how many terms are independent.

    Each term is taken to resemble the one before it (an autoregression of order 1).
    """
    count = len(rest)
    resemblance = float(rest[1:] @ rest[:-1] / max(rest @ rest, TINY))
    # A fit makes what it leaves less alike than it was (Marriott and Pope, 1954).
    resemblance += (1 + 2 * order + 3 * max(resemblance, 0.0)) / count
    one, two = (float(np.mean((rest[lag:] - rest[:-lag]) ** 2)) for lag in (1, 2))
    resemblance = min(max(resemblance, two / max(one, TINY) - 1, 0.0), 0.98)
    new = rest[1:] - resemblance * rest[:-1]
    variance = float(new @ new) / max(count - 1 - 2 * order, 1) / (1 - resemblance) ** 2
    return variance + TINY, count * (1 - resemblance) / (1 + resemblance)

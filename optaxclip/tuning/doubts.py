"""Reasons not to trust a suggested limit, and advice."""

import math

import numpy as np

from optaxclip.tuning.spread import Floats, Shape

ENOUGH_NORMS = 100
SHARE_AT_LIMIT = 0.1
"""If a larger share of norms is within a thousandth of the largest, they were probably clipped."""
LARGE_FACTOR = 20.0
"""In a run that learns, the level varies by less, and ordinary norms exceed it by less."""
LAST = 3
"""If this many norms at the end are not finite, the run is lost."""

Lines = tuple[str, ...]


def doubts_and_advice(norms: Floats, shape: Shape, limit: float) -> tuple[Lines, Lines]:
    """Reasons not to trust a limit, and advice on what else to do.

    Args:
      norms: float64[steps], all norms.
      shape: what was found in those that are finite and positive.
      limit: the suggested limit.
    """
    doubts = (*_about_the_record(norms, shape), *_signs_of_loss(norms, shape))
    return doubts, _advice(norms, shape, limit)


def _about_the_record(norms: Floats, shape: Shape) -> Lines:
    doubts = []
    if len(shape.level) < ENOUGH_NORMS:
        doubts.append(f"there are only {len(shape.level)} norms; record {ENOUGH_NORMS} or more")
    finite = norms[np.isfinite(norms)]
    if np.mean(finite >= 0.999 * finite.max()) > SHARE_AT_LIMIT:
        doubts.append(f"many norms equal the largest, {finite.max():g}: are they clipped already?")
    fall = _rise(-shape.level[shape.warmup :])
    if fall > LARGE_FACTOR:
        doubts.append(
            f"the level of the norms falls by a factor of {fall:.3g}: no limit fits both its ends"
        )
    return tuple(doubts)


def _signs_of_loss(norms: Floats, shape: Shape) -> Lines:
    """Doubts because norms look like those of a run that explodes, was lost, or never learned."""
    doubts = []
    rise, reach = _rise(shape.level), math.exp(shape.reach)
    if rise > LARGE_FACTOR:
        doubts.append(
            f"the level of the norms rises by a factor of {rise:.3g}: does the run explode?"
        )
    if not np.isfinite(norms[-LAST:]).any():
        doubts.append("the last norms are not finite: was the run lost?")
    if reach > LARGE_FACTOR:
        doubts.append(
            f"ordinary norms reach {reach:.3g} times their level, without a gap below the spikes: "
            "a limit above them does little"
        )
    return tuple(doubts)


def _rise(level: Floats) -> float:
    """The largest factor by which the level, given in logarithms, exceeds an earlier level."""
    return float(np.exp(np.max(level - np.minimum.accumulate(level))))


def _advice(norms: Floats, shape: Shape, limit: float) -> Lines:
    if _signs_of_loss(norms, shape):
        low = math.exp(shape.level.min())
        return (
            "the norms of a run that is lost show no good limit: record a run that learns, with a "
            f"low limit such as {low:.2g} or a lower learning rate, or try limits with "
            "optaxclip.tuning.sweep",
        )
    advice = []
    finite = np.isfinite(norms)
    if not finite.all():
        advice.append("no limit helps with norms that are not finite; use optaxclip.skip_nonfinite")
    if shape.regime != "stationary":
        advice.append(
            f"the level of the norms is {shape.regime}, so no constant limit fits; the adaptive "
            "rule follows the level"
        )
    if not (norms[finite] > limit).any():
        advice.append("no norm is above the limit, which would have changed nothing in this run")
    return tuple(advice)

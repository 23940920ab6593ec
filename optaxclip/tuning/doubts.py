"""When a suggested limit is not to be trusted, and what to do then."""

import math

import numpy as np

from optaxclip.tuning.spread import Floats, Shape

ENOUGH_NORMS = 100
SHARE_AT_LIMIT = 0.1
"""More norms than this share within a thousandth of the largest were clipped before recording."""
FAR = 20.0
"""In a run that learns, norms keep within this factor: the level of itself, ordinary ones of it."""
LAST = 3
"""A run whose last norms, so many, are not finite does not come back."""

Lines = tuple[str, ...]


def doubts_and_advice(norms: Floats, shape: Shape, limit: float) -> tuple[Lines, Lines]:
    """What speaks against a limit for float64[steps] norms, and what to do beside taking it.

    `shape` is that of the norms that are finite and positive.
    """
    doubts = (*_about_the_record(norms, shape), *_signs_of_loss(norms, shape))
    return doubts, _advice(norms, shape, limit)


def _about_the_record(norms: Floats, shape: Shape) -> Lines:
    doubts = []
    if len(shape.level) < ENOUGH_NORMS:
        doubts.append(f"only {len(shape.level)} norms, {ENOUGH_NORMS} would tell more")
    finite = norms[np.isfinite(norms)]
    if np.mean(finite >= 0.999 * finite.max()) > SHARE_AT_LIMIT:
        doubts.append(f"many norms equal the largest, {finite.max():g}: are they clipped already?")
    fall = _rise(-shape.level[shape.warmup :])
    if fall > FAR:
        doubts.append(f"the level of the norms falls {fall:.3g}-fold: no limit fits both its ends")
    return tuple(doubts)


def _signs_of_loss(norms: Floats, shape: Shape) -> Lines:
    """What norms look like when the run explodes, was lost, or never learned."""
    doubts = []
    rise, reach = _rise(shape.level), math.exp(shape.reach)
    if rise > FAR:
        doubts.append(f"the level of the norms rises {rise:.3g}-fold: does the run explode?")
    if not np.isfinite(norms[-LAST:]).any():
        doubts.append("the last norms are not finite: was the run lost?")
    if reach > FAR:
        doubts.append(
            f"ordinary norms spread to {reach:.3g} times their level, with no gap below the "
            "spikes: a limit so high does little"
        )
    return tuple(doubts)


def _rise(level: Floats) -> float:
    """By which factor the level, in logarithms, comes to lie above what it was before."""
    return float(np.exp(np.max(level - np.minimum.accumulate(level))))


def _advice(norms: Floats, shape: Shape, limit: float) -> Lines:
    if _signs_of_loss(norms, shape):
        low = math.exp(shape.level.min())
        return (
            "norms of a run that was lost are not ordinary: record one that learns, under a low "
            f"limit such as {low:.2g} or at a lower learning rate, or try limits with "
            "optaxclip.tuning.sweep",
        )
    advice = []
    finite = np.isfinite(norms)
    if not finite.all():
        advice.append("no limit mends norms that are not finite; optaxclip.skip_nonfinite does")
    if shape.regime != "stationary":
        advice.append(
            f"norms that are {shape.regime} have no one limit; the adaptive rule follows them"
        )
    if not (norms[finite] > limit).any():
        advice.append("no norm is above the limit: it would have changed nothing in this run")
    return tuple(advice)

"""The verdict on a threshold, reasons not to trust it, advice, and the words for each verdict."""

import math
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from optaxclip.tuning.columns import Steps
from optaxclip.tuning.spread import LARGEST_RATIO, Floats, Shape

ENOUGH_NORMS = 100
SHARE_AT_THRESHOLD = 0.1
"""If a larger share of norms is within a thousandth of the largest, they were probably clipped."""
LARGE_FACTOR = 20.0
"""In a run that learns, the level changes by less."""
FAR_FACTOR = 13.0
"""In a run that learns, fewer ordinary norms than one in 300 are that many times their level."""
LAST = 3
"""If this many norms at the end are not finite, the run is lost."""

FITS = 0.05
"""A constant threshold fits a level that moves if it clips at most this share of ordinary norms, and
whatever is 8 times its level, which is a spike everywhere."""

Lines = tuple[str, ...]
Verdict: TypeAlias = Literal["constant", "adaptive", "none"]


class Words(NamedTuple):
    """What is said of a suggestion because of its verdict: first, of its threshold, rule and line."""

    title: str
    threshold: str
    rule: str
    line: str


def words(verdict: Verdict, threshold: float, call: str, doubts: Lines) -> Words:
    """The words for a threshold and for the call of an adaptive rule."""
    doubt = ", in doubt" if doubts else ""
    return {
        "constant": Words(f"threshold {threshold:g}{doubt}", f"suggested{doubt}", "adaptive", ""),
        "adaptive": Words(
            f"{call}{doubt}, as no constant threshold fits",
            "the best constant threshold",
            f"suggested{doubt}",
            "best constant ",
        ),
        "none": Words(f"threshold {threshold:g}, in doubt", "in doubt", "adaptive", "doubtful "),
    }[verdict]


class Judgement(NamedTuple):
    """What to do with the threshold, reasons not to trust it, and what else to do."""

    verdict: Verdict
    doubts: Lines
    advice: Lines


def judged_threshold(
    norms: Floats, shape: Shape, threshold: float, steps: Steps | None = None
) -> Judgement:
    """Judges the best constant threshold; `shape` is of the norms that are finite and positive.

    The steps of the norms rise; they are 0, 1, ... if they are None.
    """
    signs = _signs_of_loss(norms, shape)
    doubts = (*_about_the_record(norms, shape, steps), *signs)
    if signs:
        low = math.exp(shape.level.min())
        remedy = (
            "the norms of a run that is lost show no good threshold: record a run that learns, with a "
            f"low threshold such as {low:.2g} or a lower learning rate, or try thresholds with "
            "optaxclip.tuning.sweep"
        )
        return Judgement("none", doubts, (remedy,))
    fall = _rise(-shape.level[shape.warmup :])
    if fall > LARGE_FACTOR:
        falls = f"the level of the norms falls by a factor of {fall:.3g}"
        doubts = (*doubts, f"{falls}: no threshold fits start and end")
    does = _effect(norms, shape, threshold)
    fits = does.clipped <= FITS and does.times <= LARGEST_RATIO and fall <= LARGE_FACTOR
    fits |= shape.regime == "stationary"
    verdict: Verdict = "constant" if fits else "adaptive"
    return Judgement(verdict, doubts, _advice(norms, shape, threshold, does, verdict))


def _about_the_record(norms: Floats, shape: Shape, steps: Steps | None) -> Lines:
    doubts = []
    if len(shape.level) < ENOUGH_NORMS:
        doubts.append(f"there are only {len(shape.level)} norms; record {ENOUGH_NORMS} or more")
    every = 1 if steps is None else round(float(np.median(np.diff(steps))))
    if every > 1:
        doubts.append(
            f"the log has one of {every} steps, and shows no spike of the others: "
            "optaxclip.monitor.record keeps the norm of every step"
        )
    finite = norms[np.isfinite(norms)]
    if np.mean(finite >= 0.999 * finite.max()) > SHARE_AT_THRESHOLD:
        doubts.append(f"many norms equal the largest, {finite.max():g}: are they clipped already?")
    return tuple(doubts)


def _signs_of_loss(norms: Floats, shape: Shape) -> Lines:
    """Doubts because norms look like those of a run that explodes, was lost, or never learned."""
    doubts = []
    rise, far = _rise(shape.level), math.exp(shape.seldom)
    if rise > LARGE_FACTOR:
        doubts.append(
            f"the level of the norms rises by a factor of {rise:.3g}: does the run explode?"
        )
    if not np.isfinite(norms[-LAST:]).any():
        doubts.append("the last norms are not finite: was the run lost?")
    if far > FAR_FACTOR:
        doubts.append(
            f"one in 300 ordinary norms is {far:.3g} times its level, without a gap below the "
            "spikes: a threshold above them does little"
        )
    return tuple(doubts)


def _rise(level: Floats) -> float:
    """The largest factor by which the level, given in logarithms, exceeds an earlier level."""
    return float(np.exp(np.max(level - np.minimum.accumulate(level))))


class _Effect(NamedTuple):
    """What a threshold does to the norms after the warm-up.

    `clipped` is the share of ordinary norms above it, `missed` how many spikes are not above it,
    `times` how many times the lowest level it is.
    """

    clipped: float
    missed: int
    times: float
    is_reached: bool


def _effect(norms: Floats, shape: Shape, threshold: float) -> _Effect:
    is_above = norms[np.isfinite(norms) & (norms > 0)][shape.warmup :] > threshold
    is_spike = shape.spikes[shape.warmup :]
    clipped, missed = float(np.mean(is_above[~is_spike])), int(np.sum(is_spike & ~is_above))
    return _Effect(clipped, missed, threshold / math.exp(shape.low), bool(is_above.any()))


def _advice(
    norms: Floats, shape: Shape, threshold: float, does: _Effect, verdict: Verdict
) -> Lines:
    advice = []
    if not np.isfinite(norms).all():
        advice.append(
            "no threshold helps with norms that are not finite; use optaxclip.skip_nonfinite"
        )
    level = f"the level of the norms is {shape.regime}"
    if verdict == "adaptive":
        return (
            *advice,
            f"{level}, so no constant threshold fits: {threshold:g} clips {does.clipped:.1%} of the "
            f"ordinary norms, and is {does.times:.3g} times the lowest level; the adaptive rule "
            "follows the level",
        )
    if shape.regime != "stationary":
        advice.append(f"{level}; if it moves on, the adaptive rule follows it")
    if not does.is_reached:
        advice.append(
            "no norm is above the threshold, which would have changed nothing in this run"
        )
    elif does.missed:
        advice.append(
            f"{does.missed} of {shape.spikes[shape.warmup :].sum()} spikes are below the threshold"
        )
    return tuple(advice)

"""Suggests a threshold from recorded norms."""

import dataclasses
import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from optaxclip._base.host import ArrayLike
from optaxclip._base.validation import short_repr, validate_call, warn
from optaxclip.tuning.columns import Steps
from optaxclip.tuning.doubts import Verdict, Words, judged_threshold, words
from optaxclip.tuning.files import Column, read_norms
from optaxclip.tuning.replaying import MAX_REPLAYED, UNCHOSEN, WINDOW, beside, replayed
from optaxclip.tuning.spread import Floats, Regime, shape_of

MIN_NORMS = 10
PERCENTILES = (90, 95, 99)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another clip, and how often it would have clipped.

    Attributes:
      call: the code that makes it.
      share_clipped: the share of steps that it would have clipped, among those after the warm-up
        with a finite positive norm; for an adaptive clip, among the last 10,000 of these.
      why: the reason, in a few words.
    """

    call: str
    share_clipped: float
    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Suggestion:
    """A threshold for recorded norms, and why; `print` it to read it all.

    Attributes:
      threshold: the best constant threshold, which is suggested if the verdict is "constant".
      share_clipped: the share of steps with a norm above it, among those after the warm-up with a
        finite positive norm.
      typical_norm: the median after the warm-up, without spikes.
      spread: the standard deviation of the logarithms of ordinary norms from their level.
      regime: how the level of the norms moves after the warm-up: "stationary", "drifting" or
        "stepped".
      warmup_steps: how many steps at the start have norms unlike all later ones.
      spikes: int[spikes], the steps after the warm-up whose norms are spikes.
      num_nonfinite: how many norms were NaN or infinite.
      percentiles: constant thresholds at a few percentiles of the norms after the warm-up.
      adaptive: the threshold rule that fits the regime.
      unchosen: AdaGC by the global norm, for adaptive optimizers if you do not want to choose.
      unchosen_threshold: the threshold of `unchosen` after the last norm.
      notes: the doubts, then advice.
      norms: float64[steps], all the norms.
      steps: int64[steps], the step of each norm: that of the log, or 0, 1, ... if it has none.
      doubts: reasons not to trust the threshold; empty if there are none.
      verdict: what is suggested. "constant": the threshold. "adaptive": the rule, because the level
        moves, and a constant threshold clips ordinary norms or is far above the lowest level.
        "none": nothing, because the run was lost.
      column: the column of the file that was read; None for an array, or a file of one column.
      again: how many rows of the file were left out, because their steps came again.
    """

    threshold: float
    share_clipped: float
    typical_norm: float
    spread: float
    regime: Regime
    warmup_steps: int
    spikes: np.ndarray[Any, np.dtype[np.int64]]
    num_nonfinite: int
    percentiles: tuple[Alternative, ...]
    adaptive: Alternative
    unchosen: Alternative
    unchosen_threshold: float
    notes: tuple[str, ...]
    norms: Floats = dataclasses.field(repr=False)
    steps: Steps = dataclasses.field(repr=False)
    doubts: tuple[str, ...] = ()
    verdict: Verdict = "constant"
    column: str | None = None
    again: int = 0

    @property
    def counted(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool[steps]: the steps that are counted in all shares, and searched for spikes.

        They are those after the warm-up with a finite positive norm.
        """
        is_settled = np.arange(len(self.norms)) >= self.warmup_steps
        return is_settled & np.isfinite(self.norms) & (self.norms > 0)

    @property
    def is_spike(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool[steps]: the steps that are spikes."""
        return np.isin(self.steps, self.spikes)

    @property
    def words(self) -> Words:
        """What is said because of the verdict."""
        return words(self.verdict, self.threshold, self.adaptive.call, self.doubts)

    def __str__(self) -> str:
        """Lines to read: the threshold, doubts, what was found, alternatives, notes."""
        factor = math.exp(self.spread)
        source = "" if self.column is None else f" of the column {self.column!r}"
        source += f" ({self.again} rows of steps that came again left out)" if self.again else ""
        found = (
            f"{len(self.norms)} steps{source}, {self.num_nonfinite} of them not finite; "
            f"{self.warmup_steps} of warm-up, then {self.counted.sum()} that are counted, "
            f"{self.regime}",
            f"typical norm {self.typical_norm:.3g}, most within a factor of {factor:.2f}; "
            f"{len(self.spikes)} spikes{self._spike_range()}",
        )
        says = self.words
        rows = [
            (_constant(self.threshold), self.share_clipped, says.threshold),
            *(dataclasses.astuple(other) for other in self.percentiles),
            (self.adaptive.call, self.adaptive.share_clipped, f"{says.rule}, {self.adaptive.why}"),
            dataclasses.astuple(self.unchosen),
        ]
        width = max(len(call) for call, _, _ in rows)
        table = [f"  {call:<{width}}  clips {share:6.1%}  {why}" for call, share, why in rows]
        doubts = [f"doubt: {doubt}" for doubt in self.doubts]
        notes = [f"note: {note}" for note in self.notes if note not in self.doubts]
        return "\n".join([says.title, *doubts, *found, *table, *notes])

    def to_dict(self) -> dict[str, Any]:
        """All fields except the norms and their steps, in Python's own types, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["norms"], fields["steps"]
        return fields | {
            "spikes": self.spikes.tolist(),
            "percentiles": [dataclasses.asdict(other) for other in self.percentiles],
            "adaptive": dataclasses.asdict(self.adaptive),
            "unchosen": dataclasses.asdict(self.unchosen),
            "notes": list(self.notes),
            "doubts": list(self.doubts),
            "num_steps": len(self.norms),
            "num_counted": int(self.counted.sum()),
        }

    def _spike_range(self) -> str:
        if not self.spikes.size:
            return ""
        sizes = self.norms[self.is_spike]
        return f" from {sizes.min():.3g} to {sizes.max():.3g}"


@validate_call()
def suggest(norms: ArrayLike | str | os.PathLike[str], *, column: str | None = None) -> Suggestion:
    """Suggests a threshold that leaves ordinary gradients alone and catches the spikes.

    The level is the median of the norms; if they drift or step by more than chance explains, and by
    more than a factor of 1.5, it is the median of the steps around each norm. A norm is a spike if
    it is at least 1.5 times its level, and if the tail of the other norms does not explain it, or
    if it is 8 times its level. `python -m benchmarks.suggesting` counts how often this is wrong.
    The threshold is 4.5 standard deviations of the logarithms of ordinary norms above the highest level
    that lasts, and from 1.5 to 8 times that level. None of this rests on single norms, so that a
    log of every second step gets nearly the same (`--real` counts it). If the level moves, and the
    threshold clips more than 5 % of the ordinary norms, or is more than 8 times the lowest level, the
    verdict is that no constant threshold fits, and a rule that follows the level is suggested. Only
    steps after the warm-up are counted, printed and marked in pictures. Record the norms before any
    clip, as `optaxclip.monitor.record` does as the first stage of a chain. The threshold is
    proportional to the norms.

    Args:
      norms: float[steps], the norms of the raw gradients in the order of the steps, as
        `optaxclip.monitor.history` gives them; or the path of a log: CSV and other tables, JSON,
        the lines of `optaxclip.monitor.json_line`, the lines with `name: value` or dicts that
        trainers print amid other lines, an array that `np.save` wrote, a TensorBoard event file or
        a directory of event files (which need `optaxclip[tensorboard]`). A table may have a row for
        each number, with columns such as `key`, `value` and `step`. The rows of a JSON object, such
        as the file `trainer_state.json` of Transformers, are its longest list of objects. If the
        log has steps, each counts once: a step that comes again takes the place of itself and of
        all later ones. Norms that are NaN or infinite, or null in JSON, are counted, and then left
        out. An incomplete last line or record is left out too. A number at the end of a text that
        was cut short is read as the shorter number, because nothing tells it from a whole one.
      column: the column, key or tag of a file; `train.grad_norm` is the key `grad_norm` of the
        object `train`. It is not needed if the name of one column is plainly that of the norm, such
        as `train/grad_norm` or `record/norm`, or if the only column other than steps and times has
        no name, or is `Value` as in TensorBoard's CSV files. The suggestion names it.

    Returns:
      A `Suggestion`.

    Raises:
      ValueError: for norms of more than one axis or below zero, fewer than 10 that are finite and
        positive, norms that are all equal, and files that are damaged, or in which the column is
        not found or holds anything but numbers (rows are counted from 1, below the names).
      TypeError: for norms that are not real numbers.
      OSError: for files that cannot be read.

    Warns:
      UserWarning: for each doubt: a log of every second or tenth step; fewer than 100 norms; many
        norms equal to the largest, as if they were clipped already; a level that rises or falls by
        a factor of 20; ordinary norms of which one in 300 is 13 times its level; last norms that
        are not finite.

    Example:
      >>> import numpy as np
      >>> from optaxclip import tuning
      >>> norms = np.exp(0.2 * np.random.default_rng(0).normal(size=500))
      >>> norms[[100, 200, 300]] = 10.0, 50.0, np.nan
      >>> suggestion = tuning.suggest(norms)
      >>> print(suggestion.spikes, suggestion.num_nonfinite, suggestion.regime)
      [100 200] 1 stationary
      >>> print(suggestion)  # doctest: +ELLIPSIS
      threshold ...
    """
    if isinstance(norms, str | os.PathLike):
        return suggested(read_norms(norms, column))
    if column is not None:
        raise ValueError(f"column is for files; got {column!r} with an array")
    return suggested(Column(None, norms))


def suggested(column: Column) -> Suggestion:
    """`suggest` for what was read from a file, or for an array."""
    values = _checked(column.norms)
    steps = np.arange(len(values)) if column.steps is None else column.steps
    finite = np.isfinite(values)
    used = np.flatnonzero(finite & (values > 0))
    shape = shape_of(np.log(values[used]))
    counted = used[shape.warmup :]
    settled, is_spike = values[counted], shape.spikes[shape.warmup :]
    threshold = float(f"{math.exp(shape.threshold):.3g}")
    verdict, doubts, advice = judged_threshold(values, shape, threshold, steps)
    for doubt in doubts:
        warn(doubt)
    share = float(np.mean(settled > threshold))
    unchosen, unchosen_threshold = _unchosen(threshold, values[used], shape.warmup)
    return Suggestion(
        threshold=threshold,
        share_clipped=share,
        typical_norm=float(np.median(settled[~is_spike])),
        spread=shape.spread,
        regime=shape.regime,
        warmup_steps=int(counted[0]) if shape.warmup else 0,
        spikes=steps[counted[is_spike]],
        num_nonfinite=int(np.sum(~finite)),
        percentiles=tuple(_percentile(percent, settled) for percent in PERCENTILES),
        adaptive=_adaptive(shape.regime, share, values[used], shape.warmup),
        unchosen=unchosen,
        unchosen_threshold=unchosen_threshold,
        notes=(*doubts, *advice),
        norms=values,
        steps=steps,
        doubts=doubts,
        verdict=verdict,
        column=column.name,
        again=column.again,
    )


def _checked(norms: ArrayLike) -> Floats:
    try:
        array = np.asarray(norms)
    except ValueError as error:  # raised for lists of different lengths
        if isinstance(norms, list):
            raise TypeError(f"norms must be real numbers: {error}") from None
        array = np.asarray(None)
    if (array.dtype == object and not isinstance(norms, list)) or hasattr(norms, "_fields"):
        raise TypeError(
            f"norms must be an array of norms, or the path of a file, got {short_repr(norms)} of type "
            f"{type(norms).__name__}; from the state of a chain with monitor.record, "
            "optaxclip.monitor.history(state) gets them"
        )
    if array.dtype.kind not in "fiu" and array.dtype != jnp.bfloat16:
        raise TypeError(f"norms must be real numbers, got the dtype {array.dtype}")
    if array.ndim != 1:
        remedy = "with a norm for each leaf pass one column, or np.linalg.norm(norms, axis=1)"
        raise ValueError(f"norms must have one axis, got the shape {array.shape}; {remedy}")
    values = array.astype(np.float64)
    negative = np.flatnonzero(values < 0)
    if negative.size:
        at = negative[0]
        raise ValueError(f"norms must not be negative, got {values[at]:g} at step {at}")
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) < MIN_NORMS:
        raise ValueError(
            f"norms must hold at least {MIN_NORMS} that are finite and positive, got "
            f"{len(positive)} among {len(values)}; record more steps, and before any clip"
        )
    if np.ptp(positive) == 0:
        remedy = "record the raw norms, before anything clips or normalizes them"
        raise ValueError(f"norms must not be all equal, got only {positive[0]:g}; {remedy}")
    return values


def _percentile(percent: int, settled: Floats) -> Alternative:
    threshold = float(f"{np.percentile(settled, percent):.3g}")
    share = float(np.mean(settled > threshold))
    return Alternative(_constant(threshold), share, f"{percent}th percentile")


def _constant(threshold: float) -> str:
    return f"clip_by_global_norm({threshold:g})"


def _adaptive(regime: Regime, share: float, norms: Floats, warmup: int) -> Alternative:
    # AutoClip gets the percentile of the suggested threshold, so that it clips as often as that threshold.
    percent = float(np.clip(round(100 * (1 - share), 1), PERCENTILES[0], PERCENTILES[-1]))
    calls: dict[Regime, str] = {
        "stationary": f"autoclip({percent:g}, window={WINDOW})",
        "drifting": "zclip()",
        "stepped": "clip_by_window_norm()",
    }
    share, _ = replayed(norms, regime, warmup, percent)
    basis = "" if len(norms) - warmup <= MAX_REPLAYED else f", of the last {MAX_REPLAYED} steps"
    return Alternative(calls[regime], share, f"for {regime} norms{basis}")


def _unchosen(threshold: float, norms: Floats, warmup: int) -> tuple[Alternative, float]:
    """AdaGC, and its threshold after the last norm."""
    share, last = replayed(norms, "unchosen", warmup)
    why = f"meant to clip so often; its threshold ends at {last:.3g}, {beside(last, threshold)}"
    return Alternative(UNCHOSEN, share, why), last

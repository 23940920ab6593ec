"""Suggests a threshold from recorded norms."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import short_repr, validate_call, warn
from optaxclip.transforms.adaptive import clip_by_window_norm, zclip
from optaxclip.tuning._levels import FAR, Flags, Floats, Regime, Shape, analyze, running_median

Steps: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Recommendation: TypeAlias = Literal["constant", "adaptive", "none"]

MIN_NORMS, ENOUGH_NORMS = 10, 100
EXPLOSION = 20.0
"""If the level increases by more than this factor after the warm-up, the run has diverged."""
RISE_BEFORE_COLLAPSE, COLLAPSE = 5.0, 50.0
"""If the level increases by the first factor and then falls to the initial level divided by the
second factor, the run has diverged."""
PILE_FRACTION, PILE_RATIO = 0.1, 3.0
"""If more than this fraction of the norms is within a thousandth of the largest norm, and the next
most common value is at most a third as common, the norms were already clipped."""
START_FRACTION = 0.05
MAX_REPLAYED = 10_000  # The maximum number of norms that are replayed through a method.

Method: TypeAlias = tuple[str, Callable[[], optax.GradientTransformation]]
TUNING_FREE = 1.0
"""The threshold of the recommended default, `clip_by_global_norm(1.0)` in `skip_nonfinite`."""
ADAPTIVE: dict[Regime, Method] = {
    "stationary": ("zclip()", zclip),
    "drifting": ("zclip()", zclip),
    "stepped": ("clip_by_window_norm()", clip_by_window_norm),
}


class Alternative(NamedTuple):
    """A clipping method to use instead of a constant threshold.

    Attributes:
      call: The code that constructs the method.
      clipped_fraction: The fraction of norms that the method would have clipped.
      reason: When to use the method.
    """

    call: str
    clipped_fraction: float
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class Suggestion:
    """A threshold for recorded norms. You can `print` it to see an explanation.

    Attributes:
      recommendation: "constant" if you should use `threshold`, or "adaptive" if you should use the
        method `adaptive`, because the level changes too much for a constant threshold. If it is
        "none", `warnings` explains why no threshold can be suggested.
      threshold: The best constant threshold. It is NaN if the recommendation is "none".
      regime: How the level changes after the warm-up: "stationary", "drifting", or "stepped".
      level_ratio: The ratio of the highest to the lowest level after the warm-up. It is 1 if the
        level is stationary.
      warmup_steps: The number of initial norms outside the range of later norms, at most a tenth of
        all norms.
      typical_norm: The median of the norms after the warm-up, without spikes.
      spread: The standard deviation of the logarithms of typical norms above their level.
      warnings: Reasons why the suggestion may be wrong. Read them first.
      notes: Additional facts and advice.
      num_nonfinite: The number of norms that are NaN or infinite.
      num_zeros: The number of norms that are zero.
      norms: float64[n], all norms.
      steps: int64[n], the steps of the norms.
      is_spike: bool[n], True for norms after the warm-up that are far above their level.
    """

    recommendation: Recommendation
    threshold: float
    regime: Regime
    level_ratio: float
    warmup_steps: int
    typical_norm: float
    spread: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    num_nonfinite: int
    num_zeros: int
    norms: Floats = dataclasses.field(repr=False)
    steps: Steps = dataclasses.field(repr=False)
    is_spike: Flags = dataclasses.field(repr=False)

    @property
    def is_used(self) -> Flags:
        """The finite positive norms after the warm-up, which fractions are based on, as bool[n]."""
        is_settled = np.arange(len(self.norms)) >= self.warmup_steps
        return is_settled & np.isfinite(self.norms) & (self.norms > 0)

    @property
    def spikes(self) -> Steps:
        """The steps of the spikes, int64[spikes]."""
        return self.steps[self.is_spike]

    @property
    def clipped_fraction(self) -> float:
        """The fraction of norms above the threshold."""
        return float(np.mean(self.norms[self.is_used] > self.threshold))

    @functools.cached_property
    def adaptive(self) -> Alternative:
        """The recommended adaptive method for the regime."""
        method = ADAPTIVE[self.regime]
        return Alternative(method[0], self._replay(method), f"for {self.regime} norms")

    @functools.cached_property
    def tuning_free(self) -> Alternative:
        """The recommended default for AdamW, Muon, and Lion, which requires no tuning."""
        fraction = float(np.mean(self.norms[self.is_used] > TUNING_FREE))
        reason = "the default without tuning, inside skip_nonfinite"
        return Alternative(f"clip_by_global_norm({TUNING_FREE})", fraction, reason)

    def __str__(self) -> str:
        """Formats a summary and a table of methods."""
        moved = f" by a factor of {self.level_ratio:.3g}" if self.regime != "stationary" else ""
        sizes = self.norms[self.is_spike]
        of_spikes = f", from {sizes.min():.3g} to {sizes.max():.3g}" if sizes.size else ""
        lines = [
            *(f"warning: {warning}" for warning in self.warnings),
            f"{len(self.norms)} norms, {self.num_nonfinite} of them non-finite, {self.num_zeros} "
            f"zero; {self.warmup_steps} of warm-up; the level is {self.regime}{moved}",
            f"typical norm {self.typical_norm:.3g}, most within a factor of "
            f"{math.exp(self.spread):.2f} of their level; spikes: {len(sizes)}{of_spikes}",
        ]
        title, doubt = "no threshold", " (see warnings)" if self.warnings else ""
        if self.recommendation != "none":
            title = f"threshold {self.threshold:g}{doubt}"
            constant, adaptive = "suggested", "adaptive"
            if self.recommendation == "adaptive":
                title = f"{self.adaptive.call}{doubt}, because the level changes{moved}"
                constant, adaptive = "the best constant threshold", "suggested"
            call = f"clip_by_global_norm({self.threshold:g})"
            rows = [
                Alternative(call, self.clipped_fraction, constant),
                self.adaptive._replace(reason=f"{adaptive}, {self.adaptive.reason}"),
                self.tuning_free,
            ]
            width = max(len(row.call) for row in rows)
            lines += [f"  {call:<{width}}  clips {part:6.1%}  {why}" for call, part, why in rows]
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields except the arrays as Python types that JSON supports."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["norms"], fields["steps"], fields["is_spike"]
        return fields | {
            "threshold": None if math.isnan(self.threshold) else self.threshold,
            "clipped_fraction": self.clipped_fraction,
            "spikes": self.spikes.tolist(),
            "num_used": int(self.is_used.sum()),
            "adaptive": self.adaptive._asdict(),
            "tuning_free": self.tuning_free._asdict(),
        }

    def _replay(self, method: Method) -> float:
        """Returns the fraction of norms that a method clips."""
        is_positive = np.isfinite(self.norms) & (self.norms > 0)
        last = self.norms[is_positive][-MAX_REPLAYED:]
        # Dividing by the median prevents overflow and underflow in float32.
        unit = float(np.median(last))
        # Padding with zeros to a power of two reduces the number of compiled programs.
        padded = np.zeros(max(1 << (len(last) - 1).bit_length(), 64), np.float32)
        padded[: len(last)] = np.minimum(last / unit, np.finfo(np.float32).max)
        is_clipped = np.asarray(_replay(padded, make=method[1]))  # bool[padded]
        is_used = self.is_used[is_positive][-MAX_REPLAYED:]
        return float(np.mean(is_clipped[: len(last)][is_used]))


@functools.partial(jax.jit, static_argnames="make")
def _replay(gradients: Any, *, make: Callable[[], optax.GradientTransformation]) -> jax.Array:
    """Returns flags for the norms that are clipped, bool[norms]."""
    clip = make()

    def step(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
        state = clip.update(gradient, state)[1]
        return state, state.info.fraction > 0

    return jax.lax.scan(step, clip.init(gradients[0]), gradients)[1]


@validate_call()
def suggest(norms: HostArrayLike, steps: HostArrayLike | None = None) -> Suggestion:
    """Suggests a threshold that clips spikes and leaves typical gradients unchanged.

    Record the norms before clipping, for example with `optaxclip.monitor.record` as the first stage
    of a chain. If the norms were already clipped or the run diverged, no threshold is suggested.

    The level of the norms is a running median over a twelfth of the run. Their scale is a robust
    standard deviation of the log norms around the level. Spikes are norms of at least 1.5 times
    their level that are beyond the tail of typical norms. The threshold is 4.5 scales above the
    level, or above the 0.9 quantile of the level if the level changes. It is between 1.5 and 8
    times the level, and at most 1.25 times the largest typical norm. If the level changes by a
    factor of more than about 4, an adaptive method is recommended. To measure how often suggestions
    are wrong, run `python -m benchmarks.suggesting`.

    Args:
      norms: The norms of the raw gradients in the order of the steps, float[n], for example from
        `optaxclip.monitor.history` or `optaxclip.tuning.read_log`. Norms that are NaN, infinite, or
        zero are counted but not used.
      steps: The steps of the norms, int[n]. Defaults to the index if `norms` is a pandas Series,
        and otherwise to 0, 1, ...

    Returns:
      A `Suggestion`.

    Raises:
      ValueError: If the norms have more than one axis or are negative, if fewer than 10 of them are
        finite and positive, or if the steps have a different shape.
      TypeError: If the norms are not real numbers.

    Warns:
      UserWarning: If there are fewer than 100 norms, or if no threshold can be suggested.

    Example:
      >>> import numpy as np
      >>> norms = np.exp(0.2 * np.random.default_rng(0).normal(size=500))
      >>> norms[[100, 200, 300]] = 10.0, 50.0, np.nan
      >>> suggestion = suggest(norms)
      >>> print(suggestion.spikes, suggestion.num_nonfinite, suggestion.regime)
      [100 200] 1 stationary
    """
    values = _check_norms(norms)
    if steps is None and hasattr(norms, "to_numpy"):
        steps = getattr(norms, "index", None)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    if steps.shape != values.shape or steps.dtype.kind not in "iu":
        raise ValueError(
            f"steps must be an int array of shape {values.shape}, got {steps.dtype}{[*steps.shape]}"
        )
    # Zeros and non-finite norms have no logarithm, so they are excluded.
    (used,) = np.nonzero(np.isfinite(values) & (values > 0))
    logs = np.log(values[used])  # f64[used]
    shape = analyze(logs)
    warmup = int(used[shape.warmup]) if shape.warmup else 0
    # [used] -> [n]
    is_spike = np.zeros(len(values), bool)
    is_spike[used[shape.warmup :]] = shape.spikes[shape.warmup :]
    typical = logs[shape.warmup :][~shape.spikes[shape.warmup :]]
    reasons = (*_loss_reasons(values, logs, shape), *_clip_reasons(values[used]))
    few = f"there are only {len(used)} norms; record at least {ENOUGH_NORMS}"
    warnings = (*reasons, few) if len(used) < ENOUGH_NORMS else reasons
    for warning in warnings:
        warn(warning)
    is_far = shape.regime != "stationary" and shape.ratio > FAR
    threshold = math.nan if reasons else float(f"{math.exp(min(shape.threshold, 709.0)):.3g}")
    return Suggestion(
        recommendation="none" if reasons else "adaptive" if is_far else "constant",
        threshold=threshold,
        regime=shape.regime,
        level_ratio=math.exp(shape.ratio),
        warmup_steps=warmup,
        typical_norm=math.exp(float(np.median(typical))),
        spread=shape.spread,
        warnings=warnings,
        notes=_notes(values, steps, shape, warmup, threshold),
        num_nonfinite=int(np.sum(~np.isfinite(values))),
        num_zeros=int(np.sum(values == 0)),
        norms=values,
        steps=steps.astype(np.int64),
        is_spike=is_spike,
    )


def _check_norms(norms: HostArrayLike) -> Floats:
    if isinstance(norms, str | os.PathLike):
        raise TypeError(
            f"norms must be an array, got the path {str(norms)!r}; "
            "pass optaxclip.tuning.read_log(path)"
        )
    try:
        array = np.asarray(norms)
    except ValueError:
        # NumPy rejects ragged nested lists.
        array = np.asarray(None)
    if array.dtype == object or hasattr(norms, "_fields"):
        raise TypeError(
            f"norms must be an array of real numbers, got {short_repr(norms)} of type "
            f"{type(norms).__name__}; use optaxclip.monitor.history(state) to get them from a state"
        )
    if array.dtype.kind not in "fiu" and array.dtype != jnp.bfloat16:
        raise TypeError(f"norms must be real numbers, got dtype {array.dtype}")
    if array.ndim != 1:
        remedy = "pass the norms of a single run"
        raise ValueError(f"norms must be one-dimensional, got shape {array.shape}; {remedy}")
    values = array.astype(np.float64)
    negative = np.flatnonzero(values < 0)
    if negative.size:
        at = negative[0]
        raise ValueError(f"norms must not be negative, got {values[at]:g} at index {at}")
    num_used = int(np.sum(np.isfinite(values) & (values > 0)))
    if num_used < MIN_NORMS:
        raise ValueError(
            f"norms must contain at least {MIN_NORMS} finite positive numbers, got {num_used} out "
            f"of {len(values)} ({np.sum(values == 0)} are zero); record more steps before clipping"
        )
    return values


def _loss_reasons(norms: Floats, logs: Floats, shape: Shape) -> tuple[str, ...]:
    """Returns the reasons why the run probably diverged."""
    reasons = []
    # Isolated spikes do not affect medians of five norms.
    near = running_median(logs, 5)  # f64[used]
    start = float(np.median(near[: max(len(near) // 20, 5)]))
    peak = int(np.argmax(near))
    collapses = near[peak:].min() < start - math.log(COLLAPSE)
    if near[peak] > start + math.log(RISE_BEFORE_COLLAPSE) and collapses:
        up, down = math.exp(near[peak] - start), math.exp(start - near[peak:].min())
        reasons.append(
            f"the norms explode by a factor of {up:.3g} and then collapse to 1/{down:.3g} of their "
            "initial level, so the run diverged"
        )
    elif shape.rise > math.log(EXPLOSION):
        factor = math.exp(shape.rise)
        reasons.append(f"the level rises by a factor of {factor:.3g}, so the run diverged")
    if not np.isfinite(norms[-3:]).any():
        reasons.append("the last norms are non-finite, so the run diverged")
    if not np.any(norms[-max(len(norms) // 20, MIN_NORMS) :]):
        reasons.append("the last norms are all zero, so the run no longer learns")
    if reasons:
        reasons[-1] += "; record a stable run, using a lower learning rate or a low threshold"
    return tuple(reasons)


def _clip_reasons(norms: Floats) -> tuple[str, ...]:
    """Returns the reason why the norms, float64[n], had probably already been clipped."""
    largest = norms.max()
    pile = int(np.sum(norms >= 0.999 * largest))
    # Coarsely rounded norms are also often equal, but not mainly to the largest norm.
    _, counts = np.unique(np.round(norms[norms < 0.999 * largest] / largest, 3), return_counts=True)
    next_pile = counts.max(initial=0)
    if pile < max(PILE_FRACTION * len(norms), 3) or pile < PILE_RATIO * next_pile:
        return ()
    return (
        f"{pile / len(norms):.0%} of the norms equal the largest norm {largest:.4g}, so they were "
        "already clipped or normalized; record the norms before clipping",
    )


def _notes(
    norms: Floats, steps: Steps, shape: Shape, warmup: int, threshold: float
) -> tuple[str, ...]:
    notes = []
    n, zeros = len(norms), int(np.sum(norms == 0))
    if zeros:
        notes.append(f"{zeros} norms are zero ({zeros / n:.1%}) and ignored")
    if not np.isfinite(norms).all():
        notes.append("clipping cannot fix non-finite gradients; use optaxclip.skip_nonfinite")
    # Uses the median, because steps may be missing after a restart.
    every = round(float(np.median(np.diff(steps))))
    if every > 1:
        notes.append(f"the log has one of {every} steps and can miss spikes")
    if shape.regime != "stationary":
        turns = {"falls": shape.fall, "rises": shape.rise}
        verb = max(turns, key=lambda turn: turns[turn])
        notes.append(f"the level {verb} by a factor of {math.exp(turns[verb]):.3g}")
    if math.isnan(threshold):
        return tuple(notes)
    # Norms are often larger at the start, so a threshold from the whole run may be too low there.
    start = norms[: max(warmup, round(START_FRACTION * n), 5)]
    start = start[np.isfinite(start) & (start > 0)]
    at_start = float(np.mean(start > threshold)) if start.size else 0.0
    if at_start > 0.1:
        notes.append(f"the threshold clips {at_start:.0%} of the first {len(start)} norms")
    is_above = np.isfinite(norms) & (norms > threshold) & (np.arange(n) >= warmup)
    if not is_above.any():
        notes.append(
            "no norm after the start is above the threshold, so it would not have changed this run"
        )
    return tuple(notes)

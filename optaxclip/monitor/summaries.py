"""Numbers for a log, from a clip, skip, noise scale or history, on the device or on the host."""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import optaxclip._border.devices as devices
from optaxclip._base.ranges import exponents_of_parts
from optaxclip._base.states import Names
from optaxclip._base.types import ClipState
from optaxclip._border.entry_counts import WORD, num_counts
from optaxclip.methods.loss_scaling import LossScaleState
from optaxclip.methods.skipping import SkipState
from optaxclip.monitor.histogram_stage import HistogramState
from optaxclip.monitor.noise import NoiseScaleState, scale_of
from optaxclip.monitor.recording import RecordState
from optaxclip.monitor.states import unboxed
from optaxclip.monitor.statistics import STATISTICS

Recorded: TypeAlias = (
    ClipState | SkipState | LossScaleState | NoiseScaleState | RecordState | HistogramState
)
"""The states that have numbers for a log."""

Summary: TypeAlias = dict[str, Any]
"""An array `[labels]`, or `[1]`, for each kind of number; "top" has a dict for each entry."""

# The numbers of a record that has no entries.
_NOTHING = {"norm": 0.0, "limit": float("inf"), "factor": 1.0}
NUMBERS = (
    *("norm", "limit", "factor", "clipped_norm", "clipped_fraction", "num_clipped"),
    *("num_nonfinite", "num_skipped", "loss", "loss_limit", "loss_scale"),
    *("scale", "signal", "variance"),
    *("low_exponent", "median_exponent", "high_exponent", "num_infinite", "num_nan"),
    *(name for name in STATISTICS if name != "norm"),
    "steps",
)
"""The kinds of numbers, in the order shown, because `jit` sorts the dicts that it returns."""

COUNTS = ("steps", "num_clipped", "num_nonfinite", "num_skipped")
"""What is counted from the first step on."""

ROUNDING = 1e-6
"""Positive scores count as equal if their relative difference is no larger."""


def wanted(state: Recorded) -> dict[str, Any]:
    """What `summary` needs, still on the device."""
    if isinstance(state, NoiseScaleState):
        sums = {field: getattr(state, field) for field in ("steps", "signal", "variance")}
        return {key: unboxed(x) for key, x in sums.items()}
    if isinstance(state, HistogramState):
        return {"steps": unboxed(state.steps), "sizes": unboxed(state.counts)}
    if isinstance(state, RecordState):
        last = {name: unboxed(x) for name, x in state.last.items()}
        return {"steps": unboxed(state.steps), "last": last}
    if isinstance(state, LossScaleState):
        return wanted(state.skip) | {"loss_scale": unboxed(state.loss_scale)}
    of_info = ("norm", "limit", "factor", "num_nonfinite")
    found = {field: getattr(state.info, field) for field in of_info}
    if isinstance(state, ClipState):
        found |= {"num_clipped": state.info.num_clipped, "steps": state.steps}
    else:
        found["num_skipped"] = state.num_skipped
        if state.loss:
            found |= {"loss": state.loss.info.norm, "loss_limit": state.loss.info.limit}
    return {key: unboxed(x) for key, x in found.items()}


def labels_of(state: Recorded) -> tuple[str, ...]:
    """The entries of the record that a user has named; empty if there are none."""
    names = names_of(state)
    return tuple(names) if names.are_labels else ()


def names_of(state: Recorded) -> Names:
    """The names of the record's entries."""
    if isinstance(state, NoiseScaleState):
        return Names()
    has_names = isinstance(state, RecordState | HistogramState)
    return state.names if has_names else state.info.names


def has_entries(kept: dict[str, Any]) -> bool:
    """Whether a clip or a history has numbers for several leaves or groups."""
    values = next(iter(kept["last"].values())) if "last" in kept else kept.get("norm")
    return "steps" in kept and values is not None and values.ndim > kept["steps"].ndim


@functools.partial(jax.jit, static_argnames=("with_labels", "top"), inline=True)
def summary_on_device(
    kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int
) -> Summary:
    """`summary` with `jax.numpy`, for arrays that may be traced, and split over a mesh by seeds."""
    kept, earlier = jax.tree.map(devices.gathered, (kept, earlier))
    return summary(kept, earlier, with_labels, top, jnp)


def summary(
    kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int, numpy: Any
) -> Summary:
    """The numbers of one clip, skip, noise scale or history, and those of its `top` worst entries.

    The counts of an earlier state are subtracted. With labels, each entry along the last axis has
    numbers of its own. `numpy` is `numpy` or `jax.numpy`.
    """
    found = _of_all(kept, earlier, with_labels, numpy)
    return found | ({"top": _of_few(kept, top, numpy)} if top and has_entries(kept) else {})


def _of_all(
    kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, numpy: Any
) -> Summary:
    """The numbers of the whole record; leading axes, from `vmap`, count as more entries."""
    if "signal" in kept:
        return _of_noise(kept, numpy)
    kept = kept | {count: kept[count] - start for count, start in earlier.items()}
    steps = kept["steps"] if "steps" in kept else kept["num_skipped"]
    states = max(steps.size, 1)
    if "sizes" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        words = kept["sizes"].reshape(*shape, *kept["sizes"].shape[-2:])
        found = _of_sizes(numpy.sum(words, axis=0, dtype=words.dtype), numpy)
        return found | {"steps": _most(steps.reshape(-1, 1), numpy)}
    if "last" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        found = {name: _of_largest(x.reshape(shape), numpy) for name, x in kept["last"].items()}
        return found | {"steps": _most(steps.reshape(-1, 1), numpy)}

    def rows(x: Any) -> Any:
        """`[entries, labels]`, or `[entries, 1]`."""
        return x.reshape(states, x.size // states) if with_labels else x.reshape(-1, 1)

    found = _of_worst({field: rows(kept[field]) for field in _NOTHING}, numpy)
    if "steps" in kept:
        counts = kept["num_clipped"]
        per_step = counts.reshape(states, -1) / numpy.maximum(steps, 1).reshape(states, 1)
        shares = rows(per_step.astype(numpy.float32))
        share = numpy.sum(shares, axis=0) / max(len(shares), 1)
        found["steps"] = _most(steps.reshape(-1, 1), numpy)
        found["clipped_fraction"] = numpy.where(found["steps"] < 0, numpy.nan, share)
        found["num_clipped"] = _most(rows(counts), numpy)
    found["num_nonfinite"] = _most(rows(kept["num_nonfinite"]), numpy)
    if "num_skipped" in kept:
        found["num_skipped"] = _most(kept["num_skipped"].reshape(-1, 1), numpy)
    if "loss" in kept:
        loss, limit = (kept[field].reshape(-1, 1) for field in ("loss", "loss_limit"))
        found |= _of_largest_loss(loss, limit, numpy)
    if "loss_scale" in kept:
        scales = kept["loss_scale"].reshape(-1, 1)
        found["loss_scale"] = numpy.min(scales, axis=0, initial=numpy.inf)
    return found


def _most(counts: Any, numpy: Any) -> Any:
    """The largest count of each column, 0 if it is empty; below 0 if `since` is a later state."""
    return numpy.max(counts, axis=0) if counts.size else numpy.zeros(counts.shape[1:], counts.dtype)


def _of_sizes(words: Any, numpy: Any) -> Summary:
    """The numbers of a histogram, from its counts by size `[labels, 2, counts]`."""
    low, high = words[:, 0], words[:, 1]
    counts = low.astype(numpy.float32) + high.astype(numpy.float32) * numpy.float32(2.0**WORD)
    nonzero = counts[:, 1:-2]
    up_to = numpy.cumsum(nonzero, axis=1)
    known, every = up_to[:, -1:], numpy.sum(counts, axis=1)
    exponents = exponents_of_parts(wide=words.shape[-1] == num_counts(wide=True))

    def at(share: float) -> Any:
        is_reached = (up_to >= numpy.float32(share) * known).astype(numpy.int32)
        found = numpy.asarray(exponents, numpy.float32)[numpy.argmax(is_reached, axis=1)]
        return numpy.where(known[:, 0] > 0, found, numpy.nan)

    # The words of several groups were added up.
    high, low = high + (low >> WORD), low & (2**WORD - 1)
    exact = numpy.where(high < 2**15, (high << WORD) | low, 2**31 - 1).astype(numpy.int32)
    return {
        "low_exponent": at(0.05),
        "median_exponent": at(0.5),
        "high_exponent": at(0.95),
        "zero_fraction": numpy.where(every > 0, counts[:, 0] / numpy.maximum(every, 1), numpy.nan),
        "num_infinite": exact[:, -2],
        "num_nan": exact[:, -1],
    }


def _of_noise(kept: dict[str, Any], numpy: Any) -> Summary:
    """The averages over all states, and the noise scale from these averages."""
    means = {x: numpy.mean(kept[x].reshape(-1, 1), axis=0) for x in ("signal", "variance")}
    return {"scale": scale_of(numpy.max(kept["steps"]), **means, numpy=numpy), **means}


def _of_largest(rows: Any, numpy: Any) -> Any:
    """The largest number of each column, NaN if one is NaN; -inf stands for a missing group."""
    if not rows.size:
        return numpy.zeros(rows.shape[1:], rows.dtype)
    # A maximum over devices loses a NaN on a CPU (JAX 0.10.2).
    is_nan = numpy.isnan(rows)
    largest = numpy.max(numpy.where(is_nan, -numpy.inf, rows), axis=0)
    is_unknown = numpy.any(is_nan, axis=0) | (largest == -numpy.inf)
    return numpy.where(is_unknown, numpy.nan, largest).astype(rows.dtype)


def _of_worst(columns: dict[str, Any], numpy: Any) -> Summary:
    """For each column the number of the entry whose ratio of norm to limit is the largest."""
    norm = columns["norm"]
    if len(norm) == 0:
        of_none = numpy.ones(norm.shape[1:], norm.dtype)
        found = {field: of_none * x for field, x in _NOTHING.items()}
    else:
        found = _at_largest(_excess(norm, columns["limit"], numpy), columns, numpy)
    factor = found["factor"]
    # Where the factor is 0, nothing went on; a norm that is NaN times 0 would be NaN.
    return found | {"clipped_norm": numpy.where(factor == 0, 0, found["norm"]) * factor}


def _excess(norm: Any, limit: Any, numpy: Any) -> Any:
    """The square root of norm / limit: unlike the ratio, it is always in the range of float32."""
    is_usable = (limit > 0) & numpy.isfinite(norm)
    norm, limit = numpy.where(is_usable, norm, 0), numpy.where(is_usable, limit, 1)
    return numpy.where(is_usable, numpy.sqrt(norm) / numpy.sqrt(limit), numpy.inf)


def _of_few(kept: dict[str, Any], top: int, numpy: Any) -> list[dict[str, Any]]:
    """The numbers and the indices of the entries that are worst, or largest."""
    states = max(kept["steps"].size, 1)
    if "last" in kept:
        columns = {name: x.reshape(states, -1) for name, x in kept["last"].items()}
        # One order for all statistics: that of the norms, or else of the first statistic.
        first = next(x for x in ("norm", *NUMBERS) if x in columns)
        # A group without leaves is -inf here and comes last; what is not finite comes first.
        values = columns[first]
        score = numpy.max(numpy.where(numpy.isnan(values), numpy.inf, values), axis=0)
        found = {name: _of_largest(x, numpy) for name, x in columns.items()}
    else:
        found = _of_worst({x: kept[x].reshape(states, -1) for x in _NOTHING}, numpy)
        score = _excess(found["norm"], found["limit"], numpy)
    is_taken, few = numpy.zeros(score.shape, bool), []
    for _ in range(min(top, score.size)):
        left = numpy.where(is_taken, -numpy.inf, score)
        where = numpy.argmax(_is_largest(left, numpy) & ~is_taken)
        is_taken |= numpy.arange(score.size) == where
        of_entry = {field: entry_at(where, x, numpy) for field, x in found.items()}
        few.append({"index": where.astype(numpy.int32), **of_entry})
    return few


def worst_entry(kept: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a clip's worst leaf or group, and its index, -1 if there is none."""
    few = _of_few(kept, 1, jnp)
    return few[0] if few else {x: jnp.asarray(y) for x, y in (_NOTHING | {"index": -1}).items()}


def _of_largest_loss(loss: Any, limit: Any, numpy: Any) -> Summary:
    """The loss that is furthest above its limit, and that limit."""
    is_finite = numpy.isfinite(loss)
    above = numpy.where(is_finite, numpy.where(is_finite, loss, 0) - limit, numpy.inf)
    return _at_largest(above, {"loss": loss, "loss_limit": limit}, numpy)


def _at_largest(score: Any, columns: dict[str, Any], numpy: Any) -> Summary:
    """For each column, the number of the first entry with the largest score, up to rounding."""
    if len(score) == 1:
        return {field: x[0] for field, x in columns.items()}
    where = numpy.argmax(_is_largest(score, numpy), axis=0)
    return {field: entry_at(where, x, numpy) for field, x in columns.items()}


def entry_at(where: Any, x: Any, numpy: Any) -> Any:
    """`x[where]`, for each column its own entry.

    It is a sum, because JAX 0.10.2 cannot index under `vmap` over an axis of an explicit mesh.
    """
    entries = numpy.arange(len(x)).reshape(-1, *(1,) * where.ndim)
    is_there = entries == where.reshape(1, *where.shape)
    return numpy.sum(numpy.where(is_there, x, 0), axis=0, dtype=x.dtype)


def _is_largest(score: Any, numpy: Any) -> Any:
    """Which scores of each column are the largest, up to rounding.

    The device and the host round differently, and must choose the same entry of several equal ones.
    """
    largest = numpy.max(score, axis=0, keepdims=True)
    return score >= numpy.minimum(largest, largest * (1 - ROUNDING))

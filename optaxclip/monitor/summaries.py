"""Numbers for a log, from a clip, skip, noise scale or history, on the device or on the host."""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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
from optaxclip.monitor.states import lost_names, name_of, unboxed
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

OF_ALL = ("steps", "num_skipped")
"""What all entries have in common."""

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


def labels_of(state: Recorded, entries: bool) -> tuple[str, ...]:
    """The entries that have numbers of their own: those with labels, or all; empty if none has."""
    names = names_of(state)
    if names.are_labels or not entries:
        return tuple(names) if names.are_labels else ()
    is_histogram = isinstance(state, HistogramState)
    kept = {} if isinstance(state, NoiseScaleState) else wanted(state)
    if not is_histogram and not has_entries(kept):
        return ()
    if not names and any(x.size for x in jax.tree.leaves((kept.get("norm"), kept.get("last")))):
        raise lost_names(f"{name_of(state)} has lost the names of its leaves")
    return tuple(names)


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


def _namespace(x: Any) -> Any:
    """The module whose functions take `x`: `jax.numpy` on the device, NumPy on the host."""
    return jnp if isinstance(x, jax.Array) else np


@functools.partial(jax.jit, static_argnames=("with_labels", "top"), inline=True)
def summary_on_device(
    kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int
) -> Summary:
    """`summary` with `jax.numpy`, for arrays that may be traced, and split over a mesh by seeds."""
    kept, earlier = jax.tree.map(devices.gathered, (kept, earlier))
    return summary(kept, earlier, with_labels, top)


def summary(kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int) -> Summary:
    """The numbers of one clip, skip, noise scale or history, and those of its `top` worst entries.

    The counts of an earlier state are subtracted. With labels, each entry along the last axis has
    numbers of its own.
    """
    found = _of_all(kept, earlier, with_labels)
    return found | ({"top": _of_few(kept, top)} if top and has_entries(kept) else {})


def _of_all(kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool) -> Summary:
    """The numbers of the whole record; leading axes, from `vmap`, count as more entries."""
    if "signal" in kept:
        return _of_noise(kept)
    was_run = kept["steps"] > 0 if "sizes" in kept else None
    kept = kept | {count: kept[count] - start for count, start in earlier.items()}
    steps = kept["steps"] if "steps" in kept else kept["num_skipped"]
    states = max(steps.size, 1)
    xp = _namespace(steps)
    if "sizes" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        words = kept["sizes"].reshape(*shape, *kept["sizes"].shape[-2:])
        found = _of_sizes(xp.sum(words, axis=0, dtype=words.dtype), xp.any(was_run))
        if not kept["sizes"].shape[-3]:  # a tree without leaves has no sizes
            found = {name: x for name, x in found.items() if not name.endswith("exponent")}
        return found | {"steps": _most(steps.reshape(-1, 1))}
    if "last" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        found = {name: _of_largest(x.reshape(shape)) for name, x in kept["last"].items()}
        return found | {"steps": _most(steps.reshape(-1, 1))}

    def rows(x: Any) -> Any:
        """`[entries, labels]`, or `[entries, 1]`."""
        return x.reshape(states, x.size // states) if with_labels else x.reshape(-1, 1)

    found = _of_worst({field: rows(kept[field]) for field in _NOTHING})
    if "steps" in kept:
        found["steps"] = _most(steps.reshape(-1, 1))
        found["num_clipped"] = _most(rows(kept["num_clipped"]))
        share = (found["num_clipped"] / xp.maximum(found["steps"], 1)).astype(xp.float32)
        found["clipped_fraction"] = xp.where(found["steps"] < 0, xp.nan, share)
    found["num_nonfinite"] = _most(rows(kept["num_nonfinite"]))
    if "num_skipped" in kept:
        found["num_skipped"] = _most(kept["num_skipped"].reshape(-1, 1))
    if "loss" in kept:
        loss, limit = (kept[field].reshape(-1, 1) for field in ("loss", "loss_limit"))
        found |= _of_largest_loss(loss, limit)
    if "loss_scale" in kept:
        scales = kept["loss_scale"].reshape(-1, 1)
        found["loss_scale"] = xp.min(scales, axis=0, initial=xp.inf)
    return found


def _most(counts: Any) -> Any:
    """The largest count of each column, 0 if it is empty; below 0 if `since` is a later state."""
    xp = _namespace(counts)
    return xp.max(counts, axis=0) if counts.size else xp.zeros(counts.shape[1:], counts.dtype)


def _of_sizes(words: Any, was_run: Any) -> Summary:
    """The numbers of a histogram, from its counts by size `[labels, 2, counts]`."""
    xp = _namespace(words)
    low, high = words[:, 0], words[:, 1]
    counts = low.astype(xp.float32) + high.astype(xp.float32) * xp.float32(2.0**WORD)
    nonzero = counts[:, 1:-2]
    up_to = xp.cumsum(nonzero, axis=1)
    known, every = up_to[:, -1:], xp.sum(counts, axis=1)
    exponents = exponents_of_parts(wide=words.shape[-1] == num_counts(wide=True))

    def at(share: float) -> Any:
        is_reached = (up_to >= xp.float32(share) * known).astype(xp.int32)
        found = xp.asarray(exponents, xp.float32)[xp.argmax(is_reached, axis=1)]
        return xp.where(known[:, 0] > 0, found, xp.nan)

    # The words of several groups were added up.
    high, low = high + (low >> WORD), low & (2**WORD - 1)
    exact = xp.where(high < 2**15, (high << WORD) | low, 2**31 - 1).astype(xp.int32)
    return {
        "low_exponent": at(0.05),
        "median_exponent": at(0.5),
        "high_exponent": at(0.95),
        "zero_fraction": xp.where(was_run, counts[:, 0] / xp.maximum(every, 1), xp.nan),
        "num_infinite": exact[:, -2],
        "num_nan": exact[:, -1],
    }


def _of_noise(kept: dict[str, Any]) -> Summary:
    """The averages over all states, and the noise scale from these averages."""
    xp = _namespace(kept["steps"])
    means = {x: xp.mean(kept[x].reshape(-1, 1), axis=0) for x in ("signal", "variance")}
    return {"scale": scale_of(xp.max(kept["steps"]), **means), **means}


def _of_largest(rows: Any) -> Any:
    """The largest number of each column, NaN if one is NaN; -inf stands for a missing group."""
    xp = _namespace(rows)
    if not rows.size:
        return xp.zeros(rows.shape[1:], rows.dtype)
    # A maximum over devices loses a NaN on a CPU (JAX 0.10.2).
    is_nan = xp.isnan(rows)
    largest = xp.max(xp.where(is_nan, -xp.inf, rows), axis=0)
    is_unknown = xp.any(is_nan, axis=0) | (largest == -xp.inf)
    return xp.where(is_unknown, xp.nan, largest).astype(rows.dtype)


def _of_worst(columns: dict[str, Any]) -> Summary:
    """For each column the number of the entry whose ratio of norm to limit is the largest."""
    xp = _namespace(columns["norm"])
    norm = columns["norm"]
    if len(norm) == 0:
        of_none = xp.ones(norm.shape[1:], norm.dtype)
        found = {field: of_none * x for field, x in _NOTHING.items()}
    else:
        found = _at_largest(_excess(norm, columns["limit"]), columns)
    factor = found["factor"]
    # Where the factor is 0, nothing went on; a norm that is NaN times 0 would be NaN.
    return found | {"clipped_norm": xp.where(factor == 0, 0, found["norm"]) * factor}


def _excess(norm: Any, limit: Any) -> Any:
    """The square root of norm / limit: unlike the ratio, it is always in the range of float32."""
    xp = _namespace(norm)
    is_usable = (limit > 0) & xp.isfinite(norm)
    norm, limit = xp.where(is_usable, norm, 0), xp.where(is_usable, limit, 1)
    return xp.where(is_usable, xp.sqrt(norm) / xp.sqrt(limit), xp.inf)


def _of_few(kept: dict[str, Any], top: int) -> list[dict[str, Any]]:
    """The numbers and the indices of the entries that are worst, or largest."""
    xp = _namespace(kept["steps"])
    states = max(kept["steps"].size, 1)
    if "last" in kept:
        columns = {name: x.reshape(states, -1) for name, x in kept["last"].items()}
        # One order for all statistics: that of the norms, or else of the first statistic.
        first = next(x for x in ("norm", *NUMBERS) if x in columns)
        # A group without leaves is -inf here and comes last; what is not finite comes first.
        values = columns[first]
        score = xp.max(xp.where(xp.isnan(values), xp.inf, values), axis=0)
        found = {name: _of_largest(x) for name, x in columns.items()}
    else:
        found = _of_worst({x: kept[x].reshape(states, -1) for x in _NOTHING})
        score = _excess(found["norm"], found["limit"])
    is_taken, few = xp.zeros(score.shape, bool), []
    for _ in range(min(top, score.size)):
        left = xp.where(is_taken, -xp.inf, score)
        where = xp.argmax(_is_largest(left) & ~is_taken)
        is_taken |= xp.arange(score.size) == where
        of_entry = {field: entry_at(where, x) for field, x in found.items()}
        few.append({"index": where.astype(xp.int32), **of_entry})
    return few


def worst_entry(kept: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a clip's worst leaf or group, and its index, -1 if there is none."""
    few = _of_few(kept, 1)
    return few[0] if few else {x: jnp.asarray(y) for x, y in (_NOTHING | {"index": -1}).items()}


def _of_largest_loss(loss: Any, limit: Any) -> Summary:
    """The loss that is furthest above its limit, and that limit."""
    xp = _namespace(loss)
    is_finite = xp.isfinite(loss)
    above = xp.where(is_finite, xp.where(is_finite, loss, 0) - limit, xp.inf)
    return _at_largest(above, {"loss": loss, "loss_limit": limit})


def _at_largest(score: Any, columns: dict[str, Any]) -> Summary:
    """For each column, the number of the first entry with the largest score, up to rounding."""
    xp = _namespace(score)
    if len(score) == 1:
        return {field: x[0] for field, x in columns.items()}
    where = xp.argmax(_is_largest(score), axis=0)
    return {field: entry_at(where, x) for field, x in columns.items()}


def entry_at(where: Any, x: Any) -> Any:
    """`x[where]`, for each column its own entry.

    It is a sum, because JAX 0.10.2 cannot index under `vmap` over an axis of an explicit mesh.
    """
    xp = _namespace(x)
    entries = xp.arange(len(x)).reshape(-1, *(1,) * where.ndim)
    is_there = entries == where.reshape(1, *where.shape)
    return xp.sum(xp.where(is_there, x, 0), axis=0, dtype=x.dtype)


def _is_largest(score: Any) -> Any:
    """Which scores of each column are the largest, up to rounding.

    The device and the host round differently, and must choose the same entry of several equal ones.
    """
    xp = _namespace(score)
    largest = xp.max(score, axis=0, keepdims=True)
    return score >= xp.minimum(largest, largest * (1 - ROUNDING))

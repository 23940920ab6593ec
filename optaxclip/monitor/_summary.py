"""Computes numbers for logs from records, on the device or on the host."""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
from optaxclip._backend.exponent_counts import WORD_BITS, num_counts
from optaxclip._base.float_formats import bin_exponents
from optaxclip._base.state import StaticNames
from optaxclip._base.types import ClipState, PyTree
from optaxclip.monitor._find_states import (
    deduplicate,
    describe_tree,
    is_deleted,
    name_of,
    names_lost_error,
    records,
    unbox,
)
from optaxclip.monitor._histogram import HistogramState
from optaxclip.monitor._noise_scale import NoiseScaleState, scale_of
from optaxclip.monitor._record import RecordState
from optaxclip.monitor._statistics import STATISTICS
from optaxclip.transforms.loss_scale import LossScaleState
from optaxclip.transforms.skip import SkipState

Recorded: TypeAlias = (
    ClipState | SkipState | LossScaleState | NoiseScaleState | RecordState | HistogramState
)
"""The states that have numbers for a log."""

Summary: TypeAlias = dict[str, Any]
"""An array `[labels]` or `[1]` by kind of number, and dicts of the worst elements in "top"."""

# The numbers of a record without elements.
_EMPTY_RECORD = {"norm": 0.0, "threshold": float("inf"), "factor": 1.0}
NUMBERS = (
    *("norm", "threshold", "factor", "clipped_norm", "clipped_fraction", "num_clipped"),
    *("num_nonfinite", "num_skipped", "loss", "loss_threshold", "loss_scale"),
    *("scale", "signal", "variance"),
    *("low_exponent", "median_exponent", "high_exponent", "num_infinite", "num_nan"),
    *(name for name in STATISTICS if name != "norm"),
    "steps",
)
"""The kinds of numbers, in the order shown, because `jit` sorts the dicts that it returns."""

COUNTS = ("steps", "num_clipped", "num_nonfinite", "num_skipped")
"""The kinds of numbers that are counted from the first step."""

OF_ALL = ("steps", "num_skipped")
"""The kinds of numbers that all elements share."""

ROUNDING = 1e-6
"""The maximum relative difference of positive scores that are treated as equal."""


def summary_inputs(state: Recorded) -> dict[str, Any]:
    """Returns the inputs of `summary`, still on the device."""
    if isinstance(state, NoiseScaleState):
        sums = {field: getattr(state, field) for field in ("steps", "signal", "variance")}
        return {key: unbox(x) for key, x in sums.items()}
    if isinstance(state, HistogramState):
        return {"steps": unbox(state.steps), "sizes": unbox(state.counts)}
    if isinstance(state, RecordState):
        last = {name: unbox(x) for name, x in state.last.items()}
        return {"steps": unbox(state.steps), "last": last}
    if isinstance(state, LossScaleState):
        return summary_inputs(state.skip) | {"loss_scale": unbox(state.loss_scale)}
    of_info = ("norm", "threshold", "factor", "num_nonfinite")
    found = {field: getattr(state.info, field) for field in of_info}
    if isinstance(state, ClipState):
        found |= {"num_clipped": state.info.num_clipped, "steps": state.steps}
    else:
        found["num_skipped"] = state.num_skipped
        if state.loss:
            found |= {"loss": state.loss.info.norm, "loss_threshold": state.loss.info.threshold}
    return {key: unbox(x) for key, x in found.items()}


def labels_of(state: Recorded, per_group: bool) -> tuple[str, ...]:
    """Returns the elements with separate numbers (labeled ones or all), or an empty tuple."""
    names = names_of(state)
    if names.is_user_label or not per_group:
        return tuple(names) if names.is_user_label else ()
    is_histogram = isinstance(state, HistogramState)
    kept = {} if isinstance(state, NoiseScaleState) else summary_inputs(state)
    if not is_histogram and not has_entries(kept):
        return ()
    if not names and any(x.size for x in jax.tree.leaves((kept.get("norm"), kept.get("last")))):
        raise names_lost_error(f"{name_of(state)} has lost the names of its leaves")
    return tuple(names)


def names_of(state: Recorded) -> StaticNames:
    """Returns the names of the record's elements."""
    if isinstance(state, NoiseScaleState):
        return StaticNames()
    has_names = isinstance(state, RecordState | HistogramState)
    return state.names if has_names else state.info.names


def has_entries(record: dict[str, Any]) -> bool:
    """Returns `True` if a clip or a history has numbers for several leaves or groups."""
    values = next(iter(record["last"].values())) if "last" in record else record.get("norm")
    return "steps" in record and values is not None and values.ndim > record["steps"].ndim


def _namespace(x: Any) -> Any:
    """Returns `jax.numpy` for arrays on the device and NumPy for arrays on the host."""
    return jnp if isinstance(x, jax.Array) else np


@functools.partial(jax.jit, static_argnames=("with_labels", "top"), inline=True)
def summary_on_device(
    kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int
) -> Summary:
    """Computes `summary` with `jax.numpy` for arrays that can be traced, or sharded by seeds."""
    kept, earlier = jax.tree.map(meshes.replicate, (kept, earlier))
    return summary(kept, earlier, with_labels, top)


def summary(kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool, top: int) -> Summary:
    """Computes the numbers of a record and of its `top` worst elements.

    The counts of an earlier state are subtracted. With labels, elements along the last axis have
    separate numbers.
    """
    found = _summarize(kept, earlier, with_labels)
    return found | ({"top": _top_k(kept, top)} if top and has_entries(kept) else {})


def _summarize(kept: dict[str, Any], earlier: dict[str, Any], with_labels: bool) -> Summary:
    """Computes the numbers of a whole record, with leading axes of `vmap` as more elements."""
    if "signal" in kept:
        return _summarize_noise(kept)
    was_run = kept["steps"] > 0 if "sizes" in kept else None
    kept = kept | {count: kept[count] - start for count, start in earlier.items()}
    steps = kept["steps"] if "steps" in kept else kept["num_skipped"]
    states = max(steps.size, 1)
    xp = _namespace(steps)
    if "sizes" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        words = kept["sizes"].reshape(*shape, *kept["sizes"].shape[-2:])
        found = _summarize_histogram(xp.sum(words, axis=0, dtype=words.dtype), xp.any(was_run))
        if not kept["sizes"].shape[-3]:  # A tree without leaves has no sizes.
            found = {name: x for name, x in found.items() if not name.endswith("exponent")}
        return found | {"steps": _column_max(steps.reshape(-1, 1))}
    if "last" in kept:
        shape = (states, -1) if with_labels else (-1, 1)
        found = {name: _nan_aware_max(x.reshape(shape)) for name, x in kept["last"].items()}
        return found | {"steps": _column_max(steps.reshape(-1, 1))}

    def rows(x: Any) -> Any:
        """Reshapes to `[elements, labels]` or `[elements, 1]`."""
        return x.reshape(states, x.size // states) if with_labels else x.reshape(-1, 1)

    found = _take_worst({field: rows(kept[field]) for field in _EMPTY_RECORD})
    if "steps" in kept:
        found["steps"] = _column_max(steps.reshape(-1, 1))
        found["num_clipped"] = _column_max(rows(kept["num_clipped"]))
        share = (found["num_clipped"] / xp.maximum(found["steps"], 1)).astype(xp.float32)
        found["clipped_fraction"] = xp.where(found["steps"] < 0, xp.nan, share)
    found["num_nonfinite"] = _column_max(rows(kept["num_nonfinite"]))
    if "num_skipped" in kept:
        found["num_skipped"] = _column_max(kept["num_skipped"].reshape(-1, 1))
    if "loss" in kept:
        loss, threshold = (kept[field].reshape(-1, 1) for field in ("loss", "loss_threshold"))
        found |= _take_largest_loss(loss, threshold)
    if "loss_scale" in kept:
        scales = kept["loss_scale"].reshape(-1, 1)
        found["loss_scale"] = xp.min(scales, axis=0, initial=xp.inf)
    return found


def _column_max(counts: Any) -> Any:
    """Returns the largest counts of columns (0 if empty, negative if `since` is later)."""
    xp = _namespace(counts)
    return xp.max(counts, axis=0) if counts.size else xp.zeros(counts.shape[1:], counts.dtype)


def _summarize_histogram(words: Any, was_run: Any) -> Summary:
    """Computes the numbers of a histogram from its counts by size `[labels, 2, counts]`."""
    xp = _namespace(words)
    low, high = words[:, 0], words[:, 1]  # [labels, counts]
    counts = low.astype(xp.float32) + high.astype(xp.float32) * xp.float32(2.0**WORD_BITS)
    nonzero = counts[:, 1:-2]
    up_to = xp.cumsum(nonzero, axis=1)
    known, every = up_to[:, -1:], xp.sum(counts, axis=1)
    exponents = bin_exponents(is_float64=words.shape[-1] == num_counts(wide=True))

    def quantile(share: float) -> Any:
        is_reached = (up_to >= xp.float32(share) * known).astype(xp.int32)
        found = xp.asarray(exponents, xp.float32)[xp.argmax(is_reached, axis=1)]
        return xp.where(known[:, 0] > 0, found, xp.nan)

    # The low words of several groups were summed and can need more than WORD_BITS bits.
    high, low = high + (low >> WORD_BITS), low & (2**WORD_BITS - 1)
    exact = xp.where(high < 2**15, (high << WORD_BITS) | low, 2**31 - 1).astype(xp.int32)
    return {
        "low_exponent": quantile(0.05),
        "median_exponent": quantile(0.5),
        "high_exponent": quantile(0.95),
        "zero_fraction": xp.where(was_run, counts[:, 0] / xp.maximum(every, 1), xp.nan),
        "num_infinite": exact[:, -2],
        "num_nan": exact[:, -1],
    }


def _summarize_noise(kept: dict[str, Any]) -> Summary:
    """Averages over all states and computes the noise scale from these averages."""
    xp = _namespace(kept["steps"])
    means = {x: xp.mean(kept[x].reshape(-1, 1), axis=0) for x in ("signal", "variance")}
    return {"scale": scale_of(xp.max(kept["steps"]), **means), **means}


def _nan_aware_max(rows: Any) -> Any:
    """Returns the largest numbers of columns, or NaN if one is NaN or all are missing (-inf)."""
    xp = _namespace(rows)
    if not rows.size:
        return xp.zeros(rows.shape[1:], rows.dtype)
    # A maximum over devices drops NaN on a CPU (as of JAX 0.10.2).
    is_nan = xp.isnan(rows)
    largest = xp.max(xp.where(is_nan, -xp.inf, rows), axis=0)
    is_unknown = xp.any(is_nan, axis=0) | (largest == -xp.inf)
    return xp.where(is_unknown, xp.nan, largest).astype(rows.dtype)


def _take_worst(columns: dict[str, Any]) -> Summary:
    """Returns the numbers of the elements with the largest ratio of norm to threshold by column."""
    xp = _namespace(columns["norm"])
    norm = columns["norm"]
    if len(norm) == 0:
        of_none = xp.ones(norm.shape[1:], norm.dtype)
        found = {field: of_none * x for field, x in _EMPTY_RECORD.items()}
    else:
        found = _take_argmax(_norm_to_threshold(norm, columns["threshold"]), columns)
    factor = found["factor"]
    # A factor of 0 must result in 0, but NaN * 0 is NaN.
    return found | {"clipped_norm": xp.where(factor == 0, 0, found["norm"]) * factor}


def _norm_to_threshold(norm: Any, threshold: Any) -> Any:
    """Computes sqrt(norm / threshold), which never overflows in float32, unlike the ratio."""
    xp = _namespace(norm)
    is_usable = (threshold > 0) & xp.isfinite(norm)
    norm, threshold = xp.where(is_usable, norm, 0), xp.where(is_usable, threshold, 1)
    return xp.where(is_usable, xp.sqrt(norm) / xp.sqrt(threshold), xp.inf)


def _top_k(kept: dict[str, Any], top: int) -> list[dict[str, Any]]:
    """Returns the numbers and the indices of the worst or largest elements."""
    xp = _namespace(kept["steps"])
    states = max(kept["steps"].size, 1)
    if "last" in kept:
        columns = {name: x.reshape(states, -1) for name, x in kept["last"].items()}
        # All statistics use the order of the norms, or of the first statistic without norms.
        first = next(x for x in ("norm", *NUMBERS) if x in columns)
        # A group without leaves is -inf and sorts last. Non-finite values sort first.
        values = columns[first]
        score = xp.max(xp.where(xp.isnan(values), xp.inf, values), axis=0)
        found = {name: _nan_aware_max(x) for name, x in columns.items()}
    else:
        found = _take_worst({x: kept[x].reshape(states, -1) for x in _EMPTY_RECORD})
        score = _norm_to_threshold(found["norm"], found["threshold"])
    is_taken, few = xp.zeros(score.shape, bool), []
    for _ in range(min(top, score.size)):
        left = xp.where(is_taken, -xp.inf, score)
        where = xp.argmax(_is_largest(left) & ~is_taken)
        is_taken |= xp.arange(score.size) == where
        of_entry = {field: take_along_columns(where, x) for field, x in found.items()}
        few.append({"index": where.astype(xp.int32), **of_entry})
    return few


def worst_group(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a clip's worst leaf or group, and its index (-1 if there is none)."""
    few = _top_k(kept, 1)
    return (
        few[0] if few else {x: jnp.asarray(y) for x, y in (_EMPTY_RECORD | {"index": -1}).items()}
    )


def _take_largest_loss(loss: Any, threshold: Any) -> Summary:
    """Returns the loss that is furthest above its threshold, and this threshold."""
    xp = _namespace(loss)
    is_finite = xp.isfinite(loss)
    above = xp.where(is_finite, xp.where(is_finite, loss, 0) - threshold, xp.inf)
    return _take_argmax(above, {"loss": loss, "loss_threshold": threshold})


def _take_argmax(score: Any, columns: dict[str, Any]) -> Summary:
    """Returns the numbers of the first elements with the largest scores, up to rounding."""
    xp = _namespace(score)
    if len(score) == 1:
        return {field: x[0] for field, x in columns.items()}
    where = xp.argmax(_is_largest(score), axis=0)
    return {field: take_along_columns(where, x) for field, x in columns.items()}


def take_along_columns(where: Any, x: Any) -> Any:
    """Returns `x[where]` with a separate index per column.

    Uses a sum, because JAX cannot index under `vmap` over an axis of an explicit mesh (as of JAX
    0.10.2).
    """
    xp = _namespace(x)
    entries = xp.arange(len(x)).reshape(-1, *(1,) * where.ndim)
    is_there = entries == where.reshape(1, *where.shape)
    return xp.sum(xp.where(is_there, x, 0), axis=0, dtype=x.dtype)


def _is_largest(score: Any) -> Any:
    """Marks the largest scores of columns, up to rounding.

    The device and the host round differently, but must choose the same one of equal elements.
    """
    xp = _namespace(score)
    largest = xp.max(score, axis=0, keepdims=True)
    return score >= xp.minimum(largest, largest * (1 - ROUNDING))


Counts: TypeAlias = dict[str, dict[str, Any]]
"""The counts of records from the first step, by their names in `metrics`."""


def counts(opt_state: PyTree) -> Counts:
    """Returns the counts of all records in a state, for `since=` of a later log.

    The state itself may no longer exist by then, because a step to which it is donated deletes its
    arrays and an `nnx.Optimizer` changes in place. Keeping it would also use memory for Adam's
    moments. The counts are a few integers in plain data, which a checkpoint can contain.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.

    Returns:
      A dict from the names of clips, skips and `record` in `metrics` to their counts: `steps`,
      `num_clipped`, `num_nonfinite` and `num_skipped`, if the record has them. They are int32
      arrays, with one element per leaf or label if the record has several. Outside `jit` they are
      NumPy arrays, after one `jax.device_get`.

    Raises:
      ValueError: If `metrics` raises it for this state.

    Example:
      >>> import jax, jax.numpy as jnp, optaxclip
      >>> from optaxclip import monitor
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> step = jax.jit(lambda x, state: tx.update(x, state)[1], donate_argnums=1)
      >>> state = tx.init(jnp.zeros(2))
      >>> for size in (3.0, 4.0):
      ...     state = step(jnp.array([0.0, size]), state)
      >>> earlier = monitor.counts(state)
      >>> for size in (0.1, 0.2, 3.0, 0.3):
      ...     state = step(jnp.array([0.0, size]), state)
      >>> log = monitor.scalars(state, since=earlier)
      >>> for number in ("steps", "num_clipped", "clipped_fraction"):
      ...     print(number, log[f"clip_by_global_norm/{number}"])
      steps 4.0
      num_clipped 1.0
      clipped_fraction 0.25
    """
    found = _counts_of(loggable_records(opt_state, "counts"))
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(found)):
        return found
    # Copied, because `device_get` returns views of the device's memory on a CPU. A later step
    # could change these views, or could not reuse the memory.
    return jax.tree.map(np.array, jax.device_get(found))


def loggable_records(opt_state: PyTree, caller: str) -> dict[str, Recorded]:
    """Returns all records that have numbers for a log, by their names in `metrics`."""
    more = (LossScaleState, NoiseScaleState, RecordState, HistogramState)
    found = [state for _, state in records(opt_state, caller, *more)]
    return dict(zip(deduplicate([name_of(state) for state in found]), found, strict=True))


def subtract_counts(
    found: Mapping[str, Recorded], since: PyTree | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the inputs of `summary` and the counts to subtract, for all records."""
    kept = [summary_inputs(state) for state in found.values()]
    if since is None:
        return [(numbers, {}) for numbers in kept]
    earlier = _parse_since(since)
    shapes, before = (_shapes(each) for each in (_counts_of(found), earlier))
    if shapes != before:
        raise ValueError(
            f"since must be an earlier state of the same optimizer, or monitor.counts of it: it "
            f"holds the counts {before}, and the state holds {shapes}"
        )
    return [(numbers, earlier.get(name, {})) for name, numbers in zip(found, kept, strict=True)]


def _counts_of(found: Mapping[str, Recorded]) -> Counts:
    every = {name: summary_inputs(state) for name, state in found.items()}
    return {
        name: {count: numbers[count] for count in COUNTS if count in numbers}
        for name, numbers in every.items()
        if not isinstance(found[name], NoiseScaleState)
    }


def _parse_since(since: PyTree) -> Counts:
    """Returns the counts from `since`, a state or counts."""
    if any(map(is_deleted, jax.tree.leaves(since))):
        raise ValueError(
            "since must contain usable arrays, got arrays that were donated to a later step; "
            "compute monitor.counts(opt_state) before that step and pass the result as since"
        )
    are_counts = isinstance(since, Mapping) and all(
        isinstance(each, Mapping) and set(each) <= {*COUNTS} for each in since.values()
    )
    if are_counts and since:
        return {name: dict(each) for name, each in since.items()}
    try:
        return _counts_of(loggable_records(since, "counts"))
    except ValueError:
        raise ValueError(
            "since must be an earlier state of the optimizer, or monitor.counts of it, got "
            f"{describe_tree(since)}"
        ) from None


def _shapes(found: Counts) -> dict[str, dict[str, tuple[int, ...]]]:
    return {name: {key: np.shape(x) for key, x in each.items()} for name, each in found.items()}

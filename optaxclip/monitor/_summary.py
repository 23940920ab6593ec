"""Computes the numbers for logs from records, on the device or on the host."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optaxclip._backend.exponent_counts import WORD_BITS, num_counts
from optaxclip._base.float_formats import bin_exponents
from optaxclip._base.state import StaticNames
from optaxclip._base.types import ClipState, PyTree
from optaxclip.monitor._find_states import describe_tree, is_deleted, records, unbox, unique_names
from optaxclip.monitor._histogram import HistogramState
from optaxclip.monitor._noise_scale import NoiseScaleState, scale_of
from optaxclip.monitor._record import STATISTICS, RecordState
from optaxclip.transforms.loss_scale import LossScaleState
from optaxclip.transforms.skip import SkipState

Recorded: TypeAlias = (
    ClipState | SkipState | LossScaleState | NoiseScaleState | RecordState | HistogramState
)
"""The states that have numbers for logs."""

Summary: TypeAlias = dict[str, Any]
"""Arrays `[labels]` or `[1]` by kind of number, and a list of the worst elements as "top"."""

# The numbers of a record without elements.
EMPTY_RECORD = {"norm": 0.0, "threshold": float("inf"), "factor": 1.0}
NUMBERS = (
    *("norm", "threshold", "factor", "clipped_norm", "clipped_fraction", "num_clipped"),
    *("num_nonfinite", "num_skipped", "loss", "loss_threshold", "loss_scale"),
    *("scale", "signal", "variance"),
    *("low_exponent", "median_exponent", "high_exponent", "num_infinite", "num_nan"),
    *(name for name in STATISTICS if name != "norm"),
    "steps",
)
"""The kinds of numbers in the order of logs, because `jit` sorts the dicts that it returns."""

COUNTS = ("steps", "num_clipped", "num_nonfinite", "num_skipped")
"""The kinds of numbers that are counted from the first step."""

OF_ALL = ("steps", "num_skipped")
"""The kinds of numbers that all elements share."""


@dataclasses.dataclass(frozen=True)
class _CountedRecord:
    """The arrays of a state that a log needs. Under `vmap`, they have leading axes for states."""

    def since(self, earlier: dict[str, Any]) -> Self:
        """Subtracts earlier counts."""
        later = {name: getattr(self, name) - start for name, start in earlier.items()}
        return dataclasses.replace(self, **later)


@dataclasses.dataclass(frozen=True)
class NormRecord(_CountedRecord):
    # f32[*states] for a whole tree, and f32[*states, elements] for leaves, groups or labels.
    norm: Any
    threshold: Any
    factor: Any
    num_nonfinite: Any  # i32, with the same shape

    def worst_elements(self, shape: tuple[int, int]) -> Summary:
        """Returns the numbers of the worst element of each column in a shape [rows, columns]."""
        xp = _namespace(self.norm)
        columns = {field: getattr(self, field).reshape(shape) for field in EMPTY_RECORD}
        norm = columns["norm"]  # f32[rows, columns]
        if len(norm) == 0:
            of_none = xp.ones(norm.shape[1:], norm.dtype)
            found = {field: of_none * x for field, x in EMPTY_RECORD.items()}
        else:
            found = _take_argmax(_norm_to_threshold(norm, columns["threshold"]), columns)
        factor = found["factor"]  # f32[columns]
        # A factor of 0 must result in 0, but NaN * 0 is NaN.
        return found | {"clipped_norm": xp.where(factor == 0, 0, found["norm"]) * factor}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClipRecord(NormRecord):
    num_clipped: Any  # i32, with the shape of `norm`
    steps: Any  # i32[*states]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        """Returns the numbers of the worst elements, and the largest counts, [labels]."""
        xp, record = _namespace(self.norm), self.since(earlier)
        shape = _column_shape(self.steps, with_labels)
        found = record.worst_elements(shape)
        steps = _column_max(record.steps.reshape(-1, 1))  # i32[1]
        num_clipped = _column_max(record.num_clipped.reshape(shape))  # i32[labels] or i32[1]
        fraction = (num_clipped / xp.maximum(steps, 1)).astype(xp.float32)
        return found | {
            "steps": steps,
            "num_clipped": num_clipped,
            # The steps are negative if `since` is the later state, for example after a rollback.
            "clipped_fraction": xp.where(steps < 0, xp.nan, fraction),
            "num_nonfinite": _column_max(record.num_nonfinite.reshape(shape)),
        }

    def rank_elements(self) -> tuple[Any, Summary]:
        """Returns the scores and the numbers of all elements, [elements]."""
        found = self.worst_elements(_column_shape(self.steps, with_labels=True))
        return _norm_to_threshold(found["norm"], found["threshold"]), found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipRecord(NormRecord):
    num_skipped: Any  # i32[*states]
    loss: Any = None  # f32[*states]
    loss_threshold: Any = None  # f32[*states]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        """Returns the numbers of the worst state, and the loss furthest above its threshold."""
        del with_labels  # A skip has one norm for the whole tree.
        record = self.since(earlier)
        found = record.worst_elements((-1, 1))
        found["num_nonfinite"] = _column_max(record.num_nonfinite.reshape(-1, 1))
        found["num_skipped"] = _column_max(record.num_skipped.reshape(-1, 1))
        if self.loss is None:
            return found
        xp = _namespace(self.loss)
        loss, threshold = self.loss.reshape(-1, 1), self.loss_threshold.reshape(-1, 1)
        is_finite = xp.isfinite(loss)  # bool[states, 1]
        # A difference is used instead of a ratio, because a loss can be negative.
        above = xp.where(is_finite, xp.where(is_finite, loss, 0) - threshold, xp.inf)
        return found | _take_argmax(above, {"loss": loss, "loss_threshold": threshold})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleRecord(SkipRecord):
    loss_scale: Any  # f32[*states]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        xp, scales = _namespace(self.loss_scale), self.loss_scale.reshape(-1, 1)
        smallest = xp.min(scales, axis=0, initial=xp.inf)  # f32[1]
        return super().summarize(earlier, with_labels) | {"loss_scale": smallest}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseRecord:
    steps: Any  # i32[*states]
    signal: Any  # f32[*states]
    variance: Any  # f32[*states]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        """Averages over all states and computes the noise scale from the averages."""
        del earlier, with_labels
        xp = _namespace(self.steps)
        sums = {"signal": self.signal, "variance": self.variance}
        # A ratio of averages is less noisy than an average of ratios.
        means = {field: xp.mean(x.reshape(-1, 1), axis=0) for field, x in sums.items()}  # f32[1]
        return {"scale": scale_of(xp.max(self.steps), **means), **means}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HistogramRecord(_CountedRecord):
    steps: Any  # i32[*states]
    sizes: Any  # u32[*states, groups, 2, counts]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        xp = _namespace(self.steps)
        # The counts are from a single step, so they remain valid if no step followed `since`.
        was_run, steps = xp.any(self.steps > 0), self.since(earlier).steps
        shape = (*_column_shape(self.steps, with_labels), *self.sizes.shape[-2:])
        # u32[labels, 2, counts]. The two words of a count are summed separately.
        words = xp.sum(self.sizes.reshape(shape), axis=0, dtype=self.sizes.dtype)
        low, high = words[:, 0], words[:, 1]  # u32[labels, counts]
        counts = low.astype(xp.float32) + high.astype(xp.float32) * xp.float32(2.0**WORD_BITS)
        # The first count is of zeros, and the last two are of infinite elements and NaN.
        up_to = xp.cumsum(counts[:, 1:-2], axis=1)  # f32[labels, bins]
        num_nonzero, num_elements = up_to[:, -1:], xp.sum(counts, axis=1)
        exponents = bin_exponents(is_float64=words.shape[-1] == num_counts(wide=True))

        def quantile(fraction: float) -> Any:
            is_reached = (up_to >= xp.float32(fraction) * num_nonzero).astype(xp.int32)
            # f32[labels]. The argmax is the first bin that reaches the quantile.
            found = xp.asarray(exponents, xp.float32)[xp.argmax(is_reached, axis=1)]
            return xp.where(num_nonzero[:, 0] > 0, found, xp.nan)

        # The sum of several low words can have more than WORD_BITS bits.
        high, low = high + (low >> WORD_BITS), low & (2**WORD_BITS - 1)
        exact = xp.where(high < 2**15, (high << WORD_BITS) | low, 2**31 - 1).astype(xp.int32)
        found = {
            "zero_fraction": xp.where(was_run, counts[:, 0] / xp.maximum(num_elements, 1), xp.nan),
            "num_infinite": exact[:, -2],
            "num_nan": exact[:, -1],
            "steps": _column_max(steps.reshape(-1, 1)),
        }
        if self.sizes.shape[-3]:  # A tree without leaves has no exponents.
            found["low_exponent"] = quantile(0.05)
            found["median_exponent"] = quantile(0.5)
            found["high_exponent"] = quantile(0.95)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StatisticsRecord(_CountedRecord):
    steps: Any  # i32[*states]
    last: dict[str, Any]  # f32[*states], or f32[*states, groups]

    def summarize(self, earlier: dict[str, Any], with_labels: bool) -> Summary:
        shape = _column_shape(self.steps, with_labels)
        found = {name: _nan_aware_max(x.reshape(shape)) for name, x in self.last.items()}
        return found | {"steps": _column_max(self.since(earlier).steps.reshape(-1, 1))}

    def rank_elements(self) -> tuple[Any, Summary]:
        """Returns the scores and the statistics of all groups, [groups]."""
        shape = _column_shape(self.steps, with_labels=True)
        columns = {name: x.reshape(shape) for name, x in self.last.items()}  # f32[states, groups]
        # Groups are ranked by the norm or, if it is not recorded, by the first statistic.
        values = columns[next(x for x in ("norm", *NUMBERS) if x in columns)]
        xp = _namespace(values)
        # A group without leaves is -inf and sorts last. Non-finite values sort first.
        score = xp.max(xp.where(xp.isnan(values), xp.inf, values), axis=0)
        return score, {name: _nan_aware_max(x) for name, x in columns.items()}


LogRecord: TypeAlias = ClipRecord | SkipRecord | NoiseRecord | HistogramRecord | StatisticsRecord


def record_of(state: Recorded) -> LogRecord:
    """Returns the arrays of a state that a log needs, without copying them to the host."""
    if isinstance(state, NoiseScaleState):
        return NoiseRecord(*map(unbox, (state.steps, state.signal, state.variance)))
    if isinstance(state, HistogramState):
        return HistogramRecord(unbox(state.steps), unbox(state.counts))
    if isinstance(state, RecordState):
        last = {name: unbox(x) for name, x in state.last.items()}
        return StatisticsRecord(unbox(state.steps), last)
    if isinstance(state, LossScaleState):
        of_skip = vars(norm_record_of(state.skip))
        return LossScaleRecord(**of_skip, loss_scale=unbox(state.loss_scale))
    return norm_record_of(state)


def norm_record_of(state: ClipState | SkipState) -> ClipRecord | SkipRecord:
    """Returns the record of a clipping stage or a skip wrapper."""
    fields = ("norm", "threshold", "factor", "num_nonfinite")
    of_info = {field: unbox(getattr(state.info, field)) for field in fields}
    if isinstance(state, ClipState):
        num_clipped, steps = unbox(state.info.num_clipped), unbox(state.steps)
        return ClipRecord(**of_info, num_clipped=num_clipped, steps=steps)
    record = SkipRecord(**of_info, num_skipped=unbox(state.num_skipped))
    if not state.loss:
        return record
    loss, threshold = unbox(state.loss.info.norm), unbox(state.loss.info.threshold)
    return dataclasses.replace(record, loss=loss, loss_threshold=threshold)


def has_elements(record: LogRecord) -> TypeGuard[ClipRecord | StatisticsRecord]:
    """Returns `True` if a record has values for several leaves or groups."""
    if isinstance(record, StatisticsRecord):
        return next(iter(record.last.values())).ndim > record.steps.ndim
    return isinstance(record, ClipRecord) and record.norm.ndim > record.steps.ndim


def names_of(state: Recorded) -> StaticNames:
    if isinstance(state, NoiseScaleState):
        return StaticNames()
    has_names = isinstance(state, RecordState | HistogramState)
    return state.names if has_names else state.info.names


def summarize(record: LogRecord, earlier: dict[str, Any], with_labels: bool, top: int) -> Summary:
    """Returns the numbers of a record or of its labels, and those of its `top` worst elements."""
    found = record.summarize(earlier, with_labels)  # [labels], or [1] without labels.
    return found | ({"top": top_k(record, top)} if top and has_elements(record) else {})


def top_k(record: ClipRecord | StatisticsRecord, top: int) -> list[dict[str, Any]]:
    """Returns the numbers and the positions of the worst elements."""
    score, found = record.rank_elements()
    xp = _namespace(score)
    is_taken, few = xp.zeros(score.shape, bool), []  # bool[elements]
    # A sort would compare rounding errors, so the order could differ between device and host.
    for _ in range(min(top, score.size)):
        left = xp.where(is_taken, -xp.inf, score)
        where = xp.argmax(_is_largest(left) & ~is_taken)
        is_taken |= xp.arange(score.size) == where
        of_element = {field: take_along_columns(where, x) for field, x in found.items()}
        few.append({"index": where.astype(xp.int32), **of_element})
    return few


def _namespace(x: Any) -> Any:
    """Returns `jax.numpy` for JAX arrays and NumPy for other arrays."""
    return jnp if isinstance(x, jax.Array) else np


def _column_shape(steps: Any, with_labels: bool) -> tuple[int, int]:
    """Returns the shape [states, labels], or [elements, 1] without labels."""
    return (max(steps.size, 1), -1) if with_labels else (-1, 1)


def _column_max(counts: Any) -> Any:
    """Returns the largest count of each column, or 0 if there are no rows."""
    xp = _namespace(counts)
    return xp.max(counts, axis=0) if counts.size else xp.zeros(counts.shape[1:], counts.dtype)


def _nan_aware_max(rows: Any) -> Any:
    """Returns the largest value of each column, or NaN if one is NaN or all are missing (-inf)."""
    xp = _namespace(rows)
    if not rows.size:
        return xp.zeros(rows.shape[1:], rows.dtype)
    # On a CPU, a maximum over devices ignores NaN (as of JAX 0.10.2).
    is_nan = xp.isnan(rows)
    largest = xp.max(xp.where(is_nan, -xp.inf, rows), axis=0)
    is_unknown = xp.any(is_nan, axis=0) | (largest == -xp.inf)
    return xp.where(is_unknown, xp.nan, largest).astype(rows.dtype)


def _norm_to_threshold(norm: Any, threshold: Any) -> Any:
    """Computes sqrt(norm / threshold), or inf for a non-finite norm or a threshold of 0."""
    # Unlike the ratio, its square root never overflows in float32.
    xp = _namespace(norm)
    is_usable = (threshold > 0) & xp.isfinite(norm)
    norm, threshold = xp.where(is_usable, norm, 0), xp.where(is_usable, threshold, 1)
    return xp.where(is_usable, xp.sqrt(norm) / xp.sqrt(threshold), xp.inf)


def _take_argmax(score: Any, columns: dict[str, Any]) -> Summary:
    """Returns the numbers of the first elements with the largest scores, up to rounding."""
    xp = _namespace(score)
    if len(score) == 1:
        return {field: x[0] for field, x in columns.items()}
    where = xp.argmax(_is_largest(score), axis=0)
    return {field: take_along_columns(where, x) for field, x in columns.items()}


def take_along_columns(where: Any, x: Any) -> Any:
    """Returns `x[where]` with a separate index per column."""
    # Uses a sum, because JAX cannot index under `vmap` over an axis of an explicit mesh (as of JAX
    # 0.10.2).
    xp = _namespace(x)
    rows = xp.arange(len(x)).reshape(-1, *(1,) * where.ndim)  # i32[rows, 1] or i32[rows]
    is_there = rows == where.reshape(1, *where.shape)  # bool[rows, columns]
    return xp.sum(xp.where(is_there, x, 0), axis=0, dtype=x.dtype)


def _is_largest(score: Any) -> Any:
    """Marks the largest score of each column, up to rounding."""
    # The device and the host round differently, but must choose the same element. For negative
    # scores, the minimum is the largest score itself.
    xp = _namespace(score)
    largest = xp.max(score, axis=0, keepdims=True)
    return score >= xp.minimum(largest, largest * (1 - 1e-6))


Counts: TypeAlias = dict[str, dict[str, Any]]
"""Counts of records, by their names in `metrics`."""


def counts(opt_state: PyTree) -> Counts:
    """Returns the counts of all records in a state, for the `since=` of a later log.

    Keep the counts instead of the state, because the arrays of a donated state are deleted, an
    `nnx.Optimizer` is modified in place, and a state uses much more memory. You can save the counts
    in a checkpoint.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.

    Returns:
      A dict that maps the names in `metrics` to dicts of `steps`, `num_clipped`, `num_nonfinite`,
      and `num_skipped`, if the record has them. They are int32[] or, if there are several leaves or
      labels, int32[elements]. Outside `jit`, they are NumPy arrays, after one `jax.device_get`.

    Raises:
      ValueError: If `metrics` raises it for this state.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> from optaxclip import monitor
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, state = tx.update(jnp.array([0.0, 3.0]), tx.init(jnp.zeros(2)))
      >>> earlier = monitor.counts(state)
      >>> for size in (0.1, 3.0):
      ...     _, state = tx.update(jnp.array([0.0, size]), state)
      >>> print(monitor.scalars(state, since=earlier)["clip_by_global_norm/clipped_fraction"])
      0.5
    """
    states = loggable_records(opt_state, "counts")
    found = _counts_of({name: record_of(state) for name, state in states.items()})
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(found)):
        return found
    # On a CPU, `device_get` returns views of device memory, which a later step could overwrite.
    return jax.tree.map(np.array, jax.device_get(found))


def loggable_records(opt_state: PyTree, caller: str) -> dict[str, Recorded]:
    """Returns all states that have numbers for a log, by their names in `metrics`."""
    more = (LossScaleState, NoiseScaleState, RecordState, HistogramState)
    found = [state for _, state in records(opt_state, caller, *more)]
    return dict(zip(unique_names(found), found, strict=True))


def counts_until(found: Mapping[str, LogRecord], since: PyTree | None) -> Counts:
    """Returns the counts to subtract from records."""
    if since is None:
        return {}
    earlier = _parse_since(since)
    shapes, before = (
        {name: {key: np.shape(x) for key, x in row.items()} for name, row in each.items()}
        for each in (_counts_of(found), earlier)
    )
    if shapes != before:
        raise ValueError(
            "since must be an earlier state of the same optimizer or its monitor.counts, with "
            f"counts of the shapes {shapes}, got the shapes {before}"
        )
    return earlier


def _counts_of(found: Mapping[str, LogRecord]) -> Counts:
    return {
        name: {count: getattr(record, count) for count in COUNTS if hasattr(record, count)}
        for name, record in found.items()
        if not isinstance(record, NoiseRecord)
    }


def _parse_since(since: PyTree) -> Counts:
    """Returns the counts from `since`, which is a state or the result of `counts`."""
    if any(map(is_deleted, jax.tree.leaves(since))):
        raise ValueError(
            "since contains arrays that were donated to a later step; call "
            "monitor.counts(opt_state) before that step and pass the result"
        )
    are_counts = isinstance(since, Mapping) and all(
        isinstance(each, Mapping) and set(each) <= {*COUNTS} for each in since.values()
    )
    if are_counts and since:
        return {name: dict(each) for name, each in since.items()}
    try:
        found = loggable_records(since, "counts")
    except ValueError:
        raise ValueError(
            "since must be an earlier state of the same optimizer or its monitor.counts, got "
            f"{describe_tree(since)}"
        ) from None
    return _counts_of({name: record_of(state) for name, state in found.items()})

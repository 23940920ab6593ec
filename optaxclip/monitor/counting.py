"""The counts that records keep, and their difference from those of an earlier state."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from optaxclip._base.types import PyTree
from optaxclip.methods.loss_scaling import LossScaleState
from optaxclip.monitor.histogram_stage import HistogramState
from optaxclip.monitor.noise import NoiseScaleState
from optaxclip.monitor.recording import RecordState
from optaxclip.monitor.states import deduplicate, describe_tree, is_deleted, name_of, records
from optaxclip.monitor.summaries import COUNTS, Recorded, summary_inputs

Counts: TypeAlias = dict[str, dict[str, Any]]
"""For each record, by its name in `metrics`, its counts from the first step on."""


def counts(opt_state: PyTree) -> Counts:
    """The counts of all records in a state: a few integers, for `since=` of a later log.

    The state itself may be gone by then: a step to which it is donated deletes its arrays, an
    `nnx.Optimizer` changes in place, and Adam's moments take memory. The counts are plain data,
    which a checkpoint can hold.

    Args:
      opt_state: as in `read`.

    Returns:
      A dict from the name of each clip, skip and `record` in `metrics` to its counts: those of
      `steps`, `num_clipped`, `num_nonfinite` and `num_skipped` that it has. They are int32 arrays,
      with an entry for each leaf or label if the record has several. Outside of `jit` they are in
      NumPy, after one `jax.device_get`.

    Raises:
      ValueError: as `metrics`.

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
    # Copied, because on a CPU `device_get` gives views of the device's memory. A later step could
    # change what they show, or could not reuse that memory.
    return jax.tree.map(np.array, jax.device_get(found))


def loggable_records(opt_state: PyTree, caller: str) -> dict[str, Recorded]:
    """All records that have numbers for a log; their names begin with the record's key."""
    more = (LossScaleState, NoiseScaleState, RecordState, HistogramState)
    found = [state for _, state in records(opt_state, caller, *more)]
    return dict(zip(deduplicate([name_of(state) for state in found]), found, strict=True))


def subtract_counts(
    found: Mapping[str, Recorded], since: PyTree | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each record, the arrays that its numbers are made of, and the counts to begin at."""
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
    """The counts in `since`, which is a state, or counts already."""
    if any(map(is_deleted, jax.tree.leaves(since))):
        raise ValueError(
            "since holds arrays that are deleted, because the state was donated to a later step: "
            "keep monitor.counts(opt_state) before that step, and pass it as since"
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

"""Reads the history of a run from the states of `record` and `events`."""

import itertools
from typing import Any

import numpy as np

import optaxclip.monitor._find_states as find_states
from optaxclip._base.types import PyTree
from optaxclip._base.validation import did_you_mean
from optaxclip.monitor._events import NOT_RUN, VERDICTS, EventSource, EventsState, event_sources
from optaxclip.monitor._record import RecordState
from optaxclip.monitor._summary import has_elements


def history(
    opt_state: PyTree, name: str | None = None, stat: str | None = None
) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the values that `record` or `events` recorded on recent steps, oldest first.

    Args:
      opt_state: Any pytree that contains the state, as in `read`.
      name: The `name` of the `record` or `events` stage. Required if there are several.
      stat: The statistic of a record, or the field of events. If None, returns the norm of a
        record, or all fields of events.

    Returns:
      A NumPy array of all steps so far, or of the last `window` steps, after one `jax.device_get`.

      For a record, the array is float32[steps] or, with a scope, float32[steps, groups], with one
      column per name in `history_names`.

      For events, it is a structured array [steps], which `pandas.DataFrame` accepts. For example,
      `found[found["verdict"] == "skipped"]` selects rows. The fields are

        step      | int64, 0 is the first update after `init`
        verdict   | "taken", "clipped", "not finite" (and not skipped), or "skipped"
        norm      | float32, the norm of the worst leaf or group, as in `metrics`
        threshold | float32, the norm above which the rule acts
        factor    | float32, the factor applied to the gradient, 0 for a skipped step
        worst     | the name of the worst leaf or group

      The verdict applies to the whole step. The remaining fields are from the outermost stage or
      wrapper. The fields of other stages start with the name of the stage, as in
      `clip_by_global_norm/threshold`. If a stage did not run on a step, for example because the
      step was skipped, its numbers are NaN and its `worst` is empty. Wrappers that check the loss
      also have `loss` and `loss_threshold`.

    Raises:
      ValueError: If the stage cannot be identified, if the statistic or field was not recorded, if
        `stat` is None and a record has several statistics but no norm, or if the state has lost the
        names of its leaves.
      TypeError: If called under `jit`, `vmap` or `grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor, scopes
      >>> tx = monitor.record(scope=scopes.leaf(), stats=("norm", "max"))
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(history_names(state), history(state), history(state, stat="max"))
      ('b', 'w') [[2. 5.]] [[2. 4.]]
    """
    state = _only_record(opt_state, name)
    if isinstance(state, EventsState):
        return _events_history(state, stat)
    kept = sorted(state.last)
    default = kept[0] if len(kept) == 1 else "norm"
    if stat is None and default in kept:
        stat = default
    position = kept.index(_check_stat(stat, kept))
    _, rows = _fetch_rows(state.steps, state.ring)
    return rows if len(kept) == 1 else rows[:, position]


def _fetch_rows(steps: Any, *rings: Any) -> list[Any]:
    """Returns the number of steps, and the rows of all ring buffers, oldest first."""
    arrays = [find_states.unbox(x) for x in (steps, *rings)]
    steps, *fetched = find_states.fetch_to_host(arrays, "history")
    find_states.check_not_vmapped(steps, "history")
    # [window, ...] -> [min(steps, window), ...]. In a full ring buffer, the oldest row is the next
    # row to be overwritten.
    return [steps, *(np.roll(ring[:steps], -(steps % len(ring)), axis=0) for ring in fetched)]


def _fields_of(sources: list[EventSource]) -> list[list[str]]:
    found = []
    for source in sources:
        front = "" if source.name == sources[0].name else f"{source.name}/"
        of_loss, of_norm = ("loss", "loss_threshold"), ("norm", "threshold", "factor", "worst")
        found.append([front + kind for kind in (of_loss if source.is_loss else of_norm)])
    return found


def _events_history(state: EventsState, stat: str | None) -> np.ndarray[Any, np.dtype[Any]]:
    # [steps], f32[rows, sources, 3], i32[rows, 1 + sources]
    steps, numbers, flags = _fetch_rows(state.steps, state.numbers, state.flags)
    sources = event_sources(state.inner_state)
    all_fields = _fields_of(sources)
    if stat is not None:
        _check_stat(stat, ["step", "verdict", *itertools.chain(*all_fields)])
    found: dict[str, Any] = {
        "step": np.arange(steps - len(flags), steps, dtype=np.int64),
        "verdict": np.array(VERDICTS)[flags[:, 0]],
    }
    for i, (source, fields) in enumerate(zip(sources, all_fields, strict=True)):
        worst = flags[:, 1 + i]  # i32[rows]
        names = source.names if has_elements(source.record) else state.names
        for number, field in enumerate(fields):
            if not field.endswith("worst"):
                found[field] = np.where(worst == NOT_RUN, np.nan, numbers[:, i, number])
            elif stat in (None, field):
                if not names and np.any(worst > 0):
                    raise find_states.names_lost_error(f"the events of {source.name}")
                found[field] = np.array(["", *names])[np.maximum(worst, 0)]
    if stat is not None:
        return found[stat]
    # A structured array, because the columns have different dtypes.
    table = np.empty(len(flags), [(field, column.dtype) for field, column in found.items()])
    for field, column in found.items():
        table[field] = column
    return table


def _check_stat(stat: str | None, kept: list[str]) -> str:
    if stat not in kept:
        hint = did_you_mean(stat, kept) if isinstance(stat, str) else ""
        raise ValueError(f"stat must be one of {kept}, got {stat!r}{hint}")
    return stat


def history_names(opt_state: PyTree, name: str | None = None) -> tuple[str, ...]:
    """Returns the names of the columns in `history`.

    Args:
      opt_state: Any pytree that contains the state, as in `history`.
      name: The `name` of the `record` or `events` stage. Required if there are several.

    Returns:
      A tuple of the names of groups or leaves, `("tree",)`, `("loss",)`, or the fields of events.

    Raises:
      ValueError: If the stage cannot be identified, or if the state has lost its names.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import scopes
      >>> from optaxclip.monitor import record
      >>> history_names(record(scope=scopes.leaf()).init({"w": jnp.zeros(2), "b": jnp.zeros(1)}))
      ('b', 'w')
    """
    state = _only_record(opt_state, name)
    if isinstance(state, EventsState):
        fields = _fields_of(event_sources(state.inner_state))
        return ("step", "verdict", *itertools.chain(*fields))
    if not state.names and find_states.unbox(state.ring).size:
        raise find_states.names_lost_error("the record")
    return tuple(state.names)


def _only_record(opt_state: PyTree, name: str | None) -> RecordState | EventsState:
    words = {"reader": "history", "what": "record"}
    return find_states.find_one_state(opt_state, name, RecordState, EventsState, **words)

"""Histories of a run, read out of the states that `record` keeps."""

from typing import Any

import numpy as np

from optaxclip._base.arguments import near_miss
from optaxclip._base.types import PyTree
from optaxclip.monitor.recording import RecordState
from optaxclip.monitor.states import find, lost_names, name_of, to_host, unboxed


def history(
    opt_state: PyTree, name: str | None = None, stat: str | None = None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What `record` kept of the last steps, the oldest first.

    Args:
      opt_state: any pytree that holds the state, as in `read`.
      name: which record, if there are several: the `name=` that `record` was given.
      stat: which statistic, if the record keeps several; the norm if None.

    Returns:
      float32[steps], or, of a record with a scope, float32[steps, groups] with a column for each of
      `history_names`: all steps so far, or the last `window` of them. In NumPy, after one
      `jax.device_get`.

    Raises:
      ValueError: if no record has the name, or several have; for a statistic that it does not keep,
        or none where it keeps several without the norm.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

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
    kept = sorted(state.last)
    chosen = _chosen(kept, stat)
    steps, ring = to_host((unboxed(state.steps), unboxed(state.ring)), "history")
    if np.ndim(steps):
        one = "jax.tree.map(lambda x: x[0], opt_state)"
        raise ValueError(f"history takes one state, got {steps.size} under vmap; pass {one}")
    # The oldest row of a full ring is the one to be written next.
    rows = np.roll(ring[:steps], -(steps % len(ring)), axis=0)
    return rows if len(kept) == 1 else rows[:, kept.index(chosen)]


def _chosen(kept: list[str], stat: str | None) -> str:
    """The name of the statistic that the user asks for."""
    if stat is None and (len(kept) == 1 or "norm" in kept):
        return kept[0] if len(kept) == 1 else "norm"
    if stat not in kept:
        hint = near_miss(stat, kept) if isinstance(stat, str) else ""
        raise ValueError(f"stat must be one of {kept}, which the record keeps; got {stat!r}{hint}")
    return stat


def history_names(opt_state: PyTree, name: str | None = None) -> tuple[str, ...]:
    """The names of the columns in `history`: those of groups or leaves, `("tree",)` or `("loss",)`.

    Args:
      opt_state: as in `history`.
      name: as in `history`.

    Returns:
      A tuple with a name for each column of `history`.

    Raises:
      ValueError: if no record has the name, or several have.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip.monitor import record
      >>> history_names(record(per_leaf=True).init({"w": jnp.zeros(2), "b": jnp.zeros(1)}))
      ('b', 'w')
    """
    state = _only_record(opt_state, name)
    if not state.names and unboxed(state.ring).size:
        raise lost_names("the record has lost the names of its groups")
    return tuple(state.names)


def _only_record(opt_state: PyTree, name: str | None) -> RecordState:
    records = find(opt_state, RecordState)
    fitting = [state for state in records.values() if name in (None, name_of(state))]
    if len(fitting) == 1:
        return fitting[0]
    if not records:
        raise ValueError(
            "the state holds no record, and so no history: put monitor.record(window) into the "
            "chain, in front of the clip for the raw norms, and pass the chain's state"
        )
    which = "" if name is None else f" named {name!r}"
    raise ValueError(
        f"the state must hold one record{which}, it holds {len(fitting)}; all its records: "
        f"{list(records)}. Give each record its own name=, and pass history the name that you want"
    )

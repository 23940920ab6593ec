"""Which leaves caused a skip, and whether to go on: for the loop on the host."""

from typing import Literal, TypeAlias

import numpy as np

from optaxclip._base.arguments import check_int
from optaxclip._base.types import ClipState, PyTree
from optaxclip.methods.skipping import SkipState
from optaxclip.monitor.states import fetch_to_host, find, names_lost_error, unbox

StepStatus: TypeAlias = Literal["ok", "skipped", "roll back"]


def bad_leaves(opt_state: PyTree) -> tuple[str, ...]:
    """The leaves that caused a skipped step, or that were not finite when they were clipped.

    A skip keeps the leaves that caused the latest step that it skipped: the leaves that were not
    finite; if all were finite, those whose own norm was above the threshold; if none was, the one with
    the largest norm; and no leaf if the loss alone was the cause. It finds them in the same read of
    the gradients as the norm. A clip of single leaves (the scopes `leaf`, `axes`, `unit`) keeps
    which leaves were not finite at the last step, except those that `nonfinite="mask"` had mended;
    a clip of labelled groups keeps the labels.

    Args:
      opt_state: any pytree that holds the state, as in `optaxclip.monitor.read`, also one restored
        from a checkpoint. For states under `vmap`, a leaf is named if any state names it.

    Returns:
      The names, such as `encoder/0/kernel`, each once; empty if there were none.

    Raises:
      ValueError: if nothing in the state keeps leaves; a clip with one norm for all keeps none.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1))
      >>> grads = {"w": jnp.ones(2), "b": jnp.array([jnp.nan])}
      >>> _, opt_state = tx.update(grads, tx.init(grads))
      >>> bad_leaves(opt_state)
      ('b',)
    """
    found: list[tuple[tuple[str, ...], object]] = []
    nameless = []
    for key, state in find(opt_state, ClipState, SkipState).items():
        if isinstance(state, SkipState):
            names, flags = state.leaves, unbox(state.is_bad_leaf)
        elif np.ndim(unbox(state.info.norm)) > np.ndim(unbox(state.steps)):
            names, flags = state.info.names, unbox(state.info.norm)
        else:
            continue
        if names or not flags.size:
            found.append((tuple(names), flags))
        else:
            nameless.append(key)
    if not found and nameless:
        raise names_lost_error(f"{nameless} have lost the names of their leaves")
    if not found:
        raise ValueError(
            "no clip and no skip in the state keeps which leaves were bad: put skip_nonfinite or "
            "skip_above around the optimizer, or clip_by_norm(math.inf), which leaves finite "
            "gradients alone, first in the chain"
        )
    bad: dict[str, None] = {}
    arrays = fetch_to_host([array for _, array in found], "bad_leaves")
    for (names, _), array in zip(found, arrays, strict=True):
        flags = array if array.dtype == bool else ~np.isfinite(array)
        flags = np.any(flags.reshape(-1, len(names)), axis=0) if names else ()
        bad |= {name: None for name, flag in zip(names, flags, strict=True) if flag}
    return tuple(bad)


def step_status(opt_state: PyTree, roll_back_after: int = 10) -> StepStatus:
    """Whether the last step was taken or skipped, and whether to go back to a checkpoint.

    It is for the loop on the host, because only that can load a checkpoint and skip the bad data::

      for batch in batches:
          params, opt_state = train_step(params, opt_state, batch)
          match monitor.step_status(opt_state):
              case "skipped":
                  log(monitor.bad_leaves(opt_state))
              case "roll back":
                  params, opt_state = restore_last_checkpoint()

    Going back cannot help if a constant threshold is below the usual norms, or if the gradient is NaN
    at every step, as that of `where(x > 0, sqrt(x), 0)` at 0 is; `docs/recovery.md` says what does.

    The host waits for the step that made the state, and then for one `jax.device_get` of three
    numbers for each skip (four if it judges the loss). Nothing is computed on the device.

    Args:
      opt_state: any pytree that holds the state, as in `optaxclip.monitor.read`, also one restored
        from a checkpoint. Of several skips, and of states under `vmap`, the worst counts.
      roll_back_after: after how many skipped steps in a row to go back. If a skip
        takes a step before that (`max_consecutive`), the skipped steps are counted from there.

    Returns:
      "ok", "skipped" or "roll back". It is "roll back" after `roll_back_after` skipped steps in a
      row, and as soon as a skip has taken a step that was not finite, as `skip_nonfinite` does
      after `max_consecutive`.

    Raises:
      ValueError: if there is no skip in the state, or `roll_back_after` is less than 1.
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet, or if
        `roll_back_after` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(0.1), 10.0)
      >>> opt_state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 20.0, 30.0, 2.0):
      ...     _, opt_state = tx.update(jnp.array([0.0, size]), opt_state)
      ...     print(verdict(opt_state, roll_back_after=2))
      ok
      skipped
      roll back
      ok
    """
    roll_back_after = check_int(roll_back_after, 1, "roll_back_after")
    skips = find(opt_state, SkipState).values()
    if not skips:
        raise ValueError(
            "there is no skip in the state, so no step can have been skipped: put skip_nonfinite "
            "or skip_above around the optimizer"
        )
    numbers = []
    for state in skips:
        infos = [state.info, state.loss.info] if state.loss else [state.info]
        judged = [unbox(info.norm) for info in infos]
        numbers.append((unbox(state.consecutive), unbox(state.info.factor), judged))
    most, is_lost = 0, False
    for consecutive, factor, judged in fetch_to_host(numbers, "verdict"):
        most = max(most, int(np.max(consecutive, initial=0)))
        is_bad = np.any([~np.isfinite(number) for number in judged], axis=0)
        is_lost |= bool(np.any(is_bad & (factor > 0)))
    if is_lost or most >= roll_back_after:
        return "roll back"
    return "skipped" if most else "ok"

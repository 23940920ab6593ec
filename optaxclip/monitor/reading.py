"""What the clips and skips in a state did at the last step."""

import itertools
from typing import Any

import numpy as np

from optaxclip._base.types import ClipInfo, ClipState, PyTree
from optaxclip.methods.skipping import SkipState
from optaxclip.monitor.states import find, to_host, unboxed


def read(opt_state: PyTree) -> dict[str, ClipInfo]:
    """What every clip and every skip in an optimizer's state did at the last step.

    It only looks: no computation, no transfer, and it works under `jit` too.

    Args:
      opt_state: any pytree that holds the state: the state itself, a `TrainState`, an
        `nnx.Optimizer` (but not `nnx.state(optimizer)`, of which Flax has made nameless dicts).

    Returns:
      A dict in the order of the state, a skip before what it wraps. A key is the path in the state
      and the transformation's name: `0/clip_by_global_norm` for `opt_state[0]`,
      `inner_state/1/clip_by_norm` for `opt_state.inner_state[1]`. The path makes it unique, with or
      without `name=`, and it is the same at every step. (Should dict keys with a `/` make two keys
      equal, all paths are in Python's notation: `['a/b'][0]/clip_by_norm`.) After a skip that
      judges the loss comes what it did about that, under its key and `/loss`; `norm` is the loss.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optax.chain(optaxclip.clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for key, info in read(opt_state).items():
      ...     print(key, info.norm, info.factor)
      0/clip_by_global_norm 5.0 0.2
    """
    infos = {}
    for key, state in find(opt_state, ClipState, SkipState).items():
        infos[key] = state.info
        if isinstance(state, SkipState) and state.loss:
            infos[f"{key}/loss"] = state.loss.info
    return {key: ClipInfo(*map(unboxed, info)) for key, info in infos.items()}


def scalars(opt_state: PyTree) -> dict[str, float]:
    """The records as flat numbers with stable names, ready for a log.

    The n-th clip in the order of `read` gives `clip/n/norm` and so on, the n-th skip `skip/n/norm`:

      name             | of   | what                                       | of many entries
      -----------------|------|--------------------------------------------|-----------------
      norm             | both | the norm before clipping                   | of the worst one
      limit            | both | the norm above which something is done     | of the worst one
      factor           | both | what the gradient was multiplied by        | of the worst one
      clipped_fraction | clip | the share of all steps so far with a clip  | the mean
      num_nonfinite    | both | steps so far with a norm not finite        | the largest
      num_skipped      | skip | steps so far that were skipped             | the largest
      loss, loss_limit | skip | the same of the loss, where it is judged   | furthest above

    The worst entry is the one with the largest ratio of norm to limit; a norm that is not finite
    and a limit of 0 are worse than anything. States under `vmap` count as more entries. Before the
    first step the limit is inf, and that of `skip_nonfinite` always.

    The host waits for the step that made the state, then for one `jax.device_get` of six arrays a
    clip (of eight for a skip that judges the loss), however many leaves it has. Nothing is computed
    on the device, so that one process of many may call it alone.

    Args:
      opt_state: as in `read`.

    Returns:
      A dict from name to Python float; empty where there are no clips.

    Raises:
      TypeError: under `jit`, `vmap` or `grad`, where there are no numbers yet.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_global_norm(1.0)
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> for name, value in scalars(opt_state).items():
      ...     print(f"{name} {value:.1f}")
      clip/0/norm 5.0
      clip/0/limit 1.0
      clip/0/factor 0.2
      clip/0/clipped_fraction 1.0
      clip/0/num_nonfinite 0.0
    """
    states = find(opt_state, ClipState, SkipState).values()
    numbers = {"clip": itertools.count(), "skip": itertools.count()}
    flat = {}
    for arrays in to_host([_wanted(state) for state in states], "scalars"):
        kind = "skip" if "num_skipped" in arrays else "clip"
        prefix = f"{kind}/{next(numbers[kind])}"
        flat |= {f"{prefix}/{name}": float(x) for name, x in _summary(arrays).items()}
    return flat


def _wanted(state: ClipState | SkipState) -> dict[str, Any]:
    """What `_summary` needs, still on the device."""
    of_info = ("norm", "limit", "factor", "num_clipped", "num_nonfinite")
    wanted = {field: getattr(state.info, field) for field in of_info}
    if isinstance(state, ClipState):
        wanted["steps"] = state.steps
    else:
        wanted["num_skipped"] = state.num_skipped
        if state.loss:
            wanted |= {"loss": state.loss.info.norm, "loss_limit": state.loss.info.limit}
    return {key: unboxed(x) for key, x in wanted.items()}


def _summary(of: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The numbers of one clip or skip, from what `_wanted` says."""
    # The appended entry is never the worst, but where there is no other.
    norm, limit, factor = (
        np.append(of[field], nothing).astype(np.float64)
        for field, nothing in (("norm", 0.0), ("limit", np.inf), ("factor", 1.0))
    )
    usable = (limit > 0) & np.isfinite(norm)
    with np.errstate(over="ignore"):
        ratio = np.divide(norm, limit, out=np.full(norm.shape, np.inf), where=usable)
    worst = np.argmax(ratio)
    summary = {"norm": norm[worst], "limit": limit[worst], "factor": factor[worst]}
    if "steps" in of:
        steps = np.maximum(of["steps"], 1)
        entries = of["num_clipped"].reshape(*steps.shape, -1)
        summary["clipped_fraction"] = np.sum(entries / steps[..., None]) / max(entries.size, 1)
    summary["num_nonfinite"] = np.max(of["num_nonfinite"], initial=0)
    if "num_skipped" in of:
        summary["num_skipped"] = np.max(of["num_skipped"])
    if "loss" in of:
        loss, limit = np.ravel(of["loss"]), np.ravel(of["loss_limit"])
        above = np.subtract(loss, limit, out=np.full(loss.shape, np.inf), where=np.isfinite(loss))
        furthest = np.argmax(above)
        summary |= {"loss": loss[furthest], "loss_limit": limit[furthest]}
    return summary

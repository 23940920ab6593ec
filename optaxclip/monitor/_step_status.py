"""Whether the last step was taken: for all else that the compiled step changes."""

import functools
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from optaxclip._backend.global_view import put_on_device
from optaxclip._base.types import ClipState, PyTree
from optaxclip._base.validation import check_int
from optaxclip.monitor._find_states import (
    describe_tree,
    fetch_to_host,
    find,
    iter_states,
    names_lost_error,
    unbox,
)
from optaxclip.transforms.loss_scale import LossScaleState, round_to_pow2
from optaxclip.transforms.skip import SkipState


def step_was_applied(opt_state: PyTree) -> Array:
    """Whether the last step was taken, not skipped; it works inside of the compiled step too.

    A skip leaves the parameters and the optimizer's state as they were. It does not know what else
    a step changes: running statistics of BatchNorm, averages of weights, the carried state of a
    recurrent network. A NaN that gets there stays there. So keep their old values if the step was
    not taken::

      updates, opt_state = tx.update(grads, opt_state, params)
      batch_stats = optax.tree.where(monitor.step_was_applied(opt_state), new_batch_stats,
      batch_stats)

    `taken` says what became of the step, not whether it was good: a step that a skip took after all
    (`max_consecutive`) was taken. If there are several skips, all must have taken it. If they are
    for parts of the parameters, as in `optax.partition`, pass a part of the state to ask for that
    part.

    Args:
      opt_state: any pytree that holds the state, as in `optaxclip.monitor.read`, after the update.
        In `optax.MultiSteps`, a microbatch that was added to the sum counts as taken until the step
        of the whole batch says otherwise, and one that `should_skip_update_fn` left out does not.

    Returns:
      bool[]; under `vmap` one for each state. True before the first step. Nothing is sent to the
      host, so it works under `jit`, `scan`, `vmap` and `shard_map`.

    Raises:
      ValueError: if there is no skip in the state.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1))
      >>> params, mean = jnp.zeros(2), jnp.zeros(())
      >>> opt_state = tx.init(params)
      >>> for batch in (jnp.array([1.0, 3.0]), jnp.array([jnp.nan, 1.0])):
      ...     updates, opt_state = tx.update(params - batch, opt_state)
      ...     mean = jnp.where(step_was_applied(opt_state), 0.9 * mean + 0.1 * batch.mean(), mean)
      ...     print(step_was_applied(opt_state), mean)
      True 0.2
      False 0.2
    """
    flags = list(_flags(opt_state))
    if not flags:
        raise ValueError(
            "monitor.step_was_applied takes an optimizer's state that holds a skip, and finds none "
            f"in what it got: {describe_tree(opt_state)}. Put skip_nonfinite, skip_above or "
            "scale_loss around the "
            "optimizer, and pass opt_state, a TrainState or an nnx.Optimizer. (The state of "
            "optax.apply_if_finite does not say whether it took a step.)"
        )
    return functools.reduce(jnp.logical_and, flags)


def _flags(tree: PyTree) -> Iterator[Array]:
    """For each skip in a state, whether it took the last step that reached it."""
    kinds = (SkipState, optax.MultiStepsState, optax.ApplyIfFiniteState)
    for _, state in iter_states(tree, kinds):
        if isinstance(state, SkipState):
            yield put_on_device(unbox(state.info.factor)) > 0
        elif isinstance(state, optax.ApplyIfFiniteState):
            # A step that `apply_if_finite` rejects does not reach the skips inside of it.
            was_asked = put_on_device(unbox(state.last_finite))
            yield from (flag & was_asked for flag in _flags(state.inner_state))
        else:
            # While `MultiSteps` collects microbatches, the skips inside of it hold their verdict on
            # the batch before.
            waits = put_on_device(unbox(state.mini_step)) > 0
            yield from (flag | waits for flag in _flags(state.inner_opt_state))
            if isinstance(state.skip_state, Mapping) and "should_skip" in state.skip_state:
                yield ~put_on_device(unbox(state.skip_state["should_skip"]))


StepStatus: TypeAlias = Literal["ok", "skipped", "roll back"]


def bad_leaves(opt_state: PyTree) -> tuple[str, ...]:
    """The leaves that caused a skipped step, or that were not finite when they were clipped.

    A skip keeps the leaves that caused the latest step that it skipped: the leaves that were not
    finite; if all were finite, those whose own norm was above the threshold; if none was, the one
    with the largest norm; and no leaf if the loss alone was the cause. It finds them in the same
    read of the gradients as the norm. A clip of single leaves (the scopes `leaf`, `axes`, `unit`)
    keeps which leaves were not finite at the last step, except those that `nonfinite="mask"` had
    mended; a clip of labelled groups keeps the labels.

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

    Going back cannot help if a constant threshold is below the usual norms, or if the gradient is
    NaN at every step, as that of `where(x > 0, sqrt(x), 0)` at 0 is; `docs/recovery.md` says what
    does.

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
      ...     print(step_status(opt_state, roll_back_after=2))
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


def loss_scale(opt_state: PyTree) -> Array:
    """The number to multiply the next loss by, if `scale_loss` is around the optimizer.

    Read it from the state that you pass to the update of the same step::

      def scaled_loss(params):
          return loss_fn(params, batch).astype(jnp.float32) * monitor.loss_scale(opt_state)

      grads = jax.grad(scaled_loss)(params)
      updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: any pytree that holds the state, as in `optaxclip.monitor.read`.

    Returns:
      float32[], a power of two; under `vmap` one for each state. Nothing is sent to the host.

    Raises:
      ValueError: if there is no state of `scale_loss`, or several; or if a wrapper around
        `scale_loss` hides overflows from it, so that the scale could never fall.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.scale_loss(optax.adam(1e-3))
      >>> print(loss_scale(tx.init(jnp.ones(3))))
      32768.0
    """
    _check_wrappers(opt_state)
    found = [state for _, state in iter_states(opt_state, (LossScaleState,))]
    if len(found) != 1:
        count = f"{len(found)} of them" if found else "none"
        raise ValueError(
            "monitor.loss_scale takes an optimizer's state that holds one state of scale_loss, and "
            f"finds {count} in what it got: {describe_tree(opt_state)}. Put scale_loss around the "
            "optimizer, and pass opt_state, a TrainState or an nnx.Optimizer"
        )
    (state,) = found
    return round_to_pow2(put_on_device(unbox(state.loss_scale)))


def _check_wrappers(opt_state: PyTree) -> None:
    """Refuses a wrapper around `scale_loss` that would not let it see a step that overflowed."""
    keepers = (SkipState, optax.MultiStepsState, optax.ApplyIfFiniteState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, (LossScaleState, *keepers)))
    for node in (node for node in nodes if isinstance(node, keepers)):
        inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, LossScaleState))
        if any(isinstance(x, LossScaleState) for x in inside):
            raise ValueError(
                f"monitor.loss_scale: scale_loss is inside of what made a {type(node).__name__}, "
                "which does not hand on a gradient that overflowed, or keeps it in a sum, so that "
                "the scale could never fall. Put scale_loss around it, as in scale_loss("
                "optax.MultiSteps(optimizer, k).gradient_transformation())"
            )

"""Reads from a state whether the most recent step was applied, and which leaves caused a skip."""

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
    """Returns `True` if the most recent step was applied, also inside the compiled step.

    A skip wrapper does not protect state outside the optimizer, such as BatchNorm statistics,
    averages of weights, or the carried state of a recurrent network. If the step was not applied,
    keep the old values::

      updates, opt_state = tx.update(grads, opt_state, params)
      was_applied = monitor.step_was_applied(opt_state)
      batch_stats = optax.tree.where(was_applied, new_batch_stats, batch_stats)

    A step that was applied is not necessarily good. For example, a wrapper applies a bad step after
    `max_consecutive` skipped steps. If there are several wrappers, all of them must have applied
    the step. If they wrap different params, as in `optax.partition`, pass the part of the state
    that you need.

    Args:
      opt_state: Any pytree that contains the state, as in `optaxclip.monitor.read`, after the
        update. In `optax.MultiSteps`, a microbatch counts as applied if it was added to the sum.

    Returns:
      bool[], or one element per state under `vmap`. It is True before the first step. Nothing is
      sent to the host, so the function works under `jit`, `scan`, `vmap`, and `shard_map`.

    Raises:
      ValueError: If the state does not contain a skip wrapper.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1))
      >>> _, opt_state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(jnp.zeros(2)))
      >>> print(step_was_applied(opt_state))
      False
    """
    flags = list(_flags(opt_state))
    if not flags:
        raise ValueError(
            "monitor.step_was_applied: opt_state must contain a skip wrapper, got "
            f"{describe_tree(opt_state)}; wrap the optimizer in skip_nonfinite or skip_above"
        )
    return functools.reduce(jnp.logical_and, flags)


def _flags(tree: PyTree) -> Iterator[Array]:
    """Iterates over the skip wrappers in a state, with True if the most recent step was applied."""
    kinds = (SkipState, optax.MultiStepsState, optax.ApplyIfFiniteState)
    for _, state in iter_states(tree, kinds):
        if isinstance(state, SkipState):
            yield put_on_device(unbox(state.info.factor)) > 0
        elif isinstance(state, optax.ApplyIfFiniteState):
            # A step that `apply_if_finite` rejects does not reach the wrappers inside it.
            was_run = put_on_device(unbox(state.last_finite))
            yield from (flag & was_run for flag in _flags(state.inner_state))
        else:
            # While `MultiSteps` accumulates microbatches, wrappers inside it keep the record of the
            # previous batch.
            is_accumulating = put_on_device(unbox(state.mini_step)) > 0
            yield from (flag | is_accumulating for flag in _flags(state.inner_opt_state))
            if isinstance(state.skip_state, Mapping) and "should_skip" in state.skip_state:
                yield ~put_on_device(unbox(state.skip_state["should_skip"]))


StepStatus: TypeAlias = Literal["ok", "skipped", "roll back"]


def bad_leaves(opt_state: PyTree) -> tuple[str, ...]:
    """Returns the leaves that caused the most recent skipped step, or that were non-finite.

    A skip wrapper records the leaves that were non-finite on the most recent step that it skipped.
    If all leaves were finite, it records the leaves with norms above the threshold or, if there are
    none, the leaf with the largest norm. If only the loss caused the skip, there are no leaves. A
    stage that clips leaves (the scopes `leaf`, `axes`, and `unit`) or labeled groups records the
    ones that were non-finite on the most recent step, except leaves that `nonfinite="mask"`
    repaired.

    Args:
      opt_state: Any pytree that contains the state, as in `optaxclip.monitor.read`, such as a state
        from a checkpoint. For states under `vmap`, the result contains the leaves of all states.

    Returns:
      The names without duplicates, such as `encoder/0/kernel`, or an empty tuple.

    Raises:
      ValueError: If the state does not record leaves, for example if all stages use global norms.
      TypeError: If called under `jit`, `vmap` or `grad`.

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
        raise names_lost_error(f"the states of {nameless}")
    if not found:
        raise ValueError(
            "opt_state contains neither a skip wrapper nor a stage that clips each leaf; wrap the "
            "optimizer in skip_nonfinite, or insert clip_by_norm(math.inf) into the chain"
        )
    bad: dict[str, None] = {}
    arrays = fetch_to_host([array for _, array in found], "bad_leaves")
    for (names, _), array in zip(found, arrays, strict=True):
        flags = array if array.dtype == bool else ~np.isfinite(array)
        flags = np.any(flags.reshape(-1, len(names)), axis=0) if names else ()
        bad |= {name: None for name, flag in zip(names, flags, strict=True) if flag}
    return tuple(bad)


def step_status(opt_state: PyTree, roll_back_after: int = 10) -> StepStatus:
    """Returns the status of the most recent step, and whether to return to a checkpoint.

    Call it in the training loop on the host, because only the host can load a checkpoint::

      match monitor.step_status(opt_state):
          case "skipped":
              log(monitor.bad_leaves(opt_state))
          case "roll back":
              params, opt_state = restore_last_checkpoint()

    A checkpoint does not help if a constant threshold is below the usual norms, or if the gradient
    is always NaN, like the gradient of `where(x > 0, sqrt(x), 0)` at 0. See `docs/recovery.md` for
    remedies. The host waits for the step that computes the state and for one `jax.device_get`.

    Args:
      opt_state: Any pytree that contains the state, as in `optaxclip.monitor.read`, such as a state
        from a checkpoint. If there are several skip wrappers, or states under `vmap`, the worst one
        determines the status.
      roll_back_after: The number of consecutive skipped steps after which to roll back. If a
        wrapper applies a step earlier (`max_consecutive`), counting starts again.

    Returns:
      "ok", "skipped", or "roll back". It is "roll back" after `roll_back_after` consecutive skipped
      steps, or as soon as a wrapper has applied a non-finite step, as `skip_nonfinite` does after
      `max_consecutive`.

    Raises:
      ValueError: If the state does not contain a skip wrapper, or if `roll_back_after` is below 1.
      TypeError: If called under `jit`, `vmap` or `grad`, or if `roll_back_after` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(0.1), 10.0)
      >>> opt_state = tx.init(jnp.zeros(2))
      >>> for size in (1.0, 20.0, 30.0):
      ...     _, opt_state = tx.update(jnp.array([0.0, size]), opt_state)
      ...     print(step_status(opt_state, roll_back_after=2))
      ok
      skipped
      roll back
    """
    roll_back_after = check_int(roll_back_after, 1, "roll_back_after")
    skips = find(opt_state, SkipState).values()
    if not skips:
        raise ValueError("opt_state contains no skip wrapper; wrap the optimizer in skip_nonfinite")
    numbers = []
    for state in skips:
        infos = [state.info, state.loss.info] if state.loss else [state.info]
        checked = [unbox(info.norm) for info in infos]
        numbers.append((unbox(state.consecutive), unbox(state.info.factor), checked))
    most, is_lost = 0, False
    # i32[*states], f32[*states], and one or two f32[*states]
    for consecutive, factor, checked in fetch_to_host(numbers, "step_status"):
        most = max(most, int(np.max(consecutive, initial=0)))
        is_nonfinite = np.any([~np.isfinite(number) for number in checked], axis=0)
        is_lost |= bool(np.any(is_nonfinite & (factor > 0)))
    if is_lost or most >= roll_back_after:
        return "roll back"
    return "skipped" if most else "ok"


def loss_scale(opt_state: PyTree) -> Array:
    """Returns the factor for the next loss if the optimizer is wrapped in `scale_loss`.

    Read it from the state that you pass to the update of the same step::

      def scaled_loss(params):
          return loss_fn(params, batch).astype(jnp.float32) * monitor.loss_scale(opt_state)

      grads = jax.grad(scaled_loss)(params)
      updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: Any pytree that contains the state, as in `optaxclip.monitor.read`.

    Returns:
      float32[], a power of two, or one element per state under `vmap`. Nothing is sent to the host.

    Raises:
      ValueError: If the state does not contain exactly one `scale_loss` state, or if a wrapper
        around `scale_loss` hides overflows from it, because the scale could then never decrease.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.scale_loss(optax.adam(1e-3))
      >>> print(loss_scale(tx.init(jnp.ones(3))))
      32768.0
    """
    kinds = (SkipState, optax.MultiStepsState, optax.ApplyIfFiniteState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, (LossScaleState, *kinds)))
    for node in (node for node in nodes if isinstance(node, kinds)):
        inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, LossScaleState))
        if any(isinstance(x, LossScaleState) for x in inside):
            # The wrapper does not pass an overflowed gradient on, or adds it to a sum.
            raise ValueError(
                f"scale_loss must not be inside another wrapper, but is in {type(node).__name__}; "
                "use scale_loss(optax.MultiSteps(optimizer, k).gradient_transformation())"
            )
    found = [state for _, state in iter_states(opt_state, (LossScaleState,))]
    if len(found) != 1:
        raise ValueError(
            "monitor.loss_scale: opt_state must contain exactly one scale_loss state, but there "
            f"are {len(found)} in {describe_tree(opt_state)}; wrap the optimizer in scale_loss"
        )
    return round_to_pow2(put_on_device(unbox(found[0].loss_scale)))

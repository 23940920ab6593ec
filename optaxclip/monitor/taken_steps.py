"""Whether the last step was taken: for all else that the compiled step changes."""

import functools
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import optax
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.types import PyTree
from optaxclip.methods.skipping import SkipState
from optaxclip.monitor.states import describe_tree, iter_states, unbox


def step_was_applied(opt_state: PyTree) -> Array:
    """Whether the last step was taken, not skipped; it works inside of the compiled step too.

    A skip leaves the parameters and the optimizer's state as they were. It does not know what else
    a step changes: running statistics of BatchNorm, averages of weights, the carried state of a
    recurrent network. A NaN that gets there stays there. So keep their old values if the step was
    not taken::

      updates, opt_state = tx.update(grads, opt_state, params)
      batch_stats = optax.tree.where(monitor.step_was_applied(opt_state), new_batch_stats, batch_stats)

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
      ...     mean = jnp.where(taken(opt_state), 0.9 * mean + 0.1 * batch.mean(), mean)
      ...     print(taken(opt_state), mean)
      True 0.2
      False 0.2
    """
    flags = list(_flags(opt_state))
    if not flags:
        raise ValueError(
            "monitor.step_was_applied takes an optimizer's state that holds a skip, and finds none in what it "
            f"got: {describe_tree(opt_state)}. Put skip_nonfinite, skip_above or scale_loss around the "
            "optimizer, and pass opt_state, a TrainState or an nnx.Optimizer. (The state of "
            "optax.apply_if_finite does not say whether it took a step.)"
        )
    return functools.reduce(jnp.logical_and, flags)


def _flags(tree: PyTree) -> Iterator[Array]:
    """For each skip in a state, whether it took the last step that reached it."""
    kinds = (SkipState, optax.MultiStepsState, optax.ApplyIfFiniteState)
    for _, state in iter_states(tree, kinds):
        if isinstance(state, SkipState):
            yield devices.put_on_device(unbox(state.info.factor)) > 0
        elif isinstance(state, optax.ApplyIfFiniteState):
            # A step that `apply_if_finite` rejects does not reach the skips inside of it.
            was_asked = devices.put_on_device(unbox(state.last_finite))
            yield from (flag & was_asked for flag in _flags(state.inner_state))
        else:
            # While `MultiSteps` collects microbatches, the skips inside of it hold their verdict on
            # the batch before.
            waits = devices.put_on_device(unbox(state.mini_step)) > 0
            yield from (flag | waits for flag in _flags(state.inner_opt_state))
            if isinstance(state.skip_state, Mapping) and "should_skip" in state.skip_state:
                yield ~devices.put_on_device(unbox(state.skip_state["should_skip"]))

"""The number by which the compiled step multiplies the loss."""

import jax
import optax
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.types import PyTree
from optaxclip.methods.loss_scaling import LossScaleState, round_to_pow2
from optaxclip.methods.skipping import SkipState
from optaxclip.monitor.states import describe_tree, iter_states, unbox


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
    return round_to_pow2(devices.put_on_device(unbox(state.loss_scale)))


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

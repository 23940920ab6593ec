"""Thresholds for losses.

A loss threshold can be negative and has no floor.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import is_real
from optaxclip._base.types import ThresholdRule
from optaxclip.thresholds._adaptive import remove_floor
from optaxclip.thresholds._constant import ScalarOrSchedule, count_steps, make_rule
from optaxclip.thresholds._rule import check_not_component, check_threshold_value


def loss_from_extra_args(
    extra_args: Mapping[str, Any], name: str, axis_names: tuple[str, ...] | None
) -> Array:
    """Returns `loss` or `value` from the extra arguments of an update, in float32 or float64.

    The loss must be the same on all devices that share a norm. These are the devices along
    `axis_names`, or all devices if it is None.
    """
    given = {key: extra_args[key] for key in ("loss", "value") if extra_args.get(key) is not None}
    if not given:
        raise ValueError(
            f"{name}: value or loss must be passed to the update, got neither; call "
            "update(grads, state, params, value=loss). Flax's TrainState.apply_gradients does not "
            "pass extra arguments, so call state.tx.update(grads, state.opt_state, state.params, "
            "value=loss), as in the recipe 'Steps with a bad loss'"
        )
    # If both are passed, `loss` is used.
    argument, loss = next(iter(given.items()))
    if not is_real(loss):
        raise TypeError(f"{argument} must be the loss, a real number, got {loss!r:.80}")
    if jnp.ndim(loss):
        raise ValueError(
            f"{argument} must be a scalar, the loss of the whole batch, got an array of shape "
            f"{jnp.shape(loss)}; pass its mean"
        )
    meshes.check_replicated_scalar(loss, axis_names, f"{name}: {argument}")
    loss = jnp.asarray(loss)  # []
    return loss.astype(jnp.float64 if loss.dtype == jnp.float64 else jnp.float32)


def check_loss_threshold(
    threshold: ScalarOrSchedule | ThresholdRule, argument: str = "loss_threshold"
) -> ThresholdRule:
    """Checks a threshold of any sign for the loss and returns it as a rule without a floor."""
    if isinstance(threshold, ThresholdRule):
        if threshold.uses_params:
            raise ValueError(
                f"{argument} must not be relative to the parameters, got a rule with "
                "uses_params=True; pass another rule"
            )
        return remove_floor(make_rule(threshold, argument), argument)
    if callable(threshold):
        return make_rule(threshold, argument)
    check_not_component(threshold, argument)
    number = check_threshold_value(threshold, argument, allow_any_number=True, schedule=True)
    if not isinstance(number, jax.Array) and math.isnan(number):
        raise ValueError(
            f"{argument} must not be NaN, got {number!r}; pass None to ignore the loss"
        )
    # Constants use the rule of schedules, so both have the same state in checkpoints.
    return count_steps(number)

"""Thresholds for losses; unlike thresholds for norms, they may be negative and have no floor."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

import optaxclip._backend.meshes as meshes
from optaxclip._base.numerics import is_real
from optaxclip._base.state import safe_increment
from optaxclip._base.types import ThresholdRule, Thresholds
from optaxclip.thresholds.adaptive import remove_floor
from optaxclip.thresholds.constant import ScalarOrSchedule
from optaxclip.thresholds.rule import (
    check_not_component,
    check_rule,
    check_schedule,
    check_threshold_value,
)


def loss_from_extra_args(
    extra_args: Mapping[str, Any], name: str, axis_names: tuple[str, ...] | None
) -> Array:
    """The loss, `loss` or `value` among an update's extra arguments, in float32 or float64.

    It must not differ over devices that share a norm: those along `axis_names`, all if it is None.
    """
    given = {key: extra_args[key] for key in ("loss", "value") if extra_args.get(key) is not None}
    if not given:
        raise ValueError(
            f"{name}: the update needs the loss, and was given neither value= nor loss=; pass it: "
            "update(grads, state, params, value=loss). Flax's TrainState.apply_gradients passes "
            "nothing on: call state.tx.update(grads, state.opt_state, state.params, value=loss), "
            "as the recipe 'Steps with a bad loss' shows"
        )
    argument, loss = next(iter(given.items()))
    if not is_real(loss):
        raise TypeError(f"{argument} must be the loss, a real number, got {loss!r:.80}")
    if jnp.ndim(loss):
        raise ValueError(
            f"{argument} must be a scalar, the loss of the whole batch, got an array of shape "
            f"{jnp.shape(loss)}; pass its mean"
        )
    meshes.check_replicated_scalar(loss, axis_names, f"{name}: {argument}")
    loss = jnp.asarray(loss)
    return loss.astype(jnp.float64 if loss.dtype == jnp.float64 else jnp.float32)


def check_loss_threshold(
    threshold: ScalarOrSchedule | ThresholdRule, argument: str = "loss_threshold"
) -> ThresholdRule:
    """A checked threshold of the loss, of any sign, as a rule; the floor of a rule is not used."""
    if isinstance(threshold, ThresholdRule):
        if threshold.uses_params:
            raise ValueError(f"{argument} cannot be relative to the parameters: pass another rule")
        return remove_floor(check_rule(threshold, argument), argument).as_pytree()
    check_not_component(threshold, argument)
    if callable(threshold):
        checked = Partial(check_schedule(threshold, argument))
        return ThresholdRule(Partial(_no_steps), Partial(_scheduled_loss_update, checked))
    number = check_threshold_value(threshold, argument, allow_any_number=True, schedule=True)
    if not isinstance(number, jax.Array) and math.isnan(number):
        raise ValueError(f"{argument} must not be NaN; to judge the norm alone pass None")
    return ThresholdRule(Partial(_no_steps), Partial(_scheduled_loss_update, number))


def _no_steps(losses: Array) -> Array:
    del losses
    return jnp.zeros((), jnp.int32)


def _scheduled_loss_update(
    threshold: Any, loss: Array, count: Array, param_norms: Array | None
) -> tuple[Thresholds, Array]:
    del param_norms
    now = threshold(count) if callable(threshold) else threshold
    now = check_threshold_value(now, "the schedule's value", allow_any_number=True)
    now = jnp.asarray(now).astype(loss.dtype)
    return Thresholds(now, now), safe_increment(count)

"""Transformations that clip each entry by its own value."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

import optaxclip.methods.elementwise as elementwise
from optaxclip._base.arguments import checked_bool, makes_transformation
from optaxclip._base.states import check_state, increased, registered_state
from optaxclip._base.trees import flatten
from optaxclip._base.types import PyTree
from optaxclip._border.crossing import Transformation, stateless, transformation
from optaxclip.thresholds.calling import checked_schedule
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.fixed import ScalarOrSchedule, without_memory


@registered_state
class ClipByValueState(NamedTuple):
    """State of elementwise clipping.

    Attributes:
      steps: int32[], steps so far.
    """

    NEEDS_OPTIMIZER = True

    steps: Array


@makes_transformation(
    "ops.clip_by_value(grads, -1.0, 1.0)",
    too_many=". For a bound on either side take clip_by_value(min_value, max_value)",
)
def clip(max_delta: ScalarOrSchedule, *, record: bool = True) -> Transformation[ClipByValueState]:
    """Clips each entry to `[-max_delta, max_delta]`, a complex one to the modulus `max_delta`.

    NaN stays NaN, and infinite entries become the bounds.

    Args:
      max_delta: the largest absolute value, or a schedule of it.
      record: whether the state counts the steps. With False the state is an `optax.EmptyState`, and
        any state is accepted and returned as it is. A schedule needs the step count, so
        `record=False` is an error with it.

    Returns:
      A transformation with a `ClipByValueState`. It does not record what was clipped, because that
      would read the gradients more often than the clip does.

    Raises:
      ValueError: if `max_delta` is negative, NaN or not a scalar, or is a schedule while `record`
        is False.
      TypeError: if it is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip(2.0)
      >>> grads = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0, 1.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [nan  2. -2.  2.  1.]
    """
    if callable(max_delta):
        checked_schedule(max_delta, "max_delta", any_shape=True)
    else:
        max_delta = checked_limit(max_delta, "max_delta", off="math.inf", schedule=True)
    return _clip_by_bounds(None, max_delta, ("max_delta", "max_delta"), record)


@makes_transformation("ops.clip_by_value(grads, -1.0, 1.0)")
def clip_by_value(
    min_value: ScalarOrSchedule, max_value: ScalarOrSchedule, *, record: bool = True
) -> Transformation[ClipByValueState]:
    """Clips each entry to `[min_value, max_value]`, a complex one to the modulus `max_value`.

    NaN stays NaN, and infinite entries become the bounds.

    Args:
      min_value: a scalar, an array that broadcasts to every leaf, or a schedule of one of these.
      max_value: as `min_value`.
      record: as in `clip`.

    Returns:
      A transformation with a `ClipByValueState`, which counts only the steps.

    Raises:
      ValueError: if a minimum exceeds its maximum (traced values are not compared), if a bound does
        not broadcast to the shape of a leaf, or if one is a schedule while `record` is False.
      TypeError: if a bound is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.clip_by_value(-1.0, 4.0)
      >>> grads = jnp.array([-3.0, 2.0, 6.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.  2.  4.]
    """
    bounds = (("min_value", min_value), ("max_value", max_value))
    for argument, bound in bounds:
        if callable(bound):
            checked_schedule(bound, argument, any_shape=True)
        else:
            elementwise.checked_bound(bound, argument)
    if not callable(min_value) and not callable(max_value):
        elementwise.check_order(min_value, max_value, ("min_value", "max_value"))
    return _clip_by_bounds(min_value, max_value, ("min_value", "max_value"), record)


def _clip_by_bounds(
    low: ScalarOrSchedule | None, high: ScalarOrSchedule, arguments: tuple[str, str], record: bool
) -> Transformation[ClipByValueState]:
    name = "clip" if low is None else "clip_by_value"

    def clamped(updates: PyTree, smallest: Any, largest: Any) -> PyTree:
        return elementwise.clamp(flatten(updates, "updates"), smallest, largest, arguments)

    is_scheduled = callable(low) or callable(high)
    if not checked_bool(record, "record"):
        if is_scheduled:
            raise ValueError(without_memory(name))
        return stateless(lambda updates, *_, **__: clamped(updates, low, high))

    def init(params: PyTree) -> ClipByValueState:
        flatten(params, "params")
        return ClipByValueState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipByValueState]:
        del params, extra_args
        is_fresh = state is None and not is_scheduled
        state = ClipByValueState(jnp.zeros((), jnp.int32)) if is_fresh else state
        check_state(state, ClipByValueState, name, updates=updates)
        smallest, largest = (_at_step(bound, state.steps) for bound in (low, high))
        return clamped(updates, smallest, largest), ClipByValueState(increased(state.steps))

    return transformation(init, update)


def _at_step(bound: ScalarOrSchedule | None, steps: Array) -> Any:
    """A bound, or the value of a schedule, checked."""
    if not callable(bound):
        return bound
    return elementwise.checked_bound(bound(steps), "the schedule's value")

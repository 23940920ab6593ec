"""The rules that learn from past norms share a statistic and six options.

Such a rule has a `Statistic` of the norms so far. Its options mean the same in all rules:

  option         | meaning
  ---------------|------------------------------------------------------------------------------
  `record`       | what a norm above its limit adds to the statistic: itself ("raw"), the norm it
                 | was clipped to ("clipped"), its limit ("capped"), or nothing ("accepted")
  `inclusive`    | whether a norm counts in the statistic that judges it
  `warmup_steps` | how many norms must have been recorded before there is a limit
  `floor`        | smaller norms are not recorded, and no limit falls below it
  `patience`     | after this many norms in a row above their limit the raw norm is recorded, until
                 | a norm is at or below its limit; with None it never is
  `max_norm`     | a cap on every limit, in the warm-up too

The published rules have neither a floor nor patience: `patience=None, floor=0.0`. Without patience,
a rule that records clipped norms may clip for ever after a lasting rise of the norms. A norm that
is not finite leaves the state exactly as it was.
"""

import dataclasses
import re
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.arguments import Function, asks, checked_bool, checked_choice
from optaxclip._base.docstrings import completed
from optaxclip._base.numerics import narrowed, over_power, power_of_two_below, safe_sqrt
from optaxclip._base.states import Names, increased, registered_state
from optaxclip._base.types import ArrayLike, Limits, PyTree, Threshold
from optaxclip.thresholds.checks import checked_limit, has_value, refuse_narrow

Record = Literal["raw", "clipped", "capped", "accepted"]

FLOOR = 1e-8
"""The default floor; a gradient with a smaller norm is practically zero."""

PATIENCE = 20
"""The default patience; a rise of the norms that lasts longer is not a spike."""


_OF_ALL_RULES = {
    "Returns": """Returns:
  A `Threshold`. Its limits are arrays with the shape and dtype of the norms.""",
    "Raises": """Raises:
  ValueError: if an option is out of its range.
  TypeError: if an option is not a number, or a decay has fewer digits than float32.""",
}


def makes_rule(fn: Function) -> Function:
    """`asks` for a function that makes a rule; its docstring gets what all of these say."""
    asked = asks()(fn)
    asked.__doc__ = completed(fn.__doc__, _OF_ALL_RULES)
    return asked


class Statistic(Protocol):
    """A statistic of past norms, for one group or for an array of groups.

    Statistics are hashable, because they are static under `jit`; the numbers that they compute with
    are traced, and come as `settings`. A statistic keeps a deviation and not a variance, because
    the square of a norm may overflow in float32.

    Two attributes are optional. `window: int` is for a statistic that keeps the last values in a
    ring, the next one in place `count % window`: when the count reaches the largest int32, it falls
    by a multiple of `window`. `any_sign = True` allows numbers below 0, such as losses.
    """

    def init(self, settings: Any, like: Array) -> PyTree:
        """The state before the first norm, float32, for groups of the shape of `like`."""
        ...

    def observe(self, settings: Any, state: PyTree, norm: Array, count: Array) -> PyTree:
        """The state after one more finite norm; `count` norms were recorded before it."""
        ...

    def limits(self, settings: Any, state: PyTree, norm: Array, count: Array) -> Limits:
        """The limits for these norms; they are infinite until a norm was recorded.

        A norm that is not finite comes as 0.
        """
        ...


@registered_state
class AdaptiveState(NamedTuple):
    """State of a rule that learns from past norms. Arrays have an entry for each group.

    Attributes:
      recorded: int32, how many norms were recorded.
      streak: int32, how many norms in a row, up to the latest, were above their limit.
      statistic: the state of the statistic.
      rule: the rule's name, as a tuple of one; part of the structure, not an array.
    """

    recorded: Array
    streak: Array
    statistic: PyTree
    rule: Names


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    statistic: Statistic
    record: Record
    inclusive: bool
    reject: bool
    has_floor: bool = True

    @property
    def rule(self) -> Names:
        """The name of the rule, made from that of its statistic."""
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self.statistic).__name__)
        return Names((words.strip("_").lower(),))


class _Options(NamedTuple):
    warmup_steps: Any
    floor: Any
    patience: Any
    max_norm: Any


@asks()
def adaptive(
    statistic: Statistic,
    settings: Any,
    *,
    record: Record,
    inclusive: bool = False,
    reject: bool = False,
    warmup_steps: int = 0,
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: ArrayLike | None = None,
) -> Threshold:
    """A rule from a statistic and the shared options of `optaxclip.thresholds.base`.

    Args:
      statistic: what the rule keeps of past norms.
      settings: a pytree of numbers for the statistic.
      record: what a norm above its limit adds to the statistic.
      inclusive: whether a norm counts in the statistic that judges it.
      reject: whether a norm above its limit is brought to 0 instead of to its target.
      warmup_steps: how many norms must have been recorded before there is a limit.
      floor: smaller norms are not recorded, and no limit is smaller.
      patience: how many norms in a row may exceed their limit before the raw norm is recorded.
      max_norm: a cap on every limit.

    Returns:
      A `Threshold`. Its limits are arrays with the shapes of the norms, float32 or wider.

    Raises:
      ValueError: if an option is out of its range.
      TypeError: if an option is not a number, or a flag is neither True nor False.
    """
    record = checked_choice(record, get_args(Record), "record")
    options = _Options(
        warmup_steps=at_least(warmup_steps, 0, "warmup_steps"),
        floor=checked_limit(floor, "floor"),
        patience=None if patience is None else at_least(patience, 1, "patience"),
        max_norm=None if max_norm is None else checked_limit(max_norm, "max_norm", off="None"),
    )
    static = _Static(
        statistic, record, checked_bool(inclusive, "inclusive"), checked_bool(reject, "reject")
    )
    return Threshold(Partial(_init, static, settings), Partial(_update, static, options, settings))


def of_any_sign(rule: Threshold, argument: str) -> Threshold:
    """The rule without its floor, for numbers that may be negative, such as losses.

    A rule that `adaptive` did not make is returned as it is.
    """
    if not isinstance(rule.update, Partial) or rule.update.func is not _update:
        return rule
    static, options, settings = rule.update.args
    if not getattr(static.statistic, "any_sign", False):
        raise ValueError(
            f"{argument} must be a rule that allows negative numbers, as losses may be negative; "
            "got a rule for norms alone: use thresholds.window, zscore, percentile, median or "
            "ema, or a number"
        )
    static = dataclasses.replace(static, has_floor=False)
    return dataclasses.replace(rule, update=Partial(_update, static, options, settings))


def at_least(value: Any, minimum: float, argument: str) -> Any:
    """`value`, checked to be a number; unless it is traced, it must be at least `minimum`."""
    return within(value, minimum, float("inf"), argument)


def as_float(number: Any) -> Array:
    """A number as a float32 array."""
    return jnp.asarray(number).astype(jnp.float32)


def multiple(number: Any, of: Array) -> Array:
    """`of + (number - 1) * abs(of)`, which is `number * of` unless `of` is negative.

    It is infinite if one of the two is infinite, even if the other is 0.
    """
    number = as_float(number)
    infinite = jnp.isinf(number) | jnp.isinf(of)
    number = jnp.where(of < 0, 2 - number, number)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 0, number) * jnp.where(infinite, 0, of))


def within(value: Any, low: float, high: float, argument: str, remedy: str = "") -> Any:
    """`value`, checked to be a number; unless it is traced, it must be from `low` to `high`.

    A number with a largest value must have the digits of float32. `remedy` ends the message.
    """
    value = checked_limit(value, argument)
    if high < float("inf"):
        refuse_narrow(value, argument)
    if has_value(value) and not low <= float(jax.device_get(value)) <= high:
        raise ValueError(f"{argument} must be from {low:g} to {high:g}, got {value!r}{remedy}")
    return value


def select_tree(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `where` is True, else `old`; arrays may have further axes behind its axes."""
    return jax.tree.map(lambda x, y: jnp.where(jnp.broadcast_to(where, y.shape), x, y), new, old)


def root_of_squares(x: Array, y: Array) -> Array:
    """`sqrt(x**2 + y**2)`, even if a square overflows or underflows."""
    unit = jax.lax.stop_gradient(power_of_two_below(jnp.maximum(jnp.abs(x), jnp.abs(y))))
    x, y = (jnp.square(over_power(each, unit)) for each in (x, y))
    return unit * safe_sqrt(x + y)


def _init(static: _Static, settings: Any, norms: Array) -> AdaptiveState:
    zeros = jnp.zeros(norms.shape, jnp.int32)
    return AdaptiveState(zeros, zeros, static.statistic.init(settings, norms), static.rule)


def _update(
    static: _Static,
    options: _Options,
    settings: Any,
    norms: Array,
    state: AdaptiveState,
    param_norms: Array | None,
) -> tuple[Limits, AdaptiveState]:
    del param_norms
    # A state that was restored from a checkpoint may hold NumPy arrays.
    state = jax.tree.map(jnp.asarray, state)
    statistic = static.statistic
    period = getattr(statistic, "window", 1)
    is_finite, largest = jnp.isfinite(norms), float(jnp.finfo(jnp.float32).max)
    # A traced floor may be negative, but a rule must not record a negative limit as a norm.
    floor = jnp.maximum(as_float(options.floor), 0) if static.has_floor else as_float(-jnp.inf)
    # The state is float32, so norms in float64 are converted.
    norm = narrowed(jnp.where(is_finite, norms, 0), jnp.dtype(jnp.float32))
    counts = is_finite & (norm >= floor)

    def recorded(x: Array, where: Array) -> tuple[Array, PyTree]:
        x = jnp.clip(x, -largest, largest)
        new = statistic.observe(settings, state.statistic, x, state.recorded)
        count = increased(state.recorded, where, period=period)
        return count, select_tree(where, new, state.statistic)

    count, kept = state.recorded, state.statistic
    if static.inclusive:
        count, kept = recorded(norm, counts)
    rule = statistic.limits(settings, kept, norm, count)
    is_ready = count >= options.warmup_steps
    trigger, target = (jnp.where(is_ready, jnp.maximum(limit, floor), jnp.inf) for limit in rule)
    if static.reject:
        target = jnp.where(jnp.isinf(trigger), trigger, 0)
    is_above = is_finite & (norm > trigger)
    streak = jnp.where(is_finite, jnp.where(is_above, increased(state.streak), 0), state.streak)
    if not static.inclusive:
        by_record = {"raw": norm, "clipped": target, "capped": trigger, "accepted": norm}
        gives_in = jnp.zeros_like(counts)
        if options.patience is not None:
            gives_in = streak > options.patience
        x = jnp.where(is_above & ~gives_in, by_record[static.record], norm)
        if static.record == "accepted":
            counts = counts & (~is_above | gives_in)
        count, kept = recorded(x, counts)
    if norms.dtype == jnp.float64:
        # The conversion to float32 may have rounded a norm down to its limit. Then the limit is
        # raised to the float64 norm, so that the rule and the clip agree.
        trigger = trigger.astype(norms.dtype)
        trigger = jnp.where(is_finite & ~is_above, jnp.maximum(trigger, norms), trigger)
    if options.max_norm is not None:
        cap = as_float(options.max_norm)
        target = jnp.where(is_above | (norm <= cap), jnp.minimum(target, cap), cap)
        trigger = jnp.minimum(trigger, cap.astype(trigger.dtype))
    return Limits(trigger, target), AdaptiveState(count, streak, kept, static.rule)

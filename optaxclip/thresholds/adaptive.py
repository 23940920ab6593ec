"""The rules that learn from past norms share a statistic and six options.

Such a rule has a `Statistic` of the norms so far. Its options mean the same in all rules:

  option         | meaning
  ---------------|------------------------------------------------------------------------------
  `record`       | what a norm above its threshold adds to the statistic: itself ("raw"), the norm it
                 | was clipped to ("clipped"), its threshold ("capped"), or nothing ("accepted")
  `inclusive`    | whether a norm counts in the statistic that judges it
  `warmup_steps` | how many norms must have been recorded before there is a threshold
  `floor`        | smaller norms are not recorded, and no threshold falls below it
  `patience`     | after this many norms in a row above their threshold the raw norm is recorded, until
                 | a norm is at or below its threshold; with None it never is
  `max_norm`     | a cap on every threshold, in the warm-up too

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

from optaxclip._base.numerics import divide_by_pow2, floor_pow2, safe_sqrt, saturating_cast
from optaxclip._base.state import StaticNames, register_state, safe_increment
from optaxclip._base.types import ArrayLike, PyTree, ThresholdRule, Thresholds
from optaxclip._base.validation import (
    Function,
    add_default_sections,
    check_bool,
    check_choice,
    validate_call,
)
from optaxclip.thresholds.rule import check_threshold_value, has_value, refuse_narrow

Record = Literal["raw", "clipped", "capped", "accepted"]

DEFAULT_FLOOR = 1e-8
"""The default floor; a gradient with a smaller norm is practically zero."""

DEFAULT_PATIENCE = 20
"""The default patience; a rise of the norms that lasts longer is not a spike."""


_OF_ALL_RULES = {
    "Returns": """Returns:
  A `ThresholdRule`. Its thresholds are arrays with the shape and dtype of the norms.""",
    "Raises": """Raises:
  ValueError: if an option is out of its range.
  TypeError: if an option is not a number, or a decay has fewer digits than float32.""",
}


def rule_factory(fn: Function) -> Function:
    """`asks` for a function that makes a rule; its docstring gets what all of these say."""
    asked = validate_call()(fn)
    asked.__doc__ = add_default_sections(fn.__doc__, _OF_ALL_RULES)
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

    def compute_thresholds(
        self, settings: Any, state: PyTree, norm: Array, count: Array
    ) -> Thresholds:
        """The thresholds for these norms; they are infinite until a norm was recorded.

        A norm that is not finite comes as 0.
        """
        ...


@register_state
class AdaptiveState(NamedTuple):
    """State of a rule that learns from past norms. Arrays have an entry for each group.

    Attributes:
      recorded: int32, how many norms were recorded.
      streak: int32, how many norms in a row, up to the latest, were above their threshold.
      statistic: the state of the statistic.
      rule: the rule's name, as a tuple of one; part of the structure, not an array.
    """

    num_recorded: Array
    num_consecutive_clipped: Array
    statistic: PyTree
    rule: StaticNames


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticConfig:
    statistic: Statistic
    record: Record
    inclusive: bool
    reject: bool
    has_floor: bool = True

    @property
    def rule(self) -> StaticNames:
        """The name of the rule, made from that of its statistic."""
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self.statistic).__name__)
        return StaticNames((words.strip("_").lower(),))


class _Options(NamedTuple):
    warmup_steps: Any
    floor: Any
    patience: Any
    max_norm: Any


@validate_call()
def adaptive(
    statistic: Statistic,
    settings: Any,
    *,
    record: Record,
    inclusive: bool = False,
    reject: bool = False,
    warmup_steps: int = 0,
    floor: float = DEFAULT_FLOOR,
    patience: int | None = DEFAULT_PATIENCE,
    max_norm: ArrayLike | None = None,
) -> ThresholdRule:
    """A rule from a statistic and the shared options of `optaxclip.thresholds.adaptive`.

    Args:
      statistic: what the rule keeps of past norms.
      settings: a pytree of numbers for the statistic.
      record: what a norm above its threshold adds to the statistic.
      inclusive: whether a norm counts in the statistic that judges it.
      reject: whether a norm above its threshold is brought to 0 instead of to its target.
      warmup_steps: how many norms must have been recorded before there is a threshold.
      floor: smaller norms are not recorded, and no threshold is smaller.
      patience: how many norms in a row may exceed their threshold before the raw norm is recorded.
      max_norm: a cap on every threshold.

    Returns:
      A `ThresholdRule`. Its thresholds are arrays with the shapes of the norms, float32 or wider.

    Raises:
      ValueError: if an option is out of its range.
      TypeError: if an option is not a number, or a flag is neither True nor False.
    """
    record = check_choice(record, get_args(Record), "record")
    options = _Options(
        warmup_steps=check_minimum(warmup_steps, 0, "warmup_steps"),
        floor=check_threshold_value(floor, "floor"),
        patience=None if patience is None else check_minimum(patience, 1, "patience"),
        max_norm=None
        if max_norm is None
        else check_threshold_value(max_norm, "max_norm", disabled_value="None"),
    )
    static = _StaticConfig(
        statistic, record, check_bool(inclusive, "inclusive"), check_bool(reject, "reject")
    )
    return ThresholdRule(
        Partial(_init, static, settings), Partial(_update, static, options, settings)
    )


def remove_floor(rule: ThresholdRule, argument: str) -> ThresholdRule:
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


def check_minimum(value: Any, minimum: float, argument: str) -> Any:
    """`value`, checked to be a number; unless it is traced, it must be at least `minimum`."""
    return check_range(value, minimum, float("inf"), argument)


def cast_to_float32(number: Any) -> Array:
    """A number as a float32 array."""
    return jnp.asarray(number).astype(jnp.float32)


def signed_multiple(number: Any, of: Array) -> Array:
    """`of + (number - 1) * abs(of)`, which is `number * of` unless `of` is negative.

    It is infinite if one of the two is infinite, even if the other is 0.
    """
    number = cast_to_float32(number)
    infinite = jnp.isinf(number) | jnp.isinf(of)
    number = jnp.where(of < 0, 2 - number, number)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 0, number) * jnp.where(infinite, 0, of))


def check_range(value: Any, low: float, high: float, argument: str, remedy: str = "") -> Any:
    """`value`, checked to be a number; unless it is traced, it must be from `low` to `high`.

    A number with a largest value must have the digits of float32. `remedy` ends the message.
    """
    value = check_threshold_value(value, argument)
    if high < float("inf"):
        refuse_narrow(value, argument)
    if has_value(value) and not low <= float(jax.device_get(value)) <= high:
        raise ValueError(f"{argument} must be from {low:g} to {high:g}, got {value!r}{remedy}")
    return value


def select_tree(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `where` is True, else `old`; arrays may have further axes behind its axes."""
    return jax.tree.map(lambda x, y: jnp.where(jnp.broadcast_to(where, y.shape), x, y), new, old)


def safe_hypot(x: Array, y: Array) -> Array:
    """`sqrt(x**2 + y**2)`, even if a square overflows or underflows."""
    unit = jax.lax.stop_gradient(floor_pow2(jnp.maximum(jnp.abs(x), jnp.abs(y))))
    x, y = (jnp.square(divide_by_pow2(each, unit)) for each in (x, y))
    return unit * safe_sqrt(x + y)


def _init(static: _StaticConfig, settings: Any, norms: Array) -> AdaptiveState:
    zeros = jnp.zeros(norms.shape, jnp.int32)
    return AdaptiveState(zeros, zeros, static.statistic.init(settings, norms), static.rule)


def _update(
    static: _StaticConfig,
    options: _Options,
    settings: Any,
    norms: Array,
    state: AdaptiveState,
    param_norms: Array | None,
) -> tuple[Thresholds, AdaptiveState]:
    del param_norms
    # A state that was restored from a checkpoint may hold NumPy arrays.
    state = jax.tree.map(jnp.asarray, state)
    statistic = static.statistic
    period = getattr(statistic, "window", 1)
    is_finite, largest = jnp.isfinite(norms), float(jnp.finfo(jnp.float32).max)
    # A traced floor may be negative, but a rule must not record a negative threshold as a norm.
    floor = (
        jnp.maximum(cast_to_float32(options.floor), 0)
        if static.has_floor
        else cast_to_float32(-jnp.inf)
    )
    # The state is float32, so norms in float64 are converted.
    norm = saturating_cast(jnp.where(is_finite, norms, 0), jnp.dtype(jnp.float32))
    counts = is_finite & (norm >= floor)

    def where_recorded(x: Array, where: Array) -> tuple[Array, PyTree]:
        x = jnp.clip(x, -largest, largest)
        new = statistic.observe(settings, state.statistic, x, state.num_recorded)
        count = safe_increment(state.num_recorded, where, period=period)
        return count, select_tree(where, new, state.statistic)

    count, kept = state.num_recorded, state.statistic
    if static.inclusive:
        count, kept = where_recorded(norm, counts)
    rule = statistic.compute_thresholds(settings, kept, norm, count)
    is_ready = count >= options.warmup_steps
    trigger, target = (
        jnp.where(is_ready, jnp.maximum(threshold, floor), jnp.inf) for threshold in rule
    )
    if static.reject:
        target = jnp.where(jnp.isinf(trigger), trigger, 0)
    is_above = is_finite & (norm > trigger)
    streak = jnp.where(
        is_finite,
        jnp.where(is_above, safe_increment(state.num_consecutive_clipped), 0),
        state.num_consecutive_clipped,
    )
    if not static.inclusive:
        by_record = {"raw": norm, "clipped": target, "capped": trigger, "accepted": norm}
        patience_exhausted = jnp.zeros_like(counts)
        if options.patience is not None:
            patience_exhausted = streak > options.patience
        x = jnp.where(is_above & ~patience_exhausted, by_record[static.record], norm)
        if static.record == "accepted":
            counts = counts & (~is_above | patience_exhausted)
        count, kept = where_recorded(x, counts)
    if norms.dtype == jnp.float64:
        # The conversion to float32 may have rounded a norm down to its threshold. Then the threshold is
        # raised to the float64 norm, so that the rule and the clip agree.
        trigger = trigger.astype(norms.dtype)
        trigger = jnp.where(is_finite & ~is_above, jnp.maximum(trigger, norms), trigger)
    if options.max_norm is not None:
        cap = cast_to_float32(options.max_norm)
        target = jnp.where(is_above | (norm <= cap), jnp.minimum(target, cap), cap)
        trigger = jnp.minimum(trigger, cap.astype(trigger.dtype))
    return Thresholds(trigger, target), AdaptiveState(count, streak, kept, static.rule)

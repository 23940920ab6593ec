"""Builds threshold rules from statistics of past norms."""

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
from optaxclip.thresholds._rule import check_precision, check_threshold_value, has_value

Record = Literal["raw", "clipped", "capped", "accepted"]

DEFAULT_FLOOR = 1e-8
"""Smaller gradient norms are treated as zero."""

DEFAULT_PATIENCE = 20
"""Longer runs of large norms are treated as a lasting increase instead of a spike."""


_DEFAULT_SECTIONS = {
    "Returns": """Returns:
  A `ThresholdRule`. Its thresholds are arrays with the shape and dtype of the norms.""",
    "Raises": """Raises:
  ValueError: If an option is out of range.
  TypeError: If an option is not a number, or if a decay has lower precision than float32.""",
}


def rule_factory(fn: Function) -> Function:
    """Validates calls to a function that makes a rule, and completes its docstring."""
    validated = validate_call()(fn)
    validated.__doc__ = add_default_sections(fn.__doc__, _DEFAULT_SECTIONS)
    return validated


class Statistic(Protocol):
    """A statistic of past norms, computed separately for each group in an array.

    A statistic must be hashable, because it is static under `jit`. Its numeric parameters are
    traced and passed as `settings`. It should store a standard deviation instead of a variance,
    because the square of a norm may overflow in float32.

    Set `any_sign = True` if the statistic also works for negative numbers, such as losses. If it
    writes norm number `count` to slot `count % window` of a ring buffer, it must have an attribute
    `window: int`. Before `count` overflows int32, it is then reduced by a multiple of `window`.
    """

    def init(self, settings: Any, like: Array) -> PyTree:
        """Returns the initial float32 state for groups with the shape of `like`."""
        ...

    def observe(self, settings: Any, state: PyTree, norm: Array, count: Array) -> PyTree:
        """Adds finite norms to the state, which contains `count` norms so far."""
        ...

    def compute_thresholds(
        self, settings: Any, state: PyTree, norm: Array, count: Array
    ) -> Thresholds:
        """Returns thresholds, infinite if `count` is 0. Non-finite norms are passed as 0."""
        ...


@register_state
class AdaptiveState(NamedTuple):
    """The state of an adaptive rule. Its arrays have one element per group.

    Attributes:
      num_recorded: The number of recorded norms, as int32.
      num_consecutive_clipped: The number of most recent norms in a row that exceeded their
        threshold, as int32.
      statistic: The state of the statistic.
      rule: A tuple with the name of the rule. It is static, so it is not a pytree leaf.
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
    rule: StaticNames
    has_floor: bool = True


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
    """Makes a rule from a statistic of past norms.

    All adaptive rules share these options. Published rules have neither a floor nor patience. To
    reproduce them, use `patience=None, floor=0.0`. Non-finite norms do not change the state.

    Args:
      statistic: The statistic of past norms.
      settings: A pytree of numbers for the statistic.
      record: The value to record if a norm exceeds its threshold: the norm ("raw"), the norm after
        clipping ("clipped"), the threshold ("capped"), or nothing ("accepted").
      inclusive: If True, a norm is recorded before its threshold is computed.
      reject: If True, norms above their threshold are reduced to 0 instead of their target.
      warmup_steps: The number of norms to record before clipping begins.
      floor: A lower bound on thresholds. Norms below it are not recorded.
      patience: Once more than this many norms in a row exceed their threshold, raw norms are
        recorded until a norm is within its threshold. If None, this is disabled, and clipping may
        continue forever after a lasting increase in the norms.
      max_norm: An upper bound on thresholds, also during warmup. By default, there is no bound.

    Returns:
      A `ThresholdRule`. Its thresholds are float32 or float64 arrays with the shape of the norms.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If an option is not a number, or if a flag is neither True nor False.
    """
    record = check_choice(record, get_args(Record), "record")
    warmup_steps = check_minimum(warmup_steps, 0, "warmup_steps")
    floor = check_threshold_value(floor, "floor")
    if patience is not None:
        patience = check_minimum(patience, 1, "patience")
    if max_norm is not None:
        max_norm = check_threshold_value(max_norm, "max_norm", disabled_value="None")
    options = _Options(warmup_steps, floor, patience, max_norm)
    inclusive, reject = check_bool(inclusive, "inclusive"), check_bool(reject, "reject")
    # The state contains the name of the rule: `_LogTracker` becomes "log_tracker".
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(statistic).__name__)
    name = StaticNames((words.strip("_").lower(),))
    static = _StaticConfig(statistic, record, inclusive, reject, name)
    return ThresholdRule(
        Partial(_init, static, settings), Partial(_update, static, options, settings)
    )


def remove_floor(rule: ThresholdRule, argument: str) -> ThresholdRule:
    """Removes the floor from rules made by `adaptive`, for numbers that can be negative."""
    if not isinstance(rule.update, Partial) or rule.update.func is not _update:
        return rule
    static, options, settings = rule.update.args
    if not getattr(static.statistic, "any_sign", False):
        raise ValueError(
            f"{argument} must support negative losses, but the rule {static.rule.names[0]} does "
            "not; use a number, or a rule such as thresholds.window or thresholds.zscore"
        )
    static = dataclasses.replace(static, has_floor=False)
    return dataclasses.replace(rule, update=Partial(_update, static, options, settings))


def check_minimum(value: Any, minimum: float, argument: str) -> Any:
    """Checks that `value` is a number of at least `minimum`, unless traced, and returns it."""
    return check_range(value, minimum, float("inf"), argument)


def check_range(value: Any, low: float, high: float, argument: str, remedy: str = "") -> Any:
    """Checks that `value` is a number from `low` to `high`, unless traced, and returns it.

    If `high` is finite, arrays must also be float32 or more precise.
    """
    value = check_threshold_value(value, argument)
    if high < float("inf"):
        check_precision(value, argument)
    if has_value(value) and not low <= float(jax.device_get(value)) <= high:
        wanted = f"between {low:g} and {high:g}" if high < float("inf") else f"at least {low:g}"
        raise ValueError(f"{argument} must be {wanted}, got {value!r}{remedy}")
    return value


def cast_to_float32(number: Any) -> Array:
    return jnp.asarray(number).astype(jnp.float32)


def signed_multiple(number: Any, of: Array) -> Array:
    """Returns `number * of`, or `(2 - number) * of` if `of` is negative.

    Both are `of + (number - 1) * abs(of)`. The result is infinite if an argument is infinite.
    """
    number = cast_to_float32(number)
    infinite = jnp.isinf(number) | jnp.isinf(of)
    number = jnp.where(of < 0, 2 - number, number)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 0, number) * jnp.where(infinite, 0, of))


def select_tree(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects arrays from `new` where `where` is True and from `old` elsewhere."""
    # Arrays may have a leading window axis, [window, groups].
    return jax.tree.map(lambda x, y: jnp.where(jnp.broadcast_to(where, y.shape), x, y), new, old)


def safe_hypot(x: Array, y: Array) -> Array:
    """Computes `sqrt(x**2 + y**2)` without overflow or underflow of the squares."""
    # Dividing by a power of two near the larger number prevents overflow.
    unit = jax.lax.stop_gradient(floor_pow2(jnp.maximum(jnp.abs(x), jnp.abs(y))))
    x, y = (jnp.square(divide_by_pow2(part, unit)) for part in (x, y))
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
    # States restored from checkpoints may contain NumPy arrays.
    state = jax.tree.map(jnp.asarray, state)
    statistic = static.statistic
    period = getattr(statistic, "window", 1)
    # From here on, all arrays have the shape of the norms, [groups].
    is_finite, largest = jnp.isfinite(norms), float(jnp.finfo(jnp.float32).max)
    # A traced floor can be negative, but negative thresholds must not be recorded as norms.
    floor = jnp.maximum(cast_to_float32(options.floor), 0) if static.has_floor else -jnp.inf
    # The state is float32, so float64 norms are converted.
    norm = saturating_cast(jnp.where(is_finite, norms, 0), jnp.dtype(jnp.float32))
    is_recorded = is_finite & (norm >= floor)

    def record(x: Array, where: Array) -> tuple[Array, PyTree]:
        # An average that includes an infinite threshold would stay infinite.
        x = jnp.clip(x, -largest, largest)
        observed = statistic.observe(settings, state.statistic, x, state.num_recorded)
        count = safe_increment(state.num_recorded, where, period=period)
        return count, select_tree(where, observed, state.statistic)

    count, new = state.num_recorded, state.statistic
    if static.inclusive:
        count, new = record(norm, is_recorded)
    thresholds = statistic.compute_thresholds(settings, new, norm, count)
    is_ready = count >= options.warmup_steps
    # f32[groups], infinite during the warmup
    trigger, target = (
        jnp.where(is_ready, jnp.maximum(threshold, floor), jnp.inf) for threshold in thresholds
    )
    if static.reject:
        target = jnp.where(jnp.isinf(trigger), trigger, 0)
    is_above = is_finite & (norm > trigger)  # bool[groups]
    previous = state.num_consecutive_clipped
    # Non-finite norms do not change the streak.
    streak = jnp.where(is_finite, jnp.where(is_above, safe_increment(previous), 0), previous)
    if not static.inclusive:
        by_record = {"raw": norm, "clipped": target, "capped": trigger, "accepted": norm}
        patience_exhausted = jnp.zeros_like(is_recorded)
        if options.patience is not None:
            patience_exhausted = streak > options.patience
        x = jnp.where(is_above & ~patience_exhausted, by_record[static.record], norm)
        if static.record == "accepted":
            is_recorded = is_recorded & (~is_above | patience_exhausted)
        count, new = record(x, is_recorded)
    if norms.dtype == jnp.float64:
        # If conversion to float32 rounded a norm down to its threshold, the threshold is increased
        # to the float64 norm, so that the norm is not clipped.
        trigger = trigger.astype(norms.dtype)
        trigger = jnp.where(is_finite & ~is_above, jnp.maximum(trigger, norms), trigger)
    if options.max_norm is not None:
        cap = cast_to_float32(options.max_norm)
        # Norms between the cap and their threshold are clipped to the cap.
        target = jnp.where(is_above | (norm <= cap), jnp.minimum(target, cap), cap)
        trigger = jnp.minimum(trigger, cap.astype(trigger.dtype))
    return Thresholds(trigger, target), AdaptiveState(count, streak, new, static.rule)

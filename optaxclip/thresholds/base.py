"""What all history-based rules share: what to record, when to start, how not to lock.

A rule is a `Statistic` of the norms so far, and six options with one meaning everywhere:

  option         | meaning
  ---------------|------------------------------------------------------------------------------
  `record`       | what a norm above its limit adds to the statistic: itself ("raw"), the norm it
                 | was clipped to ("clipped"), its limit ("capped"), or nothing ("accepted")
  `inclusive`    | whether a norm counts in the statistic that judges it
  `warmup_steps` | how many norms must have been recorded before there is a limit
  `floor`        | norms below it say nothing about the scale: they are not recorded, and no limit
                 | falls below it
  `patience`     | after so many norms in a row above their limit the raw norm is recorded, until
                 | a norm is at or below its limit; with None it never is
  `max_norm`     | a cap on every limit, in the warm-up too

`patience=None, floor=0.0` is the published behaviour of every rule. A norm that is not finite
leaves the state exactly as it was.
"""

import dataclasses
import re
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.counters import increased
from optaxclip._base.grouping import concatenated, split_up
from optaxclip._base.names import Names
from optaxclip._base.numerics import narrowed, power_of_two_below, safe_sqrt
from optaxclip._base.types import Limits, NormTree, PyTree, Threshold
from optaxclip.thresholds.fixed import check_limit

Record = Literal["raw", "clipped", "capped", "accepted"]

FLOOR = 1e-8
"""The default floor: gradients with such a norm are zero for all purposes."""

PATIENCE = 20
"""The default patience: no spike lasts that long."""


class Statistic(Protocol):
    """What a rule knows of the past of one group, or of an array of groups at once.

    Statistics are static and hashable; the numbers they compute with are traced. The square of a
    norm may leave the range of float32, so a statistic keeps numbers with the unit of norms, such
    as a deviation in place of a variance.
    """

    def init(self, numbers: Any, like: Array) -> PyTree:
        """The state before the first norm, float32, for groups of the shape of `like`."""
        ...

    def observe(self, numbers: Any, state: PyTree, norm: Array, count: Array) -> PyTree:
        """The state after a finite norm; `count` norms have been recorded before it."""
        ...

    def limits(self, numbers: Any, state: PyTree, norm: Array, count: Array) -> Limits:
        """The limits for this norm; infinite where there is nothing to judge it by."""
        ...


@runtime_checkable
class Windowed(Protocol):
    """A statistic that keeps a ring of values, in which the next place is `count % window`.

    When the count of norms reaches the largest int32, it is set back by `window`, so that places
    stay the same.

    Attributes:
      window: the number of values.
    """

    window: int


@runtime_checkable
class OfAnySign(Protocol):
    """A statistic that makes sense of numbers below 0 too.

    Attributes:
      any_sign: True.
    """

    any_sign: bool


class AdaptiveState(NamedTuple):
    """State of a history-based rule, one entry per group.

    Attributes:
      recorded: int32, the norms recorded so far.
      streak: int32, how many norms in a row were above their limit.
      statistic: what the statistic keeps.
      rule: the rule's name, as a tuple of one; structure, not an array.
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
    by_norm_of_all: bool

    @property
    def rule(self) -> Names:
        """The name of the rule, as that of its statistic."""
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self.statistic).__name__)
        return Names((words.strip("_").lower(),))


class _Options(NamedTuple):
    warmup_steps: Any
    floor: Any
    patience: Any
    max_norm: Any


def adaptive(
    statistic: Statistic,
    numbers: Any,
    *,
    record: Record,
    inclusive: bool = False,
    reject: bool = False,
    by_norm_of_all: bool = False,
    warmup_steps: int = 0,
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: jax.typing.ArrayLike | None = None,
) -> Threshold:
    """A rule from a statistic and the shared options, which the module explains.

    Args:
      statistic: what the rule knows of the past.
      numbers: a pytree of numbers for the statistic.
      record: what a norm above its limit adds to the statistic.
      inclusive: whether a norm counts in the statistic that judges it.
      reject: whether a norm above its limit is brought to 0, whatever the statistic says.
      by_norm_of_all: whether `limits` is given `(numbers, norm)` in place of `numbers`, where
        `norm` is the L2 norm of all groups that are finite.
      warmup_steps: how many norms must have been recorded before there is a limit.
      floor: smaller norms are not recorded, and no limit is smaller.
      patience: how many norms in a row may exceed their limit before the raw norm is recorded.
      max_norm: a cap on every limit.

    Returns:
      A `Threshold`. Its limits are arrays with the shapes of the norms, float32 or wider.

    Raises:
      ValueError: if an option is out of its range.
      TypeError: if an option is not a number.
    """
    if record not in get_args(Record):
        raise ValueError(f"record must be one of {list(get_args(Record))}, got {record!r}")
    options = _Options(
        warmup_steps=at_least(warmup_steps, 0, "warmup_steps"),
        floor=check_limit(floor, "floor"),
        patience=None if patience is None else at_least(patience, 1, "patience"),
        max_norm=None if max_norm is None else check_limit(max_norm, "max_norm"),
    )
    static = _Static(statistic, record, inclusive, reject, by_norm_of_all)
    return Threshold(Partial(_init, static, numbers), Partial(_update, static, options, numbers))


def of_any_sign(rule: Threshold, argument: str) -> Threshold:
    """The same rule for numbers that may be negative and have no scale, as losses: without a floor.

    Args:
      rule: a rule of `adaptive`; any other is left as it is.
      argument: what it is called in messages.

    Raises:
      ValueError: for a rule that makes no sense of numbers below 0.
    """
    if not isinstance(rule.update, Partial) or rule.update.func is not _update:
        return rule
    static, options, numbers = rule.update.args
    if not isinstance(static.statistic, OfAnySign):
        raise ValueError(
            f"{argument} must be a rule for numbers of any sign, as a loss may be negative; got "
            "one for norms alone: use thresholds.window, zscore, percentile, median or ema, or a "
            "number"
        )
    options = options._replace(floor=-jnp.inf)
    return dataclasses.replace(rule, update=Partial(_update, static, options, numbers))


def at_least(value: Any, least: float, argument: str) -> Any:
    """`value`, checked to be a number of at least `least` where it is concrete.

    Raises:
      ValueError: if it is less.
      TypeError: if it is not a number.
    """
    return within(value, least, float("inf"), argument)


def as_float(number: Any) -> Array:
    """A number of any kind as float32."""
    return jnp.asarray(number).astype(jnp.float32)


def multiple(number: Any, of: Array) -> Array:
    """`number * of`; infinite if either is, even where the other is 0.

    For negative `of` it is `of + (number - 1) * abs(of)`, as far above it.
    """
    number = as_float(number)
    infinite = jnp.isinf(number) | jnp.isinf(of)
    number = jnp.where(of < 0, 2 - number, number)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 0, number) * jnp.where(infinite, 0, of))


def within(value: Any, low: float, high: float, argument: str) -> Any:
    """`value`, checked to be a number in `[low, high]` where it is concrete.

    Raises:
      ValueError: if it is not.
      TypeError: if it is not a number.
    """
    value = check_limit(value, argument)
    if not isinstance(value, jax.Array) and not low <= float(value) <= high:
        raise ValueError(f"{argument} must be from {low:g} to {high:g}, got {value!r}")
    return value


def select(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `where`, else `old`; arrays may have leading axes that `where` lacks."""
    return jax.tree.map(lambda x, y: jnp.where(jnp.broadcast_to(where, y.shape), x, y), new, old)


def root_of_squares(x: Array, y: Array) -> Array:
    """`sqrt(x**2 + y**2)`, also where a square leaves the range."""
    unit = jax.lax.stop_gradient(power_of_two_below(jnp.maximum(jnp.abs(x), jnp.abs(y))))
    return unit * safe_sqrt(jnp.square(x / unit) + jnp.square(y / unit))


def _init(static: _Static, numbers: Any, norms: NormTree) -> AdaptiveState:
    norm = _as_one(norms)
    zeros = jnp.zeros(norm.shape, jnp.int32)
    return AdaptiveState(zeros, zeros, static.statistic.init(numbers, norm), static.rule)


def _update(
    static: _Static,
    options: _Options,
    numbers: Any,
    norms: NormTree,
    state: AdaptiveState,
    param_norms: NormTree | None,
) -> tuple[Limits, AdaptiveState]:
    del param_norms
    # One that was restored may be of NumPy arrays.
    state = jax.tree.map(jnp.asarray, state)
    limits, state = _step(static, options, numbers, _as_one(norms), state)
    return Limits(*(_like(norms, field) for field in limits)), state


def _as_one(norms: NormTree) -> Array:
    """All norms in one array, so that the structure of the state does not depend on the groups."""
    leaves = jax.tree.leaves(norms)
    return leaves[0] if len(leaves) == 1 else concatenated(leaves)


def _like(norms: NormTree, limits: Array) -> NormTree:
    """Limits in the structure of norms."""
    leaves, structure = jax.tree.flatten(norms)
    if len(leaves) == 1:
        return jax.tree.unflatten(structure, [limits])
    return jax.tree.unflatten(structure, split_up(limits, [norm.shape for norm in leaves]))


def _norm_of_all(norms: Array) -> Array:
    """The L2 norm of all groups that are finite."""
    finite = jnp.where(jnp.isfinite(norms), norms, 0)
    unit = power_of_two_below(jnp.max(finite, initial=0))
    return unit * safe_sqrt(jnp.sum(jnp.square(finite / unit)))


def _step(
    static: _Static, options: _Options, numbers: Any, norm: Array, state: AdaptiveState
) -> tuple[Limits, AdaptiveState]:
    statistic = static.statistic
    period = statistic.window if isinstance(statistic, Windowed) else 1
    is_finite, most = jnp.isfinite(norm), float(jnp.finfo(jnp.float32).max)
    # The state keeps float32.
    exact, norm = norm, narrowed(jnp.where(is_finite, norm, 0), jnp.dtype(jnp.float32))
    counts = is_finite & (norm >= as_float(options.floor))

    def recorded(x: Array, where: Array) -> tuple[Array, PyTree]:
        new = statistic.observe(numbers, state.statistic, jnp.clip(x, -most, most), state.recorded)
        return increased(state.recorded, where, period=period), select(where, new, state.statistic)

    count, known = state.recorded, state.statistic
    if static.inclusive:
        count, known = recorded(norm, counts)
    known_numbers = (numbers, _norm_of_all(norm)) if static.by_norm_of_all else numbers
    rule = statistic.limits(known_numbers, known, norm, count)
    is_ready = count >= options.warmup_steps
    trigger, target = (
        jnp.where(is_ready, jnp.maximum(limit, as_float(options.floor)), jnp.inf) for limit in rule
    )
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
        count, known = recorded(x, counts)
    if exact.dtype == jnp.float64:
        # What float32 rounds, or cannot hold, is not above its limit by that alone.
        trigger = trigger.astype(exact.dtype)
        trigger = jnp.where(is_finite & ~is_above, jnp.maximum(trigger, exact), trigger)
    if options.max_norm is not None:
        cap = as_float(options.max_norm)
        target = jnp.where(is_above | (norm <= cap), jnp.minimum(target, cap), cap)
        trigger = jnp.minimum(trigger, cap.astype(trigger.dtype))
    return Limits(trigger, target), AdaptiveState(count, streak, known, static.rule)

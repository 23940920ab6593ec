"""What all history-based rules share: what to record, when to start, how not to lock.

A rule is a `Statistic` of the norms so far, and six options with one meaning everywhere:

  option         | meaning
  ---------------|------------------------------------------------------------------------------
  `record`       | what a norm above its limit adds to the statistic: itself ("raw"), the norm it
                 | was clipped to ("clipped"), its limit ("capped"), or nothing ("accepted")
  `inclusive`    | whether a norm is already in the statistic that judges it
  `warmup_steps` | how many norms must have been recorded before there is a limit
  `floor`        | norms below it say nothing about the scale: they are not recorded, and no limit
                 | falls below it
  `patience`     | after so many norms above their limit in a row the raw norm is recorded, until
                 | one passes; never if None
  `max_norm`     | a cap on every limit, in the warm-up too

`patience=None, floor=0.0` is the published behaviour of every rule. A norm that is not finite
leaves the state exactly as it was.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.counters import increased
from optaxclip._base.devices import (
    Axes,
    largest,
    manual_axes,
    sum_over_devices,
    tracks,
    varying_axes,
)
from optaxclip._base.numerics import power_of_two_below, safe_sqrt
from optaxclip._base.types import Limits, NormTree, PyTree, Threshold
from optaxclip.thresholds.fixed import check_limit

Record = Literal["raw", "clipped", "capped", "accepted"]

FLOOR = 1e-8
"""The default floor: gradients with such a norm are zero for all purposes."""

PATIENCE = 20
"""The default patience: no spike lasts that long."""


_LARGEST = 1e18
"""Norms are recorded up to here, so that the square of one never overflows."""


class Statistic(Protocol):
    """What a rule knows of the past of one group, or of an array of groups at once.

    Statistics are static and hashable; the numbers they compute with are traced. One that keeps a
    ring of values says how many in an attribute `window`: `count % window` then goes round it, even
    where `count` has become as large as it can be. One that makes sense of numbers below 0 too says
    so in an attribute `any_sign`.
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


class AdaptiveState(NamedTuple):
    """State of a history-based rule, one entry per group.

    Attributes:
      recorded: int32, the norms recorded so far.
      streak: int32, how many norms in a row were above their limit.
      statistic: what the statistic keeps.
    """

    recorded: Array
    streak: Array
    statistic: PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    statistic: Statistic
    record: Record
    inclusive: bool
    reject: bool
    by_whole: bool


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
    by_whole: bool = False,
    warmup_steps: int = 0,
    floor: float = FLOOR,
    patience: int | None = PATIENCE,
    max_norm: jax.typing.ArrayLike | None = None,
) -> Threshold:
    """A rule from a statistic and the shared options, which the module explains.

    Args:
      statistic: what to know of the past.
      numbers: a pytree of numbers for the statistic.
      record: what a norm above its limit adds to the statistic.
      inclusive: whether a norm is in the statistic that judges it.
      reject: whether a norm above its limit is brought to 0, whatever the statistic says.
      by_whole: whether `limits` is given `(numbers, whole)` in the place of `numbers`, where
        `whole` is the L2 norm of all groups that are finite.
      warmup_steps: how many norms must have been recorded before there is a limit.
      floor: the least norm that counts, and the least limit.
      patience: how many norms in a row may exceed their limit before the raw norm is recorded.
      max_norm: a cap on every limit.

    Returns:
      A `Threshold`, whose limits are float32 arrays of the shapes of the norms.

    Raises:
      ValueError: for an option out of its range.
      TypeError: for an option that is no number.
    """
    if record not in get_args(Record):
        raise ValueError(f"record must be one of {list(get_args(Record))}, got {record!r}")
    options = _Options(
        warmup_steps=at_least(warmup_steps, 0, "warmup_steps"),
        floor=check_limit(floor, "floor"),
        patience=None if patience is None else at_least(patience, 1, "patience"),
        max_norm=None if max_norm is None else check_limit(max_norm, "max_norm"),
    )
    static = _Static(statistic, record, inclusive, reject, by_whole)
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
    if not getattr(static.statistic, "any_sign", False):
        raise ValueError(
            f"{argument} must be a rule for numbers of any sign, got one for numbers of at least 0 "
            "alone: use thresholds.window, zscore, percentile, median or ema, or a number"
        )
    options = options._replace(floor=-jnp.inf)
    return dataclasses.replace(rule, update=Partial(_update, static, options, numbers))


def at_least(value: Any, least: float, argument: str) -> Any:
    """`value`, checked to be a number of at least `least` where it is concrete.

    Raises:
      ValueError: if it is less.
      TypeError: if it is no number.
    """
    return within(value, least, float("inf"), argument)


def as_float(number: Any) -> Array:
    """A number of any kind as float32."""
    return jnp.asarray(number).astype(jnp.float32)


def multiple(number: Any, of: Array) -> Array:
    """`number * of`; infinite if either is, even where the other is 0.

    Below 0, where more is nearer to 0, it is as far above `of` as it would be above `-of`.
    """
    number = as_float(number)
    infinite = jnp.isinf(number) | jnp.isinf(of)
    number = jnp.where(of < 0, 2 - number, number)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 0, number) * jnp.where(infinite, 0, of))


def within(value: Any, low: float, high: float, argument: str) -> Any:
    """`value`, checked to be a number in `[low, high]` where it is concrete.

    Raises:
      ValueError: if it is not.
      TypeError: if it is no number.
    """
    value = check_limit(value, argument)
    if not isinstance(value, jax.Array) and not low <= float(value) <= high:
        raise ValueError(f"{argument} must be from {low:g} to {high:g}, got {value!r}")
    return value


def select(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `where`, else `old`; arrays may have leading axes that `where` lacks."""
    return jax.tree.map(lambda x, y: jnp.where(jnp.broadcast_to(where, y.shape), x, y), new, old)


def _init(static: _Static, numbers: Any, norms: NormTree) -> list[AdaptiveState]:
    def init(norm: Array) -> AdaptiveState:
        zeros = jnp.zeros(norm.shape, jnp.int32)
        return AdaptiveState(zeros, zeros, static.statistic.init(numbers, norm))

    return [init(norm) for norm in jax.tree.leaves(norms)]


def _update(
    static: _Static,
    options: _Options,
    numbers: Any,
    norms: NormTree,
    states: list[AdaptiveState],
    param_norms: NormTree | None,
) -> tuple[Limits, list[AdaptiveState]]:
    del param_norms
    leaves, structure = jax.tree.flatten(norms)
    leaves = [norm.astype(jnp.float32) for norm in leaves]
    whole = _whole(leaves, isinstance(norms, dict)) if static.by_whole else None
    steps = [
        _step(static, options, numbers, whole, norm, state)
        for norm, state in zip(leaves, states, strict=True)
    ]
    trigger = jax.tree.unflatten(structure, [limits.trigger for limits, _ in steps])
    target = jax.tree.unflatten(structure, [limits.target for limits, _ in steps])
    return Limits(trigger, target), [state for _, state in steps]


def _whole(norms: list[Array], may_be_split: bool) -> Array:
    """The L2 norm of all groups that are finite, wherever they are.

    Args:
      norms: of the groups.
      may_be_split: whether other devices may hold other groups of the same leaves.

    Raises:
      ValueError: where devices may hold groups that nothing tells of.
    """
    manual = manual_axes()
    if manual and may_be_split and any(norm.ndim for norm in norms) and not tracks(manual):
        raise ValueError(
            "the limit depends on the norms of all groups, and inside pmap or "
            "shard_map(check_vma=False) nothing tells which of them other devices hold; use "
            "shard_map(check_vma=True), or clip outside of it"
        )
    zero, by_axes = jnp.zeros((), jnp.float32), dict[Axes, list[Array]]()
    for norm in norms:
        finite = jnp.where(jnp.isfinite(norm), norm, 0)
        by_axes.setdefault(varying_axes(norm), []).append(finite)
    tops = [
        largest(functools.reduce(jnp.maximum, [jnp.max(x, initial=0) for x in some]), axes)
        for axes, some in by_axes.items()
    ]
    unit = power_of_two_below(functools.reduce(jnp.maximum, tops, zero))
    squares = [
        sum_over_devices(sum((jnp.sum(jnp.square(x / unit)) for x in some), zero), axes)
        for axes, some in by_axes.items()
    ]
    return unit * safe_sqrt(sum(squares, zero))


def _step(
    static: _Static,
    options: _Options,
    numbers: Any,
    whole: Array | None,
    norm: Array,
    state: AdaptiveState,
) -> tuple[Limits, AdaptiveState]:
    statistic, period = static.statistic, getattr(static.statistic, "window", 1)
    is_finite = jnp.isfinite(norm)
    norm = jnp.where(is_finite, norm, 0)
    counts = is_finite & (norm >= as_float(options.floor))

    def recorded(x: Array, where: Array) -> tuple[Array, PyTree]:
        x = jnp.clip(x, -_LARGEST, _LARGEST)
        new = statistic.observe(numbers, state.statistic, x, state.recorded)
        return increased(state.recorded, where, period=period), select(where, new, state.statistic)

    count, known = recorded(norm, counts) if static.inclusive else (state.recorded, state.statistic)
    known_numbers = numbers if whole is None else (numbers, whole)
    rule = statistic.limits(known_numbers, known, norm, count)
    is_ready = count >= options.warmup_steps
    trigger, target = (
        jnp.where(is_ready, jnp.maximum(limit, as_float(options.floor)), jnp.inf) for limit in rule
    )
    target = jnp.zeros_like(target) if static.reject else target
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
    if options.max_norm is not None:
        cap = as_float(options.max_norm)
        target = jnp.where(is_above | (norm <= cap), jnp.minimum(target, cap), cap)
        trigger = jnp.minimum(trigger, cap)
    return Limits(trigger, target), AdaptiveState(count, streak, known)

"""Thresholds that do not depend on the past: a constant, a schedule, a share of the parameters."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.state import StaticNames, safe_increment
from optaxclip._base.types import ArrayLike, PyTree, ThresholdRule, Thresholds
from optaxclip.thresholds.adaptive import rule_factory
from optaxclip.thresholds.rule import (
    apply_by_name,
    check_not_component,
    check_rule,
    check_schedule,
    check_threshold_value,
)

ScalarOrSchedule: TypeAlias = ArrayLike | Callable[[Array], ArrayLike]
ThresholdLike: TypeAlias = (
    ScalarOrSchedule | ThresholdRule | Mapping[str, ScalarOrSchedule | ThresholdRule]
)


@rule_factory
def constant(threshold: ArrayLike) -> ThresholdRule:
    """The same threshold at every step.

    Args:
      threshold: a scalar.

    Raises:
      ValueError: if `threshold` is not a scalar, or is a negative or NaN number. (A traced threshold below
        0 acts as 0, a traced NaN makes the groups NaN.)
      TypeError: if `threshold` is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.constant(1.0)
      >>> thresholds, _ = rule.update(jnp.array([3.0, 0.5]), rule.init(jnp.zeros(2)), None)
      >>> print(thresholds.target)
      [1. 1.]
    """
    return _constant_rule(check_threshold_value(threshold, "threshold", disabled_value="math.inf"))


@rule_factory
def schedule(fn: Callable[[Array], ArrayLike]) -> ThresholdRule:
    """A threshold `fn(count)`, where `count` is the number of steps so far: 0 at the first step.

    Args:
      fn: an Optax schedule, or any traceable function from int32[] to a scalar.

    Raises:
      ValueError: if a value of the schedule is not a scalar.
      TypeError: if `fn` is not a function from a step count to a number. To check this, it is
        traced once.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> rule = optaxclip.thresholds.schedule(optax.linear_schedule(2.0, 1.0, 1))
      >>> norm = jnp.array(3.0)
      >>> _, state = rule.update(norm, rule.init(norm), None)
      >>> print(rule.update(norm, state, None)[0].target)
      1.0
    """
    return _rule_of_schedule(fn, "fn")


def _constant_rule(checked: Any) -> ThresholdRule:
    return ThresholdRule(Partial(_no_state), Partial(_constant, checked))


def _rule_of_schedule(fn: Callable[[Array], ArrayLike], argument: str) -> ThresholdRule:
    """`schedule`, with `argument` as the function's name in messages."""
    checked = Partial(check_schedule(fn, argument))
    return ThresholdRule(Partial(_init_count), Partial(_scheduled_update, _Schedule(checked)))


@rule_factory
def relative_to_params(ratio: ScalarOrSchedule, eps: ArrayLike = 1e-3) -> ThresholdRule:
    """A threshold of `ratio * max(norm of the parameters, eps)` for each group.

    Source: Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.

    Args:
      ratio: the largest allowed ratio of gradient norm to parameter norm, or a schedule of it.
      eps: a floor under the parameter norm; without it, parameters of zero would stay zero.

    Raises:
      ValueError: if `ratio` or `eps` is not a scalar, or is a negative or NaN number.
      TypeError: if `ratio` or `eps` is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.relative_to_params(0.01)
      >>> norms, param_norms = jnp.array([3.0, 4.0]), jnp.array([5.0, 0.0])
      >>> print(rule.update(norms, rule.init(norms), param_norms)[0].target)
      [5.e-02 1.e-05]
    """
    return relative(ratio, eps, "ratio")


def relative(ratio: ScalarOrSchedule, eps: ArrayLike, argument: str) -> ThresholdRule:
    """`relative_to_params`, with `argument` as the name of `ratio` in messages."""
    eps = check_threshold_value(eps, "eps")
    if callable(ratio):
        inner = _rule_of_schedule(ratio, argument)
    else:
        inner = _constant_rule(
            check_threshold_value(ratio, argument, disabled_value="math.inf", schedule=True)
        )
    return ThresholdRule(inner.init, Partial(_relative, inner.update, eps), uses_params=True)


@rule_factory
def fixed(thresholds: Thresholds) -> ThresholdRule:
    """The given thresholds at every step, a trigger and a target for each group.

    Args:
      thresholds: triggers and targets: each is one number or an array of the shape of the norms.

    Raises:
      ValueError: (when used) if a field does not broadcast to the shape of the norms.
    """
    return ThresholdRule(Partial(_no_state), Partial(_fixed_update, thresholds))


def check_threshold(
    threshold: ThresholdLike, argument: str = "threshold"
) -> ThresholdRule | dict[str, Any]:
    """A threshold that a user passed, checked: as a rule, or as a dict of rules and numbers by name.

    A rule is a pytree, so it can be an argument of `jit`.
    """
    if isinstance(threshold, Mapping):
        return {name: _check_one(each, f"{argument}[{name!r}]") for name, each in threshold.items()}
    return _make_rule(_check_one(threshold, argument)).as_pytree()


def _check_one(threshold: ScalarOrSchedule | ThresholdRule, argument: str) -> Any:
    """One threshold, checked: as a rule, or as a number."""
    if isinstance(threshold, ThresholdRule):
        return check_rule(threshold, argument)
    check_not_component(threshold, argument)
    if callable(threshold):
        return _rule_of_schedule(threshold, argument)
    return check_threshold_value(threshold, argument, disabled_value="math.inf", schedule=True)


def _make_rule(checked: Any) -> ThresholdRule:
    return checked if isinstance(checked, ThresholdRule) else _constant_rule(checked)


def resolve_rule(
    threshold: ThresholdRule | dict[str, Any],
    entries: Sequence[tuple[str, tuple[int, ...]]],
    is_part: bool = False,
) -> ThresholdRule:
    """The rule of a checked threshold for these entries of the norms: a name and a shape for each.

    Without entries, as for parameters without leaves, the names are those of the threshold. In a part
    of a tree, groups of the threshold may be missing.
    """
    if isinstance(threshold, ThresholdRule):
        return threshold
    entries = entries or [(name, ()) for name in sorted(threshold)]
    names = [name for name, _ in entries]
    if not set(names) <= set(threshold) or (len(threshold) > len(names) and not is_part):
        groups = (
            f"thresholds are given for the groups {sorted(threshold)}, but the groups are {names}"
        )
        raise ValueError(f"{groups}: give one threshold for each of these, and no others")
    groups = StaticNames(tuple(names), tuple(shape for _, shape in entries))
    return apply_by_name({name: _make_rule(threshold[name]) for name in names}, groups)


def stateless_rule_state(threshold: ThresholdRule | dict[str, Any], name: str) -> PyTree:
    """The state of a checked threshold without memory, which is the same at every step."""

    def rule_state(rule: ThresholdRule) -> PyTree:
        state = jax.eval_shape(rule.init, jax.ShapeDtypeStruct((1,), jnp.float32))
        if jax.tree.leaves(state):
            raise ValueError(needs_state_message(name))
        return state

    if isinstance(threshold, dict):
        return {group: rule_state(_make_rule(each)) for group, each in threshold.items()}
    return rule_state(threshold)


def needs_state_message(name: str) -> str:
    """The message for a threshold that depends on earlier steps where `record=False`."""
    return (
        f"{name}: with record=False there is no state, which this threshold needs because it depends "
        "on earlier steps; leave record=False out, or take a constant threshold"
    )


def evaluate_schedules(rule: ThresholdRule, state: PyTree) -> ThresholdRule:
    """The rule, with each schedule replaced by its value at this step.

    Thus one compiled program serves all steps and all schedules. Rules that contain other rules
    evaluate their schedules themselves, and are returned as they are.
    """
    # A state of any other shape belongs to another rule; a later check refuses it.
    is_count = getattr(state, "shape", None) == ()
    if getattr(rule.update, "func", None) not in (_scheduled_update, _relative) or not is_count:
        return rule

    def evaluate(x: Any) -> Any:
        return x(state) if isinstance(x, _Schedule) else x

    return jax.tree.map(evaluate, rule, is_leaf=lambda x: isinstance(x, _Schedule))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Schedule:
    """A schedule inside of a rule whose state is the number of steps."""

    fn: Callable[[Array], Any]

    def __call__(self, count: Array) -> Any:
        return check_threshold_value(self.fn(count), "the schedule's value", allow_any_number=True)


def _no_state(norms: Array) -> tuple[()]:
    del norms
    return ()


def _init_count(norms: Array) -> Array:
    del norms
    return jnp.zeros((), jnp.int32)


def _broadcast_threshold(threshold: Any, norms: Array) -> Array:
    """A threshold in the shape and dtype of the norms."""
    return jnp.broadcast_to(jnp.asarray(threshold).astype(norms.dtype), norms.shape)


def _constant(
    threshold: Any, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Thresholds, tuple[()]]:
    del param_norms
    thresholds = _broadcast_threshold(threshold, norms)
    return Thresholds(thresholds, thresholds), state


def _fixed_update(
    thresholds: Thresholds, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Thresholds, tuple[()]]:
    del param_norms
    return Thresholds(*(_broadcast_threshold(field, norms) for field in thresholds)), state


def _scheduled_update(
    threshold: Any, norms: Array, count: Array, param_norms: Array | None
) -> tuple[Thresholds, Array]:
    del param_norms
    thresholds = _broadcast_threshold(
        threshold(count) if isinstance(threshold, _Schedule) else threshold, norms
    )
    return Thresholds(thresholds, thresholds), safe_increment(count)


def _relative(
    inner: Callable[..., tuple[Thresholds, PyTree]],
    eps: Any,
    norms: Array,
    state: PyTree,
    param_norms: Array,
) -> tuple[Thresholds, PyTree]:
    (ratio, _), state = inner(norms, state, None)
    size = jnp.maximum(param_norms.astype(ratio.dtype), jnp.asarray(eps).astype(ratio.dtype))
    # The product gets 0 for an infinite ratio: even unselected, its derivatives must be finite.
    is_infinite = jnp.isinf(ratio)
    thresholds = jnp.where(is_infinite, ratio, jnp.where(is_infinite, 0, ratio) * size)
    return Thresholds(thresholds, thresholds), state

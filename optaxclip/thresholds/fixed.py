"""Limits that do not depend on the past: a constant, a schedule, a share of the parameters."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from optaxclip._base.states import Names, increased
from optaxclip._base.types import ArrayLike, Limits, PyTree, Threshold
from optaxclip.thresholds.base import makes_rule
from optaxclip.thresholds.by_name import by_name
from optaxclip.thresholds.calling import checked_rule, checked_schedule
from optaxclip.thresholds.checks import checked_limit, refuse_parts

ScalarOrSchedule: TypeAlias = ArrayLike | Callable[[Array], ArrayLike]
LimitLike: TypeAlias = ScalarOrSchedule | Threshold | Mapping[str, ScalarOrSchedule | Threshold]


@makes_rule
def constant(limit: ArrayLike) -> Threshold:
    """The same limit at every step.

    Args:
      limit: a scalar.

    Raises:
      ValueError: if `limit` is not a scalar, or is a negative or NaN number. (A traced limit below
        0 acts as 0, a traced NaN makes the groups NaN.)
      TypeError: if `limit` is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.constant(1.0)
      >>> limits, _ = rule.update(jnp.array([3.0, 0.5]), rule.init(jnp.zeros(2)), None)
      >>> print(limits.target)
      [1. 1.]
    """
    return _constant_rule(checked_limit(limit, "limit", off="math.inf"))


@makes_rule
def schedule(fn: Callable[[Array], ArrayLike]) -> Threshold:
    """A limit `fn(count)`, where `count` is the number of steps so far: 0 at the first step.

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


def _constant_rule(checked: Any) -> Threshold:
    return Threshold(Partial(_no_state), Partial(_constant, checked))


def _rule_of_schedule(fn: Callable[[Array], ArrayLike], argument: str) -> Threshold:
    """`schedule`, with `argument` as the function's name in messages."""
    checked = Partial(checked_schedule(fn, argument))
    return Threshold(Partial(_zero_count), Partial(_scheduled, _Schedule(checked)))


@makes_rule
def relative_to_params(ratio: ScalarOrSchedule, eps: ArrayLike = 1e-3) -> Threshold:
    """A limit of `ratio * max(norm of the parameters, eps)` for each group.

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


def relative(ratio: ScalarOrSchedule, eps: ArrayLike, argument: str) -> Threshold:
    """`relative_to_params`, with `argument` as the name of `ratio` in messages."""
    eps = checked_limit(eps, "eps")
    if callable(ratio):
        inner = _rule_of_schedule(ratio, argument)
    else:
        inner = _constant_rule(checked_limit(ratio, argument, off="math.inf", schedule=True))
    return Threshold(inner.init, Partial(_relative, inner.update, eps), uses_params=True)


@makes_rule
def given(limits: Limits) -> Threshold:
    """The given limits at every step, a trigger and a target for each group.

    Args:
      limits: triggers and targets: each is one number or an array of the shape of the norms.

    Raises:
      ValueError: (when used) if a field does not broadcast to the shape of the norms.
    """
    return Threshold(Partial(_no_state), Partial(_given, limits))


def as_limit(limit: LimitLike, argument: str = "limit") -> Threshold | dict[str, Any]:
    """A limit that a user passed, checked: as a rule, or as a dict of rules and numbers by name.

    A rule is a pytree, so it can be an argument of `jit`.
    """
    if isinstance(limit, Mapping):
        return {name: _checked(each, f"{argument}[{name!r}]") for name, each in limit.items()}
    return _as_rule(_checked(limit, argument)).as_pytree()


def _checked(limit: ScalarOrSchedule | Threshold, argument: str) -> Any:
    """One limit, checked: as a rule, or as a number."""
    if isinstance(limit, Threshold):
        return checked_rule(limit, argument)
    refuse_parts(limit, argument)
    if callable(limit):
        return _rule_of_schedule(limit, argument)
    return checked_limit(limit, argument, off="math.inf", schedule=True)


def _as_rule(checked: Any) -> Threshold:
    return checked if isinstance(checked, Threshold) else _constant_rule(checked)


def rule_for(
    limit: Threshold | dict[str, Any],
    entries: Sequence[tuple[str, tuple[int, ...]]],
    is_part: bool = False,
) -> Threshold:
    """The rule of a checked limit for these entries of the norms: a name and a shape for each.

    Without entries, as for parameters without leaves, the names are those of the limit. In a part
    of a tree, groups of the limit may be missing.
    """
    if isinstance(limit, Threshold):
        return limit
    entries = entries or [(name, ()) for name in sorted(limit)]
    names = [name for name, _ in entries]
    if not set(names) <= set(limit) or (len(limit) > len(names) and not is_part):
        groups = f"limits are given for the groups {sorted(limit)}, but the groups are {names}"
        raise ValueError(f"{groups}: give one limit for each of these, and no others")
    groups = Names(tuple(names), tuple(shape for _, shape in entries))
    return by_name({name: _as_rule(limit[name]) for name in names}, groups)


def state_of_fixed(limit: Threshold | dict[str, Any], name: str) -> PyTree:
    """The state of a checked limit without memory, which is the same at every step."""

    def of(rule: Threshold) -> PyTree:
        state = jax.eval_shape(rule.init, jax.ShapeDtypeStruct((1,), jnp.float32))
        if jax.tree.leaves(state):
            raise ValueError(without_memory(name))
        return state

    if isinstance(limit, dict):
        return {group: of(_as_rule(each)) for group, each in limit.items()}
    return of(limit)


def without_memory(name: str) -> str:
    """The message for a limit that depends on earlier steps where `record=False`."""
    return (
        f"{name}: with record=False there is no state, which this limit needs because it depends "
        "on earlier steps; leave record=False out, or take a constant limit"
    )


def at_step(rule: Threshold, state: PyTree) -> Threshold:
    """The rule, with each schedule replaced by its value at this step.

    Thus one compiled program serves all steps and all schedules. Rules that contain other rules
    evaluate their schedules themselves, and are returned as they are.
    """
    # A state of any other shape belongs to another rule; a later check refuses it.
    is_count = getattr(state, "shape", None) == ()
    if getattr(rule.update, "func", None) not in (_scheduled, _relative) or not is_count:
        return rule

    def now(x: Any) -> Any:
        return x(state) if isinstance(x, _Schedule) else x

    return jax.tree.map(now, rule, is_leaf=lambda x: isinstance(x, _Schedule))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Schedule:
    """A schedule inside of a rule whose state is the number of steps."""

    fn: Callable[[Array], Any]

    def __call__(self, count: Array) -> Any:
        return checked_limit(self.fn(count), "the schedule's value", allow_any_number=True)


def _no_state(norms: Array) -> tuple[()]:
    del norms
    return ()


def _zero_count(norms: Array) -> Array:
    del norms
    return jnp.zeros((), jnp.int32)


def _filled(limit: Any, norms: Array) -> Array:
    """A limit in the shape and dtype of the norms."""
    return jnp.broadcast_to(jnp.asarray(limit).astype(norms.dtype), norms.shape)


def _constant(
    limit: Any, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Limits, tuple[()]]:
    del param_norms
    limits = _filled(limit, norms)
    return Limits(limits, limits), state


def _given(
    limits: Limits, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Limits, tuple[()]]:
    del param_norms
    return Limits(*(_filled(field, norms) for field in limits)), state


def _scheduled(
    limit: Any, norms: Array, count: Array, param_norms: Array | None
) -> tuple[Limits, Array]:
    del param_norms
    limits = _filled(limit(count) if isinstance(limit, _Schedule) else limit, norms)
    return Limits(limits, limits), increased(count)


def _relative(
    inner: Callable[..., tuple[Limits, PyTree]],
    eps: Any,
    norms: Array,
    state: PyTree,
    param_norms: Array,
) -> tuple[Limits, PyTree]:
    (ratio, _), state = inner(norms, state, None)
    size = jnp.maximum(param_norms.astype(ratio.dtype), jnp.asarray(eps).astype(ratio.dtype))
    # The product gets 0 for an infinite ratio: even unselected, its derivatives must be finite.
    is_infinite = jnp.isinf(ratio)
    limits = jnp.where(is_infinite, ratio, jnp.where(is_infinite, 0, ratio) * size)
    return Limits(limits, limits), state

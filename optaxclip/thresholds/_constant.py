"""Rules for constant, scheduled and relative thresholds, and conversion of thresholds to rules."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

import optaxclip._backend.meshes as meshes
from optaxclip._backend.packing import ravel_and_concatenate, split_and_reshape
from optaxclip._base.numerics import is_real
from optaxclip._base.state import StaticNames, safe_increment
from optaxclip._base.types import ArrayLike, PyTree, ThresholdRule, Thresholds
from optaxclip._base.validation import short_repr
from optaxclip.thresholds._adaptive import remove_floor, rule_factory
from optaxclip.thresholds._rule import (
    call_rule,
    check_not_component,
    check_schedule,
    check_threshold_value,
)

ScalarOrSchedule: TypeAlias = ArrayLike | Callable[[Array], ArrayLike]
ThresholdLike: TypeAlias = (
    ScalarOrSchedule | ThresholdRule | Mapping[str, ScalarOrSchedule | ThresholdRule]
)


@rule_factory
def constant(threshold: ArrayLike) -> ThresholdRule:
    """Uses the same threshold on all steps.

    Args:
      threshold: A scalar.

    Raises:
      ValueError: If `threshold` is negative, NaN or not a scalar. Under `jit`, a negative threshold
        is treated as 0, and NaN makes the clipped gradients NaN.
      TypeError: If `threshold` is not a number.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.constant(1.0)
      >>> thresholds, _ = rule.update(jnp.array([3.0, 0.5]), rule.init(jnp.zeros(2)), None)
      >>> print(thresholds.target)
      [1. 1.]
    """
    number = check_threshold_value(threshold, "threshold", disabled_value="math.inf")
    return ThresholdRule(Partial(_init_empty), Partial(_update_constant, number))


@rule_factory
def schedule(fn: Callable[[Array], ArrayLike]) -> ThresholdRule:
    """Uses the threshold `fn(count)`, where `count` is 0 on the first step.

    Args:
      fn: An Optax schedule or any other traceable function from int32[] to a scalar.

    Raises:
      ValueError: If `fn` does not return a scalar.
      TypeError: If `fn` is not a function that returns a number. To check this, `fn` is traced.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> rule = optaxclip.thresholds.schedule(optax.linear_schedule(2.0, 1.0, 1))
      >>> norm = jnp.array(3.0)
      >>> _, state = rule.update(norm, rule.init(norm), None)
      >>> print(rule.update(norm, state, None)[0].target)
      1.0
    """
    return count_steps(_Schedule(Partial(check_schedule(fn, "fn"))))


@rule_factory
def relative_to_params(ratio: ScalarOrSchedule, eps: ArrayLike = 1e-3) -> ThresholdRule:
    """Uses the threshold `ratio * max(norm of the parameters, eps)` for all groups.

    Source: Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.

    Args:
      ratio: The maximum ratio of gradient norm to parameter norm, or a schedule for this ratio.
      eps: The lower bound on the parameter norm. If 0, parameters that are zero stay zero.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> rule = optaxclip.thresholds.relative_to_params(0.01)
      >>> norms, param_norms = jnp.array([3.0, 4.0]), jnp.array([5.0, 0.0])
      >>> print(rule.update(norms, rule.init(norms), param_norms)[0].target)
      [5.e-02 1.e-05]
    """
    return relative(ratio, eps, "ratio")


def relative(ratio: ScalarOrSchedule, eps: ArrayLike, argument: str) -> ThresholdRule:
    """Makes the rule of `relative_to_params`, with `argument` as the name of the ratio."""
    eps = check_threshold_value(eps, "eps")
    if callable(ratio):
        inner = make_rule(ratio, argument)
    else:
        ratio = check_threshold_value(ratio, argument, disabled_value="math.inf", schedule=True)
        inner = ThresholdRule(Partial(_init_empty), Partial(_update_constant, ratio))
    return ThresholdRule(inner.init, Partial(_update_relative, inner.update, eps), uses_params=True)


@rule_factory
def fixed(thresholds: Thresholds) -> ThresholdRule:
    """Uses the given thresholds on all steps, with a trigger and a target per group.

    Args:
      thresholds: The triggers and targets, as numbers or as arrays with the shape of the norms.

    Raises:
      ValueError: If the update function cannot broadcast a field to the shape of the norms.
    """
    return ThresholdRule(Partial(_init_empty), Partial(_update_fixed, thresholds))


def make_rule(threshold: ScalarOrSchedule | ThresholdRule, argument: str) -> ThresholdRule:
    """Converts a number or a schedule to a rule, and checks a rule."""
    if isinstance(threshold, ThresholdRule):
        arguments_by_field = {"init": ("norms",), "update": ("norms", "state", "param_norms")}
        for field, arguments in arguments_by_field.items():
            fn = getattr(threshold, field)
            try:
                inspect.signature(fn).bind(*arguments)
            except ValueError:  # some built-in functions have no signature
                continue
            except TypeError:
                raise TypeError(
                    f"{argument}.{field} must be a function that accepts the arguments "
                    f"({', '.join(arguments)}), got {short_repr(fn)}"
                ) from None
        return threshold.as_pytree()
    check_not_component(threshold, argument)
    if callable(threshold):
        return count_steps(_Schedule(Partial(check_schedule(threshold, argument))))
    number = check_threshold_value(threshold, argument, disabled_value="math.inf", schedule=True)
    return ThresholdRule(Partial(_init_empty), Partial(_update_constant, number))


def count_steps(threshold: Any) -> ThresholdRule:
    """Makes a rule from a `_Schedule` or a number, with the step count as its state."""
    return ThresholdRule(Partial(_init_count), Partial(_update_schedule, threshold))


def check_threshold(
    threshold: ThresholdLike, argument: str = "threshold"
) -> ThresholdRule | dict[str, ThresholdRule]:
    """Converts a threshold to a rule, or a dict of thresholds to a dict of rules."""
    if isinstance(threshold, Mapping):
        return {name: make_rule(one, f"{argument}[{name!r}]") for name, one in threshold.items()}
    return make_rule(threshold, argument)


def check_loss_threshold(
    threshold: ScalarOrSchedule | ThresholdRule, argument: str = "loss_threshold"
) -> ThresholdRule:
    """Converts a threshold for the loss, which may be negative, to a rule without a floor."""
    if isinstance(threshold, ThresholdRule):
        if threshold.uses_params:
            raise ValueError(
                f"{argument} must not depend on the parameters, got a rule with uses_params=True; "
                "use a rule with uses_params=False, such as thresholds.zscore"
            )
        return remove_floor(make_rule(threshold, argument), argument)
    if callable(threshold):
        return make_rule(threshold, argument)
    check_not_component(threshold, argument)
    number = check_threshold_value(threshold, argument, allow_any_number=True, schedule=True)
    if not isinstance(number, jax.Array) and math.isnan(number):
        raise ValueError(f"{argument} must not be NaN; pass None to ignore the loss")
    # Constants use the rule for schedules, so both have the same state in checkpoints.
    return count_steps(number)


def loss_from_extra_args(
    extra_args: Mapping[str, Any], name: str, axis_names: tuple[str, ...] | None
) -> Array:
    """Returns `loss`, or else `value`, from the extra arguments of an update as float32 or float64.

    The loss must be equal on all devices along `axis_names`, or on all devices if this is None.
    """
    argument = "value" if extra_args.get("loss") is None else "loss"
    loss = extra_args.get(argument)
    if loss is None:
        raise ValueError(
            f"{name}: value or loss is required; call update(grads, state, params, value=loss). "
            "Flax's apply_gradients does not pass extra arguments, so call state.tx.update instead"
        )
    if not is_real(loss):
        raise TypeError(f"{name}: {argument} must be a real number, got {loss!r:.80}")
    if jnp.ndim(loss):
        raise ValueError(
            f"{name}: {argument} must be a scalar, got shape {jnp.shape(loss)}; "
            "pass the mean loss of the batch"
        )
    meshes.check_replicated_scalar(loss, axis_names, f"{name}: {argument}")
    loss = jnp.asarray(loss)  # []
    return loss.astype(jnp.float64 if loss.dtype == jnp.float64 else jnp.float32)


def resolve_rule(
    threshold: ThresholdRule | dict[str, ThresholdRule],
    entries: Sequence[tuple[str, tuple[int, ...]]],
    is_part: bool = False,
) -> ThresholdRule:
    """Combines a dict of rules into one rule for groups with these names and shapes.

    The state of this rule is a dict of states. If the tree has no leaves, `entries` is empty and
    the rule uses the names in the dict. If `is_part` is True, the tree may lack groups of the dict
    because it is a part of a larger tree.
    """
    if isinstance(threshold, ThresholdRule):
        return threshold
    entries = entries or [(name, ()) for name in sorted(threshold)]
    names = [name for name, _ in entries]
    if not set(names) <= set(threshold) or (len(threshold) > len(names) and not is_part):
        raise ValueError(
            f"thresholds must have the groups {names}, got {sorted(threshold)}; pass one "
            "threshold per group"
        )
    # `init` only receives the norms, so the names must be stored in the rule.
    groups = StaticNames(tuple(names), tuple(shape for _, shape in entries))
    rules = {name: threshold[name] for name in names}
    return ThresholdRule(
        Partial(_init_by_name, groups, rules),
        Partial(_update_by_name, groups, rules),
        uses_params=any(rule.uses_params for rule in rules.values()),
    )


def stateless_rule_state(threshold: ThresholdRule | dict[str, ThresholdRule], name: str) -> PyTree:
    """Returns the state of a threshold, or raises if the state contains arrays."""
    # The structure of a state does not depend on the shape of the norms, so any shape can be used.
    like = jax.ShapeDtypeStruct((1,), jnp.float32)
    if isinstance(threshold, dict):
        state = {group: jax.eval_shape(rule.init, like) for group, rule in threshold.items()}
    else:
        state = jax.eval_shape(threshold.init, like)
    if jax.tree.leaves(state):
        raise ValueError(needs_state_message(name))
    return state


def needs_state_message(name: str) -> str:
    return (
        f"{name}: record=False cannot be combined with a threshold that depends on earlier "
        "steps; remove record=False or use a constant threshold"
    )


def evaluate_schedules(rule: ThresholdRule, state: PyTree) -> ThresholdRule:
    """Replaces the schedule in a rule with its value on this step.

    This runs before the compiled update, so all steps and schedules share one compiled program.
    Dicts of rules evaluate their schedules in the update instead.
    """
    # If the state is not a step count, it belongs to a different rule and `update_rule` rejects it.
    is_count = getattr(state, "shape", None) == ()
    func = getattr(rule.update, "func", None)
    if not is_count or func not in (_update_schedule, _update_relative):
        return rule
    return jax.tree.map(
        lambda x: x(state) if isinstance(x, _Schedule) else x,
        rule,
        is_leaf=lambda x: isinstance(x, _Schedule),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Schedule:
    """A schedule in a rule that counts steps."""

    fn: Callable[[Array], Any]

    def __call__(self, count: Array) -> Any:
        return check_threshold_value(self.fn(count), "the schedule's value", allow_any_number=True)


def _init_empty(norms: Array) -> tuple[()]:
    del norms
    return ()


def _init_count(norms: Array) -> Array:
    del norms
    return jnp.zeros((), jnp.int32)


def _broadcast(threshold: Any, norms: Array) -> Array:
    """Converts a threshold to the shape and dtype of the norms."""
    return jnp.broadcast_to(jnp.asarray(threshold).astype(norms.dtype), norms.shape)


def _update_constant(
    threshold: Any, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Thresholds, tuple[()]]:
    del param_norms
    thresholds = _broadcast(threshold, norms)  # f32[groups]
    return Thresholds(thresholds, thresholds), state


def _update_fixed(
    thresholds: Thresholds, norms: Array, state: tuple[()], param_norms: Array | None
) -> tuple[Thresholds, tuple[()]]:
    del param_norms
    return Thresholds(*(_broadcast(field, norms) for field in thresholds)), state


def _update_schedule(
    threshold: Any, norms: Array, count: Array, param_norms: Array | None
) -> tuple[Thresholds, Array]:
    del param_norms
    # `evaluate_schedules` may already have replaced the schedule by its value.
    value = threshold(count) if isinstance(threshold, _Schedule) else threshold
    thresholds = _broadcast(value, norms)  # f32[groups]
    return Thresholds(thresholds, thresholds), safe_increment(count)


def _update_relative(
    inner: Callable[..., tuple[Thresholds, PyTree]],
    eps: Any,
    norms: Array,
    state: PyTree,
    param_norms: Array,
) -> tuple[Thresholds, PyTree]:
    (ratio, _), state = inner(norms, state, None)  # f32[groups]
    # f32[groups], in the dtype of the norms
    size = jnp.maximum(param_norms.astype(ratio.dtype), jnp.asarray(eps).astype(ratio.dtype))
    # The product uses 0 instead of an infinite ratio, because both branches of `where` must have
    # finite derivatives.
    is_infinite = jnp.isinf(ratio)
    thresholds = jnp.where(is_infinite, ratio, jnp.where(is_infinite, 0, ratio) * size)
    return Thresholds(thresholds, thresholds), state


def _init_by_name(
    groups: StaticNames, rules: dict[str, ThresholdRule], norms: Array
) -> dict[str, PyTree]:
    del norms
    shapes = dict(zip(groups, groups.shapes, strict=True))
    return {name: rule.init(jnp.zeros(shapes[name])) for name, rule in rules.items()}


def _update_by_name(
    groups: StaticNames,
    rules: dict[str, ThresholdRule],
    norms: Array,
    state: dict[str, PyTree],
    param_norms: Array | None,
) -> tuple[Thresholds, dict[str, PyTree]]:
    norms_by_name = _split_by_group(norms, groups)
    param_norms_by_name = {} if param_norms is None else _split_by_group(param_norms, groups)
    triggers, targets, new = {}, {}, {}
    for name, rule in rules.items():
        sizes = param_norms_by_name[name] if rule.uses_params else None
        (triggers[name], targets[name]), new[name] = call_rule(
            rule, norms_by_name[name], state[name], sizes, f"the threshold of {name!r}"
        )
    if not norms.size:
        # Trees without leaves have no thresholds, but their rules update their states.
        return Thresholds(norms, norms), new
    fields = []
    for by_name in (triggers, targets):
        flat = ravel_and_concatenate([by_name[name] for name in groups])  # f32[groups]
        fields.append(flat.astype(norms.dtype).reshape(norms.shape))
    return Thresholds(*fields), new


def _split_by_group(norms: Array, groups: StaticNames) -> dict[str, Array]:
    """Splits the norms by group name. They are NaN if the tree has no leaves."""
    if not norms.size:
        pieces = [jnp.full(shape, jnp.nan, norms.dtype) for shape in groups.shapes]
    else:
        # f32[groups] -> f32[*shape] for the groups of a name, f32[] for the scope `tree`
        pieces = split_and_reshape(norms, groups.shapes) if norms.ndim else [norms]
    return dict(zip(groups, pieces, strict=True))

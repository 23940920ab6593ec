"""Checks of the numbers and functions that a user passes as thresholds."""

import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.tree_util import Partial

import optaxclip._backend.meshes as meshes
from optaxclip._backend.packing import ravel_and_concatenate, split_and_reshape
from optaxclip._base.numerics import is_real, saturating_cast
from optaxclip._base.state import REINIT_HINT, StaticNames
from optaxclip._base.types import PyTree, ThresholdRule, Thresholds
from optaxclip._base.validation import (
    chain_hint,
    check_called,
    is_uncalled_factory,
    short_repr,
    warn,
)


def check_threshold_value(
    threshold: Any,
    argument: str,
    *,
    allow_any_number: bool = False,
    disabled_value: str = "",
    schedule: bool = False,
    by_name: bool = False,
) -> Any:
    """`threshold`, checked to be a scalar that can be a threshold.

    The value of an array is checked like that of a number, unless the array is traced.

    Args:
      threshold: a Python, NumPy, JAX or traced scalar.
      argument: what it is called in messages.
      allow_any_number: whether negative numbers and NaN are allowed.
      disabled_value: the value that switches clipping off, for messages. With it, 0 causes a warning.
      schedule: whether messages add that it may be a schedule, or a dict of thresholds.
      by_name: whether messages add that it may be a dict of thresholds.
    """
    hint = f"; to switch clipping off pass {disabled_value}" if disabled_value else ""
    if not is_real(threshold):
        kinds = "a number, a scalar array or a schedule" if schedule else "a number or scalar array"
        raise TypeError(
            f"{argument} must be {kinds}, got {short_repr(threshold)} of type {type(threshold).__name__}"
            f"{hint if threshold is None else chain_hint(threshold)}"
        )
    shape = getattr(threshold, "shape", ())
    if shape != ():
        a_dict = "pass a dict from the names of the groups, as in optaxclip.clip_by"
        remedy = f"; to give each group a threshold, {a_dict}" if schedule or by_name else ""
        raise ValueError(f"{argument} must be a scalar, got an array of shape {shape}{remedy}")
    is_array = isinstance(threshold, jax.Array)
    if is_array and (allow_any_number or not has_value(threshold)):
        return threshold
    try:
        value = float(jax.device_get(threshold) if is_array else threshold)
    except OverflowError:  # an integer above all floats
        value = threshold = math.inf if threshold > 0 else -math.inf
    if not allow_any_number and (math.isnan(value) or value < 0):
        raise ValueError(f"{argument} must not be negative or NaN, got {threshold!r}{hint}")
    if disabled_value and value == 0 and not allow_any_number:
        warn(f"{argument} is 0, so no gradient passes and nothing is trained{hint}")
    if is_array:
        return threshold
    # A number too large for JAX's default float dtype is infinite; NumPy would warn of it later.
    if abs(value) > float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).max):
        return math.copysign(math.inf, value)
    # JAX would cut integers of 2**31 or more to 32 bits.
    return threshold if abs(value) < 2**31 else value


def check_decay(decay: Any, argument: str) -> Any:
    """`decay`, checked to be a number; unless it is an array, it must be from 0 to below 1.

    A decay of 1 gives all values the weight 0, so that a debiased average would be 0 / 0.
    """
    check_threshold_value(decay, argument, allow_any_number=True)
    refuse_narrow(decay, argument)
    if not has_value(decay):
        return decay
    if not 0 <= decay < 1:
        raise ValueError(f"{argument} must be at least 0 and below 1, got {decay!r}")
    if np.float32(decay) == 1:
        raise ValueError(
            f"{argument} must be below 1 in float32 too, and {decay!r} is 1 there: the "
            "largest decay is 0.99999994"
        )
    return decay


def has_value(number: Any) -> bool:
    """Whether a number can be compared now: it is neither traced nor on other hosts alone."""
    is_array = isinstance(number, jax.Array)
    return not is_array or (not isinstance(number, Tracer) and number.is_fully_addressable)


def refuse_narrow(number: Any, argument: str) -> None:
    """Refuses an array with fewer digits than float32 for a number near the end of its range.

    In bfloat16 a decay of 0.999 is 1, so that an average would never move.
    """
    dtype = getattr(number, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return
    if jnp.finfo(dtype).eps > jnp.finfo(jnp.float32).eps:
        raise TypeError(
            f"{argument} must have at least the digits of float32, got an array of dtype {dtype}, "
            "in which 0.999 may be 1; with optax.inject_hyperparams pass "
            "hyperparam_dtype=jnp.float32"
        )


def check_not_component(threshold: Any, argument: str) -> None:
    """Refuses names of rules, a scope and functions of this package, which are not schedules."""
    check_called(threshold, "optaxclip.thresholds", argument, "thresholds")
    if isinstance(threshold, str) and (near := difflib.get_close_matches(threshold, _rules(), n=1)):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got the name {threshold!r}: a rule is "
            f"what thresholds.{near[0]}(...) returns"
        )
    if str(getattr(threshold, "__module__", "")).startswith("optaxclip.scopes"):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got a scope, which is the first "
            "argument, as in clip_by(scopes.leaf(), 1.0)"
        )
    if is_uncalled_factory(threshold, "optaxclip"):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got the function "
            f"{getattr(threshold, '__name__', '')} of optaxclip, which is none of these"
        )


def _rules() -> list[str]:
    """The names of the functions that make rules."""
    namespace = sys.modules[__name__.rpartition(".")[0]]
    return [name for name, value in vars(namespace).items() if inspect.isfunction(value)]


_OWN_RULE = "a threshold that depends on norms is a rule, optaxclip.ThresholdRule(init, update)"
_CALLS = {"init": ("norms",), "update": ("norms", "state", "param_norms")}


def check_rule(rule: ThresholdRule, argument: str) -> ThresholdRule:
    """A rule, after a check that its functions take the arguments that they will be called with."""
    for field, arguments in _CALLS.items():
        fn = getattr(rule, field)
        if not callable(fn) or not _takes(fn, arguments):
            raise TypeError(
                f"{argument}: the {field} of a rule is called as {field}({', '.join(arguments)}), "
                f"got {short_repr(fn)}"
            )
    return rule


def params_if_needed(rule: ThresholdRule, params: PyTree | None, name: str) -> PyTree | None:
    """The parameters, if the threshold is relative to them; else None."""
    if rule.uses_params and params is None:
        raise ValueError(
            f"{name}: the threshold is relative to the parameters; pass them: "
            "update(grads, state, params)"
        )
    return params if rule.uses_params else None


def update_rule(
    rule: ThresholdRule,
    state: PyTree,
    norms: Array,
    param_norms: Array | None,
    name: str,
    any_sign: bool = False,
) -> tuple[Thresholds, PyTree]:
    """A rule's thresholds for these norms, and its next state, in the dtypes of the state before.

    They are the dtypes of that state because a trainer may have cast it to a narrower dtype. A
    negative threshold acts as 0, because a negative factor would turn the gradient around. With
    `any_sign` the rule is for losses, which may be negative.
    """
    _check_state(rule, state, norms, name)
    thresholds, new = call_rule(rule, norms, state, param_norms, name)
    if meshes.manual_axes():
        measured = meshes.tree_varying_axes((norms, param_norms))
        for threshold in thresholds:
            others = meshes.varying_axes(threshold) - measured
            meshes.check_replicated_scalar(threshold, others, f"{name}: the threshold")
    if not any_sign:
        thresholds = Thresholds(
            *(jnp.where(threshold < 0, 0, threshold) for threshold in thresholds)
        )
    return thresholds, jax.tree.map(_restore_dtype, new, state) if jax.tree.leaves(state) else new


def _restore_dtype(new: Array, old: Any) -> Array:
    dtype = jnp.result_type(old)
    is_cast = new.dtype != dtype and jnp.issubdtype(dtype, jnp.floating)
    return saturating_cast(new, dtype) if is_cast else new


def _check_state(rule: ThresholdRule, state: PyTree, norms: Array, name: str) -> None:
    """Checks that a state was made by this threshold rule. Under `jit` that costs nothing."""
    own = jax.eval_shape(rule.init, norms)
    if not jax.tree.leaves(own) and not jax.tree.leaves(state):
        return  # such as None, which some checkpoints store for ()
    if _shapes(own) != _shapes(state):
        raise ValueError(
            f"{name}: the state was made by another threshold: it holds {_describe_state(state)}, and this threshold "
            f"keeps {_describe_state(own)}; {REINIT_HINT}"
        )


def call_rule(
    rule: ThresholdRule, norms: Array, state: PyTree, param_norms: Array | None, name: str
) -> tuple[Thresholds, PyTree]:
    """What a rule returns for these norms, checked; under `jit` that costs nothing."""
    returned = rule.update(norms, state, param_norms)
    must = f"{name}: the update of a threshold rule must return"
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], Thresholds):
        raise TypeError(f"{must} (Thresholds(trigger, target), state), got {_describe(returned)}")
    thresholds, new = returned
    for field, threshold in thresholds._asdict().items():
        is_array = hasattr(threshold, "dtype") and is_real(threshold)
        if not is_array or jnp.shape(threshold) != norms.shape:
            raise (ValueError if is_array else TypeError)(
                f"{must} thresholds like the norms, {_describe(norms)}; {field} is "
                f"{_describe(threshold)}. For one threshold for all groups: jnp.full_like(norms, threshold)"
            )
    # The state of a threshold without memory may be None, as some checkpoints store it, or may have
    # entries for groups that are not in this part of the tree.
    if jax.tree.leaves((state, new)) and _signature(new) != _signature(state):
        raise ValueError(
            f"{must} a state with the structure, shapes and kinds of numbers of the last one, "
            f"{_describe(state)}, got {_describe(new)}"
        )
    return thresholds, jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new)


def check_schedule(fn: Any, argument: str, *, any_shape: bool = False) -> Callable[..., Any]:
    """A function that a user passed in place of a number, checked to be a schedule.

    It is traced once with an abstract step count; if it cannot be traced, it is called with 0.
    """
    schedule = f"{argument} is a function, so it must be a schedule, a function of the step count"
    named = _first_parameter(fn)
    if re.search(r"(^|_)(norms?|grads?|gradients?)$", named):
        raise TypeError(f"{schedule}, and not of {named!r}; {_OWN_RULE}")
    try:
        value = _wrap_first_step(fn)
    except NameError:  # the name of an axis that is bound later, inside of `shard_map`
        return fn
    except Exception as error:
        raise TypeError(
            f"{schedule}; called with one, an int32 scalar, it raised "
            f"{type(error).__name__}: {error!s:.160}; {_OWN_RULE}"
        ) from error
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    if not is_real(np.zeros(0, value.dtype) if is_abstract else value):
        raise TypeError(f"{schedule} to a number; its value is {_describe(value)}")
    if np.shape(value) != () and not any_shape:
        raise ValueError(f"{schedule} to a scalar; its value is {_describe(value)}")
    return fn


def _wrap_first_step(fn: Callable[..., Any]) -> Any:
    # The schedule may be used under other settings of JAX's promotion of dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            return jax.eval_shape(fn, jax.ShapeDtypeStruct((), jnp.int32))
        except jax.errors.JAXTypeError:
            # The schedule branches on the value of the count, which works in eager mode.
            return fn(jnp.zeros((), jnp.int32))


def _first_parameter(fn: Callable[..., Any]) -> str:
    """The name of a function's first parameter; empty if it is unknown."""
    try:
        return next(iter(inspect.signature(fn).parameters), "")
    except (TypeError, ValueError):
        return ""


def _takes(fn: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some functions have no signature
        return True
    return True


def _shapes(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(x) for x in leaves]


def _signature(state: PyTree) -> tuple[Any, list[Any]]:
    """The structure and shapes of a state, and which of its arrays have floats."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in jax.tree.leaves(state)]
    return _shapes(state), [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]


def _describe_state(state: PyTree) -> str:
    """The state of a rule, described for a message."""
    nodes = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(getattr(x, "rule", None), StaticNames)
    )
    rules = sorted({name for node in nodes for name in getattr(node, "rule", ())})
    if not jax.tree.leaves(state):
        return "nothing, as for a constant"
    arrays = f"arrays of the shapes {_shapes(state)[1]}"
    return f"the state of {' and '.join(rules)}, {arrays}" if rules else arrays


def _describe(value: Any) -> str:
    """What a user's function returned, for a message."""
    if isinstance(value, Thresholds):
        return "Thresholds alone, without the state"
    if isinstance(value, tuple) and any(isinstance(x, Thresholds) for x in value[1:]):
        return "the two in the other order"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{[*shape]}"
    if isinstance(value, (tuple, list)) and value:
        parts = [_describe(x) for x in value[:3]] + ["..."] * (len(value) > 3)
        return f"a {type(value).__name__} of {' and '.join(parts)}"
    return f"{short_repr(value)} of type {type(value).__name__}"


def apply_by_name(rules: Mapping[str, ThresholdRule], groups: StaticNames) -> ThresholdRule:
    """One rule that applies to each group the rule of that group's name.

    The names are in the order of the norms. The state is a dict from name to the state of that
    group's rule.
    """
    own = {name: rules[name].as_pytree() for name in groups}
    uses_params = any(rule.uses_params for rule in own.values())
    return ThresholdRule(
        Partial(_init, groups, own), Partial(_update, groups, own), uses_params=uses_params
    )


def _init(groups: StaticNames, rules: dict[str, ThresholdRule], norms: Array) -> dict[str, PyTree]:
    del norms
    shapes = dict(zip(groups, groups.shapes, strict=True))
    return {name: rule.init(jnp.zeros(shapes[name])) for name, rule in rules.items()}


def _update(
    groups: StaticNames,
    rules: dict[str, ThresholdRule],
    norms: Array,
    state: dict[str, PyTree],
    param_norms: Array | None,
) -> tuple[Thresholds, dict[str, PyTree]]:
    own = _split_by_group(norms, groups)
    of_params = {} if param_norms is None else _split_by_group(param_norms, groups)
    triggers, targets, new = {}, {}, {}
    for name, rule in rules.items():
        param_norms = of_params[name] if rule.uses_params else None
        thresholds, new[name] = call_rule(
            rule, own[name], state[name], param_norms, f"the threshold of {name!r}"
        )
        triggers[name], targets[name] = thresholds
    if not norms.size:
        return Thresholds(norms, norms), new
    thresholds = (
        ravel_and_concatenate([each[name] for name in groups]) for each in (triggers, targets)
    )
    return Thresholds(*(each.astype(norms.dtype).reshape(norms.shape) for each in thresholds)), new


def _split_by_group(norms: Array, groups: StaticNames) -> dict[str, Array]:
    """The norms of each group, by its name; NaN if there are none, as in a tree without leaves."""
    if not norms.size:
        pieces = [jnp.full(shape, jnp.nan, norms.dtype) for shape in groups.shapes]
    else:
        pieces = split_and_reshape(norms, groups.shapes) if norms.ndim else [norms]
    return dict(zip(groups, pieces, strict=True))

"""Calls rules and schedules, and checks what the users' own ones take and return."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.arguments import short
from optaxclip._base.numerics import is_real, narrowed
from optaxclip._base.states import FRESH_STATE, Names
from optaxclip._base.types import Limits, PyTree, Threshold

_OWN_RULE = "a limit that depends on norms is a rule, optaxclip.Threshold(init, update)"
_CALLS = {"init": ("norms",), "update": ("norms", "state", "param_norms")}


def checked_rule(rule: Threshold, argument: str) -> Threshold:
    """A rule, after a check that its functions take the arguments that they will be called with."""
    for field, arguments in _CALLS.items():
        fn = getattr(rule, field)
        if not callable(fn) or not _takes(fn, arguments):
            raise TypeError(
                f"{argument}: the {field} of a rule is called as {field}({', '.join(arguments)}), "
                f"got {short(fn)}"
            )
    return rule


def params_for(rule: Threshold, params: PyTree | None, name: str) -> PyTree | None:
    """The parameters, if the limit is relative to them; else None."""
    if rule.uses_params and params is None:
        raise ValueError(
            f"{name}: the limit is relative to the parameters; pass them: "
            "update(grads, state, params)"
        )
    return params if rule.uses_params else None


def limits_of(
    rule: Threshold,
    state: PyTree,
    norms: Array,
    param_norms: Array | None,
    name: str,
    any_sign: bool = False,
) -> tuple[Limits, PyTree]:
    """A rule's limits for these norms, and its next state, in the dtypes of the state before.

    They are the dtypes of that state because a trainer may have cast it to a narrower dtype. A
    negative limit acts as 0, because a negative factor would turn the gradient around. With
    `any_sign` the rule is for losses, which may be negative.
    """
    _check_state(rule, state, norms, name)
    limits, new = limits_by(rule, norms, state, param_norms, name)
    if devices.manual_axes():
        measured = devices.varying_together((norms, param_norms))
        for limit in limits:
            others = devices.varying_axes(limit) - measured
            devices.refuse_different(limit, others, f"{name}: the limit")
    if not any_sign:
        limits = Limits(*(jnp.where(limit < 0, 0, limit) for limit in limits))
    return limits, jax.tree.map(_as_before, new, state) if jax.tree.leaves(state) else new


def _as_before(new: Array, old: Any) -> Array:
    dtype = jnp.result_type(old)
    is_cast = new.dtype != dtype and jnp.issubdtype(dtype, jnp.floating)
    return narrowed(new, dtype) if is_cast else new


def _check_state(rule: Threshold, state: PyTree, norms: Array, name: str) -> None:
    """Checks that a state was made by this limit rule. Under `jit` that costs nothing."""
    own = jax.eval_shape(rule.init, norms)
    if not jax.tree.leaves(own) and not jax.tree.leaves(state):
        return  # such as None, which some checkpoints store for ()
    if _shapes(own) != _shapes(state):
        raise ValueError(
            f"{name}: the state was made by another limit: it holds {_kept(state)}, and this limit "
            f"keeps {_kept(own)}. {FRESH_STATE}"
        )


def limits_by(
    rule: Threshold, norms: Array, state: PyTree, param_norms: Array | None, name: str
) -> tuple[Limits, PyTree]:
    """What a rule returns for these norms, checked; under `jit` that costs nothing."""
    returned = rule.update(norms, state, param_norms)
    must = f"{name}: the update of a limit rule must return"
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], Limits):
        raise TypeError(f"{must} (Limits(trigger, target), state), got {_described(returned)}")
    limits, new = returned
    for field, limit in limits._asdict().items():
        is_array = hasattr(limit, "dtype") and is_real(limit)
        if not is_array or jnp.shape(limit) != norms.shape:
            raise (ValueError if is_array else TypeError)(
                f"{must} limits like the norms, {_described(norms)}; {field} is "
                f"{_described(limit)}. For one limit for all groups: jnp.full_like(norms, limit)"
            )
    # The state of a limit without memory may be None, as some checkpoints store it, or may have
    # entries for groups that are not in this part of the tree.
    if jax.tree.leaves((state, new)) and _kinds(new) != _kinds(state):
        raise ValueError(
            f"{must} a state with the structure, shapes and kinds of numbers of the last one, "
            f"{_described(state)}, got {_described(new)}"
        )
    return limits, jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new)


def checked_schedule(fn: Any, argument: str, *, any_shape: bool = False) -> Callable[..., Any]:
    """A function that a user passed in place of a number, checked to be a schedule.

    It is traced once with an abstract step count; if it cannot be traced, it is called with 0.
    """
    schedule = f"{argument} is a function, so it must be a schedule, a function of the step count"
    named = _first_parameter(fn)
    if re.search(r"(^|_)(norms?|grads?|gradients?)$", named):
        raise TypeError(f"{schedule}, and not of {named!r}; {_OWN_RULE}")
    try:
        value = _at_first_step(fn)
    except NameError:  # the name of an axis that is bound later, inside of `shard_map`
        return fn
    except Exception as error:
        raise TypeError(
            f"{schedule}; called with one, an int32 scalar, it raised "
            f"{type(error).__name__}: {error!s:.160}; {_OWN_RULE}"
        ) from error
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    if not is_real(np.zeros(0, value.dtype) if is_abstract else value):
        raise TypeError(f"{schedule} to a number; its value is {_described(value)}")
    if np.shape(value) != () and not any_shape:
        raise ValueError(f"{schedule} to a scalar; its value is {_described(value)}")
    return fn


def _at_first_step(fn: Callable[..., Any]) -> Any:
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


def _kinds(state: PyTree) -> tuple[Any, list[Any]]:
    """The structure and shapes of a state, and which of its arrays have floats."""
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in jax.tree.leaves(state)]
    return _shapes(state), [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]


def _kept(state: PyTree) -> str:
    """The state of a rule, described for a message."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(getattr(x, "rule", None), Names))
    rules = sorted({name for node in nodes for name in getattr(node, "rule", ())})
    if not jax.tree.leaves(state):
        return "nothing, as for a constant"
    arrays = f"arrays of the shapes {_shapes(state)[1]}"
    return f"the state of {' and '.join(rules)}, {arrays}" if rules else arrays


def _described(value: Any) -> str:
    """What a user's function returned, for a message."""
    if isinstance(value, Limits):
        return "Limits alone, without the state"
    if isinstance(value, tuple) and any(isinstance(x, Limits) for x in value[1:]):
        return "the two in the other order"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{[*shape]}"
    if isinstance(value, (tuple, list)) and value:
        parts = [_described(x) for x in value[:3]] + ["..."] * (len(value) > 3)
        return f"a {type(value).__name__} of {' and '.join(parts)}"
    return f"{short(value)} of type {type(value).__name__}"

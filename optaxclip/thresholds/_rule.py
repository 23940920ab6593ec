"""Checks thresholds and evaluates threshold rules."""

import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip._backend.meshes as meshes
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
    """Checks that `threshold` is a scalar that is neither negative nor NaN, and returns it.

    Args:
      threshold: A Python, NumPy or JAX scalar. The values of traced arrays are not checked.
      argument: The name of the argument in messages.
      allow_any_number: If True, negative numbers and NaN are also valid.
      disabled_value: The value that disables clipping, for messages. If set, 0 causes a warning.
      schedule: If True, messages also suggest a schedule or a dict of thresholds.
      by_name: If True, messages also suggest a dict of thresholds.
    """
    hint = f"; pass {disabled_value} to disable clipping" if disabled_value else ""
    if not is_real(threshold):
        kind = "a number, a scalar array, or a schedule" if schedule else "a number or scalar array"
        raise TypeError(
            f"{argument} must be {kind}, got {short_repr(threshold)} of type "
            f"{type(threshold).__name__}{hint if threshold is None else chain_hint(threshold)}"
        )
    if shape := getattr(threshold, "shape", ()):  # Python numbers have no shape
        remedy = "; pass a dict to set a threshold per group, as in optaxclip.clip_by"
        raise ValueError(
            f"{argument} must be a scalar, got an array of shape {shape}"
            f"{remedy * (schedule or by_name)}"
        )
    is_array = isinstance(threshold, jax.Array)
    if is_array and (allow_any_number or not has_value(threshold)):
        return threshold
    try:
        value = float(jax.device_get(threshold) if is_array else threshold)
    except OverflowError:  # an integer that is too large for a float
        value = threshold = math.inf if threshold > 0 else -math.inf
    if not allow_any_number and (math.isnan(value) or value < 0):
        raise ValueError(f"{argument} must not be negative or NaN, got {threshold!r}{hint}")
    if disabled_value and value == 0 and not allow_any_number:
        warn(f"{argument} is 0, so all gradients become zero and nothing is trained{hint}")
    if is_array:
        return threshold
    # Make numbers too large for JAX's default float dtype infinite, so that NumPy does not warn.
    if abs(value) > float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).max):
        return math.copysign(math.inf, value)
    # JAX truncates larger integers to 32 bits (as of JAX 0.10.2), so return them as floats.
    return threshold if abs(value) < 2**31 else value


def check_decay(decay: Any, argument: str) -> Any:
    """Checks that `decay` is in the range [0, 1), unless traced, and returns it.

    With a decay of 1, the weights of all values would be 0, so a debiased average would be 0 / 0.
    """
    check_threshold_value(decay, argument, allow_any_number=True)
    check_precision(decay, argument)
    if has_value(decay):
        if not 0 <= decay < 1:
            raise ValueError(f"{argument} must be at least 0 and below 1, got {decay!r}")
        if np.float32(decay) == 1:
            raise ValueError(
                f"{argument} must be below 1 after rounding to float32, got {decay!r}; use "
                "0.99999994 or less"
            )
    return decay


def has_value(number: Any) -> bool:
    """Returns `True` if a number is not traced and this process can read it."""
    is_array = isinstance(number, jax.Array)
    return not is_array or (not isinstance(number, Tracer) and number.is_fully_addressable)


def check_precision(number: Any, argument: str) -> None:
    """Checks that a floating-point array is at least as precise as float32.

    For example, bfloat16 rounds a decay of 0.999 to 1, so the average would never change.
    """
    dtype = getattr(number, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if is_float and jnp.finfo(dtype).eps > jnp.finfo(jnp.float32).eps:
        raise TypeError(
            f"{argument} must have at least float32 precision, got dtype {dtype}; pass "
            "hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        )


def check_not_component(threshold: Any, argument: str) -> None:
    """Rejects values that are easily mistaken for thresholds: rule names, scopes and factories."""
    check_called(threshold, "optaxclip.thresholds", argument, "thresholds")
    must = f"{argument} must be a number, a schedule, or a rule, got"
    if isinstance(threshold, str):
        # Importing `optaxclip.thresholds` here would be circular.
        namespace = vars(sys.modules[__name__.rpartition(".")[0]])
        names = [name for name, value in namespace.items() if inspect.isfunction(value)]
        if near := difflib.get_close_matches(threshold, names, n=1):
            raise TypeError(f"{must} {threshold!r}; use thresholds.{near[0]}(...)")
    if str(getattr(threshold, "__module__", "")).startswith("optaxclip.scopes"):
        raise TypeError(
            f"{must} a scope; pass the scope as the first argument, as in "
            "clip_by(scopes.leaf(), 1.0)"
        )
    if is_uncalled_factory(threshold, "optaxclip"):
        name = getattr(threshold, "__name__", "")
        raise TypeError(f"{must} the optaxclip function {name}; pass a number such as 1.0")


def check_schedule(fn: Any, argument: str, *, any_shape: bool = False) -> Callable[..., Any]:
    """Checks that a function is a schedule by tracing or calling it, and returns it."""
    must = f"{argument} must be a schedule (a function of the step count)"
    own_rule = "use optaxclip.ThresholdRule(init, update) for a threshold that depends on norms"
    try:
        parameter = next(iter(inspect.signature(fn).parameters), "")
    except (TypeError, ValueError):  # some built-in functions have no signature
        parameter = ""
    if re.search(r"(^|_)(norms?|grads?|gradients?)$", parameter):
        raise TypeError(f"{must}, got a function with the parameter {parameter!r}; {own_rule}")
    try:
        # Schedules may run later with different dtype and rank promotion settings.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            try:
                value = jax.eval_shape(fn, jax.ShapeDtypeStruct((), jnp.int32))
            except jax.errors.JAXTypeError:
                # Schedules that branch on the step count only work in eager mode.
                value = fn(jnp.zeros((), jnp.int32))
    except NameError:  # an axis name that `shard_map` binds later
        return fn
    except Exception as error:
        raise TypeError(
            f"{must}, but calling it with an int32 scalar raised {type(error).__name__}: "
            f"{error!s:.160}; {own_rule}"
        ) from error
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    if not is_real(np.zeros(0, value.dtype) if is_abstract else value):
        raise TypeError(f"{must} that returns a number, but it returned {_describe(value)}")
    if np.shape(value) != () and not any_shape:
        raise ValueError(f"{must} that returns a scalar, but it returned {_describe(value)}")
    return fn


def params_if_needed(rule: ThresholdRule, params: PyTree | None, name: str) -> PyTree | None:
    """Returns the parameters if the rule uses them, and None otherwise."""
    if rule.uses_params and params is None:
        raise ValueError(
            f"{name}: params are required when the threshold is relative to the parameters; call "
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
    """Returns the thresholds of a rule for these norms and its next state.

    Negative thresholds become 0, because a negative factor would reverse the gradient. Set
    `any_sign` to keep them if the rule is for losses. The next state has the dtypes of `state`,
    because a trainer may have cast the state to a lower precision.
    """
    own = jax.eval_shape(rule.init, norms)
    # Any two states without arrays match, since some checkpoints store None instead of ().
    if jax.tree.leaves((own, state)) and _shapes(own) != _shapes(state):
        raise ValueError(
            f"{name}: for this threshold, state must contain {_describe_state(own)}, but contains "
            f"{_describe_state(state)}; {REINIT_HINT}"
        )
    thresholds, new = call_rule(rule, norms, state, param_norms, name)
    if meshes.manual_axes():
        # Thresholds may only differ along mesh axes along which the norms differ.
        measured = meshes.tree_varying_axes((norms, param_norms))
        for threshold in thresholds:
            others = meshes.varying_axes(threshold) - measured
            meshes.check_replicated_scalar(threshold, others, f"{name}: the threshold")
    if not any_sign:
        thresholds = Thresholds(*(jnp.where(x < 0, 0, x) for x in thresholds))
    if not jax.tree.leaves(state):
        return thresholds, new
    leaves = []
    for x, old in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        # Casts to a lower precision saturate, because an infinite state would stay infinite.
        dtype = jnp.result_type(old)
        is_cast = x.dtype != dtype and jnp.issubdtype(dtype, jnp.floating)
        leaves.append(saturating_cast(x, dtype) if is_cast else x)
    return thresholds, jax.tree.unflatten(jax.tree.structure(new), leaves)


def call_rule(
    rule: ThresholdRule, norms: Array, state: PyTree, param_norms: Array | None, name: str
) -> tuple[Thresholds, PyTree]:
    """Calls the update function of a rule and checks its results."""
    returned = rule.update(norms, state, param_norms)
    must = f"{name}: the update function of a threshold rule must return"
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not (is_pair and isinstance(returned[0], Thresholds)):
        pair = "a tuple (Thresholds(trigger, target), state)"
        raise TypeError(f"{must} {pair}, but returned {_describe(returned)}")
    thresholds, new = returned
    for field, threshold in thresholds._asdict().items():
        is_array = hasattr(threshold, "dtype") and is_real(threshold)
        if not is_array or jnp.shape(threshold) != norms.shape:
            raise (ValueError if is_array else TypeError)(
                f"{must} thresholds with the same shape as norms, {_describe(norms)}, but returned "
                f"{_describe(threshold)} for {field}; use jnp.full_like(norms, threshold)"
            )
    # States without arrays may differ, because some checkpoints store None instead of (), and
    # because a state may contain groups that are missing in this part of the tree.
    if jax.tree.leaves((state, new)) and (
        _shapes(new) != _shapes(state) or _float_flags(new) != _float_flags(state)
    ):
        raise ValueError(
            f"{must} a state with the same structure, shapes, and kinds of dtypes as the previous "
            f"state, {_describe(state)}, but returned {_describe(new)}"
        )
    return thresholds, jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new)


def _shapes(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(x) for x in leaves]


def _float_flags(tree: PyTree) -> list[bool]:
    dtypes = (getattr(x, "dtype", None) or jnp.result_type(x) for x in jax.tree.leaves(tree))
    return [jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes]


def _describe_state(state: PyTree) -> str:
    nodes = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(getattr(x, "rule", None), StaticNames)
    )
    rules = sorted({name for node in nodes for name in getattr(node, "rule", ())})
    if not jax.tree.leaves(state):
        return "no arrays (like the state of a constant threshold)"
    arrays = f"arrays of shapes {_shapes(state)[1]}"
    return f"the state of {' and '.join(rules)} with {arrays}" if rules else arrays


def _describe(value: Any) -> str:
    """Describes the return value of a user's function in a message."""
    if isinstance(value, Thresholds):
        return "Thresholds without a state"
    if isinstance(value, tuple) and any(isinstance(x, Thresholds) for x in value[1:]):
        return "them in reverse order"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{[*shape]}"
    if isinstance(value, (tuple, list)) and value:
        parts = [_describe(x) for x in value[:3]] + ["..."] * (len(value) > 3)
        return f"a {type(value).__name__} of {' and '.join(parts)}"
    return f"{short_repr(value)} of type {type(value).__name__}"

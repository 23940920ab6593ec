"""Checks of the numbers and functions that a user passes as limits."""

import difflib
import inspect
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optaxclip._base.arguments import is_uncalled, one_of_several, refuse_uncalled, short, warn
from optaxclip._base.numerics import is_real


def checked_limit(
    limit: Any,
    argument: str,
    *,
    allow_any_number: bool = False,
    off: str = "",
    schedule: bool = False,
    by_name: bool = False,
) -> Any:
    """`limit`, checked to be a scalar that can be a limit.

    The value of an array is checked like that of a number, unless the array is traced.

    Args:
      limit: a Python, NumPy, JAX or traced scalar.
      argument: what it is called in messages.
      allow_any_number: whether negative numbers and NaN are allowed.
      off: the value that switches clipping off, for messages. With it, 0 causes a warning.
      schedule: whether messages add that it may be a schedule, or a dict of limits.
      by_name: whether messages add that it may be a dict of limits.
    """
    hint = f"; to switch clipping off pass {off}" if off else ""
    if not is_real(limit):
        kinds = "a number, a scalar array or a schedule" if schedule else "a number or scalar array"
        raise TypeError(
            f"{argument} must be {kinds}, got {short(limit)} of type {type(limit).__name__}"
            f"{hint if limit is None else one_of_several(limit)}"
        )
    shape = getattr(limit, "shape", ())
    if shape != ():
        a_dict = "pass a dict from the names of the groups, as in optaxclip.clip_by"
        remedy = f"; to give each group a limit, {a_dict}" if schedule or by_name else ""
        raise ValueError(f"{argument} must be a scalar, got an array of shape {shape}{remedy}")
    is_array = isinstance(limit, jax.Array)
    if is_array and (allow_any_number or not has_value(limit)):
        return limit
    try:
        value = float(jax.device_get(limit) if is_array else limit)
    except OverflowError:  # an integer above all floats
        value = limit = math.inf if limit > 0 else -math.inf
    if not allow_any_number and (math.isnan(value) or value < 0):
        raise ValueError(f"{argument} must not be negative or NaN, got {limit!r}{hint}")
    if off and value == 0 and not allow_any_number:
        warn(f"{argument} is 0, so no gradient passes and nothing is trained{hint}")
    if is_array:
        return limit
    # A number too large for JAX's default float dtype is infinite; NumPy would warn of it later.
    if abs(value) > float(jnp.finfo(jax.dtypes.canonicalize_dtype(float)).max):
        return math.copysign(math.inf, value)
    # JAX would cut integers of 2**31 or more to 32 bits.
    return limit if abs(value) < 2**31 else value


def checked_decay(decay: Any, argument: str) -> Any:
    """`decay`, checked to be a number; unless it is an array, it must be from 0 to below 1.

    A decay of 1 gives all values the weight 0, so that a debiased average would be 0 / 0.
    """
    checked_limit(decay, argument, allow_any_number=True)
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


def refuse_parts(limit: Any, argument: str) -> None:
    """Refuses names of rules, a scope and functions of this package, which are not schedules."""
    refuse_uncalled(limit, "optaxclip.thresholds", argument, "thresholds")
    if isinstance(limit, str) and (near := difflib.get_close_matches(limit, _rules(), n=1)):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got the name {limit!r}: a rule is "
            f"what thresholds.{near[0]}(...) returns"
        )
    if str(getattr(limit, "__module__", "")).startswith("optaxclip.scopes"):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got a scope, which is the first "
            "argument, as in clip_by(scopes.leaf(), 1.0)"
        )
    if is_uncalled(limit, "optaxclip"):
        raise TypeError(
            f"{argument} must be a number, a schedule or a rule, got the function "
            f"{getattr(limit, '__name__', '')} of optaxclip, which is none of these"
        )


def _rules() -> list[str]:
    """The names of the functions that make rules."""
    namespace = sys.modules[__name__.rpartition(".")[0]]
    return [name for name, value in vars(namespace).items() if inspect.isfunction(value)]

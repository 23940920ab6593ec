"""Checks of what must be known before there is a program, and of states that others made."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def checked_int(value: Any, least: int, argument: str) -> int:
    """`value`, checked to be an int of at least `least`, Python's or NumPy's.

    Raises:
      ValueError: if it is less.
      TypeError: if it is not an int, or an array of JAX.
    """
    refuse_arrays(value, argument)
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int of at least {least}, got {value!r}") from None
    if number < least:
        raise ValueError(f"{argument} must be an int of at least {least}, got {value!r}")
    return number


def checked_count(value: Any, argument: str, least: int = 1) -> Any:
    """A whole number of at least `least`, checked to be one: Python's, NumPy's or a scalar of JAX.

    Raises:
      ValueError: if it is less, as far as that is known, or no scalar.
      TypeError: if it is no whole number.
    """
    if not isinstance(value, jax.Array):
        return min(checked_int(value, least, argument), 2**31 - 1)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{argument} must be a whole number, got the dtype {value.dtype}")
    if value.shape:
        raise ValueError(f"{argument} must be a scalar, got an array of shape {value.shape}")
    if not isinstance(value, Tracer) and int(value) < least:
        raise ValueError(f"{argument} must be at least {least}, got {int(value)}")
    return value


def checked_name(value: Any) -> str:
    """The name of a transformation, checked to be a string that is not empty.

    Raises:
      TypeError: if it is none.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(f"name must be a string that is not empty, got {value!r}")
    return value


def checked_bool(value: Any, argument: str) -> bool:
    """`value`, checked to be True or False.

    Raises:
      TypeError: if it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def refuse_arrays(value: Any, argument: str) -> None:
    """Raises where what a program is built around is an array of JAX.

    Raises:
      TypeError: if it is.
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{argument} must be an int, not an array ({value!r}), because programs are compiled "
            f"for it; with optax.inject_hyperparams pass static_args=({argument!r},)"
        )


def is_uncalled(value: Any, package: str) -> bool:
    """Whether a value is a function of this package, in place of what the function makes."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
    return isinstance(module, str) and module.startswith(f"{package}.") and "." not in name


FRESH_STATE = (
    "If it is from a checkpoint of another transformation, begin with a fresh state for this stage "
    "and keep those of the others: of a chain, "
    "opt_state = (tx.init(params)[0], *old_opt_state[1:]) where this stage is the first"
)


def check_state(state: Any, kind: type, name: str, remedy: str = FRESH_STATE) -> None:
    """Checks that a transformation is given a state of its own kind.

    Raises:
      ValueError: otherwise, with what to do.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"{name}: the state must be a {kind.__name__}, got {short(state)} of type "
            f"{type(state).__name__}. {remedy}"
        )


def short(value: Any) -> str:
    """A value as a message shows it: on one line, and not whole if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."

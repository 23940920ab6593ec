"""Checks of users' arguments and of the states that they pass."""

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def checked_int(value: Any, minimum: int, argument: str) -> int:
    """`value`, checked to be an int of Python or NumPy that is at least `minimum`."""
    refuse_arrays(value, argument)
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int of at least {minimum}, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{argument} must be an int of at least {minimum}, got {value!r}")
    return number


def checked_count(value: Any, argument: str, minimum: int = 1) -> Any:
    """`value`, checked to be an int or an integer scalar of JAX that is at least `minimum`.

    Traced values are not compared with `minimum`.
    """
    if not isinstance(value, jax.Array):
        return min(checked_int(value, minimum, argument), 2**31 - 1)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{argument} must be an integer, got an array of dtype {value.dtype}")
    if value.shape:
        raise ValueError(f"{argument} must be a scalar, got an array of shape {value.shape}")
    if not isinstance(value, Tracer) and int(value) < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, got {int(value)}")
    return value


def checked_name(value: Any) -> str:
    """The name of a transformation, checked to be a non-empty string."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"name must be a non-empty string, got {value!r}")
    return value


def checked_bool(value: Any, argument: str, remedy: str = "") -> bool:
    """`value`, checked to be True or False; `remedy` ends the message."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {short(value)}{remedy}")
    return value


def checked_choice(value: Any, choices: Collection[Any], argument: str) -> Any:
    """`value`, checked to be one of the choices.

    Raises:
      ValueError: if it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def as_axis_names(axis_name: Any) -> tuple[str, ...] | None:
    """`axis_name`, checked, as a tuple."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a name or a sequence of names, got {axis_name!r}")
    return tuple(names)


def refuse_arrays(value: Any, argument: str) -> None:
    """Refuses a JAX array for an argument whose value decides what program is compiled."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{argument} must not be a JAX array ({value!r}), because a new program is compiled "
            f"for each value; with optax.inject_hyperparams pass static_args=({argument!r},)"
        )


def is_uncalled(value: Any, package: str) -> bool:
    """Whether a value is a function of this package that the user forgot to call."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.") and "." not in name


def refuse_uncalled(value: Any, package: str, argument: str, namespace: str) -> None:
    """Refuses a function of a package that the user forgot to call.

    Args:
      value: what the user passed.
      package: the package with its full name, such as `optaxclip.methods`.
      argument: what the value is called in messages.
      namespace: where users find the function, such as `optaxclip`.

    Raises:
      TypeError: for such a function.
    """
    if is_uncalled(value, package):
        name = getattr(value, "__name__", "")
        raise TypeError(
            f"{argument} must be what {name} returns, not {name} itself: call it, as in "
            f"{namespace}.{name}()"
        )


def near_miss(given: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar one, if there is one."""
    near = difflib.get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


FRESH_STATE = (
    "If it is from a checkpoint of another transformation, begin with a fresh state for this stage "
    "and keep the states of the other stages: where this stage is the first of a chain, "
    "opt_state = (tx.init(params)[0], *old_opt_state[1:])"
)


KEEP_STATE = (
    "Begin with state = tx.init(params), keep the state that each update returns, and pass it to "
    "the next: updates, state = tx.update(grads, state, params)"
)


def fresh_if_none(state: Any, init: Callable[[Any], Any], updates: Any) -> Any:
    """A fresh state in the place of None, if its limit does not depend on earlier steps."""
    if state is not None:
        return state
    fresh = init(updates)
    return None if jax.tree.leaves(fresh.rule) else fresh


def check_state(
    state: Any, kind: type, name: str, remedy: str = FRESH_STATE, updates: Any = None
) -> None:
    """Checks that the state passed to a transformation is of the type that it makes.

    Args:
      state: what the user passed.
      kind: the type.
      name: the transformation's name.
      remedy: the end of the message.
      updates: what the user passed for the updates, which may be the state.
    """
    if state is None:
        raise ValueError(
            f"{name}: got the state None, and with a fresh state at each step it would never learn "
            f"of earlier steps, on which its results depend. {KEEP_STATE}"
        )
    if not isinstance(state, kind):
        refuse_state_as_updates(updates, kind, name)
        raise ValueError(
            f"{name}: the state must be of type {kind.__name__}, got {short(state)} of type "
            f"{type(state).__name__}. {remedy}"
        )


def refuse_state_as_updates(updates: Any, kind: type, name: str) -> None:
    """Refuses updates that are a state, alone or in a chain: then the arguments were swapped."""
    nodes = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, kind))
    if any(isinstance(node, kind) for node in nodes):
        raise ValueError(
            f"{name}: the updates are a {kind.__name__}, so the arguments are in another order: "
            "call update(grads, state, params)"
        )


def short(value: Any) -> str:
    """The `repr` of a value for a message: on one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."

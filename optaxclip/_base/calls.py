"""Calls of public functions: what is said of arguments that a function does not take."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optaxclip._base.arguments import near_miss

Function = TypeVar("Function", bound=Callable[..., Any])


def asks(**instead: str) -> Callable[[Function], Function]:
    """A decorator that refuses keywords that a function lacks, and names the most similar one.

    Args:
      **instead: what to pass in place of keywords that other libraries have.
    """

    def decorate(fn: Function) -> Function:
        allowed = [*inspect.signature(fn).parameters]

        @functools.wraps(fn)
        def checked(*args: Any, **keywords: Any) -> Any:
            refuse_unknown(fn.__name__, keywords, allowed, instead)
            return fn(*args, **keywords)

        of_same_type: Any = checked
        return of_same_type

    return decorate


def makes_transformation(once: str = "") -> Callable[[Function], Function]:
    """`asks` for a function that makes a transformation; `once` is as in `takes_no_gradients`."""

    def decorate(fn: Function) -> Function:
        asked = asks()(fn)

        @functools.wraps(fn)
        def checked(*args: Any, **keywords: Any) -> Any:
            with takes_no_gradients(fn.__name__, args, once):
                return asked(*args, **keywords)

        of_same_type: Any = checked
        return of_same_type

    return decorate


def refuse_unknown(
    name: str,
    keywords: Iterable[str],
    allowed: Collection[str],
    instead: Mapping[str, str],
) -> None:
    """Refuses keywords that a function does not take.

    Raises:
      TypeError: for the first of them.
    """
    for keyword in keywords:
        if keyword not in allowed:
            hint = instead.get(keyword)
            hint = f": {hint}." if hint else near_miss(keyword, allowed) or "."
            raise TypeError(
                f"{name}() got an unexpected keyword argument {keyword!r}{hint} It takes "
                f"{[*allowed]}"
            )


@contextlib.contextmanager
def takes_no_gradients(name: str, given: Iterable[Any], once: str = "") -> Iterator[None]:
    """Explains an error of a function that makes a transformation, but was given gradients.

    Args:
      name: the function's name.
      given: the values of its arguments that were passed without a keyword.
      once: the call that clips gradients once, if there is one.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(map(_holds_arrays, given)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{error}. {name} makes a transformation: for gradients, {f'{once}, or ' * bool(once)}"
            f"in a training step tx = {name}(...) and tx.update(grads, state, params)"
        ) from None


def _holds_arrays(value: Any) -> bool:
    """Whether a value is a tree with arrays of floats, as gradients are."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: callable(x) or hasattr(x, "init"))
    dtypes = [leaf.dtype for leaf in leaves if getattr(leaf, "ndim", 0) and hasattr(leaf, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)

"""Checks the arguments of public functions, and explains those that they do not take."""

import contextlib
import difflib
import functools
import inspect
import operator
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_int(value: Any, minimum: int, argument: str) -> int:
    """`value`, checked to be an int of Python or NumPy that is at least `minimum`."""
    check_static(value, argument)
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an int of at least {minimum}, got {value!r}{chain_hint(value)}"
        ) from None
    if number < minimum:
        raise ValueError(f"{argument} must be an int of at least {minimum}, got {value!r}")
    return number


def check_int_or_scalar(value: Any, argument: str, minimum: int = 1) -> Any:
    """`value`, checked to be an int or an integer scalar of JAX that is at least `minimum`.

    Traced values are not compared with `minimum`.
    """
    if not isinstance(value, jax.Array):
        return min(check_int(value, minimum, argument), 2**31 - 1)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{argument} must be an integer, got an array of dtype {value.dtype}")
    if value.shape:
        raise ValueError(f"{argument} must be a scalar, got an array of shape {value.shape}")
    if not isinstance(value, Tracer) and int(value) < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, got {int(value)}")
    return value


def check_name(value: Any) -> str:
    """The name of a transformation, checked to be a non-empty string."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"name must be a non-empty string, got {value!r}")
    return value


def check_bool(value: Any, argument: str, hint: str = "") -> bool:
    """`value`, checked to be True or False; `remedy` ends the message."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {short_repr(value)}{hint}")
    return value


def check_choice(value: Any, choices: Collection[Any], argument: str) -> Any:
    """`value`, checked to be one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def normalize_axis_names(axis_name: Any) -> tuple[str, ...] | None:
    """`axis_name`, checked, as a tuple."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a name or a sequence of names, got {axis_name!r}")
    return tuple(names)


def check_static(value: Any, argument: str) -> None:
    """Refuses a JAX array for an argument whose value decides what program is compiled."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{argument} must not be a JAX array ({value!r}), because a new program is compiled "
            f"for each value; with optax.inject_hyperparams pass static_args=({argument!r},)"
        )


def is_uncalled_factory(value: Any, package: str) -> bool:
    """Whether a value is a function of this package that the user forgot to call."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.") and "." not in name


def check_called(value: Any, package: str, argument: str, namespace: str) -> None:
    """Refuses a function of a package, such as `optaxclip.transforms`, that the user forgot to call.

    Users find it in `namespace`, such as `optaxclip`.
    """
    if is_uncalled_factory(value, package):
        name = getattr(value, "__name__", "")
        raise TypeError(
            f"{argument} must be what {name} returns, not {name} itself: call it, as in "
            f"{namespace}.{name}()"
        )


_THRESHOLDS = ("max_norm", "threshold", "clipping", "max_delta", "threshold", "c", "tau")
"""What our own functions call a threshold, and what others do."""
_FOREIGN_THRESHOLD_NAMES = (
    *("clip", "clip_norm", "clip_threshold", "clip_value", "clipnorm", "clipvalue", "grad_clip"),
    *("global_clipnorm", "gradient_clip_val", "l2_norm_clip", "max_grad_norm", "max_value"),
)


def did_you_mean(args: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one that is meant, if it can be told."""
    names = list(names)
    thresholds = [name for name in names if name in _THRESHOLDS]
    is_threshold = args in _THRESHOLDS or args in _FOREIGN_THRESHOLD_NAMES
    near = (
        thresholds if thresholds and is_threshold else difflib.get_close_matches(args, names, n=1)
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def accepts_args(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether a function can be called with these arguments; False if it does not tell."""
    try:
        inspect.signature(fn).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def chain_hint(value: Any) -> str:
    """The end of a message about a transformation in the place of something else."""
    is_transformation = hasattr(value, "init") and hasattr(value, "update")
    hint = "; of several transformations make one, optax.chain(clip, optimizer)"
    return hint if is_transformation else ""


def warn(message: str) -> None:
    """Warns at the user's line: the innermost one outside of this package, JAX and Optax."""
    not_users = {"optaxclip", "jax", "optax", "contextlib"}
    frame, level = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in not_users:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def short_repr(value: Any) -> str:
    """The `repr` of a value for a message: on one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


Function = TypeVar("Function", bound=Callable[..., Any])


def validate_call(
    too_many_hint: str = "", /, **replacements: str
) -> Callable[[Function], Function]:
    """A decorator that refuses keywords that a function lacks, and names the most similar keyword.

    `too_many` ends the message about too many arguments. `instead` says, for keywords of other
    libraries, what to pass in their place.
    """

    def decorate(fn: Function) -> Function:
        parameters = inspect.signature(fn).parameters

        @functools.wraps(fn)
        def checked(*args: Any, **keywords: Any) -> Any:
            check_keywords(fn.__name__, keywords, [*parameters], replacements)
            check_signature(fn.__name__, parameters.values(), args, keywords, too_many_hint)
            return fn(*args, **keywords)

        wrapped: Any = checked
        return wrapped

    return decorate


def transformation_factory(
    one_shot_call: str = "", too_many_hint: str = ""
) -> Callable[[Function], Function]:
    """`asks` for a function that makes a transformation; `once` is as in `explain_gradient_arguments`."""

    def decorate(fn: Function) -> Function:
        asked = validate_call(too_many_hint)(fn)

        @functools.wraps(fn)
        def checked(*args: Any, **keywords: Any) -> Any:
            with explain_gradient_arguments(fn.__name__, args, one_shot_call):
                return asked(*args, **keywords)

        of_same_type: Any = checked
        return of_same_type

    return decorate


def check_keywords(
    name: str, keywords: Iterable[str], allowed: Collection[str], instead: Mapping[str, str]
) -> None:
    """Refuses keywords that a function does not take."""
    for keyword in keywords:
        if keyword not in allowed:
            hint = instead.get(keyword)
            hint = f": {hint}." if hint else did_you_mean(keyword, allowed) or "."
            raise TypeError(
                f"{name}() got an unexpected keyword argument {keyword!r}{hint} It takes "
                f"{[*allowed]}"
            )


def check_signature(
    name: str,
    parameters: Iterable[inspect.Parameter],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    too_many_hint: str = "",
) -> None:
    """Refuses too many arguments, and calls without an argument that has no default.

    The message about too many ends with `too_many`.
    """
    named = [p for p in parameters if p.kind != p.VAR_KEYWORD]
    positional = [p.name for p in named if p.kind != p.KEYWORD_ONLY]
    if len(args) > len(positional):
        raise TypeError(
            f"{name}() takes the positional arguments {positional}, got {len(args)}; pass by name "
            f"{[p.name for p in named if p.name not in positional]}{too_many_hint}"
        )
    given = {*positional[: len(args)], *keywords}
    required = [p.name for p in named if p.default is p.empty]
    missing = [argument for argument in required if argument not in given]
    if missing:
        around = (
            ". inner is the optimizer, around which it stands: it is no stage of a chain, but "
            f"{name}({', '.join(['optax.adam(1e-3)', *required[1:]])})"
        )
        raise TypeError(
            f"{name}() needs {missing}: call {name}({', '.join(required)})"
            f"{around * ('inner' in required)}"
        )


@contextlib.contextmanager
def explain_gradient_arguments(
    name: str, args: Iterable[Any], one_shot_call: str = ""
) -> Iterator[None]:
    """Explains the error of a function that makes transformations but was given gradients.

    `given` are the arguments without a keyword; `once` is the call that clips gradients once, if
    there is one.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(map(has_float_arrays, args)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{error}. {name} makes a transformation: for gradients, {f'{one_shot_call}, or ' * bool(one_shot_call)}"
            f"in a training step tx = {name}(...) and tx.update(grads, state, params)"
        ) from None


def has_float_arrays(value: Any) -> bool:
    """Whether a value is a tree with arrays of floats, as gradients are."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: callable(x) or hasattr(x, "init"))
    dtypes = [leaf.dtype for leaf in leaves if getattr(leaf, "ndim", 0) and hasattr(leaf, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


ORDER = ("Args", "Returns", "Raises", "Example")
_BEGIN = re.compile(rf"\n\n(?=(?:{'|'.join(ORDER)}):\n)")


def parse_sections(text: str | None) -> tuple[str, dict[str, str]]:
    """What stands in front of a docstring's sections, and these by their titles."""
    front, *found = _BEGIN.split(inspect.cleandoc(text or ""))
    return front, {section.partition(":")[0]: section for section in found}


def add_default_sections(text: str | None, sections: Mapping[str, str]) -> str:
    """A docstring with those of the sections that it lacks."""
    front, own = parse_sections(text)
    found = {**sections, **own}
    return "\n\n".join([front, *(found[title] for title in ORDER if title in found)])

"""Checks arguments of public functions and explains incorrect calls."""

import difflib
import functools
import inspect
import operator
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optaxclip._base.numerics import is_real

Function = TypeVar("Function", bound=Callable[..., Any])

REPO_ROOT = Path(__file__).parents[2]
"""The folder that contains the package: a checkout, or the folder with installed packages."""


def validate_call(
    *,
    transformation: bool = False,
    one_shot_call: str = "",
    too_many_hint: str = "",
    replacements: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Function], Function]:
    """Decorates a function to explain calls that do not match its signature.

    Args:
      transformation: If True, the function returns a transformation, and the message for a failed
        call with gradients explains how to use it.
      one_shot_call: The call that clips gradients once, for this message.
      too_many_hint: The end of the message about too many positional arguments.
      replacements: The arguments to use instead of keywords of other libraries.
    """

    def decorate(fn: Function) -> Function:
        signature = inspect.signature(fn)  # Includes the options from `document_options`.

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                _check_call(fn, signature, args, kwargs, too_many_hint, replacements)
                return fn(*args, **kwargs)
            except (TypeError, ValueError) as error:
                if not transformation or not any(map(has_float_arrays, args)):
                    raise
                kind = TypeError if isinstance(error, TypeError) else ValueError
                once = f"{one_shot_call} or " * bool(one_shot_call)
                raise kind(
                    f"{error}. {fn.__name__} returns a transformation. To clip gradients, call "
                    f"{once}tx.update(grads, state, params) with tx = {fn.__name__}(...)"
                ) from None

        decorated: Any = call
        return decorated

    return decorate


def _check_call(
    fn: Callable[..., Any],
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    too_many_hint: str,
    replacements: Mapping[str, str],
) -> None:
    """Checks that a call matches a signature, and explains the mistake otherwise."""
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError:
        pass
    name = fn.__name__
    named = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    accepted = [p.name for p in named]
    positional = [p.name for p in named if p.kind != p.KEYWORD_ONLY]
    keyword_only = ", ".join(accepted[len(positional) :])
    by_name = "remove the extra arguments"
    if keyword_only:
        by_name = f"pass {keyword_only} as keyword arguments"
    # A number is probably a threshold, but methods with adaptive thresholds do not accept one.
    if args and not positional:
        hint, value = by_name, args[0]
        if is_real(value) and "name" in accepted and "threshold" not in accepted:
            hint = f"use clip_by_global_norm({value!r}) for a constant threshold"
            hint += f" or max_norm={value!r} for an upper bound" * ("max_norm" in accepted)
        raise TypeError(f"{name}() accepts only keyword arguments, got {short_repr(value)}; {hint}")
    for keyword in kwargs:
        if keyword not in accepted:
            hint = did_you_mean(keyword, accepted)
            if keyword in replacements:
                hint = f"; pass {replacements[keyword]}"
            elif keyword in ("scope", "response") and "name" in accepted:
                hint = f"; use clip_by(scope, threshold, response=...) for a custom {keyword}"
            hint = f"{hint} (accepted: {accepted})" if hint else f"; it accepts {accepted}"
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{hint}")
    if len(args) > len(positional):
        raise TypeError(
            f"{name}() takes only {', '.join(positional)} by position, got {len(args)} positional "
            f"arguments; {by_name}{too_many_hint}"
        )
    # The remaining mistakes are missing arguments and arguments that are passed twice.
    required = [p.name for p in named if p.default is p.empty]
    passed = {*positional[: len(args)], *kwargs}
    missing = [argument for argument in required if argument not in passed]
    if not missing:
        twice = [argument for argument in positional[: len(args)] if argument in kwargs]
        raise TypeError(f"{name}() got multiple values for {twice}; pass one value")
    hint = f"call {name}({', '.join(required)})"
    if "inner" in required:
        hint = f"call {name}({', '.join(['optax.adam(1e-3)', *required[1:]])})"
    raise TypeError(f"{name}() requires the arguments {missing}; {hint}")


def has_float_arrays(value: Any) -> bool:
    """Returns `True` for trees with floating-point arrays, such as gradients."""
    # Rules and transformations can also contain arrays. However, they are not gradients.
    leaves = jax.tree.leaves(value, is_leaf=lambda x: callable(x) or hasattr(x, "init"))
    dtypes = [leaf.dtype for leaf in leaves if getattr(leaf, "ndim", 0) and hasattr(leaf, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


_THRESHOLDS = ("max_norm", "threshold", "clipping", "max_delta", "c", "tau")
_FOREIGN_THRESHOLD_NAMES = (
    *("clip", "clip_norm", "clip_threshold", "clip_value", "clipnorm", "clipvalue", "grad_clip"),
    *("global_clipnorm", "gradient_clip_val", "l2_norm_clip", "max_grad_norm", "max_value"),
    "limit",
)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a suggestion for an unknown name to end a message with, or an empty string."""
    names = list(names)
    similar = difflib.get_close_matches(name, names, n=1)
    if name in _THRESHOLDS or name in _FOREIGN_THRESHOLD_NAMES:
        # Thresholds in other libraries may have dissimilar names.
        similar = [x for x in names if x in _THRESHOLDS] or similar
    return f"; did you mean {similar[0]!r}?" if similar else ""


def short_repr(value: Any) -> str:
    """Returns the `repr` of a value on a single line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def chain_hint(value: Any) -> str:
    """Returns the end of a message about a transformation passed as a different argument."""
    is_transformation = hasattr(value, "init") and hasattr(value, "update")
    return "; combine transformations with optax.chain(clip, optimizer)" * is_transformation


def warn(message: str) -> None:
    """Warns at the innermost line outside this package, JAX and Optax."""
    libraries = {"optaxclip", "jax", "optax", "contextlib"}
    # The argument `skip_file_prefixes` of `warnings.warn` would require Python 3.12.
    frame, level = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in libraries:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra."""
    project, name = REPO_ROOT / "pyproject.toml", "optaxclip"
    # A checkout is installed by its path, because it may not be published.
    if project.is_file() and f'name = "{name}"' in project.read_text("utf-8"):
        name = "." if Path.cwd() == REPO_ROOT else str(REPO_ROOT)
    return f'pip install "{name}[{extra}]"'


def check_int(value: Any, minimum: int, argument: str) -> int:
    """Checks that `value` is an int of Python or NumPy that is at least `minimum`."""
    check_static(value, argument)
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError  # `operator.index` accepts bools.
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an int >= {minimum}, got {value!r}{chain_hint(value)}"
        ) from None
    if number < minimum:
        raise ValueError(f"{argument} must be an int >= {minimum}, got {value!r}")
    return number


def check_int_or_scalar(value: Any, argument: str, minimum: int = 1) -> Any:
    """Checks that `value` is an int or an integer scalar, and at least `minimum` unless traced."""
    if not isinstance(value, jax.Array):
        # Larger numbers act like infinity and do not fit into the int32 counters of states.
        return min(check_int(value, minimum, argument), 2**31 - 1)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{argument} must be an integer, got an array of dtype {value.dtype}")
    if value.shape:
        raise ValueError(f"{argument} must be a scalar, got an array of shape {value.shape}")
    if not isinstance(value, Tracer) and int(value) < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, got {int(value)}")
    return value


def check_name(value: Any) -> str:
    """Checks that the name of a transformation is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"name must be a non-empty string, got {value!r}")
    return value


def check_bool(value: Any, argument: str, hint: str = "") -> bool:
    """Checks that `value` is True or False. The message ends with `hint`."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {short_repr(value)}{hint}")
    return value


def check_choice(value: Any, choices: Collection[Any], argument: str) -> Any:
    """Checks that `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def normalize_axis_names(axis_name: Any) -> tuple[str, ...] | None:
    """Checks `axis_name` and converts it to a tuple."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a name or a sequence of names, got {axis_name!r}")
    return tuple(names)


def check_static(value: Any, argument: str) -> None:
    """Checks that an argument that the compiled program depends on is not a JAX array."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{argument} must not be a JAX array, got {value!r}; use static_args=({argument!r},) "
            "with optax.inject_hyperparams"
        )


def is_uncalled_factory(value: Any, package: str) -> bool:
    """Returns `True` for functions of a package that must be called first."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.") and "." not in name


def check_called(value: Any, package: str, argument: str, namespace: str) -> None:
    """Checks that a value is not a function of a package that must be called first."""
    if is_uncalled_factory(value, package):
        name = getattr(value, "__name__", "")
        raise TypeError(
            f"{argument} must be the result of calling {name}, got {name} itself; use "
            f"{namespace}.{name}()"
        )


def accepts_args(fn: Callable[..., Any], *args: Any) -> bool:
    """Returns `True` if a function has a signature that accepts these arguments."""
    try:
        inspect.signature(fn).bind(*args)
    except (TypeError, ValueError):
        return False  # Some builtins have no signature.
    return True


ORDER = ("Args", "Returns", "Raises", "Example")
_SECTION_BREAK = re.compile(rf"\n\n(?=(?:{'|'.join(ORDER)}):\n)")


def parse_sections(text: str | None) -> tuple[str, dict[str, str]]:
    """Splits a docstring into its description and its sections by title."""
    description, *sections = _SECTION_BREAK.split(inspect.cleandoc(text or ""))
    return description, {section.partition(":")[0]: section for section in sections}


def add_default_sections(text: str | None, sections: Mapping[str, str]) -> str:
    """Adds the sections that a docstring lacks."""
    description, own = parse_sections(text)
    found = {**sections, **own}
    return "\n\n".join([description, *(found[title] for title in ORDER if title in found)])

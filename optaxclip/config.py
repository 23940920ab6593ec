"""Transformations from plain data, such as YAML, TOML, JSON and `ml_collections` hold.

They are built by the signatures of the functions that are named there: public functions of this
package and of Optax. The return annotation of a function says what it makes: a transformation, a
`Threshold`, and so on. The annotation of an argument says what may be passed for it.
"""

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

import optax
import optax.contrib

import optaxclip.monitor as monitor
import optaxclip.norms as norms
import optaxclip.per_example as per_example
import optaxclip.responses as responses
import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._base.types import Threshold
from optaxclip.norms import Norm
from optaxclip.per_example import QuantileLimit
from optaxclip.responses import Response
from optaxclip.scopes import Scope

Config: TypeAlias = Any
"""A mapping with a name and arguments, or a list of such mappings."""


def from_config(config: Config) -> optax.GradientTransformationExtraArgs:
    """A transformation from plain data.

      data                                          | what it makes
      ----------------------------------------------|----------------------------------------------
      `{"name": "zclip", "z_thresh": 3.0}`          | `optaxclip.zclip(z_thresh=3.0)`
      `{"name": "optax.adamw", ...}`                | `optax.adamw(...)`; also `optax.contrib.muon`
      `{"name": "monitor.record", ...}`             | `optaxclip.monitor.record(...)`
      `[..., ...]`                                  | a chain, in this order; if empty, the identity
      `"inner": {...}` or `[..., ...]`              | the transformation that a skip, or
                                                    | `monitor.events`, wraps
      `"max_norm": {"schedule": "linear_schedule",` | a schedule of `optax.schedules`, wherever a
      ` "init_value": 1.0, ...}`                    | schedule may stand
      `"scope": {"name": "leaf"}`, or `"leaf"`      | `scopes.leaf()`
      `"limit": {"name": "zscore", ...}`            | `thresholds.zscore(...)`
      `"limit": {"name": "quantile_limit", ...}`    | `per_example.quantile_limit(...)`, for
                                                    | `per_example_clip_and_aggregate`
      `"norm": {"name": "lp", "p": 3}`              | `norms.lp(3)`
      `"response": {"name": "band", ...}`           | `responses.band(...)`
      `"max_norm": {"a": ..., "b": ...}`            | one of the above for each label, wherever a
                                                    | mapping may stand, as in `optax.partition`

    The key `name` chooses the function. So the key `as` stands for the argument `name=`, by which
    messages and `optaxclip.monitor` call a transformation. Values that are not plain data, such as
    a function or an optimizer, are passed on as they are.

    Args:
      config: a mapping or a list: a `dict`, an `ml_collections.ConfigDict`, the content of a YAML,
        TOML or JSON file. It is not changed. In schedules, integer keys may be written as strings,
        because JSON and TOML have only keys that are strings.

    Returns:
      The transformation, which takes extra arguments.

    Raises:
      ValueError: for an unknown name or argument (the message lists the known ones, the most
        similar first), and for a missing argument. An error of a function that is called gets a
        note that _has_string which part of `config` called it.
      TypeError: for a value that is neither a mapping nor a list.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tx = optaxclip.from_config([
      ...     {"name": "clip_by", "scope": "leaf", "limit": {"name": "zscore", "z_thresh": 3.0}},
      ...     {"name": "clip_by_global_norm", "as": "last",
      ...      "max_norm": {"schedule": "linear_schedule", "init_value": 2.0, "end_value": 1.0,
      ...                   "transition_steps": 100}},
      ...     {"name": "optax.sgd", "learning_rate": 1.0},
      ... ])
      >>> grads = jnp.array([3.0, 4.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.2 -1.6]
    """
    made = _TRANSFORMATIONS.make(_plain(config), "config")
    return optax.with_extra_args_support(made)


class _Kind(NamedTuple):
    """A kind of value that arguments may have, such as a limit rule.

    Attributes:
      what: the kind's name in messages.
      factories: returns the functions that make such values, by name.
      owns: whether a part of an argument's annotation belongs to this kind.
      is_one: whether a value is already of this kind.
    """

    what: str
    factories: Callable[[], dict[str, Callable[..., Any]]]
    owns: Callable[[Any], bool]
    is_one: Callable[[Any], bool]

    def make(self, config: Any, path: str) -> Any:
        """A value of this kind from plain data; `path` _has_string where in the config it is."""
        if self.is_one(config):
            return config
        if isinstance(config, (list, tuple)):
            stages = [self.make(each, f"{path}[{i}]") for i, each in enumerate(config)]
            return optax.chain(*stages) if stages else optax.identity()
        given: Any = {"name": config} if isinstance(config, str) else config
        by_name = self.factories()
        if not _has_string(given, "name"):
            raise TypeError(
                f"{path} must be a mapping with the name of a {self.what}, such as "
                f"{{'name': {next(iter(by_name))!r}, ...}}, got {config!r:.80}"
            )
        arguments = dict(given)
        name = arguments.pop("name")
        if name not in by_name:
            raise ValueError(f"{path}: there is no {self.what} {_unknown(name, by_name)}")
        if "as" in arguments:
            arguments["name"] = arguments.pop("as")
        return _call(by_name[name], name, arguments, path)


def _call(fn: Callable[..., Any], name: str, arguments: dict[str, Any], path: str) -> Any:
    """Calls a function with arguments made from plain data."""
    parameters = inspect.signature(fn, eval_str=True).parameters
    for argument in arguments:
        if argument not in parameters:
            allowed = ["as" if key == "name" else key for key in parameters]
            raise ValueError(f"{path}: {name} has no argument {_unknown(argument, allowed)}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise ValueError(f"{path}: {name} needs the argument {argument!r}")
    made = {
        argument: _argument(value, parameters[argument].annotation, f"{path}.{argument}")
        for argument, value in arguments.items()
    }
    try:
        return fn(**made)
    except (TypeError, ValueError) as error:
        error.add_note(f"The error is from {name} in {path}, called with {arguments}.")
        raise


def _argument(value: Any, annotation: Any, path: str) -> Any:
    """The value of an argument, made from plain data as the argument's annotation _has_string."""
    allowed = _types_in(annotation)
    if Any in allowed:  # a pytree, which is passed on as it is
        return value
    if _has_string(value, "schedule"):
        return _schedule(value, path)
    mapping = next((part for part in allowed if get_origin(part) is Mapping), None)
    if mapping is not None and isinstance(value, dict) and not _has_string(value, "name"):
        of_each = get_args(mapping)[1]
        return {key: _argument(each, of_each, f"{path}.{key}") for key, each in value.items()}
    is_text = isinstance(value, str)
    if is_text and str not in allowed and _is_number(value):
        raise TypeError(f"{path} is the string {value!r} and not a number; {_yaml_hint(value)}")
    kind = next((kind for kind in _KINDS if any(map(kind.owns, allowed))), None)
    if kind is _TRANSFORMATIONS:
        return _TRANSFORMATIONS.make(value, path)
    if isinstance(value, list):
        return [_argument(each, annotation, f"{path}[{i}]") for i, each in enumerate(value)]
    if kind is None or (is_text and str in allowed):
        return value
    if is_text or _has_string(value, "name"):
        name = value if is_text else value["name"]
        # A norm or response without arguments has no maker: its name is the argument.
        is_argument = str in allowed and name not in kind.factories() and len(value) == 1
        return name if is_argument else kind.make(value, path)
    return value


def _schedule(config: dict[str, Any], path: str) -> Any:
    """One of Optax's schedules, from plain data."""
    by_name = _factories(optax.schedules, lambda made: made is optax.Schedule)
    name = config["schedule"]
    if name not in by_name:
        raise ValueError(f"{path}: there is no schedule {_unknown(name, by_name)}")
    arguments = {
        key: _with_integer_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "schedule"
    }
    return _call(by_name[name], name, arguments, path)


def _is_transformation(annotation: Any) -> bool:
    made = get_origin(annotation) or annotation
    return isinstance(made, type) and issubclass(made, optax.GradientTransformation)


def _transformations() -> dict[str, Callable[..., Any]]:
    # Looked up at each call, because the package imports this module before its functions exist.
    own = _factories(sys.modules[__name__.partition(".")[0]], _is_transformation)
    own |= _factories(monitor, _is_transformation, "monitor.")
    theirs = _factories(optax, _is_transformation, "optax.")
    return own | theirs | _factories(optax.contrib, _is_transformation, "optax.contrib.")


def _kind(what: str, module: ModuleType, made: Any, is_one: Callable[[Any], bool]) -> _Kind:
    """The kind of value that functions of `module` with the return annotation `made` make."""
    return _Kind(
        what, lambda: _factories(module, lambda x: x == made), lambda part: part == made, is_one
    )


def _factories(
    module: ModuleType, returns: Callable[[Any], bool], prefix: str = ""
) -> dict[str, Callable[..., Any]]:
    """The public functions of a module, by name, whose return annotation `returns` accepts."""
    found = {}
    for name in dir(module):
        fn = getattr(module, name)
        if name.startswith(("_", "as_", "from_")):
            continue
        if not inspect.isfunction(inspect.unwrap(fn)):
            continue
        signature = inspect.signature(fn, eval_str=True)
        is_variadic = any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values())
        if returns(signature.return_annotation) and not is_variadic:
            found[prefix + name] = fn
    return found


def _types_in(annotation: Any) -> list[Any]:
    """An annotation, and all types within it: members of a union, elements of containers."""
    annotation = getattr(annotation, "__value__", annotation)  # what a named alias stands for
    if get_origin(annotation) is Callable:
        return [annotation]
    of_elements = get_args(annotation)[1 if get_origin(annotation) is Mapping else 0 :]
    return [annotation, *(part for each in of_elements for part in _types_in(each))]


def _unknown(name: str, names: Iterable[str]) -> str:
    """The end of an error message: a name that does not exist, and the names that do."""
    names = sorted(names)
    near = [other for other in names if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, names, cutoff=0.5)
    near += [other for other in close if other not in near]
    rest = [other for other in names if other not in near]
    # Optax's more than a hundred names are not listed, because its documentation has them.
    is_theirs = name.startswith("optax.")
    listed = [other for other in rest if other.startswith("optax.") == is_theirs]
    others = "" if is_theirs or listed == rest else ", and those of Optax, such as 'optax.adamw'"
    return f"{name!r}; there are {near + listed}{others}"


def _with_integer_keys(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping, with ints in place of the keys that are strings of digits."""
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in mapping.items()
    }


def _plain(config: Any) -> Any:
    """The data, with dicts for all mappings and lists for all sequences; tuples stay."""
    if hasattr(config, "keys") and hasattr(config, "__getitem__"):
        return {key: _plain(config[key]) for key in config.keys()}  # noqa: SIM118
    if type(config) is tuple:
        return tuple(map(_plain, config))
    if isinstance(config, Sequence) and not isinstance(config, (str, bytes, tuple)):
        return [_plain(each) for each in config]
    return config


def _has_string(value: Any, key: str) -> bool:
    """Whether a value is a dict with a string under this key."""
    return isinstance(value, dict) and isinstance(value.get(key), str)


def _yaml_hint(number: str) -> str:
    """The end of an error message: how YAML spells a number that Python reads from this string."""
    if math.isfinite(float(number)):
        return "YAML reads 1e-3, which has no point, as a string: write 1.0e-3"
    return "YAML reads inf and nan, which have no point, as strings: write .inf or .nan"


def _is_number(text: str) -> bool:
    """Whether Python can read a string as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


_TRANSFORMATIONS = _Kind(
    "transformation",
    _transformations,
    _is_transformation,
    lambda value: isinstance(value, optax.GradientTransformation),
)
_KINDS = (
    _TRANSFORMATIONS,
    _kind("limit rule", thresholds, Threshold, lambda value: isinstance(value, Threshold)),
    _kind("quantile limit", per_example, QuantileLimit, lambda x: isinstance(x, QuantileLimit)),
    _kind("norm", norms, Norm, lambda value: isinstance(value, Norm)),
    _kind("scope", scopes, Scope, callable),
    _kind("response", responses, Response, callable),
)

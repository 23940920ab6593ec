"""How plain data becomes a transformation: by the kind of thing that each argument may be.

What there is by name is what the package and Optax make public: a transformation is a function that
is declared to return one, a limit rule one that returns a `Threshold`, and so on. What an argument
may be is read from its annotation.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, get_origin

import optax
import optax.contrib

import optaxclip.norms as norms
import optaxclip.responses as responses
import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._base.types import Threshold
from optaxclip.config.data import is_number, plain, says, with_whole_keys
from optaxclip.config.names import makers, parts_of, unknown
from optaxclip.norms import Norm
from optaxclip.responses import Response
from optaxclip.scopes import Scope

Config: TypeAlias = Any
"""A mapping with a name and arguments, or a list of such mappings."""


def from_config(config: Config) -> optax.GradientTransformationExtraArgs:
    """A transformation from plain data.

      data                                          | what it makes
      ----------------------------------------------|----------------------------------------------
      `{"name": "zclip", "z_thresh": 3.0}`          | `optaxclip.zclip(z_thresh=3.0)`
      `{"name": "optax.adamw", ...}`                | Optax's own, and `optax.contrib.muon`
      `[..., ...]`                                  | a chain, in this order; identity, if empty
      `"inner": {...}` or `[..., ...]`              | what a skip wraps
      `"max_norm": {"schedule": "linear_schedule",` | a schedule of `optax.schedules`, in the place
      ` "init_value": 1.0, ...}`                    | of any number
      `"scope": {"name": "leaf"}`, or `"leaf"`      | `scopes.leaf()`
      `"limit": {"name": "zscore", ...}`            | `thresholds.zscore(...)`
      `"norm": {"name": "lp", "p": 3}`              | `norms.lp(3)`
      `"response": {"name": "band", ...}`           | `responses.band(...)`

    The key `name` chooses the transformation, so the argument `name=`, by which messages and
    `optaxclip.monitor` call it, is given under `as`. Values that are not plain data, such as a
    function or an optimizer, are taken as they are.

    Args:
      config: a mapping or a list: `dict`, `ml_collections.ConfigDict`, what a YAML, TOML or JSON
        file holds. It is not changed. In schedules, keys that are whole numbers may be text, as
        JSON and TOML have no other keys.

    Returns:
      The transformation, which takes extra arguments.

    Raises:
      ValueError: for a name or an argument that there is not, with those that there are, near
        misses first; for an argument that is missing; and whatever the transformation says of its
        arguments, with a note on where in `config` that was.
      TypeError: for what is neither a mapping nor a list, and likewise.

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
    made = _TRANSFORMATIONS.make(plain(config), "config")
    return optax.with_extra_args_support(made)


class _Kind(NamedTuple):
    """What an argument may be.

    Attributes:
      what: for messages.
      known: what makes such things from arguments, by name.
      owns: whether a part of an annotation speaks of it.
      is_one: whether a value is one already.
    """

    what: str
    known: Callable[[], dict[str, Callable[..., Any]]]
    owns: Callable[[Any], bool]
    is_one: Callable[[Any], bool]

    def make(self, config: Any, path: str) -> Any:
        """One from plain data."""
        if self.is_one(config):
            return config
        if isinstance(config, (list, tuple)) and self is _TRANSFORMATIONS:
            stages = [self.make(each, f"{path}[{i}]") for i, each in enumerate(config)]
            return optax.chain(*stages) if stages else optax.identity()
        given: Any = {"name": config} if isinstance(config, str) else config
        known = self.known()
        if not says(given, "name"):
            raise TypeError(
                f"{path} must be a mapping with the name of a {self.what}, such as "
                f"{{'name': {next(iter(known))!r}, ...}}, got {config!r:.80}"
            )
        arguments = dict(given)
        name = arguments.pop("name")
        if name not in known:
            raise ValueError(f"{path}: there is no {self.what} {unknown(name, known)}")
        if "as" in arguments:
            arguments["name"] = arguments.pop("as")
        return _call(known[name], name, arguments, path)


def _call(fn: Callable[..., Any], name: str, arguments: dict[str, Any], path: str) -> Any:
    """What a function makes of arguments in plain data."""
    parameters = inspect.signature(fn, eval_str=True).parameters
    for argument in arguments:
        if argument not in parameters:
            known = ["as" if key == "name" else key for key in parameters]
            raise ValueError(f"{path}: {name} has no argument {unknown(argument, known)}")
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
        error.add_note(f"That is {name} in {path}, with {arguments}.")
        raise


def _argument(value: Any, annotation: Any, path: str) -> Any:
    """An argument from plain data, by what its annotation says that it may be."""
    allowed = parts_of(annotation)
    if Any in allowed:  # a pytree: nothing in it is ours to read
        return value
    if says(value, "schedule"):
        return _schedule(value, path)
    is_text = isinstance(value, str)
    if is_text and str not in allowed and is_number(value):
        raise TypeError(
            f"{path} is the text {value!r} and not a number; YAML reads a number without a point, "
            "such as 1e-3, as text: write 1.0e-3"
        )
    kind = next((kind for kind in _KINDS if any(map(kind.owns, allowed))), None)
    if kind is _TRANSFORMATIONS:
        return _TRANSFORMATIONS.make(value, path)
    if isinstance(value, list):
        return [_argument(each, annotation, f"{path}[{i}]") for i, each in enumerate(value)]
    if kind is None or (is_text and str in allowed):
        return value
    if is_text or says(value, "name"):
        name = value if is_text else value["name"]
        # Norms and responses that take no arguments are known by text.
        is_known_by_text = str in allowed and name not in kind.known() and len(value) == 1
        return name if is_known_by_text else kind.make(value, path)
    if isinstance(value, dict):  # for each group its own
        return {key: _argument(each, annotation, f"{path}.{key}") for key, each in value.items()}
    return value


def _schedule(config: dict[str, Any], path: str) -> Any:
    """A schedule of Optax's."""
    known = makers(optax.schedules, lambda made: made is optax.Schedule)
    name = config["schedule"]
    if name not in known:
        raise ValueError(f"{path}: there is no schedule {unknown(name, known)}")
    arguments = {
        key: with_whole_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "schedule"
    }
    return _call(known[name], name, arguments, path)


def _is_transformation(annotation: Any) -> bool:
    made = get_origin(annotation) or annotation
    return isinstance(made, type) and issubclass(made, optax.GradientTransformation)


def _transformations() -> dict[str, Callable[..., Any]]:
    # The package imports this module, and is whole when this is called.
    own = makers(sys.modules[__name__.partition(".")[0]], _is_transformation)
    theirs = makers(optax, _is_transformation, "optax.")
    return own | theirs | makers(optax.contrib, _is_transformation, "optax.contrib.")


def _kind(what: str, module: ModuleType, made: Any, is_one: Callable[[Any], bool]) -> _Kind:
    """A part that the functions of a module make."""
    return _Kind(
        what, lambda: makers(module, lambda x: x == made), lambda part: part == made, is_one
    )


_TRANSFORMATIONS = _Kind(
    "transformation",
    _transformations,
    _is_transformation,
    lambda value: isinstance(value, optax.GradientTransformation),
)
_KINDS = (
    _TRANSFORMATIONS,
    _kind("limit rule", thresholds, Threshold, lambda value: isinstance(value, Threshold)),
    _kind("norm", norms, Norm, lambda value: isinstance(value, Norm)),
    _kind("scope", scopes, Scope, callable),
    _kind("response", responses, Response, callable),
)

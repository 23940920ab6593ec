"""Checks and documents the keyword options that transformations share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_type_hints

from optaxclip._backend.leaf_shardings import ShardingHints
from optaxclip._base.types import AxisName, NonFinite, PyTree
from optaxclip._base.validation import (
    add_default_sections,
    check_bool,
    check_name,
    normalize_axis_names,
)
from optaxclip.nonfinite import check_policy
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response, as_response

Function = TypeVar("Function", bound=Callable[..., Any])


class ShardingOptions(TypedDict, total=False):
    """Options of all transformations that compute norms.

    Attributes:
      axis_name: Inside `pmap`, `vmap(axis_name=)`, and `shard_map(check_vma=False)`, the names of
        the mapped axes over which all leaves are sharded. Inside `shard_map(check_vma=True)`, norms
        are shared along all axes over which a leaf varies, or only along the axes in `axis_name`,
        if devices along other axes have separate gradients.
      specs: The sharding of the leaves if their types do not contain it: a pytree prefix of the
        gradients with `PartitionSpec`s or `NamedSharding`s. Use `PartitionSpec()` for replicated
        leaves. Under `jit`, you can use `specs` to compute the norm with a single collective,
        because the compiler may use several by default.
      name: The name of the transformation in messages and in `optaxclip.monitor`. Defaults to the
        name of the function.
    """

    axis_name: AxisName
    specs: PyTree
    name: str


class TransformOptions(ShardingOptions, total=False):
    """Options of all stages of a chain: `ShardingOptions`, `nonfinite`, and `record`.

    Attributes:
      nonfinite: The policy for groups with a non-finite norm: "nan" (set the group to NaN), "zero"
        (set it to 0), "mask" (set non-finite elements to 0, then clip), or "error" (raise a
        `checkify` error with the names of the leaves). Defaults to "nan". Under `jit`, "error"
        requires `error, out = jax.jit(checkify.checkify(step))(*args)` and `error.throw()`.
        Thresholds never use non-finite norms.
      record: If True (the default), the state contains a record of the most recent step. If False,
        the state is an `optax.EmptyState`, and any state is accepted and returned unchanged.
        `record=False` is an error if the threshold depends on earlier steps.
    """

    nonfinite: NonFinite
    record: bool


class RescaleOptions(TransformOptions, total=False):
    """Options of transformations that scale groups: `TransformOptions` and `strict`.

    Attributes:
      strict: If True, no result exceeds its threshold, even by rounding. Defaults to False.
    """

    strict: bool


class NormOptions(RescaleOptions, total=False):
    """Options of transformations that support all norms: `RescaleOptions` and `norm`.

    Attributes:
      norm: "l2" (the default), "l1", "linf", "rms", "mean_abs", "average_l2", or a norm from
        `optaxclip.norms`.
    """

    norm: str | Norm


class ClipOptions(NormOptions, total=False):
    """Options of transformations of the whole tree: `NormOptions` and `known_norm`.

    Attributes:
      known_norm: The name of an extra argument of `update` with the norm of the incoming tree, such
        as "grad_norm". The norm is then not computed. Defaults to None. If earlier stages of the
        chain change the gradients, it must be the norm after these stages.
    """

    known_norm: str | None


_OPTION_CLASSES = (ShardingOptions, TransformOptions, RescaleOptions, NormOptions, ClipOptions)

_DEFAULTS: dict[str, Any] = {
    "norm": "l2",
    "nonfinite": "nan",
    "strict": False,
    "record": True,
    "known_norm": None,
    "axis_name": None,
    "specs": None,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of a transformation, see `ClipOptions`.

    They are static under `jit`. Comparisons ignore `axis_names` and `specs`, because `specs` can be
    a dict, and steps also receive the `LeafShardings` that follow from them.
    """

    norm: Norm
    response: Response
    nonfinite: NonFinite
    strict: bool
    record: bool
    known_norm: str | None
    axis_names: tuple[str, ...] | None = dataclasses.field(compare=False)
    specs: PyTree = dataclasses.field(compare=False)
    name: str

    @functools.cached_property
    def sharding_hints(self) -> ShardingHints:
        """The options about the sharding of leaves."""
        return ShardingHints(self.axis_names, self.specs)

    @classmethod
    def create(cls, **given: Any) -> "Options":
        """Checks the options of a user, and adds defaults."""
        chosen = _DEFAULTS | given
        for argument in ("strict", "record"):
            check_bool(chosen[argument], argument)
        known_norm = chosen["known_norm"]
        if known_norm is not None and not isinstance(known_norm, str):
            raise TypeError(
                f"known_norm must be the name of an extra argument of update, got {known_norm!r}"
            )
        if known_norm is not None and chosen["nonfinite"] == "mask":
            raise ValueError(
                f"known_norm={known_norm!r} cannot be combined with nonfinite='mask'; use "
                "nonfinite='zero'"
            )
        return cls(
            norm=as_norm(chosen["norm"]),
            response=as_response(chosen.get("response", "clip")),
            nonfinite=check_policy(chosen["nonfinite"]),
            strict=chosen["strict"],
            record=chosen["record"],
            known_norm=known_norm,
            axis_names=normalize_axis_names(chosen["axis_name"]),
            specs=chosen["specs"],
            name=check_name(chosen["name"]),
        )


_DEFAULT_SECTIONS = {
    "Returns": """Returns:
  A transformation with a `ClipState`. Its `update` function returns a tree with the shapes,
  dtypes, and weak types of the gradients.""",
    "Raises": """Raises:
  ValueError: If a threshold or an option is out of range or not a scalar, or if a name is unknown.
  TypeError: If a threshold or an option is not a number.""",
}


def document_options(options: type) -> Callable[[Function], Function]:
    """Decorates a function with `**options` to show them in its signature and docstring."""

    def decorate(fn: Function) -> Function:
        # The hints of a TypedDict include those of its parents.
        own, hints = inspect.signature(fn), get_type_hints(options)
        defaults = {x: value for x, value in _DEFAULTS.items() if x in hints}
        defaults["name"] = fn.__name__

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Other defaults are in `Options.create`, which also serves functions without options.
            return fn(*args, **{"name": fn.__name__, **kwargs})

        shared = [
            inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[x])
            for x, value in defaults.items()
        ]
        named = [p for p in own.parameters.values() if p.kind != p.VAR_KEYWORD]
        decorated: Any = call
        # `optax.inject_hyperparams` uses this signature.
        decorated.__signature__ = own.replace(parameters=[*named, *shared])
        if fn.__doc__:  # It is None under `python -OO`.
            sections = _DEFAULT_SECTIONS if "nonfinite" in hints else {}
            text = add_default_sections(fn.__doc__, sections)
            # `**options` is the last argument.
            before, _, rest = text.partition("  **options: ")
            _, _, after = rest.partition("\n\n")
            # The docstrings of the classes above contain the lines about the options.
            lines: dict[str, str] = {}
            for kind in _OPTION_CLASSES:
                name = ""  # A line with less indentation starts the next option.
                _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
                for line in section.splitlines():
                    name = name if line.startswith("    ") else line.strip().partition(":")[0]
                    lines[name] = lines.get(name, "") + f"{line}\n"
            decorated.__doc__ = f"{before}{''.join(lines[x] for x in defaults)}\n{after}"
        return decorated

    return decorate

"""The keywords that all transformations share: their meaning, and checks of them."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, get_type_hints

import optaxclip.scopes as scopes
import optaxclip.thresholds as thresholds
from optaxclip._backend.leaf_shardings import ShardingHints
from optaxclip._base.numerics import is_real
from optaxclip._base.types import AxisName, NonFinite, PyTree
from optaxclip._base.validation import (
    add_default_sections,
    check_bool,
    check_keywords,
    check_name,
    check_signature,
    explain_gradient_arguments,
    normalize_axis_names,
    short_repr,
)
from optaxclip.nonfinite import check_policy
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response, as_response

Function = TypeVar("Function", bound=Callable[..., Any])


class ShardingOptions(TypedDict, total=False):
    """Options of every transformation that measures norms.

    Attributes:
      axis_name: inside `pmap`, `vmap(axis_name=)` and `shard_map(check_vma=False)`, the names of
        the mapped axes over which every leaf is split. Inside `shard_map(check_vma=True)`, norms
        are shared along all axes over which a leaf varies. If names are given, norms are shared
        only along these, and each device along another axis has gradients of its own.
      specs: how the leaves are split over devices, if their types do not say it: a pytree prefix of
        the gradients with a `PartitionSpec` or `NamedSharding` for each leaf, `PartitionSpec()` for
        leaves that are the same on all devices. Under `jit`, the norm then takes one collective;
        without `specs` the compiler might use several.
      name: what the transformation is called in messages and by `optaxclip.monitor`; by default,
        its own name.
    """

    axis_name: AxisName
    specs: PyTree
    name: str


class TransformOptions(ShardingOptions, total=False):
    """Options of every stage of a chain: those of `ShardingOptions`, and two more.

    Attributes:
      nonfinite: what becomes of a group whose norm is not finite: "nan" (all NaN), "zero" (all 0),
        "mask" (bad entries 0, then clipped), "error" (a `checkify` error that names the leaves;
        under `jit`, `error, out = jax.jit(checkify.checkify(step))(*args)` and `error.throw()`).
        No threshold learns from such a norm.
      record: whether the state keeps what was done. With False the state is an `optax.EmptyState`,
        and any state is accepted and returned as it is. If the threshold depends on earlier steps,
        `record=False` is an error.
    """

    nonfinite: NonFinite
    record: bool


class RescaleOptions(TransformOptions, total=False):
    """Options of clips that multiply each group by a number: those of `TransformOptions`, and one more.

    Attributes:
      strict: whether no result may exceed its threshold, not even by a rounding error.
    """

    strict: bool


class NormOptions(RescaleOptions, total=False):
    """Options of clips for which the user chooses the norm: those of `RescaleOptions`, and `norm`.

    Attributes:
      norm: "l2", "l1", "linf", "rms", "mean_abs", "average_l2", or a norm from `optaxclip.norms`.
    """

    norm: str | Norm


class ClipOptions(NormOptions, total=False):
    """Options of clips of the whole tree: those of `NormOptions`, and one more.

    Attributes:
      known_norm: the name of an extra argument of the update, such as "grad_norm", that holds the
        norm of the incoming tree; the norm is then not measured. With None it is measured. After a
        stage that changes the gradients, a norm from before that stage would be wrong.
    """

    known_norm: str | None


_DEFAULTS: dict[str, Any] = {
    "norm": "l2",
    "nonfinite": "nan",
    "strict": False,
    "record": True,
    "known_norm": None,
    "axis_name": None,
    "specs": None,
}


_COMMON_SECTIONS = {
    "Returns": """Returns:
  A transformation with a `ClipState`. Its update returns a tree with the shapes, dtypes and
  weak types of the gradients.""",
    "Raises": """Raises:
  ValueError: if a threshold or an option is out of its range or not a scalar, or a name is unknown.
  TypeError: if one of them is not a number.""",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one transformation, checked; the fields are explained above.

    They are static under `jit`. `axis_name` and `specs` do not count in comparisons, because a step
    also gets a `LeafShardings` that follows from them, and because `specs` may be a dict.
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

    @property
    def sharding_hints(self) -> ShardingHints:
        """What they say of how leaves are split over devices."""
        return ShardingHints(self.axis_names, self.specs)

    @classmethod
    def create(cls, **given: Any) -> "Options":
        """The options that a user passed, checked."""
        chosen = _DEFAULTS | given
        for argument in ("strict", "record"):
            check_bool(chosen[argument], argument)
        known_norm = chosen["known_norm"]
        if known_norm is not None and not isinstance(known_norm, str):
            raise TypeError(
                "known_norm must be the name of an extra argument of the update, such as "
                f"'grad_norm', got {known_norm!r}"
            )
        if known_norm is not None and chosen["nonfinite"] == "mask":
            raise ValueError("known_norm cannot be used with nonfinite='mask', which changes norms")
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


def clip_factory(
    options: type,
    *,
    equivalent: str = "",
    once: str = "",
    instead: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Function], Function]:
    """A decorator for a transformation with `**options` of this kind.

    The decorator shows the options one by one in the signature, where `optax.inject_hyperparams`
    finds them, and in the help. There it also says what most clips return and refuse, unless the
    function says it itself. It refuses other keywords, and passes the function's own name if the
    user passes none.

    Args:
      options: the options.
      equivalent: the call of `clip_by` that makes the same transformation; messages about keywords of
        its parts show this call.
      once: the call that clips gradients once; messages about gradients show it.
      instead: for keywords that the function does not take, what to pass in their place.
    """

    def decorate(fn: Function) -> Function:
        own, hints = inspect.signature(fn), get_type_hints(options)
        named = [p for p in own.parameters.values() if p.kind != p.VAR_KEYWORD]
        defaults = {x: value for x, value in _DEFAULTS.items() if x in hints} | {
            "name": fn.__name__
        }
        allowed = [*(p.name for p in named), *defaults]
        has_positional = any(p.kind != p.KEYWORD_ONLY for p in named)

        @functools.wraps(fn)
        def create_clip(*args: Any, **keywords: Any) -> Any:
            with explain_gradient_arguments(fn.__name__, args, once):
                if args and not has_positional:
                    raise TypeError(_explain_positional(fn.__name__, args[0], allowed))
                known = {x: f"pass {y}" for x, y in instead.items()}
                known |= _explain_part_keyword(equivalent, keywords, allowed)
                check_keywords(fn.__name__, keywords, allowed, known)
                check_signature(
                    fn.__name__, shown.__signature__.parameters.values(), args, keywords
                )
                return fn(*args, **({"name": fn.__name__} | keywords))

        shared = [
            inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[x])
            for x, value in defaults.items()
        ]
        shown: Any = create_clip
        shown.__signature__ = own.replace(parameters=[*named, *shared])
        if fn.__doc__:
            shared_text = _COMMON_SECTIONS if "nonfinite" in hints else {}
            # `**options` is the last argument.
            before, _, rest = add_default_sections(fn.__doc__, shared_text).partition(
                "  **options: "
            )
            _, _, after = rest.partition("\n\n")
            explained = "".join(map(_option_docs().__getitem__, defaults))
            shown.__doc__ = f"{before}{explained}\n{after}"
        return shown

    return decorate


def _explain_positional(name: str, value: Any, allowed: list[str]) -> str:
    given = short_repr(value)
    cap = f", or pass max_norm={given} for a cap on it" if "max_norm" in allowed else ""
    threshold = f"For a threshold of {given} take clip_by_global_norm({given}){cap}. "
    return (
        f"{name}() takes only keyword arguments, got {given}; it computes its threshold itself. "
        f"{threshold if is_real(value) else ''}Its keywords are {allowed}"
    )


def _explain_part_keyword(
    parts: str, keywords: dict[str, Any], allowed: list[str]
) -> dict[str, str]:
    """How to pass each keyword that a part of the method takes, but the method does not."""
    found: dict[str, str] = {}
    for keyword in (x for x in keywords if parts and x not in allowed):
        given = f"{keyword}={short_repr(keywords[keyword])}"
        makers = re.finditer(r"(scopes|thresholds)\.(\w+)\((?=(\))?)", parts)
        of_maker = [call for call in makers if keyword in _parameters(call[1], call[2])]
        if of_maker:
            place, comma = of_maker[0].end(), "" if of_maker[0][3] else ", "
            found[keyword] = f"{parts[:place]}{given}{comma}{parts[place:]}"
        elif keyword == "response":
            found[keyword] = f"{parts[:-1]}, {given})"
        elif keyword in ("scope", "threshold"):
            found[keyword] = parts
    return {keyword: f"take the method's parts, {call}" for keyword, call in found.items()}


def _parameters(namespace: str, name: str) -> Collection[str]:
    module = {"scopes": scopes, "thresholds": thresholds}[namespace]
    return inspect.signature(getattr(module, name)).parameters


def _option_docs() -> dict[str, str]:
    """For each option, its lines in the docstrings above."""
    found: dict[str, str] = {}
    for kind in (ShardingOptions, TransformOptions, RescaleOptions, NormOptions, ClipOptions):
        _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        name = ""
        for line in section.splitlines():
            name = name if line.startswith("    ") else line.strip().partition(":")[0]
            found[name] = found.get(name, "") + f"{line}\n"
    return found

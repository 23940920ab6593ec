"""The traced part of a clip: leaves and limits in, clipped leaves, rule state and record out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

import optaxclip.nonfinite as policies
from optaxclip._info import updated_info
from optaxclip._measure import Measured, measure
from optaxclip._numerics import accumulation_dtype, power_of_two_below
from optaxclip._scale import multiplier, scale
from optaxclip._trees import is_sparse
from optaxclip._types import ClipInfo, NonFinite, NormTree, PyTree, Threshold
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response, as_response
from optaxclip.scopes import Grouping


@dataclasses.dataclass(frozen=True)
class Method:
    """What a clip does with the norms, limits apart; static under `jit`."""

    norm: Norm
    response: Response
    nonfinite: NonFinite
    strict: bool
    name: str

    @classmethod
    def checked(
        cls,
        norm: str | Norm,
        response: str | Response,
        nonfinite: str,
        strict: bool,
        name: str,
    ) -> "Method":
        """A method from what a user passed."""
        policy = policies.as_policy(nonfinite)
        return cls(as_norm(norm), as_response(response), policy, bool(strict), name)


def _norms(leaves: list[Any], *, grouping: Grouping, norm: Norm) -> list[Array]:
    return [group.norm for group in measure(_as_arrays(leaves), grouping, norm)]


def _clip(
    leaves: list[Any],
    params: list[Any] | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    given: Array | None,
    *,
    grouping: Grouping,
    method: Method,
    names: tuple[str, ...],
) -> tuple[list[Any], PyTree, ClipInfo]:
    """The way of the data: measure, limit, respond, scale."""
    leaves = _as_arrays(leaves)
    bad_entries = None
    if method.nonfinite == "mask":
        leaves, bad_entries = policies.mask(leaves, grouping)
    if given is None:
        measured = measure(leaves, grouping, method.norm)
    else:
        measured = [_already_measured(given, leaves)]
    norms = [group.norm for group in measured]
    param_norms = None
    if params is not None:
        param_norms = _norms(params, grouping=grouping, norm=method.norm)
        param_norms = _with_absent(param_norms, grouping, info)
    limits, rule_state = rule.update(_with_absent(norms, grouping, info), rule_state, param_norms)
    triggers, targets = grouping.unpack(limits.trigger), grouping.unpack(limits.target)
    replacement = policies.replacement(method.nonfinite)
    multipliers = [
        multiplier(*group, method.response, replacement)
        for group in zip(measured, triggers, targets, strict=True)
    ]
    scaled = [
        scale(leaf, multipliers[group], axes, strict=method.strict)
        for leaf, group, axes in zip(leaves, grouping.index, grouping.axes, strict=True)
    ]
    bad = bad_entries or [~jnp.isfinite(norm) for norm in norms]
    if method.nonfinite == "error":
        for flags, members in zip(bad, grouping.members(), strict=True):
            policies.check(flags, method.name, [names[i] for i in members])
    return scaled, rule_state, updated_info(info, grouping, norms, triggers, multipliers, bad)


_compiled_clip = jax.jit(_clip, static_argnames=("grouping", "method", "names"))
_compiled_norms = jax.jit(_norms, static_argnames=("grouping", "norm"))


def run(*operands: Any, method: Method, **static: Any) -> tuple[list[Any], PyTree, ClipInfo]:
    """`_clip` as one cached compiled call in eager mode; under a trace, part of that trace."""
    # In eager mode `checkify` raises at once, which a compiled call would not let it.
    inline = method.nonfinite == "error" or _is_traced(operands)
    return (_clip if inline else _compiled_clip)(*operands, method=method, **static)


def run_norms(leaves: list[Any], grouping: Grouping, norm: Norm) -> list[Array]:
    """The norms alone, in the same way."""
    return (_norms if _is_traced(leaves) else _compiled_norms)(leaves, grouping=grouping, norm=norm)


def zero_norms(leaves: list[Any], grouping: Grouping, *, wide: bool = False) -> NormTree:
    """Zeros of the norms' structure and shapes, from which rules and records make their state.

    Args:
      leaves: the leaves to be measured.
      grouping: their groups.
      wide: whether groups with 64-bit leaves get float64; float32 otherwise.
    """
    zeros = []
    for members in grouping.members():
        dtypes = [accumulation_dtype(jnp.result_type(leaves[i])) for i in members] if wide else []
        dtype = jnp.float64 if jnp.float64 in dtypes else jnp.float32
        shape = np.shape(leaves[members[0]]) if members else ()
        reduced = grouping.axes[members[0]] if members else ()
        kept = tuple(size for axis, size in enumerate(shape) if axis not in reduced)
        zeros.append(jnp.zeros(kept, dtype))
    return grouping.pack(zeros)


def _is_traced(operands: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]


def _already_measured(norm: Array, leaves: list[Any]) -> Measured:
    unit = power_of_two_below(norm)
    return Measured(norm / unit, unit, sum(leaf.size for leaf in leaves))


def _with_absent(norms: list[Array], grouping: Grouping, info: ClipInfo) -> NormTree:
    """The norms of all groups known since `init`; one without leaves in this tree has norm NaN."""
    tree = grouping.pack(norms)
    if grouping.names is None:
        return tree
    absent = {name: jnp.full(jnp.shape(x), jnp.nan) for name, x in info.norm.items()}
    return {**absent, **tree}

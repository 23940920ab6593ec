"""The traced part of a clip: leaves and limits in, clipped leaves, rule state and record out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

import optaxclip._base.devices as devices
import optaxclip._engine.masked as masked
import optaxclip.nonfinite as policies
from optaxclip._base.grouping import Grouping
from optaxclip._base.trees import is_sparse
from optaxclip._base.types import ClipInfo, NonFinite, NormTree, PyTree, Threshold
from optaxclip._engine.measure import already_measured, measure
from optaxclip._engine.placement import as_spec, on_explicit_mesh, specs_of_norms
from optaxclip._engine.record import updated_info
from optaxclip._engine.respond import Multiplier, multiplier
from optaxclip._engine.scale import scale
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response, as_response


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


def _norms(leaves: list[Any], *, grouping: Grouping, norm: Norm) -> NormTree:
    def steps(leaves: list[Any], grouping: Grouping) -> NormTree:
        return grouping.tree([each.norm for each in measure(leaves, grouping, norm)])

    leaves = _as_arrays(leaves)
    return on_explicit_mesh(steps, specs_of_norms, leaves, grouping)(leaves)


def _clip(
    leaves: list[Any],
    params: list[Any] | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    given: Array | None,
    *,
    grouping: Grouping,
    **static: Any,
) -> tuple[list[Any], PyTree, ClipInfo]:
    def out_specs(grouping: Grouping) -> PyTree:
        specs = [as_spec(spec) for spec in grouping.specs or ()]
        return specs, *jax.tree.map(devices.spec_of, (rule_state, info))

    leaves, params = _as_arrays(leaves), None if params is None else _as_arrays(params)
    steps = functools.partial(_steps, **static)
    run = on_explicit_mesh(steps, out_specs, leaves, grouping)
    return run(leaves, params, rule, rule_state, info, given)


def _steps(
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
    """The way of the data: measure, limit, respond, scale, record."""
    bad = None
    if method.nonfinite == "mask":
        leaves, bad = masked.mask(leaves, grouping)
    if given is None:
        measured = measure(leaves, grouping, method.norm)
    else:
        measured = already_measured(given, leaves, grouping, method.norm)
    norms = [each.norm for each in measured]
    bad = [~jnp.isfinite(norm) for norm in norms] if bad is None else grouping.joined(bad)
    if method.nonfinite == "error":
        report(bad, grouping, method.name, names)

    triggers, targets, rule_state = limits_of(
        rule, rule_state, norms, _param_norms(params, grouping, method), grouping
    )
    multipliers = [
        multiplier(*row, response=method.response, nonfinite=method.nonfinite)
        for row in zip(measured, triggers, targets, strict=True)
    ]
    info = updated_info(info, grouping, norms, triggers, [by.factor for by in multipliers], bad)
    rows = zip(leaves, _by_leaf(multipliers, grouping), grouping.axes, strict=True)
    scaled = [scale(leaf, by, axes=axes, strict=method.strict) for leaf, by, axes in rows]
    return scaled, rule_state, info


def _param_norms(
    params: list[Any] | None, grouping: Grouping, method: Method
) -> list[Array] | None:
    if params is None:
        return None
    return [each.norm for each in measure(params, grouping, method.norm)]


def limits_of(
    rule: Threshold,
    state: PyTree,
    norms: list[Array],
    param_norms: list[Array] | None,
    grouping: Grouping,
) -> tuple[list[Array], list[Array], PyTree]:
    """The triggers and targets of all norms, and the rule's state."""
    if rule.memoryless:
        limits, state = rule.update(norms, state, param_norms)
        return list(limits.trigger), list(limits.target), state
    of_params = None if param_norms is None else grouping.tree(param_norms)
    limits, state = rule.update(grouping.tree(norms), state, of_params)
    return grouping.of_tree(limits.trigger), grouping.of_tree(limits.target), state


def _by_leaf(multipliers: list[Multiplier], grouping: Grouping) -> list[Multiplier]:
    """The multiplier of each leaf."""
    before = grouping.by_leaf([by.before for by in multipliers])
    quotient = grouping.by_leaf([by.quotient for by in multipliers])
    flags = [by.is_zero for by in multipliers if by.is_zero is not None]
    is_zero = grouping.by_leaf(flags) if flags else [None] * len(before)
    return [Multiplier(*row) for row in zip(before, quotient, is_zero, strict=True)]


def report(bad: list[Array], grouping: Grouping, name: str, names: tuple[str, ...]) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(grouping.parted(bad), grouping.groups, strict=True):
        policies.check(flags, name, [names[i] for i in group.members])


_compiled_clip = jax.jit(_clip, static_argnames=("grouping", "method", "names"))
_compiled_norms = jax.jit(_norms, static_argnames=("grouping", "norm"))


def run(*operands: Any, method: Method, **static: Any) -> tuple[list[Any], PyTree, ClipInfo]:
    """`_clip` as one cached compiled call in eager mode; under a trace, part of that trace."""
    # In eager mode `checkify` raises at once, which a compiled call would not let it.
    inline = method.nonfinite == "error" or is_traced(operands)
    return (_clip if inline else _compiled_clip)(*operands, method=method, **static)


def run_norms(leaves: list[Any], grouping: Grouping, norm: Norm) -> NormTree:
    """The norms alone, in the same way."""
    return (_norms if is_traced(leaves) else _compiled_norms)(leaves, grouping=grouping, norm=norm)


def zero_norms(grouping: Grouping, dtype: jnp.dtype) -> NormTree:
    """Zeros of the norms' structure and shapes, from which rules make their state."""
    return jax.tree.map(
        jnp.zeros_like,
        grouping.tree(
            grouping.joined([jnp.zeros(group.shape, dtype) for group in grouping.groups])
        ),
    )


def is_traced(operands: Any) -> bool:
    """Whether these pytrees are part of a trace."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands))


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]

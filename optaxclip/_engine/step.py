"""One step: leaves and limits come in, clipped leaves, the rule's state and the record go out.

Here are the ways in, checked, compiled and on any mesh; `_steps` is the way of the data.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._base.devices as devices
import optaxclip.nonfinite as policies
from optaxclip._base.grouping import Grouping, OfGroups
from optaxclip._base.trees import FlatTree, is_sparse
from optaxclip._base.types import ClipInfo, NonFinite, NormTree, PyTree, Threshold
from optaxclip._engine.checks import matching_params, params_for
from optaxclip._engine.masked import mask
from optaxclip._engine.measure import already_measured, measure
from optaxclip._engine.placement import (
    norm_specs,
    norm_tree_specs,
    on_explicit_mesh,
    run,
)
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
    leaves: tuple[str, ...] = ()
    """The leaves' names, where they are needed for messages."""

    @classmethod
    def checked(
        cls, norm: str | Norm, response: str | Response, nonfinite: str, strict: bool, name: str
    ) -> "Method":
        """A method from what a user passed."""
        policy = policies.as_policy(nonfinite)
        return cls(as_norm(norm), as_response(response), policy, bool(strict), name)


def clipped(
    flat: FlatTree,
    params: PyTree | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    known: Array | None,
    grouping: Grouping,
    method: Method,
) -> tuple[PyTree, PyTree, ClipInfo]:
    """The tree, clipped, the rule's state and the record; `known` is a norm that the user has."""
    params = matching_params(flat, params_for(rule, params, method.name), method.name)
    raises = method.nonfinite == "error"
    if raises:
        method = dataclasses.replace(method, leaves=tuple(flat.names()))
    operands = (flat.picked(), params, rule, rule_state, info, known)
    # In eager mode `checkify` raises at once, which a compiled call would not let it.
    picked, *rest = run(_clip, *operands, grouping=grouping, how=method, inline=raises)
    return flat.rebuild(picked), *rest


def _clip(
    leaves: list[Any],
    params: list[Any] | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    known: Array | None,
    *,
    grouping: Grouping,
    how: Method,
) -> tuple[list[Any], PyTree, ClipInfo]:
    def out_specs(grouping: Grouping) -> PyTree:
        return list(grouping.specs or ()), *jax.tree.map(devices.spec_of, (rule_state, info))

    leaves, of_params = _as_arrays(leaves), None
    if params is not None:
        # By themselves, as they may be split otherwise than the gradients.
        of_params = _param_norms(_as_arrays(params), grouping, how.norm)
    steps = functools.partial(_steps, how=how)
    operands = (leaves, of_params, rule, rule_state, info, known)
    return on_explicit_mesh(steps, out_specs, leaves, grouping)(*operands)


def _param_norms(params: list[Any], grouping: Grouping, norm: Norm) -> OfGroups:
    def steps(params: list[Any], grouping: Grouping) -> OfGroups:
        return [each.norm for each in measure(params, grouping, norm)]

    return on_explicit_mesh(steps, norm_specs, params, grouping)(params)


def _steps(
    leaves: list[Any],
    of_params: OfGroups | None,
    rule: Threshold,
    rule_state: PyTree,
    info: ClipInfo,
    known: Array | None,
    *,
    grouping: Grouping,
    how: Method,
) -> tuple[list[Any], PyTree, ClipInfo]:
    """The way of the data: measure, limit, respond, scale, record."""
    bad = None
    if how.nonfinite == "mask":
        leaves, bad = mask(leaves, grouping)
    if known is None:
        measured = measure(leaves, grouping, how.norm)
    else:
        measured = already_measured(known, leaves, how.norm)
    norms = [each.norm for each in measured]
    if bad is None:
        bad = [~jnp.isfinite(norm) for norm in norms]
    if how.nonfinite == "error":
        report(bad, grouping, how.name, how.leaves)

    triggers, targets, rule_state = limits_of(rule, rule_state, norms, of_params, grouping)
    multipliers = [
        multiplier(*row, response=how.response, nonfinite=how.nonfinite)
        for row in zip(measured, triggers, targets, strict=True)
    ]
    rows = zip(leaves, _by_leaf(multipliers, grouping), grouping.axes, strict=True)
    scaled = [scale(leaf, by, axes=axes, strict=how.strict) for leaf, by, axes in rows]
    factors = [by.factor for by in multipliers]
    return scaled, rule_state, updated_info(info, grouping, norms, triggers, factors, bad)


def limits_of(
    rule: Threshold, state: PyTree, norms: OfGroups, of_params: OfGroups | None, grouping: Grouping
) -> tuple[OfGroups, OfGroups, PyTree]:
    """The triggers and targets of all norms, and the rule's state."""
    if rule.memoryless:
        limits, state = rule.update(norms, state, of_params)
        return list(limits.trigger), list(limits.target), state
    param_norms = None if of_params is None else grouping.tree(of_params)
    limits, state = rule.update(grouping.tree(norms), state, param_norms)
    return grouping.of_tree(limits.trigger), grouping.of_tree(limits.target), state


def report(bad: OfGroups, grouping: Grouping, name: str, names: tuple[str, ...]) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(grouping.parted(bad), grouping.groups, strict=True):
        policies.check(flags, name, [names[i] for i in group.members])


def _by_leaf(multipliers: list[Multiplier], grouping: Grouping) -> list[Multiplier]:
    """The multiplier of each leaf."""
    columns = zip(*multipliers, strict=True)
    fields = [
        [None] * len(grouping.axes) if column[0] is None else grouping.by_leaf(list(column))
        for column in columns
    ]
    return [Multiplier(*row) for row in zip(*fields, strict=True)]


def norms_of(leaves: list[Any], grouping: Grouping, norm: Norm) -> NormTree:
    """The norms of all groups, as limit rules see them."""
    return run(_norms, leaves, grouping=grouping, how=norm)


def _norms(leaves: list[Any], *, grouping: Grouping, how: Norm) -> NormTree:
    def steps(leaves: list[Any], grouping: Grouping) -> NormTree:
        return grouping.tree([each.norm for each in measure(leaves, grouping, how)])

    leaves = _as_arrays(leaves)
    return on_explicit_mesh(steps, norm_tree_specs, leaves, grouping)(leaves)


def _as_arrays(leaves: list[Any]) -> list[Any]:
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]

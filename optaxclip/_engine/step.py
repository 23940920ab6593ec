"""One step: leaves and limits come in, clipped leaves, the rule's state and the record go out.

`clipped` and `norms_of` check and compile, on any mesh; `_steps` runs the steps in order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import chex
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
import optaxclip.nonfinite as policies
from optaxclip._base.counters import increased
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import ClipState, NonFinite, NormTree, PyTree, Threshold
from optaxclip._border.calls import across
from optaxclip._border.checks import matching_params
from optaxclip._border.entries import as_arrays
from optaxclip._border.options import Options
from optaxclip._border.placement import located
from optaxclip._engine.masked import mask
from optaxclip._engine.measure import Measured, measure, slack
from optaxclip._engine.plan import Plan
from optaxclip._engine.record import updated_info
from optaxclip._engine.respond import Multiplier, multiplier
from optaxclip._engine.scale import scale
from optaxclip.norms import Norm
from optaxclip.responses import Response, as_response
from optaxclip.thresholds.calling import limits_of, params_for


@dataclasses.dataclass(frozen=True)
class Technique:
    """How leaves are measured and changed: each group has a norm, and is multiplied by a number.

    Other techniques override what they do otherwise. Hashable, because it is static.
    """

    names_leaves: ClassVar[bool] = False
    """Whether `measured` needs the leaves' names, for messages."""

    def measured(self, leaves: list[Any], plan: Plan, method: "Method") -> Measured:
        """The norms of all groups."""
        return measure(leaves, plan, method.norm, from_above=method.strict)

    def columns(self, by: Multiplier, limits: Array) -> Sequence[Array]:
        """The numbers per group that `scaled` needs, each array of the shape of the norms."""
        del limits
        return by

    def scaled(self, leaf: Any, columns: Array, axes: tuple[int, ...], method: "Method") -> Any:
        """The changed leaf.

        `columns` stacks along its first axis what the method `columns` gave; its other axes are the
        leaf's without `axes`.
        """
        zeroes = method.nonfinite == "zero"
        return scale(leaf, columns, axes=axes, strict=method.strict, zeroes=zeroes)


BY_NORM = Technique()


@dataclasses.dataclass(frozen=True)
class Method:
    """All settings of a clip except its limits; static under `jit`."""

    norm: Norm
    response: Response
    nonfinite: NonFinite
    strict: bool
    name: str
    technique: Technique = BY_NORM
    leaf_names: tuple[str, ...] = ()
    """The leaves' names, where they are needed for messages."""

    @classmethod
    def of(
        cls,
        options: Options,
        response: str | Response,
        technique: Technique = BY_NORM,
    ) -> "Method":
        """From the checked options, a response and a technique."""
        chosen = (options.norm, as_response(response), options.nonfinite, options.strict)
        return cls(*chosen, options.name, technique)


def clipped(
    flat: FlatTree,
    params: PyTree | None,
    rule: Threshold,
    state: ClipState,
    norm_of_tree: Array | None,
    plan: Plan,
    method: Method,
    options: Options,
) -> tuple[PyTree, ClipState]:
    """The clipped tree and the next state.

    Args:
      flat: the tree.
      params: the parameters, for a limit that is relative to them.
      rule: the limit.
      state: the state before the step; where nothing is recorded, its `info` is None.
      norm_of_tree: the norm of the whole tree, if the caller has it; else it is measured.
      plan: the groups of the tree, and where they lie.
      method: all settings but the limit.
      options: the options, for how the parameters are split over devices.
    """
    params = params_for(rule, params, method.name)
    weights, of_weights = None, plan
    if params is not None:
        weights, of_weights = weights_beside(flat, params, plan, options)
    raises = method.nonfinite == "error"
    if raises or method.technique.names_leaves:
        method = dataclasses.replace(method, leaf_names=tuple(flat.names()))
    operands = (flat.measured_leaves(), weights, rule, state, norm_of_tree)
    static = {"plan": plan, "of_weights": of_weights, "method": method}
    # In eager mode `checkify.check` raises at once, but inside of a compiled call it cannot.
    new, state = across(_steps, *operands, like=_results, compiled=not raises, **static)
    return flat.rebuild(new), state


def _results(leaves: list[Any], weights: Any, rule: Threshold, state: ClipState, _: Any) -> PyTree:
    """What the results of `_steps` are typed like."""
    del weights, rule
    return leaves, state


def weights_beside(
    flat: FlatTree, params: PyTree, plan: Plan, options: Options
) -> tuple[list[Any], Plan]:
    """The parameters of the measured leaves, and the same groups, placed as the parameters are.

    Parameters may be split differently from the updates.
    """
    found = matching_params(flat, params, options.name)
    placement = located(plan.grouping, found, options)
    return found.measured_leaves(), dataclasses.replace(plan, placement=placement)


def norms_of(flat: FlatTree, plan: Plan, norm: Norm) -> NormTree:
    """The norms of all groups, as users see them."""
    return across(_norms, flat.measured_leaves(), plan=plan, norm=norm)


def _steps(
    leaves: list[Any],
    weights: list[Any] | None,
    rule: Threshold,
    state: ClipState,
    norm_of_tree: Array | None,
    *,
    plan: Plan,
    of_weights: Plan,
    method: Method,
) -> tuple[list[Any], ClipState]:
    """The steps in order: measure, limit, respond, scale, record."""
    leaves, technique = as_arrays(leaves), method.technique
    bad, weight_norms = None, None
    if weights is not None:
        weight_norms = measure(as_arrays(weights), of_weights, method.norm).norm
    if method.nonfinite == "mask":
        leaves, bad = mask(leaves, plan)
    if norm_of_tree is None:
        measured = technique.measured(leaves, plan, method)
    else:
        measured = Measured.of(norm_of_tree, 1.0)
        if method.strict:
            measured = measured.from_above(slack(leaves, plan, method.norm))
    norm = measured.norm
    bad = ~jnp.isfinite(norm) if bad is None else bad
    chex.assert_shape([norm, bad], plan.shape)
    if method.nonfinite == "error":
        _report(bad, plan, method)
    limits, rule_state = limits_of(rule, state.rule, norm, weight_norms, method.name)
    chex.assert_shape(list(limits), plan.shape)
    options = {"response": method.response, "nonfinite": method.nonfinite, "strict": method.strict}
    by = multiplier(measured, *limits, **options)
    chex.assert_shape(list(by), plan.shape)
    # Stacked, so that each leaf cuts its part out of one array in one operation.
    columns = devices.stack(technique.columns(by, limits.trigger.astype(by.ratio.dtype)))
    parts = map(plan.placement.on_all_devices, plan.by_leaf(columns, leaves))
    rows = zip(leaves, parts, plan.grouping.axes, strict=True)
    scaled = [technique.scaled(*row, method) for row in rows]
    chex.assert_trees_all_equal_shapes_and_dtypes(leaves, scaled)
    if state.info is None:
        return scaled, state
    info = updated_info(state.info, plan, norm, limits.trigger, by.factor, bad)
    return scaled, ClipState(increased(state.steps), rule_state, info)


def _report(bad: Array, plan: Plan, method: Method) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(plan.unpack(bad), plan.grouping.groups, strict=True):
        if group.members:
            names = [method.leaf_names[i] for i in group.members]
            # JAX shows this line where `checkify` is missing; see there.
            policies.check(flags, method.name, names)  # nonfinite="error" needs checkify


def _norms(leaves: list[Any], *, plan: Plan, norm: Norm) -> NormTree:
    return plan.as_tree(measure(as_arrays(leaves), plan, norm).norm)

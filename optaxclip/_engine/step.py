"""One step: takes leaves and limits, and gives clipped leaves, the rule's state and the record.

`clipped` and `norms_of` check and compile, on any mesh; `_steps` runs the stages in order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import chex
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
import optaxclip.nonfinite as policies
from optaxclip._base.states import increased
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import ClipState, NormTree, PyTree, Threshold
from optaxclip._border.crossing import global_view
from optaxclip._border.entries import as_arrays
from optaxclip._engine.measure import Measured, mask, measure, slack
from optaxclip._engine.options import Options
from optaxclip._engine.plan import Plan, weights_beside
from optaxclip._engine.record import updated_info
from optaxclip._engine.respond import Multiplier, multiplier
from optaxclip._engine.scale import scale
from optaxclip.norms import Norm
from optaxclip.thresholds.calling import limits_of, params_for


@dataclasses.dataclass(frozen=True)
class Technique:
    """How leaves are measured and changed: each group has a norm, and is multiplied by a number.

    Other techniques override what they do differently. All are hashable, because they are static.
    """

    names_leaves: ClassVar[bool] = False
    """Whether `norms` needs the leaves' names, for messages."""

    def norms(self, leaves: list[Any], plan: Plan, options: Options) -> Measured:
        """The norms of all groups."""
        return measure(leaves, plan, options.norm, from_above=options.strict)

    def columns(self, by: Multiplier, limits: Array) -> Sequence[Array]:
        """The numbers for each group that `scaled` needs, in arrays of the shape of the norms."""
        del limits
        return by

    def scaled(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """The changed leaf.

        The argument `columns` stacks the results of the method `columns` along its first axis; its
        other axes are the leaf's axes without `axes`.
        """
        zeroes = options.nonfinite == "zero"
        return scale(leaf, columns, axes=axes, strict=options.strict, zeroes=zeroes)


BY_NORM = Technique()


def clipped(
    flat: FlatTree,
    params: PyTree | None,
    rule: Threshold,
    state: ClipState,
    norm_of_tree: Array | None,
    plan: Plan,
    options: Options,
    technique: Technique = BY_NORM,
) -> tuple[PyTree, ClipState]:
    """The clipped tree and the next state.

    If nothing is recorded, the state's `info` is None. If the caller does not know the norm of the
    whole tree, it is measured.
    """
    params = params_for(rule, params, options.name)
    weights, of_weights = None, plan
    if params is not None:
        weights, of_weights = weights_beside(flat, params, plan, options)
    raises = options.nonfinite == "error"
    if raises or technique.names_leaves:
        plan = dataclasses.replace(plan, leaf_names=tuple(flat.names()))
    # Not compiled for "error" in eager mode: `checkify.check` can raise at once there, but not
    # inside of a compiled call.
    run = _steps_one_by_one if raises else _steps_compiled
    new, state = run(
        flat.measured_leaves(),
        weights,
        rule,
        state,
        norm_of_tree,
        plan=plan,
        of_weights=of_weights,
        options=options,
        technique=technique,
    )
    return flat.rebuild(new), state


def norms_of(flat: FlatTree, plan: Plan, norm: Norm) -> NormTree:
    """The norms of all groups, as users see them."""
    return _norms(flat.measured_leaves(), plan=plan, norm=norm)


def _steps(
    leaves: list[Any],
    weights: list[Any] | None,
    rule: Threshold,
    state: ClipState,
    norm_of_tree: Array | None,
    *,
    plan: Plan,
    of_weights: Plan,
    options: Options,
    technique: Technique,
) -> tuple[list[Any], ClipState]:
    """Runs the stages in order: measure, limit, respond, scale, record."""
    leaves, bad, weight_norms = as_arrays(leaves), None, None
    if weights is not None:
        weight_norms = measure(as_arrays(weights), of_weights, options.norm).norm
    if options.nonfinite == "mask":
        leaves, bad = mask(leaves, plan)
    if norm_of_tree is None:
        measured = technique.norms(leaves, plan, options)
    else:
        measured = Measured.of(norm_of_tree, 1.0)
        if options.strict:
            measured = measured.from_above(slack(leaves, plan, options.norm))
    norm = measured.norm
    bad = ~jnp.isfinite(norm) if bad is None else bad
    chex.assert_shape([norm, bad], plan.shape)
    if options.nonfinite == "error":
        _report(bad, plan, options.name)
    limits, rule_state = limits_of(rule, state.rule, norm, weight_norms, options.name)
    chex.assert_shape(list(limits), plan.shape)
    by = multiplier(
        measured,
        limits.trigger,
        limits.target,
        response=options.response,
        nonfinite=options.nonfinite,
        strict=options.strict,
    )
    chex.assert_shape(list(by), plan.shape)
    # Stacked, so that one operation cuts a leaf's part out of one array.
    columns = devices.stack(technique.columns(by, limits.trigger.astype(by.ratio.dtype)))
    parts = map(plan.placement.on_all_devices, plan.by_leaf(columns, leaves))
    scaled = [
        technique.scaled(leaf, part, axes, options)
        for leaf, part, axes in zip(leaves, parts, plan.grouping.axes, strict=True)
    ]
    chex.assert_trees_all_equal_shapes_and_dtypes(leaves, scaled)
    if state.info is None:
        return scaled, state
    info = updated_info(state.info, plan, norm, limits.trigger, by.factor, bad)
    return scaled, ClipState(increased(state.steps), rule_state, info)


_steps_compiled = global_view(out_like=("leaves", "state"))(_steps)
_steps_one_by_one = global_view(out_like=("leaves", "state"), compiled=False)(_steps)


def _report(bad: Array, plan: Plan, name: str) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(plan.unpack(bad), plan.grouping.groups, strict=True):
        if group.members:
            names = [plan.leaf_names[i] for i in group.members]
            # If `checkify` is missing, JAX's error shows this line (see `nonfinite.check`).
            policies.check(flags, name, names)  # nonfinite="error" needs checkify


@global_view()
def _norms(leaves: list[Any], *, plan: Plan, norm: Norm) -> NormTree:
    return plan.as_tree(measure(as_arrays(leaves), plan, norm).norm)

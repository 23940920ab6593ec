"""One step: takes leaves and thresholds, and gives clipped leaves, the rule's state and the record.

`clipped` and `compute_norms` check and compile, on any mesh; `_steps` runs the stages in order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import chex
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
import optaxclip.nonfinite as policies
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.global_view import global_view
from optaxclip._base.state import safe_increment
from optaxclip._base.trees import FlatTree
from optaxclip._base.types import ClipState, NormTree, PyTree, ThresholdRule
from optaxclip._engine.measure import ScaledNorms, mask_nonfinite, measure, relative_error
from optaxclip._engine.multiplier import Multiplier, compute_multiplier
from optaxclip._engine.options import Options
from optaxclip._engine.plan import Plan, get_param_leaves
from optaxclip._engine.record import update_info
from optaxclip._engine.scale import scale
from optaxclip.norms import Norm
from optaxclip.thresholds.rule import params_if_needed, update_rule


@dataclasses.dataclass(frozen=True)
class ClipMethod:
    """How leaves are measured and changed: each group has a norm, and is multiplied by a number.

    Other techniques override what they do differently. All are hashable, because they are static.
    """

    names_leaves: ClassVar[bool] = False
    """Whether `norms` needs the leaves' names, for messages."""

    def compute_norms(self, leaves: list[Any], plan: Plan, options: Options) -> ScaledNorms:
        """The norms of all groups."""
        return measure(leaves, plan, options.norm, from_above=options.strict)

    def leaf_operands(self, by: Multiplier, threshold_values: Array) -> Sequence[Array]:
        """The numbers for each group that `scaled` needs, in arrays of the shape of the norms."""
        del threshold_values
        return by

    def apply(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """The changed leaf.

        The argument `columns` stacks the results of the method `columns` along its first axis; its
        other axes are the leaf's axes without `axes`.
        """
        zeroes = options.nonfinite == "zero"
        return scale(leaf, columns, axes=axes, strict=options.strict, zero_nonfinite=zeroes)


NORM_CLIP = ClipMethod()


def run_clip(
    flat: FlatTree,
    params: PyTree | None,
    rule: ThresholdRule,
    state: ClipState,
    known_norm: Array | None,
    plan: Plan,
    options: Options,
    technique: ClipMethod = NORM_CLIP,
) -> tuple[PyTree, ClipState]:
    """The clipped tree and the next state.

    If nothing is recorded, the state's `info` is None. If the caller does not know the norm of the
    whole tree, it is measured.
    """
    params = params_if_needed(rule, params, options.name)
    param_leaves, param_plan = None, plan
    if params is not None:
        param_leaves, param_plan = get_param_leaves(flat, params, plan, options)
    raises = options.nonfinite == "error"
    if raises or technique.names_leaves:
        plan = dataclasses.replace(plan, leaf_names=tuple(flat.names()))
    # Not compiled for "error" in eager mode: `checkify.check` can raise at once there, but not
    # inside of a compiled call.
    run = _steps_one_by_one if raises else _steps_compiled
    new, state = run(
        flat.inexact_leaves(),
        param_leaves,
        rule,
        state,
        known_norm,
        plan=plan,
        param_plan=param_plan,
        options=options,
        technique=technique,
    )
    return flat.unflatten(new), state


def compute_norms(flat: FlatTree, plan: Plan, norm: Norm) -> NormTree:
    """The norms of all groups, as users see them."""
    return _compute_norms(flat.inexact_leaves(), plan=plan, norm=norm)


def _clip_step(
    leaves: list[Any],
    param_leaves: list[Any] | None,
    rule: ThresholdRule,
    state: ClipState,
    known_norm: Array | None,
    *,
    plan: Plan,
    param_plan: Plan,
    options: Options,
    technique: ClipMethod,
) -> tuple[list[Any], ClipState]:
    """Runs the stages in order: measure, threshold, respond, scale, record."""
    leaves, bad, weight_norms = as_arrays(leaves), None, None
    if param_leaves is not None:
        weight_norms = measure(as_arrays(param_leaves), param_plan, options.norm).norm
    if options.nonfinite == "mask":
        leaves, bad = mask_nonfinite(leaves, plan)
    if known_norm is None:
        measured = technique.compute_norms(leaves, plan, options)
    else:
        measured = ScaledNorms.from_value(known_norm, 1.0)
        if options.strict:
            measured = measured.add_error_bound(relative_error(leaves, plan, options.norm))
    norm = measured.norm
    bad = ~jnp.isfinite(norm) if bad is None else bad
    chex.assert_shape([norm, bad], plan.shape)
    if options.nonfinite == "error":
        _report(bad, plan, options.name)
    thresholds, rule_state = update_rule(rule, state.rule, norm, weight_norms, options.name)
    chex.assert_shape(list(thresholds), plan.shape)
    by = compute_multiplier(
        measured,
        thresholds.trigger,
        thresholds.target,
        response=options.response,
        nonfinite=options.nonfinite,
        strict=options.strict,
    )
    chex.assert_shape(list(by), plan.shape)
    # Stacked, so that one operation cuts a leaf's part out of one array.
    columns = meshes.stack(technique.leaf_operands(by, thresholds.trigger.astype(by.ratio.dtype)))
    parts = map(plan.placement.replicate, plan.slice_for_leaves(columns, leaves))
    scaled = [
        technique.apply(leaf, part, axes, options)
        for leaf, part, axes in zip(leaves, parts, plan.grouping.axes, strict=True)
    ]
    chex.assert_trees_all_equal_shapes_and_dtypes(leaves, scaled)
    if state.info is None:
        return scaled, state
    info = update_info(state.info, plan, norm, thresholds.trigger, by.factor, bad)
    return scaled, ClipState(safe_increment(state.steps), rule_state, info)


_steps_compiled = global_view(out_like=("leaves", "state"))(_clip_step)
_steps_one_by_one = global_view(out_like=("leaves", "state"), compiled=False)(_clip_step)


def _report(bad: Array, plan: Plan, name: str) -> None:
    """Reports groups that are not finite to `checkify`."""
    for flags, group in zip(plan.unpack(bad), plan.grouping.groups, strict=True):
        if group.leaf_indices:
            names = [plan.leaf_names[i] for i in group.leaf_indices]
            # If `checkify` is missing, JAX's error shows this line (see `nonfinite.check`).
            policies.checkify_finite(flags, name, names)  # nonfinite="error" needs checkify


@global_view()
def _compute_norms(leaves: list[Any], *, plan: Plan, norm: Norm) -> NormTree:
    return plan.arrange_by_layout(measure(as_arrays(leaves), plan, norm).norm)

"""Clipping by norms: a scope, a norm, a threshold rule, a response, and a non-finite policy.

`clip_by` and `clip_tree` are the API. `run_clip` checks a step, and `_clip_step` runs its stages on
arrays: measure, threshold, respond, scale, record.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack

import chex
import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._backend.meshes as meshes
from optaxclip._backend.elementwise import as_arrays
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    move_to_device_memory,
    put_on_device,
    stateless,
    transformation,
)
from optaxclip._backend.leaf_shardings import LeafShardings, apply_scope
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.state import check_state, copy_arrays, safe_increment
from optaxclip._base.trees import FlatTree, flatten, warn_if_many_norms
from optaxclip._base.types import (
    ArrayLike,
    AxisName,
    ClipInfo,
    ClipState,
    NonFinite,
    NormTree,
    PyTree,
    ThresholdRule,
    Thresholds,
)
from optaxclip._base.validation import validate_call
from optaxclip._engine.measure import ScaledNorms, mask_nonfinite, measure, relative_error
from optaxclip._engine.options import ClipOptions, Options, document_options
from optaxclip._engine.plan import Plan, get_param_leaves, make_plan, resolve_scope
from optaxclip._engine.record import initial_info, update_info
from optaxclip._engine.scale import Multiplier, compute_multiplier, scale
from optaxclip.nonfinite import checkify_finite
from optaxclip.norms import Norm
from optaxclip.responses import Response
from optaxclip.scopes import Scope
from optaxclip.thresholds._constant import (
    ThresholdLike,
    check_threshold,
    evaluate_schedules,
    fixed,
    resolve_rule,
    stateless_rule_state,
)
from optaxclip.thresholds._rule import check_threshold_value, params_if_needed, update_rule


@validate_call(transformation=True, one_shot_call="clip_tree(grads, 1.0, scope=scopes.tree())")
@document_options(ClipOptions)
def clip_by(
    scope: Scope,
    threshold: ThresholdLike,
    *,
    response: str | Response = "clip",
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Clips groups of elements by any norm and threshold.

    All scopes, norms, and thresholds have the following guarantees. Norms are summed in float32 or
    wider, and no square overflows or underflows. A group at or below its threshold is returned
    unchanged. The new norm of other groups is the threshold up to rounding, or at most the
    threshold if `strict=True`. Dtypes, weak types, shapes, and the tree structure are unchanged.
    The value and its derivatives are finite for finite gradients. `None`, integer, bool, `float0`,
    and PRNG-key leaves are returned unchanged and ignored in norms.

    Args:
      scope: The groups of elements that share a norm, from `optaxclip.scopes`. Because a scope is a
        function but not a schedule, `optax.inject_hyperparams` requires `static_args=("scope",)`.
      threshold: A number, a scalar array (traced or not), a schedule `count -> threshold`, a rule
        from `optaxclip.thresholds`, or a dict that maps the names of all groups to such thresholds.
        Inside `optax.masked` or `optax.partition`, the dict may contain groups of other leaves.
      response: "clip" (the default), "normalize", "smooth", "auto_s", "band", or a function. See
        `optaxclip.responses`.
      **options: Options that can be used with any transformation. See `optaxclip.ClipOptions`.

    Returns:
      A transformation with a `ClipState`. If the threshold does not depend on earlier steps, you
      can also pass None as the state.

    Raises:
      ValueError: If a name is unknown, or if a threshold is negative, NaN or not a scalar. Also
        raised by `update` if the sharding of leaves is unknown, or if the state is None although
        the threshold depends on earlier steps.
      TypeError: If a threshold is not a number, or if `scope` is not a scope.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> from optaxclip import scopes
      >>> clip = optaxclip.clip_by(scopes.leaf(), optax.linear_schedule(1.0, 0.5, 100), norm="rms")
      >>> tx = optax.chain(clip, optax.adam(1e-3))
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> updates, state = clip.update(grads, clip.init(grads))
      >>> print(list(state.info.names), state.info.norm)
      ['b', 'w'] [0.5       3.5355341]
    """
    return make_clip(resolve_scope(scope), threshold, Options.create(response=response, **options))


@dataclasses.dataclass(frozen=True)
class ClipMethod:
    """The static parts of a step that differ between clipping methods."""

    names_leaves: ClassVar[bool] = False
    """If True, `compute_norms` needs the names of the leaves for messages."""

    def compute_norms(self, leaves: list[Any], plan: Plan, options: Options) -> ScaledNorms:
        """Computes the norms of all groups."""
        return measure(leaves, plan, options.norm, from_above=options.strict)

    def leaf_operands(self, by: Multiplier, threshold_values: Array) -> Sequence[Array]:
        """Returns the arrays `[groups]` that `apply` uses."""
        del threshold_values
        return by

    def apply(self, leaf: Any, columns: Array, axes: tuple[int, ...], options: Options) -> Any:
        """Changes a leaf by `columns`, the operands `[operands, *kept axes of the leaf]`."""
        zeroes = options.nonfinite == "zero"
        return scale(leaf, columns, axes=axes, strict=options.strict, zero_nonfinite=zeroes)


NORM_CLIP = ClipMethod()


def make_clip(
    scope: Scope, threshold: ThresholdLike, options: Options, method: ClipMethod = NORM_CLIP
) -> Transformation[ClipState]:
    """Makes a transformation that clips by norms."""
    checked = check_threshold(threshold)

    def get_rule(flat: FlatTree, plan: Plan) -> ThresholdRule:
        if isinstance(checked, ThresholdRule):
            return checked
        return resolve_rule(checked, plan.get_named_shapes(), flat.is_masked)

    def init(params: PyTree) -> ClipState:
        flat = flatten(params, "params")
        grouping = apply_scope(scope, flat, options.sharding_hints)
        warn_if_many_norms(grouping, options.name)
        # No norms are computed here, so the shardings are not needed.
        plan = Plan(grouping, LeafShardings.unsharded([]))
        rule = get_rule(flat, plan)
        rule_state = copy_arrays(rule.init(jnp.zeros(plan.shape, jnp.float32)))
        info = initial_info(options.name, grouping)
        return ClipState(jnp.zeros((), jnp.int32), rule_state, info)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        state = fresh_if_none(state, init, updates)
        check_state(state, ClipState, options.name, updates=updates)
        flat, info = flatten(updates, "updates"), state.info
        state_names, size = (None, 0) if info is None else (info.names, info.norm.size)
        plan = make_plan(flat, scope, options, state_names, size)
        norm = get_known_norm(options, extra_args, plan.grouping.layout)
        rule = evaluate_schedules(get_rule(flat, plan), state.rule)
        return run_clip(flat, params, rule, state, norm, plan, options, method)

    if options.record:
        return transformation(init, update)
    # Without a record, the state is constant and only the updates are returned.
    no_array: Any = None
    constant_state = ClipState(no_array, stateless_rule_state(checked, options.name), no_array)
    return stateless(
        lambda updates, params, **extra: update(updates, constant_state, params, **extra)[0]
    )


def fresh_if_none(state: Any, init: Callable[[PyTree], Any], updates: PyTree) -> Any:
    """Replaces None by a new state, unless the threshold depends on earlier steps."""
    if state is not None:
        return state
    # Flattened here, because messages of `init` about leaves would name the params.
    fresh = init(flatten(updates, "updates").tree())
    return None if jax.tree.leaves(fresh.rule) else fresh


def get_known_norm(options: Options, extra_args: dict[str, Any], layout: str) -> Any:
    """Returns the norm in the extra argument that `known_norm` names, or None."""
    argument = options.known_norm
    if argument is None:
        return None
    if layout != "scalar":
        raise ValueError(
            f"{options.name}: known_norm={argument!r} cannot be combined with a scope that has "
            "several groups; use scopes.tree()"
        )
    if extra_args.get(argument) is None:
        raise ValueError(
            f"{options.name}: {argument} is required because "
            f"known_norm={argument!r}; call update(grads, state, params, {argument}=norm)"
        )
    return _check_known_norm(extra_args[argument], argument, options)


def _check_known_norm(norm: Any, argument: str, options: Options) -> Array:
    """Checks a norm from the user, which can be negative or NaN, and converts it to an array."""
    given = jnp.asarray(check_threshold_value(norm, argument, allow_any_number=True))
    meshes.check_replicated_scalar(given, options.axis_names, f"{options.name}: {argument}")
    return given.astype(jnp.float64 if given.dtype == jnp.float64 else jnp.float32)


def clip_tree(
    tree: PyTree,
    thresholds: ThresholdLike | Thresholds,
    *,
    scope: Scope,
    params: PyTree | None = None,
    norm: str | Norm = "l2",
    response: str | Response = "clip",
    nonfinite: NonFinite = "nan",
    strict: bool = False,
    use_norm: ArrayLike | None = None,
    axis_name: AxisName = None,
    specs: PyTree = None,
    name: str = "clip_tree",
) -> tuple[PyTree, ClipInfo]:
    """Clips a tree once, like `clip_by` without a state.

    Args:
      tree: A pytree of floating-point or complex arrays. Other leaves are returned unchanged.
      thresholds: A threshold as in `clip_by`, where rules act as on their first step, or an
        `optaxclip.Thresholds`, with a norm above which to clip and a norm to reach.
      scope: The groups of elements that share a norm, as in `clip_by`.
      params: The parameters, for thresholds that are relative to them.
      norm: The norm of a group. Defaults to the L2 norm.
      response: The response to a norm above its threshold. Defaults to "clip".
      nonfinite: The policy for non-finite groups. Defaults to "nan".
      strict: If True, no result exceeds its threshold, even by rounding. Defaults to False.
      use_norm: The norm of the whole tree, which is then not computed. Other scopes ignore it.
      axis_name: The names of mapped axes, as in `clip_by`.
      specs: The sharding of the leaves, as in `clip_by`.
      name: The name of the operation in messages.

    Returns:
      The clipped tree, and a `ClipInfo` of this call, in which counts are 0 or 1.

    Raises:
      ValueError: If a name is unknown, or if a threshold is negative, NaN or not a scalar.
      TypeError: If a threshold is not a number, or if a leaf is not an array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tree, info = optaxclip.clip_tree(
      ...     [jnp.array([3.0, 4.0])], 1.0, scope=optaxclip.scopes.tree())
      >>> print(tree[0], info.norm)
      [0.6 0.8] 5.0
    """
    # JAX does not compute with arrays in different memory spaces.
    (tree, params), back = move_to_device_memory(tree, params)
    flat = flatten(tree, "tree")
    options = Options.create(
        norm=norm,
        response=response,
        nonfinite=nonfinite,
        strict=strict,
        axis_name=axis_name,
        specs=specs,
        name=name,
    )
    plan = make_plan(flat, resolve_scope(scope), options)
    if isinstance(thresholds, Thresholds):
        rule = fixed(Thresholds(*map(plan.pack_layout, thresholds)))
    else:
        rule = resolve_rule(check_threshold(thresholds, "thresholds"), plan.get_named_shapes())
    known_norm = None  # The policy "mask" uses the norm without non-finite elements.
    if use_norm is not None and plan.grouping.layout == "scalar" and nonfinite != "mask":
        known_norm = _check_known_norm(use_norm, "use_norm", options)
    dtype = norm_dtype(jnp.result_type(leaf) for leaf in flat.inexact_leaves())
    info = initial_info(name, plan.grouping, dtype)
    state = ClipState(jnp.zeros((), jnp.int32), rule.init(jnp.zeros(plan.shape, dtype)), info)
    tree, state = run_clip(flat, params, rule, state, known_norm, plan, options)
    return *back(tree), state.info


def group_norms(
    tree: PyTree,
    *,
    scope: Scope,
    norm: str | Norm = "l2",
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> NormTree:
    """Returns the norms of all groups of a tree in float32 or wider, without clipping."""
    flat = flatten(put_on_device(tree), "tree")
    options = Options.create(norm=norm, axis_name=axis_name, specs=specs, name="group_norms")
    return scope_norms(scope, flat, options)


def scope_norms(scope: Scope, flat: FlatTree, options: Options) -> NormTree:
    """Returns the norms of the groups of a flattened tree, in the layout of the API."""
    return compute_norms(flat, make_plan(flat, scope, options), options.norm)


def compute_norms(flat: FlatTree, plan: Plan, norm: Norm) -> NormTree:
    """Returns the norms of the groups of a plan, in the layout of the API."""
    return _compute_norms(flat.inexact_leaves(), plan=plan, norm=norm)


@global_view()
def _compute_norms(leaves: list[Any], *, plan: Plan, norm: Norm) -> NormTree:
    return plan.arrange_by_layout(measure(as_arrays(leaves), plan, norm).norm)


def run_clip(
    flat: FlatTree,
    params: PyTree | None,
    rule: ThresholdRule,
    state: ClipState,
    known_norm: Array | None,
    plan: Plan,
    options: Options,
    method: ClipMethod = NORM_CLIP,
) -> tuple[PyTree, ClipState]:
    """Returns the clipped tree and the next state, without a record if `state.info` is None."""
    params = params_if_needed(rule, params, options.name)
    param_leaves, param_plan = None, plan
    if params is not None:
        param_leaves, param_plan = get_param_leaves(flat, params, plan, options)
    raises = options.nonfinite == "error"
    if raises or method.names_leaves:
        plan = dataclasses.replace(plan, leaf_names=tuple(flat.names()))
    # In eager mode, `checkify.check` can only raise errors outside compiled calls.
    step = _clip_step_uncompiled if raises else _clip_step_compiled
    new, state = step(
        flat.inexact_leaves(),
        param_leaves,
        rule,
        state,
        known_norm,
        plan=plan,
        param_plan=param_plan,
        options=options,
        method=method,
    )
    return flat.unflatten(new), state


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
    method: ClipMethod,
) -> tuple[list[Any], ClipState]:
    """Runs the stages of a step: measure, threshold, respond, scale, record."""
    leaves, bad, param_norms = as_arrays(leaves), None, None
    if param_leaves is not None:
        param_norms = measure(as_arrays(param_leaves), param_plan, options.norm).norm  # f32[groups]
    if options.nonfinite == "mask":
        leaves, bad = mask_nonfinite(leaves, plan)
    if known_norm is None:
        measured = method.compute_norms(leaves, plan, options)  # f32[groups]
    else:
        measured = ScaledNorms.from_value(known_norm, 1.0)
        if options.strict:
            measured = measured.add_error_bound(relative_error(leaves, plan, options.norm))
    norm = measured.norm  # f32[groups]
    bad = ~jnp.isfinite(norm) if bad is None else bad  # bool[groups]
    chex.assert_shape([norm, bad], plan.shape)
    if options.nonfinite == "error":
        for flags, group in zip(plan.unpack(bad), plan.grouping.groups, strict=True):
            if group.leaf_indices:
                names = [plan.leaf_names[i] for i in group.leaf_indices]
                # Without `checkify`, JAX's error shows this line, see `nonfinite.checkify_finite`.
                checkify_finite(flags, options.name, names)  # nonfinite="error" needs checkify
    thresholds, rule_state = update_rule(rule, state.rule, norm, param_norms, options.name)
    chex.assert_shape(list(thresholds), plan.shape)
    by = compute_multiplier(
        measured,
        thresholds.trigger,
        thresholds.target,
        response=options.response,
        nonfinite=options.nonfinite,
        strict=options.strict,
    )
    chex.assert_shape(list(by), plan.shape)  # f32[groups]
    # Stacked to use a single operation for the slices of a leaf.
    operands = method.leaf_operands(by, thresholds.trigger.astype(by.ratio.dtype))
    columns = meshes.stack(operands)  # f32[operands, groups]
    parts = map(plan.placement.replicate, plan.slice_for_leaves(columns, leaves))
    clipped = [
        method.apply(leaf, part, axes, options)
        for leaf, part, axes in zip(leaves, parts, plan.grouping.axes, strict=True)
    ]
    chex.assert_trees_all_equal_shapes_and_dtypes(leaves, clipped)
    if state.info is None:
        return clipped, state
    info = update_info(state.info, plan, norm, thresholds.trigger, by.factor, bad)
    return clipped, ClipState(safe_increment(state.steps), rule_state, info)


_clip_step_compiled = global_view(out_like=("leaves", "state"))(_clip_step)
_clip_step_uncompiled = global_view(out_like=("leaves", "state"), compiled=False)(_clip_step)

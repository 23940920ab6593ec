"""The engine: every clip is a scope, a norm, a limit rule, a response and a non-finite policy.

Three published methods, written with these parts:

  Clipping by global norm (Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063) limits the norm of
  the whole tree. Adaptive gradient clipping (Brock et al., 2021, arXiv 2102.06171) limits the norm
  of each unit to a share of the norm of its weights. Adafactor's update clipping (Shazeer and
  Stern, 2018, arXiv 1804.04235) limits the root mean square of each leaf::

    clip_by(scopes.tree(), 1.0)
    clip_by(scopes.unit(), thresholds.relative_to_params(0.01, eps=1e-3))
    clip_by(scopes.leaf(), 1.0, norm="rms")
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array

import optaxclip._border.devices as devices
from optaxclip._base.grouping import warn_of_many_norms
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.states import check_state, own_arrays
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import (
    ArrayLike,
    AxisName,
    ClipInfo,
    ClipState,
    Limits,
    NonFinite,
    NormTree,
    PyTree,
    Threshold,
)
from optaxclip._border.crossing import Transformation, stateless, transformation
from optaxclip._border.placement import Placement, grouped
from optaxclip._engine.options import ClipOptions, Options, takes
from optaxclip._engine.plan import Plan, plan_of
from optaxclip._engine.record import initial_info
from optaxclip._engine.step import BY_NORM, Technique, clipped, norms_of
from optaxclip.norms import Norm
from optaxclip.responses import Response
from optaxclip.scopes.leaves import Scope, as_scope
from optaxclip.thresholds.checks import checked_limit
from optaxclip.thresholds.fixed import LimitLike, as_limit, at_step, given, rule_for, state_of_fixed


@takes(ClipOptions, once="clip_tree(grads, 1.0, scope=scopes.tree())")
def clip_by(
    scope: Scope,
    limit: LimitLike,
    *,
    response: str | Response = "clip",
    **options: Unpack[ClipOptions],
) -> Transformation[ClipState]:
    """Makes any clipping method, as an Optax transformation.

    Guarantees, for every scope, norm and limit: norms are summed in float32 or wider, and no square
    overflows or underflows; a group at or below its limit comes back bit for bit; the new norm of
    any other group is the limit up to rounding, and with `strict` never above it; dtype, weak type,
    shape and tree structure stay; value and derivatives are finite if the gradients are. `None`,
    integer, bool, `float0` and PRNG-key leaves pass untouched and do not count in norms.

    Args:
      scope: which entries share a norm, from `optaxclip.scopes`. Because it is a function but not a
        schedule, `optax.inject_hyperparams` needs `static_args=("scope",)`.
      limit: a number, a scalar array (traced or not), a schedule `count -> limit`, or a rule from
        `optaxclip.thresholds`; or a dict from the name of each group to one of these. Inside
        `optax.masked` or `optax.partition` the dict may also name groups of the other leaves.
      response: "clip", "normalize", "smooth", "auto_s", "band", or a function (see
        `optaxclip.responses`).
      **options: those that all transformations share, `optaxclip.ClipOptions`.

    Returns:
      A transformation whose state is a `ClipState`. If the limit does not depend on earlier steps,
      an update with the state None begins with a fresh one.

    Raises:
      ValueError: for an unknown name, or a limit that is negative, NaN or not a scalar; when used,
        if it cannot be known how leaves are split over devices, and for the state None if the limit
        depends on earlier steps.
      TypeError: for a limit that is not a number, or a scope that is not a scope.

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
    return stage(as_scope(scope), limit, Options.checked(response=response, **options))


def stage(
    scope: Scope, limit: LimitLike, options: Options, technique: Technique = BY_NORM
) -> Transformation[ClipState]:
    """Makes a transformation of any clip by norms, for `clip_by` and most named methods."""
    checked = as_limit(limit)

    def rule_of(flat: FlatTree, plan: Plan) -> Threshold:
        if isinstance(checked, Threshold):
            return checked
        return rule_for(checked, plan.entries(), flat.is_part)

    def init(params: PyTree) -> ClipState:
        flat = flatten(params, "params")
        grouping = grouped(scope, flat, options.told)
        warn_of_many_norms(grouping, options.name)
        # Nothing is measured here, so the plan does not have to say where leaves lie.
        plan = Plan(grouping, Placement.unsplit([]))
        rule = rule_of(flat, plan)
        rule_state = own_arrays(rule.init(plan.zeros(jnp.dtype(jnp.float32))))
        info = initial_info(options.name, grouping)
        return ClipState(jnp.zeros((), jnp.int32), rule_state, info)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, ClipState]:
        state = fresh_if_none(state, init, updates)
        check_state(state, ClipState, options.name, updates=updates)
        flat, info = flatten(updates, "updates"), state.info
        stored, size = (None, 0) if info is None else (info.names, info.norm.size)
        plan = plan_of(flat, scope, options, stored, size)
        norm = known_norm(options, extra_args, plan.grouping.layout)
        rule = at_step(rule_of(flat, plan), state.rule)
        return clipped(flat, params, rule, state, norm, plan, options, technique)

    if options.record:
        return transformation(init, update)
    nothing: Any = None
    always = ClipState(nothing, state_of_fixed(checked, options.name), nothing)
    return stateless(lambda updates, params, **extra: update(updates, always, params, **extra)[0])


def fresh_if_none(state: Any, init: Callable[[PyTree], Any], updates: PyTree) -> Any:
    """A fresh state in place of None, unless the limit depends on earlier steps."""
    if state is not None:
        return state
    # Messages about leaves must name the updates, although `init` takes them for parameters.
    fresh = init(flatten(updates, "updates").tree())
    return None if jax.tree.leaves(fresh.rule) else fresh


def known_norm(options: Options, extra_args: dict[str, Any], layout: str) -> Any:
    """The norm that the caller passes in the extra argument that `known_norm=` names, or None."""
    argument = options.known_norm
    if argument is None:
        return None
    if layout != "scalar":
        raise ValueError(
            f"{options.name}: known_norm={argument!r} is the norm of the whole tree, but this clip "
            "has one norm per group: leave known_norm out, or use scopes.tree()"
        )
    if extra_args.get(argument) is None:
        raise ValueError(
            f"{options.name}: known_norm={argument!r} names an extra argument that the update was "
            f"not given; pass it: update(grads, state, params, {argument}=norm)"
        )
    return given_norm(extra_args[argument], argument, options)


def given_norm(norm: Any, argument: str, options: Options) -> Array:
    """The norm that the caller passes, checked, as a float32 or float64 scalar.

    It may be negative or NaN.
    """
    given = jnp.asarray(checked_limit(norm, argument, allow_any_number=True))
    shared = devices.shared_axes(options.axis_names)
    devices.refuse_different(given, shared, f"{options.name}: {argument}")
    return given.astype(jnp.float64 if given.dtype == jnp.float64 else jnp.float32)


def clip_tree(
    tree: PyTree,
    limits: LimitLike | Limits,
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
    """Clips a tree once: `clip_by` without a state.

    Args:
      tree: a pytree of floating or complex arrays; other leaves pass untouched.
      limits: as in `clip_by`; a rule acts as at its first step. Or `optaxclip.Limits`: a norm above
        which to act, and a norm to reach.
      scope: as in `clip_by`, like the arguments that follow.
      params: the parameters, for a limit that is relative to them.
      norm: how a group is measured.
      response: what becomes of a group.
      nonfinite: the policy for groups that are not finite.
      strict: whether no result may exceed its limit, not even by rounding.
      use_norm: the norm of the whole tree, if the caller knows it; only for the scope `tree`.
      axis_name: as in `clip_by`.
      specs: as in `clip_by`.
      name: the name of the operation in messages.

    Returns:
      The clipped tree, and a `ClipInfo` of what was done, in which counts are 0 or 1.

    Raises:
      ValueError: for an unknown name or a limit that is negative, NaN or not a scalar.
      TypeError: for a limit that is not a number or a leaf that is not an array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tree, info = optaxclip.clip_tree(
      ...     [jnp.array([3.0, 4.0])], 1.0, scope=optaxclip.scopes.tree())
      >>> print(tree[0], info.norm)
      [0.6 0.8] 5.0
    """
    (tree, params), back = devices.brought(tree, params)
    flat = flatten(tree, "tree")
    options = Options.checked(
        norm=norm,
        response=response,
        nonfinite=nonfinite,
        strict=strict,
        axis_name=axis_name,
        specs=specs,
        name=name,
    )
    plan = plan_of(flat, as_scope(scope), options)
    if isinstance(limits, Limits):
        trigger, target = map(plan.from_tree, limits)
        rule = given(Limits(trigger, target))
    else:
        rule = rule_for(as_limit(limits, "limits"), plan.entries())
    norm_of_tree = None
    if use_norm is not None and plan.grouping.layout == "scalar" and nonfinite != "mask":
        norm_of_tree = given_norm(use_norm, "use_norm", options)
    dtype = norm_dtype(jnp.result_type(leaf) for leaf in flat.measured_leaves())
    info = initial_info(name, plan.grouping, dtype)
    state = ClipState(jnp.zeros((), jnp.int32), rule.init(plan.zeros(dtype)), info)
    tree, state = clipped(flat, params, rule, state, norm_of_tree, plan, options)
    return *back(tree), state.info


def group_norms(
    tree: PyTree,
    *,
    scope: Scope,
    norm: str | Norm = "l2",
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> NormTree:
    """The norm of every group of a tree, float32 or wider, without clipping."""
    flat = flatten(devices.to_device(tree), "tree")
    options = Options.checked(norm=norm, axis_name=axis_name, specs=specs, name="group_norms")
    return norms_by(scope, flat, options)


def norms_by(scope: Scope, flat: FlatTree, options: Options) -> NormTree:
    """The norms of a flattened tree's groups, as users see them."""
    return norms_of(flat, plan_of(flat, scope, options), options.norm)

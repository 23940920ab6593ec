"""The engine: every clip is a scope, a norm, a limit rule, a response and a non-finite policy.

Three known algorithms from the parts:

  Clipping by global norm (Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063) measures the whole
  tree once; adaptive gradient clipping (Brock et al., 2021, arXiv 2102.06171) each unit, and holds
  it to a share of its own weights; Adafactor's update clipping (Shazeer and Stern, 2018, arXiv
  1804.04235) the root mean square of each leaf::

    clip_by(scopes.tree(), 1.0)
    clip_by(scopes.unit(), thresholds.relative_to_params(0.01, eps=1e-3))
    clip_by(scopes.leaf(), 1.0, norm="rms")
"""

from typing import Any

import jax
import jax.numpy as jnp

from optaxclip._base.arguments import check_state
from optaxclip._base.counters import increased, own_arrays
from optaxclip._base.numerics import norm_dtype
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import flatten
from optaxclip._base.types import (
    AxisName,
    ClipInfo,
    ClipState,
    Limits,
    NonFinite,
    NormTree,
    PyTree,
)
from optaxclip._engine.checks import among_known, usable_norm
from optaxclip._engine.placement import as_axis_names, grouped
from optaxclip._engine.record import initial_info
from optaxclip._engine.step import Method, clipped, norms_of
from optaxclip.norms import Norm, as_norm
from optaxclip.responses import Response
from optaxclip.scopes import Scope
from optaxclip.thresholds.fixed import LimitLike, as_limit, at_step, given, rule_for


def clip_by(
    scope: Scope,
    limit: LimitLike,
    *,
    norm: str | Norm = "l2",
    response: str | Response = "clip",
    nonfinite: NonFinite = "nan",
    strict: bool = False,
    axis_name: AxisName = None,
    specs: PyTree = None,
    name: str = "clip_by",
) -> Transformation[ClipState]:
    """Any clipping method, as an Optax transformation.

    Guarantees, for every scope, norm and limit: norms accumulate in float32 or wider and are exact
    whatever the range; a group at or below its limit comes back bit for bit; the new norm is at
    most the limit (for bfloat16 and float16 leaves up to their rounding, or always with `strict`);
    dtype, weak type, shape and tree structure stay; value and derivatives are finite wherever the
    gradients are. `None`, integer, bool, `float0` and PRNG-key leaves pass untouched and uncounted.

    Args:
      scope: which entries share a norm, from `optaxclip.scopes`. It is a function and no schedule,
        so `optax.inject_hyperparams` needs `static_args=("scope",)`.
      limit: a number, a scalar array (traced or not), a schedule `count -> limit`, or a rule from
        `optaxclip.thresholds`; or a dict from group name to one of these.
      norm: "l2", "l1", "linf", "rms", "mean_abs", or a norm from `optaxclip.norms`.
      response: "clip", "normalize", "smooth", or a function (see `optaxclip.responses`).
      nonfinite: what becomes of a group whose norm is not finite: "nan" (all NaN), "zero" (all 0),
        "mask" (bad entries 0, then clipped), "error" (a `checkify` error that names the leaves).
      strict: whether narrow dtypes are rounded toward zero, so that they too obey the limit.
      axis_name: inside `pmap`, `vmap(axis_name=)` and `shard_map(check_vma=False)`, the names of
        the mapped axes over which every leaf is split.
      specs: how the leaves are split over devices where their types do not say it: a pytree prefix
        of the gradients with `PartitionSpec`s or `NamedSharding`s for leaves. Under `jit` they turn
        the compiler's collectives into a single one.
      name: what the transformation is called in messages and by `optaxclip.monitor`.

    Returns:
      A transformation whose state is a `ClipState`; given None, its update begins with a fresh one.
      It takes `grad_norm=`, a norm of the whole tree that the caller already has, which the scope
      `tree` then uses.

    Raises:
      ValueError: for an unknown name, or a limit that is negative, NaN or not a scalar; when used,
        where it cannot be known how leaves are split over devices.
      TypeError: for a limit that is no number.

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
    limit = as_limit(limit, "limit")
    method = Method.checked(norm, response, nonfinite, strict, name)
    axis_names = as_axis_names(axis_name)

    def init(params: PyTree) -> ClipState:
        grouping = grouped(scope, flatten(params, "params"), axis_names, specs)
        rule = rule_for(limit, grouping.names, grouping.layout)
        dtype = jnp.dtype(jnp.float32)
        rule_state = own_arrays(rule.init(grouping.zeros(dtype)))
        return ClipState(jnp.zeros((), jnp.int32), rule_state, initial_info(name, grouping, dtype))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_norm: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ClipState]:
        del extra_args
        flat = flatten(updates, "updates")
        state = init(updates) if state is None else state
        check_state(state, ClipState, name)
        grouping = grouped(scope, flat, axis_names, specs)
        grouping = among_known(grouping, state.info, name)
        rule = rule_for(limit, grouping.names, grouping.layout)
        rule = at_step(rule, state.rule)
        known = usable_norm(grad_norm, "grad_norm", grouping, nonfinite)
        updates, rule_state, info = clipped(
            flat, params, rule, state.rule, state.info, known, grouping, method
        )
        return updates, ClipState(increased(state.steps), rule_state, info)

    return Transformation(init, update)


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
    use_norm: jax.typing.ArrayLike | None = None,
    axis_name: AxisName = None,
    specs: PyTree = None,
    name: str = "clip_tree",
) -> tuple[PyTree, ClipInfo]:
    """Clips a tree once; `clip_by` without state.

    Args:
      tree: a pytree of floating or complex arrays; other leaves pass untouched.
      limits: as in `clip_by`, where a rule is at its first step; or `Limits`, each field a pytree
        like `ClipInfo.norm`, to tell when to act and how far apart.
      scope: as in `clip_by`, like the arguments that follow.
      params: the parameters, for a limit that is relative to them.
      norm: the norm.
      response: the response.
      nonfinite: the policy for groups that are not finite.
      strict: whether narrow dtypes are rounded toward zero.
      use_norm: the norm of the whole tree, if known; for the scope `tree`.
      axis_name: as in `clip_by`.
      specs: as in `clip_by`.
      name: what the operation is called in messages.

    Returns:
      The tree, clipped, and what was done; the counts in it are 0 or 1.

    Raises:
      ValueError: for an unknown name or a limit that is negative, NaN or not a scalar.
      TypeError: for a limit that is no number or a leaf that is no array.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> tree, info = optaxclip.clip_tree(
      ...     [jnp.array([3.0, 4.0])], 1.0, scope=optaxclip.scopes.tree())
      >>> print(tree[0].round(3), info.norm)
      [0.6 0.8] 5.0
    """
    flat = flatten(tree, "tree")
    grouping = grouped(scope, flat, as_axis_names(axis_name), specs)
    if isinstance(limits, Limits):
        rule = given(limits)
    else:
        rule = rule_for(as_limit(limits, "limits"), grouping.names, grouping.layout)
    method = Method.checked(norm, response, nonfinite, strict, name)
    dtype = norm_dtype(jnp.result_type(leaf) for leaf in flat.picked())
    known = usable_norm(use_norm, "use_norm", grouping, nonfinite)
    start = rule.init(grouping.zeros(dtype)), initial_info(name, grouping, dtype)
    tree, _, info = clipped(flat, params, rule, *start, known, grouping, method)
    return tree, info


def group_norms(
    tree: PyTree,
    *,
    scope: Scope,
    norm: str | Norm = "l2",
    axis_name: AxisName = None,
    specs: PyTree = None,
) -> NormTree:
    """The norm of every group of a tree, float32 or wider, without clipping.

    Args:
      tree: a pytree of floating or complex arrays; other leaves do not count.
      scope: which entries share a norm.
      norm: the norm.
      axis_name: as in `clip_by`.
      specs: as in `clip_by`.
    """
    flat = flatten(tree, "tree")
    return norms_of(
        flat.picked(), grouped(scope, flat, as_axis_names(axis_name), specs), as_norm(norm)
    )

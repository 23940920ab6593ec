"""Wrappers that skip optimizer steps: `skip_nonfinite` and `skip_above`.

A stage of a chain cannot skip a step, because Adam still decays its moments and weight decay still
changes the parameters even if the updates are zero. A wrapper leaves the moments and the parameters
unchanged. It runs the wrapped optimizer on every step and discards the results of skipped steps, so
its norms can be computed in the same pass over the gradients as those of the optimizer's stages.
"""

import math
from typing import Any, Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip._base.validation as validation
import optaxclip.scopes as scopes
from optaxclip._backend.global_view import (
    Transformation,
    global_view,
    put_on_device,
    transformation,
)
from optaxclip._backend.skip_step import select_results, skip_step
from optaxclip._base.numerics import saturating_cast
from optaxclip._base.state import (
    StaticNames,
    check_state,
    copy_arrays,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import FlatTree, Group, Grouping, flatten
from optaxclip._base.types import ClipInfo, PyTree, ThresholdRule
from optaxclip._engine.clip import compute_norms, get_known_norm
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import make_plan
from optaxclip._engine.record import initial_info
from optaxclip.norms import Norm
from optaxclip.scopes import Scope
from optaxclip.thresholds._constant import (
    ScalarOrSchedule,
    ThresholdLike,
    check_loss_threshold,
    check_threshold,
    evaluate_schedules,
    loss_from_extra_args,
    resolve_rule,
)
from optaxclip.thresholds._rule import params_if_needed, update_rule

CheckedTree = Literal["gradients", "updates"]


@register_state
class LossState(NamedTuple):
    """State of the loss threshold. The field `norm` of `info` contains the loss."""

    rule: PyTree
    info: ClipInfo


@register_state
class SkipState(NamedTuple):
    """State of a wrapper that skips steps.

    Attributes:
      rule: The state of the threshold rule.
      info: The record of the most recent step. `factor` is 0 if the step was skipped. `num_clipped`
        is the number of norms above the threshold, and `num_nonfinite` that of non-finite norms.
      num_skipped: int32[], the number of skipped steps.
      consecutive: int32[], the number of steps skipped in a row, ending with the most recent step.
      leaves: The sorted names of the leaves, which are part of the pytree structure. A leaf that is
        None in `init` is added on the first step that includes it.
      is_bad_leaf: bool[leaves], True for the leaves that caused the most recent skip: the
        non-finite leaves if there are any, otherwise the leaves above the threshold, or otherwise
        the leaf with the largest norm. All False if the loss caused the skip, or with `known_norm`.
      loss: A `LossState`, or `()` if there is no threshold for the loss.
      inner_state: The state of the wrapped optimizer.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
    leaves: StaticNames
    is_bad_leaf: Array
    loss: LossState | tuple[()]
    inner_state: PyTree


class RuleResult(NamedTuple):
    """A norm or a loss, its threshold, and the next state of the rule."""

    number: Array  # []
    threshold: Array  # []
    rule_state: PyTree
    is_above: Array  # bool[], True if the number is finite and above the threshold
    is_bad: Array  # bool[], True if the number is non-finite

    @property
    def should_skip(self) -> Array:
        """True if the step should be skipped."""
        return self.is_above | self.is_bad

    def find_bad_leaves(self, leaf_norms: Array) -> Array:
        """Returns flags, bool[leaves], that are True for the leaves that cause a skip."""
        is_above = leaf_norms > self.threshold.astype(leaf_norms.dtype)
        is_largest = leaf_norms == jnp.max(leaf_norms, initial=0)
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)
        return jnp.where(self.is_bad, ~jnp.isfinite(leaf_norms), is_above & self.is_above)

    def update_info(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """Returns `info` updated for this step."""
        new = info._replace(
            norm=saturating_cast(self.number, info.norm.dtype),
            threshold=saturating_cast(self.threshold, info.threshold.dtype),
            factor=1 - skip.astype(info.factor.dtype),
            fraction=self.is_above.astype(info.fraction.dtype),
            num_clipped=safe_increment(info.num_clipped, self.is_above),
            num_nonfinite=safe_increment(info.num_nonfinite, self.is_bad),
        )
        return meshes.reuse_buffers(info, new)


def evaluate_rule(
    rule: ThresholdRule,
    state: PyTree,
    number: Array,
    name: str,
    param_norm: Any = None,
    *,
    any_sign: bool = False,
) -> RuleResult:
    """Compares a number with a rule's threshold. Both may be negative if `any_sign` is True."""
    thresholds, state = _update_rule_globally(
        evaluate_schedules(rule, state), state, number, param_norm, name=name, any_sign=any_sign
    )
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > thresholds.trigger.astype(number.dtype))
    return RuleResult(number, thresholds.trigger, state, is_above, ~is_finite)


# The thresholds are replicated scalars [], and the new state has the sharding of the old state.
_update_rule_globally = global_view(out_like=lambda _, state, *__: (jax.P(), state))(update_rule)

_WRAP_STATE = (
    "To continue a run without this wrapper, insert the old state into a new state: "
    "opt_state = tx.init(params)._replace(inner_state=old_opt_state)"
)


def skip_wrapper(
    inner: optax.GradientTransformation,
    threshold: ThresholdLike,
    max_consecutive: int | None,
    *,
    loss_threshold: ThresholdRule | None = None,
    options: Options,
    check: CheckedTree = "gradients",
    accept_nonfinite_at_limit: bool = False,
) -> Transformation[SkipState]:
    """Returns a wrapper that skips steps whose norm or loss exceeds its threshold.

    If `accept_nonfinite_at_limit` is True, `max_consecutive` also applies to non-finite steps.
    """
    inner, name = check_inner(inner), options.name
    threshold = check_threshold(threshold, "threshold")
    if max_consecutive is not None:
        max_consecutive = validation.check_int_or_scalar(max_consecutive, "max_consecutive")

    def init(params: PyTree) -> SkipState:
        flat = flatten(params, "params")
        # In eager mode, zeros_like fails for arrays in host memory (as of JAX 0.10.2).
        inner_state = inner.init(put_on_device(params))
        _check_inner_state(inner_state, name, check)
        leaves = StaticNames(tuple(sorted(flat.names())))
        rule, loss_state, zero = resolve_rule(threshold, [("tree", ())]), (), jnp.zeros(())
        if loss_threshold is not None:
            loss_info = initial_info(name, Grouping((Group(("loss",), ()),), (), "scalar"))
            loss_state = LossState(copy_arrays(loss_threshold.init(zero)), loss_info)
        return SkipState(
            rule=copy_arrays(rule.init(zero)),
            info=initial_info(name, scopes.tree()(flat)),  # arrays []
            num_skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            leaves=leaves,
            is_bad_leaf=jnp.zeros(len(leaves), bool),
            loss=loss_state,
            inner_state=inner_state,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState, name, _WRAP_STATE, updates=updates)
        norm = get_known_norm(options, extra_args, "scalar")
        # Check updates first, because errors raised by the optimizer would not mention them.
        incoming = flatten(updates, "updates").match_name_style(state.leaves)

        def step(updates: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]) -> Any:
            return inner.update(updates, state, params, **extra_args)

        operands = (updates, state.inner_state, params, extra_args)
        taken = step(*operands) if check == "updates" else None
        flat = flatten(taken[0], "updates").match_name_style(state.leaves) if taken else incoming
        names, leaf_norms = StaticNames(), jnp.zeros(0)
        if norm is None:
            # Both norms are computed in one pass, because XLA merges identical sums.
            _, norm = _compute_norms(flat, scopes.tree(), options)
            names, leaf_norms = _compute_norms(flat, scopes.leaf(), options)
            leaf_norms = lax.stop_gradient(leaf_norms)
        if check == "updates":
            # Optimizers such as Lion can return finite updates for an infinite gradient, although
            # their state becomes infinite.
            incoming_names, incoming_norms = _compute_norms(incoming, scopes.leaf(), options)
            is_finite = jnp.isfinite(incoming_norms)
            norm = jnp.where(jnp.all(is_finite), norm, jnp.nan)
            is_bad_leaf = _reindex_flags(names, incoming_names, ~is_finite)
            leaf_norms = jnp.where(is_bad_leaf, jnp.nan, leaf_norms)
        rule, param_norm = resolve_rule(threshold, [("tree", ())]), None
        params = params_if_needed(rule, params, name)
        if params is not None:
            _, param_norm = _compute_norms(flatten(params, "params"), scopes.tree(), options)
        of_norm = evaluate_rule(rule, state.rule, norm, name, param_norm)
        is_bad, is_out = of_norm.is_bad, of_norm.should_skip
        loss_state, of_loss = state.loss, None
        if loss_threshold is not None:
            loss = loss_from_extra_args(extra_args, name, options.axis_names)
            of_loss = evaluate_rule(loss_threshold, state.loss.rule, loss, name, any_sign=True)
            is_bad, is_out = is_bad | of_loss.is_bad, is_out | of_loss.should_skip
        skip = is_out
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = is_out & ~(is_over & (~is_bad | accept_nonfinite_at_limit))
        is_counted = is_out if accept_nonfinite_at_limit else skip
        if of_loss is not None:
            loss_state = LossState(of_loss.rule_state, of_loss.update_info(state.loss.info, skip))
        bad_leaves = of_norm.find_bad_leaves(leaf_norms)
        leaves, is_bad_leaf = _update_bad_leaves(state, names, bad_leaves, skip)
        if taken:
            new_updates, inner_state = select_results(skip, state.inner_state, *taken)
        else:
            new_updates, inner_state = skip_step(skip, step, *operands)
        return new_updates, SkipState(
            rule=of_norm.rule_state,
            info=of_norm.update_info(state.info, skip),
            num_skipped=safe_increment(state.num_skipped, skip),
            consecutive=jnp.where(is_counted, safe_increment(state.consecutive), 0),
            leaves=leaves,
            is_bad_leaf=is_bad_leaf,
            loss=loss_state,
            inner_state=after_skip(inner_state, skip),
        )

    return transformation(init, update)


def _check_inner_state(inner_state: PyTree, name: str, check: CheckedTree) -> None:
    """Checks that the wrapped optimizer supports skipped steps."""
    # States with `NEEDS_OPTIMIZER` belong to stages that only change or record updates. Optimizers
    # such as `optax.sgd` have an `EmptyState`.
    nodes = jax.tree.leaves(
        inner_state,
        is_leaf=lambda x: hasattr(x, "NEEDS_OPTIMIZER") or isinstance(x, optax.EmptyState),
    )
    if nodes and all(hasattr(x, "NEEDS_OPTIMIZER") for x in nodes):
        validation.warn(
            f"{name} wraps only clipping and recording stages, so an optimizer after it still "
            f"changes the parameters on skipped steps; use {name}(optax.chain(clip, optimizer))"
        )
    if check == "gradients":
        return
    # Skipping would preserve a spike in the sum of updates, which would cause all later steps to be
    # skipped.
    orders = {
        optax.MultiStepsState: f"optax.MultiSteps({name}(optimizer, ...), k)",
        optax.ApplyEvery: f"optax.chain({name}(optimizer, ...), optax.apply_every(k))",
    }
    for node in jax.tree.leaves(inner_state, is_leaf=lambda x: type(x) in orders):
        if type(node) in orders:
            raise ValueError(
                f"{name}: with check='updates', inner must not accumulate gradients, but its state "
                f"contains {type(node).__name__}; use {orders[type(node)]}"
            )


def after_skip(inner_state: PyTree, skip: Array) -> PyTree:
    """Calls the method `after_skip` of the inner states that define it."""
    # States inside `optax.MultiSteps` are unchanged, because its stages do not run on every step.
    return jax.tree.map(
        lambda x: x.after_skip(skip) if hasattr(x, "after_skip") else x,
        inner_state,
        is_leaf=lambda x: hasattr(x, "after_skip") or isinstance(x, optax.MultiStepsState),
    )


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Checks that `inner` is a transformation, and adds support for extra arguments."""
    if not all(hasattr(inner, x) for x in ("init", "update")) or isinstance(inner, ThresholdRule):
        raise TypeError(
            "inner must be an Optax transformation such as optax.adam(1e-3), got "
            f"{validation.short_repr(inner)}; pass the optimizer as the first argument"
        )
    return optax.with_extra_args_support(inner)


def _compute_norms(flat: FlatTree, scope: Scope, options: Options) -> tuple[StaticNames, Array]:
    """Returns the names and the norms of the groups of a tree."""
    plan = make_plan(flat, scope, options)
    return plan.grouping.names, compute_norms(flat, plan, options.norm)


def _update_bad_leaves(
    state: SkipState, names: StaticNames, flags: Array, skip: Array
) -> tuple[StaticNames, Array]:
    """Returns the leaf names and flags after this step."""
    # Restore the names if the state lacks them, for example after `optax.tree_map_params`.
    lost = not state.leaves and len(names) == len(state.is_bad_leaf)
    known, before = names if lost else state.leaves, state.is_bad_leaf
    # Add leaves that were None in `init`.
    if len(known) == len(before) and not set(names) <= set(known):
        longer = StaticNames(tuple(sorted({*known, *names})))
        known, before = longer, _reindex_flags(longer, known, before)
    return known, jnp.where(skip, _reindex_flags(known, names, flags), before) if known else before


def _reindex_flags(all_leaves: StaticNames, names: StaticNames, flags: Array) -> Array:
    """Reorders flags and adds False for leaves without a flag."""
    if tuple(all_leaves) == tuple(names):
        return flags
    by_name = dict(zip(names, flags, strict=True))
    # bool[] per leaf -> bool[leaves]
    return meshes.stack([by_name.get(name, jnp.zeros((), bool)) for name in all_leaves])


@validation.validate_call(transformation=True)
@document_options(ShardingOptions)
def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: int | None = None,
    **options: Unpack[ShardingOptions],
) -> Transformation[SkipState]:
    """Skips steps whose gradients contain a NaN or an infinite element.

    `optaxclip.monitor.bad_leaves` returns the names of the non-finite leaves, and
    `optaxclip.monitor.step_status` indicates whether training should continue.

    Do not use this wrapper inside `optax.MultiSteps`, because a NaN never leaves the accumulated
    gradients of `MultiSteps` (as of Optax 0.2.8). Use
    `skip_nonfinite(optax.MultiSteps(chain, k).gradient_transformation())` instead.

    Args:
      inner: The optimizer to wrap.
      max_consecutive: The maximum number of consecutive skipped steps. After that, all steps are
        applied until the gradients are finite again, as in `optax.apply_if_finite`, so that a
        diverged run is noticed. If None, steps with non-finite gradients are always skipped.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. On skipped steps, `update` returns zeros.

    Raises:
      ValueError: If `max_consecutive` is less than 1.
      TypeError: If `inner` is not a transformation, or if `max_consecutive` is not an int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(params), params)
      >>> print(updates, state.num_skipped)
      [0. 0.] 1
    """
    checked = Options.create(**options)
    return skip_wrapper(
        inner, math.inf, max_consecutive, options=checked, accept_nonfinite_at_limit=True
    )


@validation.validate_call(transformation=True)
@document_options(ShardingOptions)
def skip_above(
    inner: optax.GradientTransformation,
    threshold: ThresholdLike,
    max_consecutive: int | None = 20,
    *,
    loss_threshold: ScalarOrSchedule | ThresholdRule | None = None,
    check: CheckedTree = "gradients",
    norm: str | Norm = "l2",
    known_norm: str | None = None,
    **options: Unpack[ShardingOptions],
) -> Transformation[SkipState]:
    """Skips steps whose global gradient norm or loss exceeds a threshold or is non-finite.

    paxml and Megatron-LM use a constant threshold, and axlearn uses
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)`. The following projects use
    `skip_above(inner, rule, loss_threshold=rule)` to also check the loss:

      project           | rule
      ------------------|-----------------------------------------------------------------
      OLMo-core         | `thresholds.window(6.0, 128, ddof=1, min_std=0.0, warmup_steps=63)`
      Levanter          | `thresholds.window(6.0, 128)`
      MaxText           | OLMo-core's rule after `clip_by_global_norm(1.0)` in a chain

    These projects use `max_consecutive=None`. `optaxclip.monitor.bad_leaves` returns the names of
    the leaves that caused the most recent skipped step, and `optaxclip.monitor.step_status`
    indicates whether training should continue.

    Source: allenai/OLMo-core, marin-community/levanter, AI-Hypercomputer/maxtext, apple/axlearn.

    Args:
      inner: The optimizer to wrap.
      threshold: The threshold for the norm: a number, a schedule, or a rule from
        `optaxclip.thresholds` (only its trigger is used). Use `math.inf` to check only the loss.
      max_consecutive: The maximum number of consecutive skipped steps. The next step with finite
        values is then applied, so a threshold that is too low cannot stop training permanently.
        Defaults to 20. If None, there is no maximum. Steps with NaN or infinity are always skipped.
      loss_threshold: The threshold for the loss, which can be negative: a number, a schedule, or
        `thresholds.window`, `zscore`, `percentile`, `median`, or `ema` (their `floor` has no
        effect). If the average `m` is negative, `k` times the average is `m + (k - 1) * abs(m)`.
      check: "gradients" (the default) to check the incoming gradients, or "updates" to check the
        updates from `inner`. The update norms of Adam and Muon do not depend on the scale of the
        gradients. Steps with non-finite gradients are skipped in both cases. If you accumulate
        gradients, use
        `optax.MultiSteps(skip_above(adam, threshold, check="updates"), k)`.
      norm: The norm to compare with `threshold`.
      known_norm: The name of an extra argument to `update` that contains the norm of the incoming
        gradients, such as "grad_norm". In that case, the norm is not computed, and `bad_leaves`
        cannot identify leaves.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. On skipped steps, `update` returns zeros. If you use
      `loss_threshold`, pass the loss to `update` as `value=`, as in Optax, or as `loss=`, which
      takes precedence. It must be a scalar with the same value on all devices. Steps with a
      non-finite loss are skipped, and that loss is never recorded. All extra arguments are passed
      to `inner`. Inside `optax.MultiSteps`, the wrapper checks the mean gradients, but only the
      loss of the last microbatch. It also requires one of the NaN safeguards described in
      `docs/recipes/wrappers.md`.

    Raises:
      ValueError: If a threshold is negative (except for `loss_threshold`), NaN, or not a scalar, if
        `loss_threshold` is a rule that only supports norms, or if `known_norm` is used with
        `check="updates"`. Also raised by `update` if the loss is missing or not a scalar, and by
        `init` if `inner` accumulates gradients and `check` is "updates".
      TypeError: If `inner` is not a transformation, or if a threshold or the loss is not a number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(1.0), 10.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
      >>> print(updates, state.info.norm, state.num_skipped)
      [0. 0.] 50.0 1
    """
    check = validation.check_choice(check, get_args(CheckedTree), "check")
    if check == "updates" and known_norm is not None:
        raise ValueError(
            f"known_norm={known_norm!r} cannot be combined with check='updates'; use "
            "check='gradients'"
        )
    rule = None if loss_threshold is None else check_loss_threshold(loss_threshold)
    checked = Options.create(norm=norm, known_norm=known_norm, **options)
    return skip_wrapper(
        inner, threshold, max_consecutive, check=check, loss_threshold=rule, options=checked
    )

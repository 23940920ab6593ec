"""Skips a step: judges its norm by a threshold, and selects the old state if the norm is above."""

import math
from typing import Any, Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import optaxclip._backend.memory as memory
import optaxclip._backend.meshes as meshes
import optaxclip.scopes as scopes
from optaxclip._backend.global_view import Transformation, transformation
from optaxclip._backend.skip_step import select_results, skip_step
from optaxclip._base.state import (
    StaticNames,
    check_state,
    copy_arrays,
    register_state,
    safe_increment,
)
from optaxclip._base.trees import FlatTree, Group, Grouping, flatten
from optaxclip._base.types import ClipInfo, PyTree, ThresholdRule
from optaxclip._base.validation import (
    check_choice,
    check_int_or_scalar,
    short_repr,
    validate_call,
    warn,
)
from optaxclip._engine.clip import compute_norms, get_known_norm
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import make_plan
from optaxclip._engine.record import initial_info
from optaxclip.norms import Norm
from optaxclip.scopes import Scope
from optaxclip.thresholds.constant import (
    ScalarOrSchedule,
    ThresholdLike,
    check_threshold,
    resolve_rule,
)
from optaxclip.thresholds.loss import check_loss_threshold, loss_from_extra_args
from optaxclip.thresholds.rule import params_if_needed
from optaxclip.transforms.rule_evaluation import evaluate_rule

CheckedTree = Literal["gradients", "updates"]


@register_state
class LossState(NamedTuple):
    """State of the threshold that a skip has for the loss.

    Attributes:
      rule: the threshold rule's state.
      info: a `ClipInfo` whose `norm` is the loss.
    """

    rule: PyTree
    info: ClipInfo


@register_state
class SkipState(NamedTuple):
    """State of a wrapper that skips steps.

    Attributes:
      rule: the threshold rule's state.
      info: the record of the last step; `factor` is 0 if it was skipped. `num_clipped` counts norms
        above the threshold, `num_nonfinite` those that were not finite.
      num_skipped: int32[], how many steps were skipped, for any reason.
      consecutive: int32[], how many steps in a row, up to the latest, were skipped.
      leaves: the leaves' names in order; part of the structure, not arrays. A leaf that was None
        at `init` is added at the first step that has it.
      blamed: bool[leaves], which leaves caused the latest skip: those that were not finite; if all
        were finite, those whose own norm was above the threshold; if none was, the one with the largest
        norm. No leaf is blamed if the loss alone was the cause, or if the caller gave the norm.
      loss: a `LossState`, or `()` if there is no threshold for the loss.
      inner_state: the wrapped optimizer's state.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
    leaves: StaticNames
    is_bad_leaf: Array
    loss: LossState | tuple[()]
    inner_state: PyTree


_WRAP_STATE = (
    "If the optimizer ran without a skip until now, put its state into a fresh one: "
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
    """A wrapper that skips steps with a norm, or a loss, above its threshold.

    After `max_consecutive` skipped steps in a row the next is taken. With `gives_up` that may even
    be a step that is not finite, and so are all others until one is finite.
    """
    inner, threshold, name = (
        check_inner(inner),
        check_threshold(threshold, "threshold"),
        options.name,
    )
    if max_consecutive is not None:
        max_consecutive = check_int_or_scalar(max_consecutive, "max_consecutive")

    def init(params: PyTree) -> SkipState:
        flat = flatten(params, "params")
        # JAX 0.10.2 cannot make zeros like an array in another memory in eager mode.
        inner_state = inner.init(memory.put_on_device(params))
        _warn_if_all_are_clips(inner_state, name)
        if check == "updates":
            _refuse_accumulators(inner_state, name)
        leaves = StaticNames(tuple(sorted(flat.names())))
        info = initial_info(name, scopes.tree()(flat))
        rule = resolve_rule(threshold, [("tree", ())])
        return SkipState(
            rule=copy_arrays(rule.init(jnp.zeros(()))),
            info=info,
            num_skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            leaves=leaves,
            is_bad_leaf=jnp.zeros(len(leaves), bool),
            loss=() if loss_threshold is None else _initial_loss(loss_threshold, name),
            inner_state=inner_state,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState, name, _WRAP_STATE, updates=updates)
        norm = get_known_norm(options, extra_args, "scalar")
        # Checked before the optimizer, whose own errors would not name the updates.
        incoming = flatten(updates, "updates").match_name_style(state.leaves)

        def step(
            updates: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]
        ) -> tuple[PyTree, PyTree]:
            return inner.update(updates, state, params, **extra_args)

        operands = (updates, state.inner_state, params, extra_args)
        taken = step(*operands) if check == "updates" else None
        flat = flatten(taken[0], "updates").match_name_style(state.leaves) if taken else incoming
        names, leaf_norms = StaticNames(), jnp.zeros(0)
        if norm is None:
            # The two norms take one read, because the compiler sums each leaf once.
            _, norm = _compute_norms(flat, scopes.tree(), options)
            names, leaf_norms = _compute_norms(flat, scopes.leaf(), options)
            leaf_norms = lax.stop_gradient(leaf_norms)
        if check == "updates":
            # An optimizer such as Lion may make finite updates of an infinite gradient, which its
            # state then keeps.
            incoming_names, incoming_norms = _compute_norms(incoming, scopes.leaf(), options)
            is_finite = jnp.isfinite(incoming_norms)
            norm = jnp.where(jnp.all(is_finite), norm, jnp.nan)
            leaf_norms = jnp.where(
                _reindex_flags(names, incoming_names, ~is_finite), jnp.nan, leaf_norms
            )
        rule, param_norm = resolve_rule(threshold, [("tree", ())]), None
        params = params_if_needed(rule, params, name)
        if params is not None:
            _, param_norm = _compute_norms(flatten(params, "params"), scopes.tree(), options)
        of_norm = evaluate_rule(rule, state.rule, norm, name, param_norm)
        is_bad, is_out, of_loss = of_norm.is_bad, of_norm.should_skip, None
        if loss_threshold is not None:
            loss = loss_from_extra_args(extra_args, name, options.axis_names)
            of_loss = evaluate_rule(loss_threshold, state.loss.rule, loss, name, any_sign=True)
            is_bad, is_out = is_bad | of_loss.is_bad, is_out | of_loss.should_skip
        skip = is_out
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = is_out & ~(is_over & (~is_bad | accept_nonfinite_at_limit))
        loss_state = state.loss
        if of_loss is not None:
            loss_state = LossState(of_loss.rule_state, of_loss.update_info(state.loss.info, skip))
        leaves, blamed = _update_bad_leaves(state, names, of_norm.find_offending(leaf_norms), skip)
        new_updates, inner_state = (
            select_results(skip, state.inner_state, *taken)
            if taken
            else skip_step(skip, step, *operands)
        )
        return new_updates, SkipState(
            rule=of_norm.rule_state,
            info=of_norm.update_info(state.info, skip),
            num_skipped=safe_increment(state.num_skipped, skip),
            consecutive=jnp.where(
                is_out if accept_nonfinite_at_limit else skip, safe_increment(state.consecutive), 0
            ),
            leaves=leaves,
            is_bad_leaf=blamed,
            loss=loss_state,
            inner_state=after_skip(inner_state, skip),
        )

    return transformation(init, update)


def _warn_if_all_are_clips(inner_state: PyTree, name: str) -> None:
    """Warns of a skip without an optimizer in it, as far as the states show it.

    States of stages that only change or record updates are marked by `NEEDS_OPTIMIZER`.
    """

    def needs_optimizer(x: Any) -> bool:
        return hasattr(x, "NEEDS_OPTIMIZER")

    # An `EmptyState` may be that of an optimizer, such as `optax.sgd`.
    nodes = jax.tree.leaves(
        inner_state, is_leaf=lambda x: needs_optimizer(x) or isinstance(x, optax.EmptyState)
    )
    if nodes and all(map(needs_optimizer, nodes)):
        warn(
            f"{name} wraps no optimizer, only clips and records, so a skipped step still moves the "
            "weights by the moments and the weight decay of an optimizer that comes after it; wrap "
            f"the optimizer too: {name}(optax.chain(clip, optimizer))"
        )


def _refuse_accumulators(inner_state: PyTree, name: str) -> None:
    """Refuses an optimizer that sums gradients or updates over several steps.

    If a step is skipped, the sum before that step is restored. A spike that came earlier remains in
    the sum, so that all later steps are skipped too.
    """
    orders = {
        optax.MultiStepsState: f"optax.MultiSteps({name}(optimizer, ...), k)",
        optax.ApplyEvery: f"optax.chain({name}(optimizer, ...), optax.apply_every(k))",
    }
    kinds = tuple(orders)
    for node in jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(node, kinds):
            raise ValueError(
                f"{name}: inner must not sum over several steps with check='updates', got a "
                f"{type(node).__name__} in its state, in which a spike would remain; use "
                f"{orders[type(node)]}"
            )


def after_skip(inner_state: PyTree, skip: Array) -> PyTree:
    """The state that a skip keeps, in which records count the step if it was skipped.

    The states of such stages have a method `after_skip`. Those inside of `optax.MultiSteps` are
    left alone, because they do not run at each step.
    """

    def counts(x: Any) -> bool:
        return hasattr(x, "after_skip") or isinstance(x, optax.MultiStepsState)

    def counted(x: Any) -> Any:
        return x.after_skip(skip) if hasattr(x, "after_skip") else x

    return jax.tree.map(counted, inner_state, is_leaf=counts)


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner`, checked to be a transformation, as one that takes extra arguments."""
    is_transformation = hasattr(inner, "init") and hasattr(inner, "update")
    if not is_transformation or isinstance(inner, ThresholdRule):
        raise TypeError(
            "inner must be an Optax transformation such as optax.adam(1e-3), and is the first "
            f"argument; got {short_repr(inner)}"
        )
    return optax.with_extra_args_support(inner)


def _compute_norms(flat: FlatTree, scope: Scope, options: Options) -> tuple[StaticNames, Array]:
    """The names of a tree's groups, and their norms."""
    plan = make_plan(flat, scope, options)
    return plan.grouping.names, compute_norms(flat, plan, options.norm)


def _update_bad_leaves(
    state: SkipState, names: StaticNames, flags: Array, skip: Array
) -> tuple[StaticNames, Array]:
    """The leaves of a state after a step, and which of them caused the latest skip.

    `flags` say which of this step's leaves, `names`, cause a skip if there is one.
    """
    # A state that has lost its names, for example by `optax.tree_map_params`, gets them back.
    lost = not state.leaves and len(names) == len(state.is_bad_leaf)
    known, before = names if lost else state.leaves, state.is_bad_leaf
    # A leaf that was None at `init` gets its name at the first step that has it.
    if len(known) == len(before) and not set(names) <= set(known):
        longer = StaticNames(tuple(sorted({*known, *names})))
        known, before = longer, _reindex_flags(longer, known, before)
    return known, jnp.where(skip, _reindex_flags(known, names, flags), before) if known else before


def _reindex_flags(all_leaves: StaticNames, names: StaticNames, flags: Array) -> Array:
    """Flags for all leaves of a state, False for those that this step's tree lacks."""
    if tuple(all_leaves) == tuple(names):
        return flags
    by_name = dict(zip(names, flags, strict=True))
    column = [by_name.get(name, jnp.zeros((), bool)) for name in all_leaves]
    return meshes.stack(column)


def _initial_loss(rule: ThresholdRule, name: str) -> LossState:
    grouping = Grouping((Group(("loss",), ()),), (), "scalar")
    info = initial_info(name, grouping)
    return LossState(copy_arrays(rule.init(jnp.zeros(()))), info)


@validate_call(transformation=True)
@document_options(ShardingOptions)
def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: int | None = None,
    **options: Unpack[ShardingOptions],
) -> Transformation[SkipState]:
    """Skips the steps whose gradients hold a NaN or an infinite entry.

    `optaxclip.monitor.bad_leaves` then names the leaves, and `optaxclip.monitor.step_status` tells the
    host whether to go on.

    Put it around `optax.MultiSteps`,
    `skip_nonfinite(optax.MultiSteps(chain, k).gradient_transformation())`, not inside of it: Optax
    0.2.8 keeps a NaN of one microbatch in its sum for ever, so that a skip inside would skip every
    later step.

    Args:
      inner: the optimizer.
      max_consecutive: after this many skipped steps in a row, steps are taken even if they are not
        finite, until one is finite, as in `optax.apply_if_finite`; this shows that the run is lost.
        With None, a step that is not finite is never taken.
      **options: those that all transformations share, `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates.

    Raises:
      ValueError: if `max_consecutive` is less than 1.
      TypeError: if `inner` is not a transformation, or `max_consecutive` is not an int.

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


@validate_call(transformation=True)
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
    """Skips the steps whose global gradient norm, or loss, exceeds a threshold or is not finite.

    With a constant this is the rule of paxml and Megatron-LM; with
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)` it is axlearn's. The following
    projects judge the loss by its own past too; pass their rule twice,
    `skip_above(inner, rule, loss_threshold=rule)`:

      project           | rule
      ------------------|-----------------------------------------------------------------
      OLMo-core         | `thresholds.window(6.0, 128, ddof=1, min_std=0.0, warmup_steps=63)`
      Levanter          | `thresholds.window(6.0, 128)`
      MaxText           | OLMo-core's rule, behind a clip of the gradients:
                        | `optax.chain(clip_by_global_norm(1.0), skip_above(...))`

    Source: allenai/OLMo-core, marin-community/levanter, AI-Hypercomputer/maxtext, apple/axlearn.

    The published rules may skip any number of steps in a row; pass `max_consecutive=None` for that.
    `optaxclip.monitor.bad_leaves` names the leaves that caused a skip, and
    `optaxclip.monitor.step_status` tells the host whether to go on.

    Args:
      inner: the optimizer.
      threshold: a number, a schedule, or a rule from `optaxclip.thresholds`, whose trigger counts;
        `math.inf` to judge the loss alone.
      max_consecutive: after this many skipped steps in a row, the next finite step is taken, so
        that a threshold cannot stop a run for good. With None the threshold always holds. Steps that are
        not finite are always skipped.
      loss_threshold: the threshold of the loss, which may be negative: a number, a schedule, or
        `thresholds.window`, `zscore`, `percentile`, `median` or `ema`, whose `floor` is not used.
        (For a negative average `m` the multiple `k` is `m + (k - 1) * abs(m)`.)
      check: "gradients" judges what comes in; "updates" judges the step that `inner` would take, whose
        length an Adam or a Muon sets itself. Steps with non-finite gradients are skipped in both
        cases. With "updates", `inner` must not accumulate gradients: write
        `optax.MultiSteps(skip_above(adam, threshold, check="updates"), k)`.
      norm: which norm of the tree is compared with `threshold`.
      known_norm: the name of an extra argument of the update, such as "grad_norm", that holds the
        norm of the incoming tree. That norm is then not measured, and no leaf can be blamed.
      **options: those that all transformations share, `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates. With `loss_threshold`, its
      update needs the loss: `value=`, as Optax calls it, or `loss=`, which is used if both are
      given. The loss must be a scalar, the same on all devices; `optax.MultiSteps` passes on only
      the loss of the last microbatch. A step whose loss is not finite is skipped, and that loss is
      never recorded. All extra arguments are passed on to the optimizer. Inside of
      `optax.MultiSteps` the skip judges means, and needs one of the guards against NaN that
      `docs/recipes/wrappers.md` shows.

    Raises:
      ValueError: for a threshold that is negative, NaN or not a scalar (a `loss_threshold` may be
        negative), for a `loss_threshold` that is a rule for norms alone, and for `get_known_norm` with
        `check="updates"`; when used, for a loss that is missing or not a scalar, and for
        `optax.MultiSteps` or `optax.apply_every` inside a skip with `check="updates"`.
      TypeError: if `inner` is not a transformation, or a threshold or a loss is not a number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(1.0), 10.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
      >>> print(updates, state.info.norm, state.num_skipped)
      [0. 0.] 50.0 1

      The loss alone:

      >>> tx = optaxclip.skip_above(optax.sgd(1.0), jnp.inf, loss_threshold=-1.0)
      >>> state = tx.init(params)
      >>> for loss in (-3.0, 0.5, jnp.nan):
      ...     updates, state = tx.update(jnp.ones(2), state, params, value=loss)
      ...     print(updates, state.num_skipped)
      [-1. -1.] 0
      [0. 0.] 1
      [0. 0.] 2
    """
    check = check_choice(check, get_args(CheckedTree), "check")
    if check == "updates" and known_norm is not None:
        raise ValueError(
            f"known_norm={known_norm!r} is of gradients: leave it out, or check='updates'"
        )
    return skip_wrapper(
        inner,
        threshold,
        max_consecutive,
        check=check,
        loss_threshold=None if loss_threshold is None else check_loss_threshold(loss_threshold),
        options=Options.create(norm=norm, known_norm=known_norm, **options),
    )

"""Skips a step: judges its norm by a limit, and selects the old state if the norm is above."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip.scopes as scopes
from optaxclip._base.arguments import checked_count, short, warn
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.states import Names, check_state, increased, own_arrays, registered_state
from optaxclip._base.trees import FlatTree, flatten
from optaxclip._base.types import ClipInfo, PyTree, Threshold
from optaxclip._border.crossing import Transformation, transformation
from optaxclip._engine.clip import known_norm
from optaxclip._engine.options import Options
from optaxclip._engine.plan import plan_of
from optaxclip._engine.record import initial_info
from optaxclip._engine.step import norms_of
from optaxclip.methods.judging import judged, kept_where, zero_where
from optaxclip.scopes import Scope
from optaxclip.thresholds.calling import params_for
from optaxclip.thresholds.fixed import LimitLike, as_limit, rule_for
from optaxclip.thresholds.losses import loss_among

Of = Literal["gradients", "updates"]


@registered_state
class LossState(NamedTuple):
    """State of the limit that a skip has for the loss.

    Attributes:
      rule: the limit rule's state.
      info: a `ClipInfo` whose `norm` is the loss.
    """

    rule: PyTree
    info: ClipInfo


@registered_state
class SkipState(NamedTuple):
    """State of a wrapper that skips steps.

    Attributes:
      rule: the limit rule's state.
      info: the record of the last step; `factor` is 0 if it was skipped. `num_clipped` counts norms
        above the limit, `num_nonfinite` those that were not finite.
      num_skipped: int32[], how many steps were skipped, for any reason.
      consecutive: int32[], how many steps in a row, up to the latest, were skipped.
      leaves: the leaves' names in order; part of the structure, not arrays. A leaf that was None
        at `init` is added at the first step that has it.
      blamed: bool[leaves], which leaves caused the latest skip: those that were not finite; if all
        were finite, those whose own norm was above the limit; if none was, the one with the largest
        norm. No leaf is blamed if the loss alone was the cause, or if the caller gave the norm.
      loss: a `LossState`, or `()` if there is no limit for the loss.
      inner_state: the wrapped optimizer's state.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
    leaves: Names
    blamed: Array
    loss: LossState | tuple[()]
    inner_state: PyTree


_WRAP_STATE = (
    "If the optimizer ran without a skip until now, put its state into a fresh one: "
    "opt_state = tx.init(params)._replace(inner_state=old_opt_state)"
)


def skipping(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None,
    *,
    loss_limit: Threshold | None = None,
    options: Options,
    of: Of = "gradients",
    gives_up: bool = False,
) -> Transformation[SkipState]:
    """A wrapper that skips steps with a norm, or a loss, above its limit.

    After `max_consecutive` skipped steps in a row the next is taken. With `gives_up` that may even
    be a step that is not finite, and so are all others until one is finite.
    """
    inner, limit, name = as_inner(inner), as_limit(limit, "limit"), options.name
    if max_consecutive is not None:
        max_consecutive = checked_count(max_consecutive, "max_consecutive")

    def init(params: PyTree) -> SkipState:
        flat = flatten(params, "params")
        # JAX 0.10.2 cannot make zeros like an array in another memory in eager mode.
        inner_state = inner.init(devices.to_device(params))
        _warn_if_all_are_clips(inner_state, name)
        if of == "updates":
            _refuse_accumulators(inner_state, name)
        leaves = Names(tuple(sorted(flat.names())))
        info = initial_info(name, scopes.tree()(flat))
        rule = rule_for(limit, [("tree", ())])
        return SkipState(
            rule=own_arrays(rule.init(jnp.zeros(()))),
            info=info,
            num_skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            leaves=leaves,
            blamed=jnp.zeros(len(leaves), bool),
            loss=() if loss_limit is None else _initial_loss(loss_limit, name),
            inner_state=inner_state,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState, name, _WRAP_STATE, updates=updates)
        norm = known_norm(options, extra_args, "scalar")
        # Checked before the optimizer, whose own errors would not name the updates.
        incoming = flatten(updates, "updates").named_like(state.leaves)
        # The optimizer runs at every step, and its results may be dropped after it: so the norms
        # that it takes of the updates share a read with these.
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        flat = incoming
        if of == "updates":
            flat = flatten(new_updates, "updates").named_like(state.leaves)
        names, leaf_norms = Names(), jnp.zeros(0)
        if norm is None:
            # The two norms take one read, because the compiler sums each leaf once.
            _, norm = _norms(flat, scopes.tree(), options)
            names, leaf_norms = _norms(flat, scopes.leaf(), options)
            leaf_norms = lax.stop_gradient(leaf_norms)
        if of == "updates":
            # An optimizer such as Lion may make finite updates of an infinite gradient, which its
            # state then keeps.
            incoming_names, incoming_norms = _norms(incoming, scopes.leaf(), options)
            is_finite = jnp.isfinite(incoming_norms)
            norm = jnp.where(jnp.all(is_finite), norm, jnp.nan)
            leaf_norms = jnp.where(_among(names, incoming_names, ~is_finite), jnp.nan, leaf_norms)
        rule, param_norm = rule_for(limit, [("tree", ())]), None
        params = params_for(rule, params, name)
        if params is not None:
            _, param_norm = _norms(flatten(params, "params"), scopes.tree(), options)
        of_norm = judged(rule, state.rule, norm, name, param_norm)
        is_bad, is_out, of_loss = of_norm.is_bad, of_norm.is_out, None
        if loss_limit is not None:
            loss = loss_among(extra_args, name, options.axis_names)
            of_loss = judged(loss_limit, state.loss.rule, loss, name, any_sign=True)
            is_bad, is_out = is_bad | of_loss.is_bad, is_out | of_loss.is_out
        skip = is_out
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = is_out & ~(is_over & (~is_bad | gives_up))
        loss_state = state.loss
        if of_loss is not None:
            loss_state = LossState(of_loss.rule_state, of_loss.recorded(state.loss.info, skip))
        leaves, blamed = _blamed(state, names, of_norm.blamed(leaf_norms), skip)
        return zero_where(skip, new_updates), SkipState(
            rule=of_norm.rule_state,
            info=of_norm.recorded(state.info, skip),
            num_skipped=increased(state.num_skipped, skip),
            consecutive=jnp.where(is_out if gives_up else skip, increased(state.consecutive), 0),
            leaves=leaves,
            blamed=blamed,
            loss=loss_state,
            inner_state=kept_where(skip, state.inner_state, inner_state),
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
                f"{name}: inner must not sum over several steps with of='updates', got a "
                f"{type(node).__name__} in its state, in which a spike would remain; use "
                f"{orders[type(node)]}"
            )


def as_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner`, checked to be a transformation, as one that takes extra arguments."""
    is_transformation = hasattr(inner, "init") and hasattr(inner, "update")
    if not is_transformation or isinstance(inner, Threshold):
        raise TypeError(
            "inner must be an Optax transformation such as optax.adam(1e-3), and is the first "
            f"argument; got {short(inner)}"
        )
    return optax.with_extra_args_support(inner)


def _norms(flat: FlatTree, scope: Scope, options: Options) -> tuple[Names, Array]:
    """The names of a tree's groups, and their norms."""
    plan = plan_of(flat, scope, options)
    return plan.grouping.names, norms_of(flat, plan, options.norm)


def _blamed(state: SkipState, names: Names, flags: Array, skip: Array) -> tuple[Names, Array]:
    """The leaves of a state after a step, and which of them caused the latest skip.

    `flags` say which of this step's leaves, `names`, cause a skip if there is one.
    """
    # A state that has lost its names, for example by `optax.tree_map_params`, gets them back.
    lost = not state.leaves and len(names) == len(state.blamed)
    known, before = names if lost else state.leaves, state.blamed
    # A leaf that was None at `init` gets its name at the first step that has it.
    if len(known) == len(before) and not set(names) <= set(known):
        longer = Names(tuple(sorted({*known, *names})))
        known, before = longer, _among(longer, known, before)
    return known, jnp.where(skip, _among(known, names, flags), before) if known else before


def _among(all_leaves: Names, names: Names, flags: Array) -> Array:
    """Flags for all leaves of a state, False for those that this step's tree lacks."""
    if tuple(all_leaves) == tuple(names):
        return flags
    by_name = dict(zip(names, flags, strict=True))
    column = [by_name.get(name, jnp.zeros((), bool)) for name in all_leaves]
    return devices.stack(column)


def _initial_loss(rule: Threshold, name: str) -> LossState:
    grouping = Grouping((Group(("loss",), ()),), (), "scalar")
    info = initial_info(name, grouping)
    return LossState(own_arrays(rule.init(jnp.zeros(()))), info)

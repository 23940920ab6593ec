"""How a step is skipped: measure, judge, and select what was there before."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_state, whole
from optaxclip._base.counters import increased, own_arrays
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.numerics import match_weak_type
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import flatten
from optaxclip._base.types import AxisName, ClipInfo, PyTree, Threshold
from optaxclip._engine.checks import as_norm_given, params_for
from optaxclip._engine.clip import group_norms
from optaxclip._engine.placement import as_axis_names, grouped
from optaxclip._engine.record import initial_info
from optaxclip._engine.step import norms_of
from optaxclip.norms import Norm, as_norm
from optaxclip.thresholds.fixed import LimitLike, as_limit, rule_for
from optaxclip.thresholds.losses import loss_among


class LossState(NamedTuple):
    """What a skip with `loss_limit` keeps of the loss.

    Attributes:
      rule: the limit rule's state.
      info: as that of a norm, where `norm` is the loss.
    """

    rule: PyTree
    info: ClipInfo


class SkipState(NamedTuple):
    """State of a wrapper that skips steps.

    Attributes:
      rule: the limit rule's state.
      info: what the last step did; `factor` is 0 if it was skipped. `num_clipped` counts norms
        above the limit, `num_nonfinite` those that were not finite.
      num_skipped: int32[], steps skipped so far, for whatever reason.
      consecutive: int32[], steps skipped in a row until now.
      leaves: the leaves' names in order, as the keys of a dict of nothing.
      blamed: bool[leaves], why the latest step was skipped: the leaves that were not finite, else
        those whose own norm was above the limit, else the one with the largest. No leaf, if it was
        the loss alone, or the norm was the caller's.
      loss: a `LossState`, or nothing where the loss is not judged.
      inner_state: the wrapped optimizer's state.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
    leaves: dict[str, tuple[()]]
    blamed: Array
    loss: LossState | tuple[()]
    inner_state: PyTree


def skipping(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None,
    *,
    loss_limit: Threshold | None = None,
    norm: str | Norm = "l2",
    axis_name: AxisName = None,
    specs: PyTree = None,
    gives_up: bool = False,
    name: str,
) -> Transformation[SkipState]:
    """A wrapper that skips steps.

    Args:
      inner: the optimizer.
      limit: the largest norm of a step that is taken.
      max_consecutive: after so many skipped steps in a row the next is taken.
      loss_limit: a rule for the largest loss of such a step.
      norm: the norm.
      axis_name: as in `optaxclip.clip_by`.
      specs: as in `optaxclip.clip_by`.
      gives_up: whether the step that is taken then may be one that is not finite.
      name: what it is called in messages and by the monitor.
    """
    limit = as_limit(limit, "limit")
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner must be an Optax transformation such as optax.adam(1e-3), got {inner!r}"
        )
    inner = optax.with_extra_args_support(inner)
    if max_consecutive is not None and not isinstance(max_consecutive, jax.Array):
        max_consecutive = min(whole(max_consecutive, 1, "max_consecutive"), 2**31 - 1)
    norm, axis_names = as_norm(norm), as_axis_names(axis_name)
    measure_params = functools.partial(
        group_norms, scope=scopes.tree(), norm=norm, axis_name=axis_name, specs=specs
    )

    def measure(updates: PyTree) -> tuple[Array, Array, list[str]]:
        """The norm of the tree, those of its leaves, and their names."""
        flat = flatten(updates, "updates")
        # They share one read, as the compiler sums each leaf once.
        of_tree, of_leaves = (
            grouped(scope, flat, axis_names, specs) for scope in (scopes.tree(), scopes.leaf())
        )
        whole_norm, norms = (norms_of(flat.picked(), of, norm) for of in (of_tree, of_leaves))
        return whole_norm, lax.stop_gradient(norms), list(of_leaves.names)

    def init(params: PyTree) -> SkipState:
        flat = flatten(params, "params")
        grouping, leaves = scopes.tree()(flat), sorted(flat.names())
        info = initial_info(name, grouping, jnp.dtype(jnp.float32))
        rule = rule_for(limit, grouping.names, grouping.layout)
        return SkipState(
            rule=own_arrays(rule.init(jnp.zeros(()))),
            info=info,
            num_skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            leaves=dict.fromkeys(leaves, ()),
            blamed=jnp.zeros(len(leaves), bool),
            loss=() if loss_limit is None else _initial_loss(loss_limit, name),
            inner_state=inner.init(params),
        )

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_norm: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SkipState]:
        check_state(state, SkipState, name)
        rule = rule_for(limit, ("tree",), "scalar")
        if grad_norm is None:
            norm_now, of_leaves, names = measure(updates)
        else:
            norm_now, of_leaves, names = as_norm_given(grad_norm, "grad_norm"), jnp.zeros(0), []
        relative_to = params_for(rule, params, name)
        param_norm = None if relative_to is None else measure_params(relative_to)
        of_norm = _judged(rule, state.rule, norm_now, param_norm)
        is_bad, is_out, of_loss = of_norm.is_bad, of_norm.is_out, None
        if loss_limit is not None:
            of_loss = _judged(loss_limit, state.loss.rule, loss_among(extra_args, name))
            is_bad, is_out = is_bad | of_loss.is_bad, is_out | of_loss.is_out
        skip = is_out
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = is_out & ~(is_over & (~is_bad | gives_up))
        loss = state.loss
        if of_loss is not None:
            loss = LossState(of_loss.rule_state, of_loss.recorded(state.loss.info, skip))
        # Selected afterwards, so that what it measures of these updates is read once with our norm.
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return _zero_where(skip, new_updates), SkipState(
            rule=of_norm.rule_state,
            info=of_norm.recorded(state.info, skip),
            num_skipped=increased(state.num_skipped, skip),
            consecutive=jnp.where(skip, increased(state.consecutive), 0),
            leaves=state.leaves,
            blamed=jnp.where(
                is_out, _among(state.leaves, names, of_norm.blamed(of_leaves)), state.blamed
            ),
            loss=loss,
            inner_state=_select(skip, state.inner_state, inner_state),
        )

    return Transformation(init, update)


class _Judged(NamedTuple):
    """A number and its limit."""

    number: Array
    limit: Array
    rule_state: PyTree
    is_above: Array
    is_bad: Array

    @property
    def is_out(self) -> Array:
        """Whether it is a reason to skip."""
        return self.is_above | self.is_bad

    def blamed(self, parts: Array) -> Array:
        """Which of the parts of a norm are why it is out."""
        is_above = parts > self.limit.astype(parts.dtype)
        is_largest = parts == jnp.max(parts, initial=0)
        is_above = jnp.where(jnp.any(is_above), is_above, is_largest)
        return jnp.where(self.is_bad, ~jnp.isfinite(parts), is_above & self.is_above)

    def recorded(self, info: ClipInfo, skip: Array) -> ClipInfo:
        """The record, of a step that was skipped or not."""
        return info._replace(
            norm=self.number.astype(jnp.float32),
            limit=self.limit.astype(jnp.float32),
            factor=1 - skip.astype(jnp.float32),
            fraction=self.is_above.astype(jnp.float32),
            num_clipped=increased(info.num_clipped, self.is_above),
            num_nonfinite=increased(info.num_nonfinite, self.is_bad),
        )


def _judged(rule: Threshold, state: PyTree, number: Array, param_norm: Any = None) -> _Judged:
    limits, state = rule.update(number, state, param_norm)
    is_finite = jnp.isfinite(number)
    is_above = is_finite & (number > limits.trigger.astype(number.dtype))
    return _Judged(number, limits.trigger, state, is_above, ~is_finite)


def _among(known: Iterable[str], names: list[str], flags: Array) -> Array:
    """Flags of some leaves as those of all that are known."""
    if list(known) == names:
        return flags
    of = dict(zip(names, flags, strict=True))
    column = [of.get(name, jnp.zeros((), bool)) for name in known]
    return jnp.stack(column) if column else jnp.zeros(0, bool)


def _initial_loss(rule: Threshold, name: str) -> LossState:
    grouping = Grouping((Group(("loss",), ()),), (), "scalar")
    info = initial_info(name, grouping, jnp.dtype(jnp.float32))
    return LossState(own_arrays(rule.init(jnp.zeros(()))), info)


def _zero_where(skip: Array, updates: PyTree) -> PyTree:
    return _select(skip, jax.tree.map(_zeros_like, updates), updates)


def _zeros_like(x: Any) -> Any:
    return x if _is_opaque(x) else jnp.zeros_like(x)


def _select(where: Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where `where`, else `new`, in the dtypes of `new`; `float0` is left alone."""

    def choose(x: Any, y: Any) -> Any:
        if getattr(y, "dtype", None) == jax.dtypes.float0:
            return y
        if _is_opaque(y):
            return jnp.where(where, x, y)
        x, y = jnp.asarray(x), jnp.asarray(y)
        chosen = jnp.where(where, x.astype(y.dtype), y)
        # A weak type that came and went would compile the step again.
        return match_weak_type(chosen, x) if x.dtype == y.dtype else chosen

    return jax.tree.map(choose, old, new)


def _is_opaque(x: Any) -> bool:
    """Whether a leaf has no numbers to compute with: `float0` or a PRNG key."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended)

"""How a step is skipped: measure, judge, and select what was there before."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_state, loss_among, whole
from optaxclip._base.counters import increased, own_arrays
from optaxclip._base.grouping import Group, Grouping
from optaxclip._base.numerics import match_weak_type
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import flatten
from optaxclip._base.types import AxisName, ClipInfo, PyTree, Threshold
from optaxclip._engine.checks import as_norm_given, params_for
from optaxclip._engine.clip import group_norms
from optaxclip._engine.record import initial_info
from optaxclip.norms import Norm, as_norm
from optaxclip.thresholds.fixed import LimitLike, as_limit, rule_for


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
      loss: a `LossState`, or nothing where the loss is not judged.
      inner_state: the wrapped optimizer's state.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
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
    inner = optax.with_extra_args_support(inner)
    if max_consecutive is not None and not isinstance(max_consecutive, jax.Array):
        max_consecutive = whole(max_consecutive, 1, "max_consecutive")
    options = {"norm": as_norm(norm), "axis_name": axis_name, "specs": specs}
    measure = functools.partial(group_norms, scope=scopes.tree(), **options)

    def init(params: PyTree) -> SkipState:
        grouping = scopes.tree()(flatten(params, "params"))
        info = initial_info(name, grouping, jnp.dtype(jnp.float32))
        rule = rule_for(limit, grouping.names, grouping.layout)
        return SkipState(
            rule=own_arrays(rule.init(jnp.zeros(()))),
            info=info,
            num_skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
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
        norm_now = measure(updates) if grad_norm is None else as_norm_given(grad_norm, "grad_norm")
        relative_to = params_for(rule, params, name)
        param_norm = None if relative_to is None else measure(relative_to)
        of_norm = _judged(rule, state.rule, norm_now, param_norm)
        is_bad, skip, of_loss = of_norm.is_bad, of_norm.is_out, None
        if loss_limit is not None:
            of_loss = _judged(loss_limit, state.loss.rule, loss_among(extra_args, name))
            is_bad, skip = is_bad | of_loss.is_bad, skip | of_loss.is_out
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = skip & ~(is_over & (~is_bad | gives_up))
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

    def recorded(self, info: ClipInfo, skip: Array) -> ClipInfo:
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

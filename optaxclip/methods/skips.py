"""Skipping whole steps, which must wrap the optimizer.

A stage of a chain cannot do it: zero updates still let Adam's moments decay and weight decay act.
Here a skipped step leaves parameters and inner state exactly as they were, by selection, never by
multiplying with zero (`0 * NaN` is NaN). What is wrapped is handed every step, and what it makes of
a skipped one is thrown away: so its clips and records share the read of the skip's own norm.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip.scopes as scopes
from optaxclip._base.arguments import check_state, whole
from optaxclip._base.counters import increased, own_arrays
from optaxclip._base.numerics import match_weak_type
from optaxclip._base.transformation import Transformation
from optaxclip._base.trees import flatten
from optaxclip._base.types import AxisName, ClipInfo, PyTree
from optaxclip._engine.checks import as_norm_given, params_for
from optaxclip._engine.clip import group_norms
from optaxclip._engine.record import initial_info
from optaxclip.norms import Norm, as_norm
from optaxclip.thresholds.fixed import LimitLike, as_limit, rule_for


class SkipState(NamedTuple):
    """State of a wrapper that skips steps.

    Attributes:
      rule: the limit rule's state.
      info: what the last step did; `factor` is 0 if it was skipped. `num_clipped` counts norms
        above the limit, `num_nonfinite` those that were not finite.
      num_skipped: int32[], steps skipped so far, for either reason.
      consecutive: int32[], steps skipped in a row until now.
      inner_state: the wrapped optimizer's state.
    """

    rule: PyTree
    info: ClipInfo
    num_skipped: Array
    consecutive: Array
    inner_state: PyTree


def skip_nonfinite(
    inner: optax.GradientTransformation,
    max_consecutive: int | None = None,
    *,
    axis_name: AxisName = None,
    specs: PyTree = None,
    name: str = "skip_nonfinite",
) -> Transformation[SkipState]:
    """Skips the steps whose gradients hold a NaN or an infinite entry.

    Args:
      inner: the optimizer.
      max_consecutive: after so many skipped steps in a row the next goes to the optimizer as it is,
        as with `optax.apply_if_finite`, so that a run that is lost shows it; never if None.
      axis_name: the mapped axes over which all leaves are split; see `optaxclip.clip_by`.
      specs: how the leaves are split over devices; see `optaxclip.clip_by`.
      name: what the transformation is called in messages and by `optaxclip.monitor`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates.

    Raises:
      ValueError: if `max_consecutive` is less than 1.
      TypeError: if `max_consecutive` is no int.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(params), params)
      >>> print(updates, state.num_skipped)
      [0. 0.] 1
    """
    measure = _measure_for("l2", axis_name, specs)
    return _skip(inner, math.inf, max_consecutive, measure, gives_up=True, name=name)


def skip_above(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None = 20,
    *,
    norm: str | Norm = "l2",
    axis_name: AxisName = None,
    specs: PyTree = None,
    name: str = "skip_above",
) -> Transformation[SkipState]:
    """Skips the steps whose global gradient norm exceeds a limit or is not finite.

    With a constant this is paxml's and Megatron-LM's rule, with
    `thresholds.ema(0.99, 20.0, record="accepted", debias=True)` axlearn's, and with
    `thresholds.window(6.0, 128, ddof=1)` OLMo-core's.

    Args:
      inner: the optimizer.
      limit: a number, a schedule, or a rule from `optaxclip.thresholds`, whose trigger counts.
      max_consecutive: after so many skipped steps in a row the next finite one is taken, so that
        no limit can stop a run for good; never if None. Non-finite steps are skipped always.
      norm: the norm.
      axis_name: the mapped axes over which all leaves are split; see `optaxclip.clip_by`.
      specs: how the leaves are split over devices; see `optaxclip.clip_by`.
      name: what the transformation is called in messages and by `optaxclip.monitor`.

    Returns:
      A transformation with a `SkipState`. A skipped step gives zero updates. Its update takes
      `grad_norm=`, as that of `optaxclip.clip_by`.

    Raises:
      ValueError: for a limit that is negative, NaN or not a scalar.
      TypeError: for a limit that is no number.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> tx = optaxclip.skip_above(optax.sgd(1.0), 10.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
      >>> print(updates, state.info.norm, state.num_skipped)
      [0. 0.] 50.0 1
    """
    measure = _measure_for(norm, axis_name, specs)
    return _skip(inner, limit, max_consecutive, measure, gives_up=False, name=name)


def _skip(
    inner: optax.GradientTransformation,
    limit: LimitLike,
    max_consecutive: int | None,
    measure: Callable[[PyTree], Array],
    *,
    gives_up: bool,
    name: str,
) -> Transformation[SkipState]:
    limit = as_limit(limit, "limit")
    inner = optax.with_extra_args_support(inner)
    if max_consecutive is not None and not isinstance(max_consecutive, jax.Array):
        max_consecutive = whole(max_consecutive, 1, "max_consecutive")

    def init(params: PyTree) -> SkipState:
        grouping = scopes.tree()(flatten(params, "params"))
        info = initial_info(name, grouping, jnp.dtype(jnp.float32))
        rule = rule_for(limit, grouping.names, grouping.layout)
        rule_state = own_arrays(rule.init(jnp.zeros(())))
        skipped, consecutive = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipState(rule_state, info, skipped, consecutive, inner.init(params))

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
        limits, rule_state = rule.update(norm_now, state.rule, param_norm)
        is_finite = jnp.isfinite(norm_now)
        is_above = is_finite & (norm_now > limits.trigger.astype(norm_now.dtype))
        skip = is_above | ~is_finite
        if max_consecutive is not None:
            is_over = state.consecutive >= max_consecutive
            skip = skip & ~(is_over & (is_finite | gives_up))
        # Selected afterwards, so that what it measures of these updates is read once with our norm.
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return _zero_where(skip, new_updates), SkipState(
            rule=rule_state,
            info=_updated_info(state.info, norm_now, limits.trigger, skip, is_above, ~is_finite),
            num_skipped=increased(state.num_skipped, skip),
            consecutive=jnp.where(skip, increased(state.consecutive), 0),
            inner_state=_select(skip, state.inner_state, inner_state),
        )

    return Transformation(init, update)


def _measure_for(norm: str | Norm, axis_name: AxisName, specs: PyTree) -> Callable[..., Array]:
    """A function from a tree to its norm."""
    return functools.partial(
        group_norms, scope=scopes.tree(), norm=as_norm(norm), axis_name=axis_name, specs=specs
    )


def _updated_info(
    info: ClipInfo, norm: Array, limit: Array, skip: Array, is_above: Array, is_bad: Array
) -> ClipInfo:
    return info._replace(
        norm=norm.astype(jnp.float32),
        limit=limit.astype(jnp.float32),
        factor=1 - skip.astype(jnp.float32),
        fraction=is_above.astype(jnp.float32),
        num_clipped=increased(info.num_clipped, is_above),
        num_nonfinite=increased(info.num_nonfinite, is_bad),
    )


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

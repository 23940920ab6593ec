"""The update direction of StableAdamW: `scale_by_stable_adam`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._backend.meshes as meshes
import optaxclip._base.numerics as numerics
import optaxclip.norms as norms
from optaxclip._backend.elementwise import scale_by_real
from optaxclip._backend.global_view import Transformation, global_view, transformation
from optaxclip._base.state import check_state, register_state, safe_increment
from optaxclip._base.trees import flatten
from optaxclip._base.types import ArrayLike, ClipState, NonFinite, PyTree
from optaxclip._base.validation import validate_call
from optaxclip._engine.clip import make_clip
from optaxclip._engine.options import Options, ShardingOptions, document_options
from optaxclip._engine.plan import Plan, make_plan
from optaxclip.thresholds._constant import ScalarOrSchedule, check_threshold
from optaxclip.thresholds._rule import check_decay, check_threshold_value
from optaxclip.transforms.norm_clips import leaf_scope
from optaxclip.transforms.second_moment import NamedMoments, check_dense, wide_dtype, zero_moments


@register_state
class StableAdamState(NamedTuple):
    """State of `scale_by_stable_adam`.

    Attributes:
      clip: The state of the clipping stage, where `norm` is the root mean square of `g / sqrt(nu)`.
      count: int32[tensors], the number of finite steps per tensor.
      mu: The unbiased averages of the gradients, a pytree like the parameters, float32 or wider.
      nu: The unbiased averages of the squared gradients, a pytree like `mu`.
    """

    clip: ClipState
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree


@validate_call(transformation=True)
@document_options(ShardingOptions)
def scale_by_stable_adam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    clipping_threshold: ScalarOrSchedule = 1.0,
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    nonfinite: NonFinite = "nan",
    **options: Unpack[ShardingOptions],
) -> Transformation[StableAdamState]:
    """Rescales gradients like Adam and clips leaves with an outdated second moment.

    Let `m` and `v` be the unbiased averages of the gradients `g` and of their squares, including
    the current step. The update of a leaf is
    `m / (sqrt(v) + eps) / max(1, rms / clipping_threshold)`, where
    `rms = sqrt(mean(g**2 / max(v, eps**2)))`. Before most loss spikes, `rms` is far above 1,
    because gradients suddenly become much larger than `sqrt(v)`. Apply weight decay after this
    stage, because it must not be reduced.

    The averages are float32 (float64 for float64 leaves) unless a trainer casts the state. Leaves
    with non-finite gradients do not change their averages. Elements (real and imaginary parts of
    complex elements) are clipped to ±1.3e19 to prevent overflow of their squares in float32. Other
    leaves, such as integers, are returned unchanged.

    Source: Wortsman, Dettmers, Zettlemoyer, Morcos, Farhadi, and Schmidt, 2023, arXiv 2304.13013.
    The clipping is from Shazeer and Stern, 2018, arXiv 1804.04235.

    Args:
      b1: The decay of the average of the gradients, at least 0 and below 1.
      b2: The decay of the average of the squared gradients, at least 0 and below 1.
      eps: A number to add to the root of the second moment.
      clipping_threshold: The maximum `rms` of a leaf.
      stacked: The number of leading axes that stack layers, as in `optaxclip.scopes.leaf`.
      nonfinite: The policy for non-finite leaves, as in `optaxclip.clip_by`.
      **options: Options that can be used with any transformation. See `optaxclip.ShardingOptions`.

    Returns:
      A transformation with a `StableAdamState`. Updates keep their shapes, dtypes, and weak types.
      `optaxclip.monitor` finds the record in the field `clip`.

    Raises:
      ValueError: If a decay is out of range, or if `eps` or the threshold is negative, NaN, or not
        a scalar.
      TypeError: If an argument is not a number. Also raised by `update` for sparse leaves.

    Example:
      >>> import jax.numpy as jnp, optax, optaxclip
      >>> direction = optaxclip.scale_by_stable_adam()
      >>> decay = optax.add_decayed_weights(0.2)
      >>> tx = optax.chain(direction, decay, optax.scale_by_learning_rate(2e-3))
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> for size in (1.0, 5.0):
      ...     updates, state = tx.update(jnp.full(2, size), state, params)
      >>> print(optaxclip.monitor.read(state)["0/clip/scale_by_stable_adam"].norm.round(3))
      [1.384]
    """
    betas = (check_decay(b1, "b1"), check_decay(b2, "b2"))
    eps = check_threshold_value(eps, "eps")
    scope = leaf_scope(stacked)
    checked = Options.create(norm="rms", nonfinite=nonfinite, **options)
    name = checked.name
    clip = make_clip(scope, check_threshold(clipping_threshold, "clipping_threshold"), checked)

    def init(params: PyTree) -> StableAdamState:
        flat = check_dense(flatten(params, "params"), name)
        clip_state = clip.init(params)
        count = jnp.zeros(len(clip_state.info.names), jnp.int32)
        mu, nu = zero_moments(flat), zero_moments(flat, real_only=True)
        return StableAdamState(clip_state, count, mu, nu)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, StableAdamState]:
        del params, extra_args
        flat = check_dense(flatten(updates, "updates"), name)
        check_state(state, StableAdamState, name, updates=updates)
        plan = make_plan(flat, scope, checked, state.clip.info.names, state.count.size)

        mu, nu = (NamedMoments.create(tree) for tree in (state.mu, state.nu))
        # Lists of [*leaf]
        leaves = (flat.inexact_leaves(), mu.get(flat, name), nu.get(flat, name))
        dtype = numerics.norm_dtype(average.dtype for average in leaves[2])
        # The weights of the current step in the averages, [tensors]
        weights = [_ema_weight(beta, safe_increment(state.count), dtype) for beta in betas]
        ratios = _ratios(*leaves, weights[1:], eps, of_leaf=_ratio, plan=plan)
        _, clip_state = clip.update(flat.unflatten(ratios), state.clip)
        is_counted = jnp.isfinite(clip_state.info.norm) & np.array(plan.grouping.has_leaves, bool)
        # Non-finite tensors are not included in the averages.
        weights = [jnp.where(is_counted, weight, 0) for weight in weights]
        columns = [*weights, clip_state.info.factor.astype(dtype)]
        rows = _directions(*leaves, columns, eps, of_leaf=_direction, plan=plan)
        directions, new_mu, new_nu = ([row[k] for row in rows] for k in range(3))
        count = safe_increment(state.count, is_counted)
        mu, nu = mu.replace(flat, new_mu), nu.replace(flat, new_nu)
        return flat.unflatten(directions), StableAdamState(clip_state, count, mu, nu)

    return transformation(init, update)


def _map_leaves(
    grads: list[Any],
    mus: list[Array],
    nus: list[Array],
    per_tensor: list[Array],
    eps: Any,
    *,
    of_leaf: Callable[..., Any],
    plan: Plan,
) -> list[Any]:
    # [columns, tensors] -> [columns, *tensors of the leaf] for all leaves
    columns = plan.slice_for_leaves(meshes.stack(per_tensor), grads)
    return [of_leaf(*row, eps) for row in zip(grads, mus, nus, columns, strict=True)]


_ratios = global_view(out_like="grads")(_map_leaves)
_directions = global_view(
    out_like=lambda grads, mus, nus, *_: list(zip(grads, mus, nus, strict=True))
)(_map_leaves)


# `_ratio` and `_direction` are jitted so that leaves with equal shapes and dtypes share one trace.
@jax.jit
def _ratio(grad: Any, mu: Array, nu: Array, per_tensor: Array, eps: Any) -> Array:
    """Divides the gradient by the root of the new average of its squares."""
    g, nu = _cast_grad(grad, mu), nu.astype(wide_dtype(nu.dtype))
    # Ratios of non-finite elements are non-finite anyway. If the elements were replaced as in
    # `_direction`, XLA would materialize an array per leaf (as of JAX 0.10.2).
    square = norms.l2.map(numerics.map_real_imag(_clamp_to_squarable, g))
    nu = _update_average(nu, square, per_tensor[0])
    return _divide_by_rms(g, nu, eps, lax.max)


@jax.jit
def _direction(
    grad: Any, mu: Array, nu: Array, per_tensor: Array, eps: Any
) -> tuple[Array, Array, Array]:
    """Returns the clipped direction and the new averages."""
    mu_weight, nu_weight, factor = per_tensor
    state_dtypes = [jnp.finfo(x.dtype).dtype for x in (mu, nu)]
    g = _cast_grad(grad, mu)
    g = numerics.map_real_imag(_clamp_to_squarable, numerics.select(jnp.isfinite(g), g, 0))
    # Compute in float32 or wider, because a trainer may have cast the state.
    mu, nu = (x.astype(wide_dtype(x.dtype)) for x in (mu, nu))
    mu = _update_average(mu, g, mu_weight)
    nu = _update_average(nu, norms.l2.map(g), nu_weight)
    x, direction = jnp.asarray(grad), _divide_by_rms(mu, nu, eps, lax.add)
    direction = scale_by_real(direction, _expand_to(factor, nu))
    mu = numerics.map_real_imag(lambda part: numerics.saturating_cast(part, state_dtypes[0]), mu)
    nu = numerics.saturating_cast(nu, state_dtypes[1])
    return numerics.match_weak_type(direction.astype(x.dtype), x), mu, nu


def _update_average(average: Array, new: Array, weight: Array) -> Array:
    # `lax` functions are faster to trace than operators (as of JAX 0.10.2).
    return lax.add(average, scale_by_real(lax.sub(new, average), _expand_to(weight, new)))


def _expand_to(per_tensor: Array, elements: Array) -> Array:
    """Adds trailing axes to per-tensor numbers so that they broadcast to elements."""
    per_tensor = per_tensor.astype(numerics.accumulation_dtype(elements.dtype))
    return numerics.expand_dims_at(per_tensor, tuple(range(per_tensor.ndim, elements.ndim)))


def _cast_grad(grad: Any, mu: Array) -> Array:
    """Casts a gradient to the wide dtype of its average."""
    g = jnp.asarray(grad)
    return (g if jnp.iscomplexobj(mu) else g.real).astype(wide_dtype(mu.dtype))


def _ema_weight(beta: Any, count: Array, dtype: Any) -> Array:
    """Returns the weight of the most recent of `count` values in their unbiased average."""
    beta = jnp.asarray(beta).astype(dtype)
    # (1 - beta) / (1 - beta**count) without cancellation for beta near 1
    weight = (1 - beta) / -jnp.expm1(count.astype(dtype) * jnp.log(beta))
    return jnp.where(count <= 1, 1, weight)


def _divide_by_rms(
    x: Array, square: Array, eps: Any, combine: Callable[[Array, Array], Array]
) -> Array:
    """Computes `x / combine(sqrt(square), eps)`, or 0 if both are 0."""
    eps = lax.max(jnp.asarray(eps).astype(square.dtype), square.dtype.type(0))
    is_positive, root = numerics.sqrt_where_positive(square)
    # If `eps` is 0, compute 0 / inf instead of 0 / 0. The derivatives are then also 0.
    zero_divisor = lax.full_like(square, numerics.select(eps == 0, jnp.inf, eps))
    divisor = numerics.select(is_positive, combine(root, eps), zero_divisor)
    return numerics.map_real_imag(lambda part: lax.div(part, divisor), x)


def _clamp_to_squarable(x: Array) -> Array:
    """Clips elements so that the sum of two squares does not overflow."""
    bound = math.sqrt(jnp.finfo(x.dtype).max / 2) * (1 - 1e-6)
    return lax.clamp(x.dtype.type(-bound), x, x.dtype.type(bound))

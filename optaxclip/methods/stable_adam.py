"""StableAdamW's direction: Adam's direction, shortened if the second moment lags behind."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip.norms as norms
from optaxclip._base.numerics import (
    accumulation_dtype,
    broadcast_over,
    by_parts,
    match_weak_type,
    narrowed,
    norm_dtype,
    root_of_positive,
    select,
)
from optaxclip._base.states import check_state, increased, registered_state
from optaxclip._base.trees import flatten
from optaxclip._base.types import ArrayLike, ClipState, NonFinite, PyTree
from optaxclip._border.crossing import Transformation, global_view, transformation
from optaxclip._border.entries import times
from optaxclip._engine.clip import stage
from optaxclip._engine.options import Options, PlaceOptions, takes
from optaxclip._engine.plan import Plan, plan_of
from optaxclip.methods.moments import NamedMoments, dense, wide_dtype, zero_moments
from optaxclip.methods.updates import leaves_apart
from optaxclip.thresholds.checks import checked_decay, checked_limit
from optaxclip.thresholds.fixed import ScalarOrSchedule, as_limit


@registered_state
class StableAdamState(NamedTuple):
    """State of `scale_by_stable_adam`.

    Attributes:
      clip: the state of the clip; its record's `norm` is the root mean square of `g / sqrt(nu)`.
      count: int32[tensors], how many steps of each tensor were finite.
      mu: the unbiased average of the gradients, a pytree like the parameters, float32 or wider.
      nu: the unbiased average of their squares, in a tree of the same kind.
    """

    clip: ClipState
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree


@takes(PlaceOptions)
def scale_by_stable_adam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    clipping_threshold: ScalarOrSchedule = 1.0,
    *,
    stacked: PyTree | Callable[[str, Array], int] | None = None,
    nonfinite: NonFinite = "nan",
    **options: Unpack[PlaceOptions],
) -> Transformation[StableAdamState]:
    """Adam's direction, shortened in each leaf whose second moment lags behind its gradient.

    Let `m` be the unbiased average of the gradients `g`, and `v` that of their squares; both
    include this step. Each leaf's update is
    `m / (sqrt(v) + eps) / max(1, RMS / clipping_threshold)`, where
    `RMS = sqrt(mean(g**2 / max(v, eps**2)))`. It is far above 1 if gradients are much larger than
    `v` says, as before most spikes of a loss. Weight decay must not be shortened, so its stage
    comes after this one in the chain.

    A leaf that is not finite keeps its averages, as if there were no step. Averages are float32
    (float64 for float64 leaves); if a trainer casts the state, they keep the dtypes that it chose,
    and are rounded to these after each step. Entries beyond ±1.3e19 (real and imaginary parts of
    complex ones) count as that bound, because in float32 the sum of two such squares would
    overflow. Integer and other leaves pass untouched.

    Source: Wortsman, Dettmers, Zettlemoyer, Morcos, Farhadi and Schmidt, 2023, arXiv 2304.13013;
    the clip is by Shazeer and Stern, 2018, arXiv 1804.04235.

    Args:
      b1: the decay of the average of gradients, at least 0 and below 1.
      b2: the decay of the average of their squares, at least 0 and below 1.
      eps: added to the root of the second moment.
      clipping_threshold: a leaf with a larger `RMS` is shortened.
      stacked: how many leading axes of each leaf stack separate tensors, as in
        `optaxclip.scopes.leaf`; with None no axis does.
      nonfinite: what becomes of leaves that are not finite, as in `optaxclip.clip_by`.
      **options: those that all transformations share, `optaxclip.PlaceOptions`.

    Returns:
      A transformation with a `StableAdamState`. Its update returns a tree with the shapes, dtypes
      and weak types of the gradients. `optaxclip.monitor` finds the record in its field `clip`.

    Raises:
      ValueError: for a decay outside of its range, or an `eps` or threshold that is negative, NaN
        or not a scalar.
      TypeError: if one of them is not a number; when used, for a sparse leaf.

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
    betas = (checked_decay(b1, "b1"), checked_decay(b2, "b2"))
    eps = checked_limit(eps, "eps")
    scope = leaves_apart(stacked)
    checked = Options.checked(norm="rms", nonfinite=nonfinite, **options)
    name = checked.name
    clip = stage(scope, as_limit(clipping_threshold, "clipping_threshold"), checked)

    def init(params: PyTree) -> StableAdamState:
        flat = dense(flatten(params, "params"), name)
        clip_state = clip.init(params)
        count = jnp.zeros(len(clip_state.info.names), jnp.int32)
        return StableAdamState(clip_state, count, zero_moments(flat), zero_moments(flat, real=True))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, StableAdamState]:
        del params, extra_args
        flat = dense(flatten(updates, "updates"), name)
        check_state(state, StableAdamState, name, updates=updates)
        plan = plan_of(flat, scope, checked, state.clip.info.names, state.count.size)

        mu, nu = (NamedMoments.of(tree) for tree in (state.mu, state.nu))
        leaves = (flat.measured_leaves(), mu.of_leaves(flat, name), nu.of_leaves(flat, name))
        dtype = norm_dtype(average.dtype for average in leaves[2])
        shares = [_share(beta, increased(state.count), dtype) for beta in betas]
        ratios = _ratios(*leaves, shares[1:], eps, of_leaf=_ratio, plan=plan)
        _, clip_state = clip.update(flat.rebuild(ratios), state.clip)
        taken = jnp.isfinite(clip_state.info.norm) & np.array(plan.grouping.present, bool)
        # A tensor that is not finite does not count in its averages.
        shares = [jnp.where(taken, share, 0) for share in shares]
        columns = [*shares, clip_state.info.factor.astype(dtype)]
        rows = _directions(*leaves, columns, eps, of_leaf=_direction, plan=plan)
        directions, *new = ([row[k] for row in rows] for k in range(3))
        return flat.rebuild(directions), StableAdamState(
            clip_state,
            increased(state.count, taken),
            mu.replaced(flat, new[0]),
            nu.replaced(flat, new[1]),
        )

    return transformation(init, update)


def _rows(grads: list[Any], mus: list[Array], nus: list[Array], *_: Any) -> list[Any]:
    return list(zip(grads, mus, nus, strict=True))


def _each(
    grads: list[Any],
    mus: list[Array],
    nus: list[Array],
    columns: list[Array],
    eps: Any,
    *,
    of_leaf: Callable[..., Any],
    plan: Plan,
) -> list[Any]:
    """Calls `of_leaf` with each gradient, its averages, its tensors' columns, and `eps`."""
    of_leaves = plan.by_leaf(devices.stack(columns), grads)
    return [of_leaf(*row, eps) for row in zip(grads, mus, nus, of_leaves, strict=True)]


_ratios = global_view(out_like="grads")(_each)
_directions = global_view(out_like=_rows)(_each)


# Both are compiled functions of their own, so that they are traced once for leaves that are alike.
@jax.jit
def _ratio(grad: Any, mu: Array, nu: Array, columns: Array, eps: Any) -> Array:
    """The gradient divided by the root of the average of its squares, this step included."""
    g, nu = _entries(grad, mu), _wide(nu)
    # Non-finite entries stay: their ratio is not finite anyway. If they were replaced, as in
    # `_direction`, XLA (JAX 0.10.2) would store an array for each leaf.
    nu = _average(nu, norms.l2.map(by_parts(_held, g)), columns[0])
    return _over_root(g, nu, eps, lax.max)


@jax.jit
def _direction(
    grad: Any, mu: Array, nu: Array, columns: Array, eps: Any
) -> tuple[Array, Array, Array]:
    """Adam's direction times the factor of the clip, and both averages after this step."""
    of_mu, of_nu, factor = columns
    g, kept = _entries(grad, mu), [jnp.finfo(x.dtype).dtype for x in (mu, nu)]
    g = by_parts(_held, select(jnp.isfinite(g), g, 0))
    mu, nu = _average(_wide(mu), g, of_mu), _average(_wide(nu), norms.l2.map(g), of_nu)
    x, direction = jnp.asarray(grad), _over_root(mu, nu, eps, lax.add)
    direction = times(direction, _beside(factor, nu))
    mu = by_parts(lambda part: narrowed(part, kept[0]), mu)
    nu = narrowed(nu, kept[1])
    return match_weak_type(direction.astype(x.dtype), x), mu, nu


def _average(before: Array, new: Array, share: Array) -> Array:
    """The average after new numbers of this weight: `share` has a number for each tensor."""
    return lax.add(before, times(lax.sub(new, before), _beside(share, new)))


def _beside(of_tensors: Array, entries: Array) -> Array:
    """A number for each tensor of a leaf, in a shape that broadcasts to the entries."""
    of_tensors = of_tensors.astype(accumulation_dtype(entries.dtype))
    return broadcast_over(of_tensors, tuple(range(of_tensors.ndim, entries.ndim)))


def _entries(grad: Any, mu: Array) -> Array:
    """A gradient in the form that is averaged: the real part, if the parameter is real."""
    g = jnp.asarray(grad)
    return (g if jnp.iscomplexobj(mu) else g.real).astype(wide_dtype(mu.dtype))


def _wide(average: Array) -> Array:
    """An average in the dtype to compute with, because a trainer may have cast the state."""
    return average.astype(wide_dtype(average.dtype))


def _share(beta: Any, count: Array, dtype: Any) -> Array:
    """The weight that the newest of `count` numbers has in their unbiased average."""
    beta = _as(beta, dtype)
    share = (1 - beta) / -jnp.expm1(count.astype(dtype) * jnp.log(beta))
    return jnp.where(count <= 1, 1, share)


def _over_root(x: Array, square: Array, eps: Any, joined: Callable[[Array, Array], Array]) -> Array:
    """`x / joined(sqrt(square), eps)`, and 0 where both are 0."""
    eps = lax.max(_as(eps, square.dtype), square.dtype.type(0))
    is_positive, root = root_of_positive(square)
    of_zero = lax.full_like(square, select(eps == 0, jnp.inf, eps))
    divisor = select(is_positive, joined(root, eps), of_zero)
    return by_parts(lambda part: lax.div(part, divisor), x)


def _held(x: Array) -> Array:
    """`x`, clamped so that two squares add without overflow."""
    bound = math.sqrt(jnp.finfo(x.dtype).max / 2) * (1 - 1e-6)
    return lax.clamp(x.dtype.type(-bound), x, x.dtype.type(bound))


def _as(number: Any, dtype: Any) -> Array:
    return jnp.asarray(number).astype(dtype)

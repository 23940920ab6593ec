"""Steps along spheres: makes the updates of weights from directions and radii.

The new weight is `R * unit(W - t * unit(u))`, where `unit(x)` is `x` divided by its norm. The norm
of `W - t * unit(u)` follows from the norms of `W` and `u` and their inner product. So everything is
measured at once: with one read, and over many devices with one collective.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.numerics import (
    broadcast_over,
    match_weak_type,
    power_of_two_below,
    reciprocal_of_power,
    safe_divide,
    safe_sqrt,
)
from optaxclip._border.crossing import global_view
from optaxclip._border.entries import times
from optaxclip._engine.plan import Plan
from optaxclip._engine.products import products
from optaxclip.methods.moments import wide_dtype


@global_view(out_like="directions")
def steps_along(
    weights: list[Any], directions: list[Any], radius: Any, rate: Any, eps: Any, *, plan: Plan
) -> list[Array]:
    """The updates of weights along their spheres, from the directions that are subtracted.

    The radius is one for each group, one for all, or None for the norms of the weights. The rate is
    the length of a step as a share of it. A direction with a norm of at most `eps` counts as zeros.
    """
    if not weights:
        return []
    weights, directions = ([jnp.asarray(x) for x in each] for each in (weights, directions))
    factors = _factors(*products(weights, directions, plan), radius, rate, eps)
    parts = plan.by_leaf(devices.stack(factors), directions)
    rows = zip(weights, directions, parts, plan.grouping.axes, strict=True)
    return [_sum(*row) for row in rows]


def _in_one_dtype(x: Array, y: Array) -> tuple[Array, Array]:
    """Two arrays in their common dtype, float32 or wider."""
    dtype = np.promote_types(*(wide_dtype(z.dtype) for z in (x, y)))
    return x.astype(dtype), y.astype(dtype)


def _factors(
    weight: Array, direction: Array, cosine: Array, radius: Any, rate: Any, eps: Any
) -> tuple[Array, Array, Array]:
    """The factors by which a group's weight and direction are multiplied; the update is their sum.

    Given are both norms and the cosine. The factor of a direction is in two parts, because it may
    leave the range of its dtype: a power of two, which brings the direction to a norm near 1, and
    the rest.
    """
    rate, eps = (jnp.asarray(x).astype(weight.dtype) for x in (rate, eps))
    radius = weight if radius is None else jnp.asarray(radius).astype(weight.dtype)
    length = rate * radius
    # Both lengths are divided by the larger one, so that no square overflows.
    unit = jnp.maximum(weight, length)
    one, other = safe_divide(weight, unit, 0.0), safe_divide(length, unit, 0.0)
    square = one * one + other * other - 2 * one * other * cosine
    # A smaller square is only the rounding error of its three summands.
    has_direction = square > 64 * jnp.finfo(weight.dtype).eps
    moves = (direction > eps) & has_direction
    ratio = safe_divide(radius, unit * safe_sqrt(jnp.where(has_direction, square, 1)), 0.0)
    of_weight = jnp.where(moves, ratio - 1, 0)
    power = lax.stop_gradient(reciprocal_of_power(power_of_two_below(direction)))
    of_direction = jnp.where(moves, -ratio * safe_divide(length, direction * power, 0.0), 0)
    bad = ~(jnp.isfinite(weight) & jnp.isfinite(direction))
    return jnp.where(bad, jnp.nan, of_weight), power, jnp.where(bad, jnp.nan, of_direction)


# A compiled function of its own, so that it is traced once for leaves of one shape.
@functools.partial(jax.jit, static_argnames="axes")
def _sum(weight: Any, direction: Any, by: Array, axes: tuple[int, ...]) -> Array:
    """Weight and direction, each times its factor, added, and rounded to the direction's dtype."""
    direction = jnp.asarray(direction)
    x, y = _in_one_dtype(weight, direction)
    of_x, power, of_y = broadcast_over(by.astype(x.real.dtype), [1 + axis for axis in axes])
    total = times(x, of_x) + times(times(y, power), of_y)
    return match_weak_type(total.astype(direction.dtype), direction)

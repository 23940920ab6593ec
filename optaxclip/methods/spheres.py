"""Steps along spheres: the updates of weights, from directions and radii.

The new weight is `R * unit(W - t * unit(u))`, where `unit(x)` is `x` divided by its norm. The norm
of `W - t * unit(u)` follows from the norms of `W` and `u` and their inner product. So everything is
measured at once: with one read, and with one collective over many devices.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._border.devices as devices
from optaxclip._base.derivatives import custom_jvp
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import (
    bounded,
    broadcast_over,
    by_parts,
    match_weak_type,
    power_of_two_below,
    real_parts,
    reciprocal_of_power,
    safe_divide,
    safe_sqrt,
)
from optaxclip._border.calls import across
from optaxclip._border.entries import times
from optaxclip._engine.groups import Groups
from optaxclip._engine.measure import measure
from optaxclip.methods.moments import wide_dtype
from optaxclip.norms import Norm, l2


def _product_above_zero(pair: Array) -> Array:
    return jnp.maximum(bounded(pair.real) * bounded(pair.imag), 0)


PRODUCT = Norm("root of the sum of positive products", _product_above_zero, l2.finish, degree=2)
"""A norm of pairs `(x, y)`, held as complex numbers, which gives inner products.

Of pairs `(x, x)` it is the norm of `x`, and of pairs `(x, y)` its square is the sum of the positive
products.
"""


def steps_along(
    weights: list[Any],
    directions: list[Any],
    radius: Any,
    rate: Any,
    eps: Any,
    *,
    groups: Groups,
) -> list[Array]:
    """The updates of the weights.

    Args:
      weights: the matrices.
      directions: for each weight the direction that is subtracted.
      radius: the radius of each group, one for all, or None for the norms of the weights.
      rate: the length of a step as a share of the radius.
      eps: a direction with a norm of at most `eps` counts as zeros.
      groups: one group for each matrix.
    """
    return across(_steps, weights, directions, radius, rate, eps, like=_directions, groups=groups)


def _directions(weights: list[Any], directions: list[Any], *_: Any) -> list[Any]:
    del weights
    return directions


def _steps(
    weights: list[Any], directions: list[Any], radius: Any, rate: Any, eps: Any, *, groups: Groups
) -> list[Array]:
    if not weights:
        return []
    weights, directions = ([jnp.asarray(x) for x in each] for each in (weights, directions))
    factors = _factors(*_norms(weights, directions, groups), radius, rate, eps)
    parts = groups.by_leaf(devices.stack(factors), directions)
    rows = zip(weights, directions, parts, groups.grouping.axes, strict=True)
    return [_sum(*row) for row in rows]


def _norms(weights: list[Array], directions: list[Array], groups: Groups) -> "_Norms":
    """The norms that a step needs, with one read and one collective."""
    by_pairs = functools.partial(_by_pairs, groups=groups)
    by_roots = functools.partial(_by_roots, groups=groups)

    @custom_jvp()
    def norms(weights: list[Array], directions: list[Array]) -> _Norms:
        return lax.platform_dependent(weights, directions, cpu=by_roots, default=by_pairs)

    @norms.defjvp
    def _(primals: Any, tangents: Any) -> tuple[_Norms, _Norms]:
        # The root of a product has no derivative where a factor is 0; the product has one.
        found = norms(*primals)
        sizes = [lax.stop_gradient(power_of_two_below(x)) for x in found[:2]]
        # Both are brought to norms near 1. Otherwise, with weights of 1e30 and directions of 1,
        # intermediate derivatives of the sums of products would overflow.
        rows = zip(zip(primals, tangents, strict=True), sizes, strict=True)
        columns = [[_divided(x, size, groups) for x in pair] for pair, size in rows]
        scaled, scaled_tangents = zip(*columns, strict=True)
        changes = jax.jvp(by_pairs, scaled, scaled_tangents)[1]
        root = jnp.sqrt(sizes[0]) * jnp.sqrt(sizes[1])
        by = (*sizes, root, root)
        return found, _Norms(*(x * size for x, size in zip(changes, by, strict=True)))

    return norms(weights, directions)


def _divided(leaves: list[Array], sizes: Array, groups: Groups) -> list[Array]:
    """Leaves, in float32 or wider, divided by powers of two, one for each group."""
    parts = groups.by_leaf(reciprocal_of_power(sizes), leaves)
    rows = zip(leaves, parts, groups.grouping.axes, strict=True)
    return [times(x.astype(wide_dtype(x.dtype)), broadcast_over(by, axes)) for x, by, axes in rows]


class _Norms(NamedTuple):
    """Norms of all groups, each `[groups]`.

    An inner product is twice the square of `above` less the square of `products`. The error of this
    difference is a rounding of the product of the two norms, because both squares are sums in which
    nothing cancels.

    Attributes:
      weight: the norms of the weights.
      direction: the norms of the directions.
      products: the roots of the sums of the moduli of all products of their entries.
      above: the roots of the sums of the positive products alone.
    """

    weight: Array
    direction: Array
    products: Array
    above: Array


def _by_roots(weights: list[Array], directions: list[Array], *, groups: Groups) -> _Norms:
    """The norms for CPUs, where XLA stores complex numbers; elsewhere it would store the roots."""
    roots = [_root(*row) for row in zip(weights, directions, strict=True)]
    above = [_above_zero(root) for root in roots]
    return _measured([weights, directions, roots, above], groups, l2)


def _by_pairs(weights: list[Array], directions: list[Array], *, groups: Groups) -> _Norms:
    """The norms for accelerators, and for derivatives on every platform."""
    rows = [_in_one_dtype(*row) for row in zip(weights, directions, strict=True)]
    columns = [
        [_paired(x, x) for x, _ in rows],
        [_paired(y, y) for _, y in rows],
        [_paired(x, _with_sign_of(x, y)) for x, y in rows],
        [_paired(x, y) for x, y in rows],
    ]
    return _measured(columns, groups, PRODUCT)


def _measured(columns: list[list[Array]], groups: Groups, norm: Norm) -> _Norms:
    """The norms of four lists of leaves, each of which has the leaves of `groups`."""
    grouping, placement, count = groups.grouping, groups.placement, len(columns[0])
    leaves = [leaf for column in columns for leaf in column]
    # Leaves that hold pairs of complex numbers have one axis more than those of the groups.
    stacks = [len(group.shape) for group in grouping.by_leaf(grouping.groups)]
    axes = [tuple(range(*row)) for row in zip(stacks, map(jnp.ndim, columns[-1]), strict=True)]
    fourfold = [
        dataclasses.replace(group, members=tuple(i + k * count for i in group.members))
        for k in range(4)
        for group in grouping.groups
    ]
    places = dataclasses.replace(
        placement,
        reduced=placement.reduced * 4,
        kept=placement.kept * 4,
        specs=placement.specs * 4,
    )
    of_all = Groups(Grouping(tuple(fourfold), (*axes,) * 4, "vector"), places)
    found = measure(leaves, of_all, norm)
    return _Norms(*found.norm.reshape(4, -1))


def _root(x: Array, y: Array) -> Array:
    """The roots of the moduli of `x * y`, entry by entry, with the signs of the products."""
    # Not the root of the product, because the product may overflow or underflow.
    return by_parts(lambda u, v: _signed_root(u) * _signed_root(v), *_in_one_dtype(x, y))


def _signed_root(x: Array) -> Array:
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


def _above_zero(x: Array) -> Array:
    return by_parts(lambda part: jnp.maximum(part, 0), x)


def _with_sign_of(x: Array, y: Array) -> Array:
    """`y` with signs that make `x * y` at least 0. Its derivative at 0 is 0, unlike that of abs."""
    return by_parts(lambda u, v: jnp.sign(u) * jnp.sign(v) * v, x, y)


def _in_one_dtype(x: Array, y: Array) -> tuple[Array, Array]:
    """Two arrays in their common dtype, float32 or wider."""
    dtype = np.promote_types(*(wide_dtype(z.dtype) for z in (x, y)))
    return x.astype(dtype), y.astype(dtype)


def _paired(x: Array, y: Array) -> Array:
    """Pairs of the entries of two arrays, as complex numbers.

    Of complex arrays, the pairs of real parts and of imaginary parts lie along another axis.
    """
    pairs = zip(real_parts(x), real_parts(y), strict=True)
    parts = [lax.complex(*pair) for pair in pairs]
    return devices.stack(parts, parts[0].ndim) if len(parts) > 1 else parts[0]


def _factors(
    weight: Array,
    direction: Array,
    products: Array,
    above: Array,
    radius: Any,
    rate: Any,
    eps: Any,
) -> tuple[Array, Array, Array]:
    """The factors of weights and of directions, whose sum is the update, for each group.

    That of directions is in two parts, because it may leave the range of its dtype: a power of two,
    which brings the direction to a norm near 1, and the rest.

    Args:
      weight: as in `_Norms`.
      direction: as in `_Norms`.
      products: as in `_Norms`.
      above: as in `_Norms`.
      radius: as in `steps_along`.
      rate: as in `steps_along`.
      eps: as in `steps_along`.
    """
    rate, eps = (jnp.asarray(x).astype(weight.dtype) for x in (rate, eps))
    radius = weight if radius is None else jnp.asarray(radius).astype(weight.dtype)
    length = rate * radius
    # Both are divided by the longer of the two, so that no square overflows.
    unit = jnp.maximum(weight, length)
    one, other = safe_divide(weight, unit, 0.0), safe_divide(length, unit, 0.0)
    root = safe_sqrt(weight) * safe_sqrt(direction)
    of_all, positive = (jnp.square(safe_divide(x, root, 0.0)) for x in (products, above))
    cosine = 2 * positive - of_all
    square = one * one + other * other - 2 * one * other * cosine
    # A smaller square is nothing but the rounding of its three summands.
    has_direction = square > 64 * jnp.finfo(weight.dtype).eps
    moves = (direction > eps) & has_direction
    ratio = safe_divide(radius, unit * safe_sqrt(jnp.where(has_direction, square, 1)), 0.0)
    of_weight = jnp.where(moves, ratio - 1, 0)
    power = lax.stop_gradient(reciprocal_of_power(power_of_two_below(direction)))
    of_direction = jnp.where(moves, -ratio * safe_divide(length, direction * power, 0.0), 0)
    bad = ~(jnp.isfinite(weight) & jnp.isfinite(direction))
    return jnp.where(bad, jnp.nan, of_weight), power, jnp.where(bad, jnp.nan, of_direction)


# Compiled by itself, so that it is traced once for leaves of one shape.
@functools.partial(jax.jit, static_argnames="axes")
def _sum(weight: Any, direction: Any, by: Array, axes: tuple[int, ...]) -> Array:
    """The sum of both, times their factors, rounded once to the direction's dtype."""
    direction = jnp.asarray(direction)
    x, y = _in_one_dtype(weight, direction)
    of_x, power, of_y = broadcast_over(by.astype(x.real.dtype), [1 + axis for axis in axes])
    total = times(x, of_x) + times(times(y, power), of_y)
    return match_weak_type(total.astype(direction.dtype), direction)

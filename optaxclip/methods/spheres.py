"""Steps along spheres: weights, directions and radii come in, what to add to the weights goes out.

The new weight is `R * norm(W - t * norm(u))`. How long `W - t * norm(u)` is follows from the norms
of `W` and `u` and their inner product, so all that is measured is measured at once: one read, and
over many devices one collective.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.devices as devices
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import (
    broadcast_over,
    match_weak_type,
    real_parts,
    safe_divide,
    safe_sqrt,
)
from optaxclip._engine.entries import times
from optaxclip._engine.groups import Groups
from optaxclip._engine.measure import measure
from optaxclip.methods.moments import wide_dtype
from optaxclip.norms import Norm, l2


def _product_above_zero(pair: Array) -> Array:
    return jnp.maximum(pair.real * pair.imag, 0)


PRODUCT = Norm("root of the sum of positive products", _product_above_zero, l2.finish, degree=2)
"""Of pairs of numbers, held as complex ones: of `(x, x)` it is the norm of x.

The square of that of `(x, y)` less that of `(x, -y)` is the inner product, the error of which is a
rounding of the product of the two norms: its positive and its negative summands do not cancel
before they are summed.
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
    """What to add to the weights.

    Args:
      weights: the matrices.
      directions: for each weight the direction that is subtracted.
      radius: the radii of all groups, one for all, or None for the norms of the weights.
      rate: a step's length as a share of the radius.
      eps: directions whose norm is at most this are none.
      groups: the matrices, as groups.
    """
    steps = functools.partial(_steps, groups=groups)
    specs = [devices.spec_of(x) for x in directions]
    steps = groups.placement.with_automatic_axes(steps, specs)
    return steps(weights, directions, radius, rate, eps)


def _steps(
    weights: list[Any], directions: list[Any], radius: Any, rate: Any, eps: Any, *, groups: Groups
) -> list[Array]:
    if not weights:
        return []
    weights, directions = ([jnp.asarray(x) for x in each] for each in (weights, directions))
    factors = _factors(*_norms(weights, directions, groups), radius, rate, eps)
    parts = groups.by_leaf([jnp.stack(factors)], directions)
    rows = zip(weights, directions, parts, groups.grouping.axes, strict=True)
    return [_sum(*row) for row in rows]


def _norms(weights: list[Array], directions: list[Array], groups: Groups) -> "_Norms":
    """What is measured, in one read and with one collective."""

    @jax.custom_jvp
    def norms(weights: list[Array], directions: list[Array]) -> _Norms:
        rows = list(zip(weights, directions, strict=True))
        roots = [[_root(*row, sign) for row in rows] for sign in (1, -1)]
        return _measured([weights, directions, *roots], groups, l2)

    @norms.defjvp
    def _(primals: Any, tangents: Any) -> tuple[_Norms, _Norms]:
        # A root of a product with 0 has no derivative, the product has.
        by_pairs = functools.partial(_by_pairs, groups=groups)
        return norms(*primals), jax.jvp(by_pairs, primals, tangents)[1]

    return norms(weights, directions)


class _Norms(NamedTuple):
    """Norms of all groups, each `[groups]`.

    Attributes:
      weight: of the weights.
      direction: of the directions.
      above: the roots of the sums of the positive summands of their inner products.
      below: of the negative ones.
    """

    weight: Array
    direction: Array
    above: Array
    below: Array


def _by_pairs(weights: list[Array], directions: list[Array], *, groups: Groups) -> _Norms:
    """The same, so that all derivatives are right; on a CPU it takes much longer."""
    rows = [_in_one_dtype(*row) for row in zip(weights, directions, strict=True)]
    columns = [
        [_paired(x, x) for x, _ in rows],
        [_paired(y, y) for _, y in rows],
        [_paired(x, y) for x, y in rows],
        [_paired(x, -y) for x, y in rows],
    ]
    return _measured(columns, groups, PRODUCT)


def _measured(columns: list[list[Array]], groups: Groups, norm: Norm) -> _Norms:
    """The norms of four lists of leaves, each like those of the groups."""
    grouping, placement, count = groups.grouping, groups.placement, len(columns[0])
    leaves = [leaf for column in columns for leaf in column]
    # Pairs of complex entries have one axis more.
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
    of_all = Groups.of(Grouping(tuple(fourfold), (*axes,) * 4, "vector"), places)
    (found,) = measure(leaves, of_all, norm)
    return _Norms(*found.norm.reshape(4, -1))


def _root(x: Array, y: Array, sign: int) -> Array:
    """The roots of the products of this sign of two arrays' entries, elsewhere 0."""
    x, y = _in_one_dtype(x, y)
    rows = zip(real_parts(x), real_parts(y), strict=True)
    # Not the root of the product, which may leave the range.
    parts = [
        jnp.where(jnp.sign(u) * jnp.sign(v) == sign, jnp.sqrt(jnp.abs(u)) * jnp.sqrt(jnp.abs(v)), 0)
        for u, v in rows
    ]
    return lax.complex(*parts) if len(parts) > 1 else parts[0]


def _in_one_dtype(x: Array, y: Array) -> tuple[Array, Array]:
    """Two arrays in a dtype to compute with that holds both."""
    dtype = np.promote_types(*(wide_dtype(z.dtype) for z in (x, y)))
    return x.astype(dtype), y.astype(dtype)


def _paired(x: Array, y: Array) -> Array:
    """The entries of two arrays as the parts of complex ones.

    Real and imaginary parts of complex arrays are entries of their own, along another axis.
    """
    pairs = zip(real_parts(x), real_parts(y), strict=True)
    parts = [lax.complex(*pair) for pair in pairs]
    return jnp.stack(parts, -1) if len(parts) > 1 else parts[0]


def _factors(
    weight: Array, direction: Array, above: Array, below: Array, radius: Any, rate: Any, eps: Any
) -> tuple[Array, Array]:
    """What weights and directions are multiplied by before they are added up, for each group.

    Args:
      weight: the norms of the weights.
      direction: the norms of the directions.
      above: the roots of the positive summands of their inner products.
      below: the roots of the negative ones.
      radius: as in `steps_along`, like the arguments that follow.
      rate: a scalar.
      eps: a scalar.
    """
    rate, eps = (jnp.asarray(x).astype(weight.dtype) for x in (rate, eps))
    radius = weight if radius is None else jnp.asarray(radius).astype(weight.dtype)
    length = rate * radius
    # In units of the longer side, in which nothing leaves the range.
    unit = jnp.maximum(weight, length)
    one, other = safe_divide(weight, unit, 0.0), safe_divide(length, unit, 0.0)
    root = safe_sqrt(weight) * safe_sqrt(direction)
    cosine = jnp.square(safe_divide(above, root, 0.0)) - jnp.square(safe_divide(below, root, 0.0))
    square = one * one + other * other - 2 * one * other * cosine
    # Less than that is the rounding of the three summands.
    has_direction = square > 64 * jnp.finfo(weight.dtype).eps
    moves = (direction > eps) & has_direction
    ratio = safe_divide(radius, unit * safe_sqrt(jnp.where(has_direction, square, 1)), 0.0)
    of_weight = jnp.where(moves, ratio - 1, 0)
    of_direction = jnp.where(moves, -ratio * safe_divide(length, direction, 0.0), 0)
    bad = ~(jnp.isfinite(weight) & jnp.isfinite(direction))
    return jnp.where(bad, jnp.nan, of_weight), jnp.where(bad, jnp.nan, of_direction)


# Compiled by itself so that it is traced once for leaves alike.
@functools.partial(jax.jit, static_argnames="axes")
def _sum(weight: Any, direction: Any, by: Array, axes: tuple[int, ...]) -> Array:
    """Both times their factors, added, and rounded once to the direction's dtype."""
    direction = jnp.asarray(direction)
    x, y = _in_one_dtype(weight, direction)
    of_x, of_y = broadcast_over(by.astype(x.real.dtype), [1 + axis for axis in axes])
    return match_weak_type((times(x, of_x) + times(y, of_y)).astype(direction.dtype), direction)

"""Sums over examples of a parameter's gradients, each multiplied by its example's factor.

They are products of the data and of the multiplied cotangents, with the axis of examples among
those that are summed over. So no example's gradient is computed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import optaxclip._border.devices as devices
import optaxclip.per_example.ghost.primitives as primitives
import optaxclip.per_example.ghost.sites as sites
from optaxclip._engine.respond import Multiplier
from optaxclip.per_example.ghost.norms import Part, in_pieces
from optaxclip.per_example.ghost.sites import Axes, Use


def weighted_sum(
    leaf: Any,
    parts: Sequence[Part],
    data: Sequence[Any],
    cotangents: Sequence[Any],
    by: Multiplier,
    dtype: Any,
) -> Array:
    """The sum of a parameter's gradients times their multipliers.

    Args:
      leaf: the parameter, or its type.
      parts: its uses.
      data: of all sites of the program.
      cotangents: likewise.
      by: the multipliers, `[examples]`. Where the ratio is 0, the example adds nothing, even if it
        is not finite.
      dtype: float32 or float64.
    """
    totals = []
    for use, _ in (use for part in parts for use in part.uses):
        d = _multiplied(cotangents[use.number], by, len(use.loops), dtype)
        totals.append(_sum(use, data[use.number], d, by, leaf, dtype))
    return functools.reduce(jnp.add, totals) if totals else jnp.zeros(leaf.shape, dtype)


def _sum(use: Use, x: Array, d: Array, by: Multiplier, leaf: Any, dtype: Any) -> Array:
    example = len(use.loops)
    if use.site.kind == primitives.ROWS:
        found = _sum_of_rows(use, x, d)
    else:
        x = jnp.where(_beside(by.ratio != 0, x, example), x, jnp.zeros_like(x)).astype(dtype)
        is_product = use.site.kind == primitives.PRODUCT
        found = (_sum_of_products if is_product else _sum_of_kernels)(use, x, d)
    if not use.reference.moves:
        return found.reshape(leaf.shape)
    return _transposed(use.reference.apply, leaf.shape, found)


def _multiplied(d: Array, by: Multiplier, example: int, dtype: Any) -> Array:
    ratio, power = (_beside(x.astype(dtype), d, example) for x in (by.ratio, by.power))
    return jnp.where(ratio == 0, jnp.zeros((), dtype), d.astype(dtype) * power * ratio)


def _beside(x: Array, like: Array, example: int) -> Array:
    """Numbers of examples with axes of size 1, so that they broadcast to `like`."""
    return lax.expand_dims(x, [axis for axis in range(like.ndim) if axis != example])


def _sum_of_products(use: Use, x: Array, d: Array) -> Array:
    """`[*sliced loops, *operand]`, where the operand holds the parameter alone."""
    x, d = sites.narrowed(use, x, d)
    axes, example = Axes.of(use), len(use.loops)
    summed = ((example, *axes.data_positions), (example, *axes.positions))
    numbers = (summed, (axes.data_groups, axes.groups))

    def product(x: Array, d: Array) -> Array:
        options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": x.dtype}
        return lax.dot_general(x, d, numbers, **options)

    cut, at = sites.cut_of(use), (example, example)
    if cut.pieces > 1:
        at = axes.data_positions[cut.axis], axes.positions[cut.axis]
    found = in_pieces(product, (x, at[0]), (d, at[1]), cut.pieces)
    return jnp.transpose(found, sites.order_of_sum(use))


def _sum_of_kernels(use: Use, x: Array, d: Array) -> Array:
    eqn = use.site.eqn

    def of_kernel(kernel: Array) -> Array:
        def fn(x: Array, kernel: Array) -> Array:
            return primitives.convolve(eqn, x, kernel, x.dtype)

        fn = jax.vmap(fn, (0, None))
        for is_sliced in reversed(use.loops):
            fn = jax.vmap(fn, (0, 0 if is_sliced else None))
        return fn(x, kernel)

    lengths = zip(use.loops, use.site.lengths, strict=True)
    around = tuple(length for is_sliced, length in lengths if is_sliced)
    return _transposed(of_kernel, (*around, *eqn.invars[1].aval.shape), d)


def _transposed(fn: Callable[[Array], Array], shape: Sequence[int], cotangent: Array) -> Array:
    """The transpose of a linear function of an array of this shape."""
    # Not `jax.linear_transpose`, whose types know no mesh (JAX 0.10.2).
    (zeros,) = devices.varying_like([cotangent], [jnp.zeros(shape, cotangent.dtype)])
    return jax.vjp(fn, zeros)[1](cotangent)[0]


def _sum_of_rows(use: Use, x: Array, d: Array) -> Array:
    """`[*sliced loops, rows, ...]`, by one addition of all rows."""
    ids, d = sites.rows(use, x, d)
    count, *entries = use.site.eqn.invars[0].aval.shape
    lengths = zip(use.loops, use.site.lengths, strict=True)
    around = tuple(length for is_sliced, length in lengths if is_sliced)
    rows = math.prod(around) * count
    first = count * jnp.arange(ids.shape[1])[None, :, None]
    at = jnp.where(ids < count, ids + first, rows).reshape(-1)
    table = jnp.zeros((rows, d.shape[-1]), d.dtype)
    return table.at[at].add(d.reshape(at.size, -1), mode="drop").reshape(*around, count, *entries)

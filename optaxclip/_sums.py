"""Sums and maxima of arrays: few roundings, and on CPU nothing stored that is only summed.

Summands are of at least 0.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._numerics import known_size


def sum_over(x: Array, axes: tuple[int, ...], *, fold: int = 1) -> Array:
    """Sums over axes.

    Args:
      x: summands.
      axes: which axes to sum over; they are removed.
      fold: how many entries to add up on CPU in the step that computes them, so that fewer are
        stored and read again; where 1, XLA decides.
    """
    if len(axes) < 2 and fold == 1:
        return lax.reduce_sum(x, axes)
    return _sum_on_platform(x, axes=axes, fold=fold)


# Compiled by itself so that it is traced once for all leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "fold"))
def _sum_on_platform(x: Array, *, axes: tuple[int, ...], fold: int) -> Array:
    # Where all axes are summed over at once a partitioner reduces over devices once, and numbers
    # in the place of arrays.
    return lax.platform_dependent(
        x,
        cpu=functools.partial(_sum_on_cpu, axes=axes, fold=fold),
        default=functools.partial(lax.reduce_sum, axes=axes),
    )


def _sum_on_cpu(x: Array, *, axes: tuple[int, ...], fold: int) -> Array:
    """Sums over axes, one after the other.

    XLA on CPU adds up to thousands of entries of several axes one after another, and rounds as
    often.
    """
    ordered = sorted(axes, reverse=True)
    total = x if fold == 1 else _folded(x, ordered, fold)
    for i, axis in enumerate(ordered):
        total = lax.reduce_sum(_apart(total, axis) if i else total, [axis])
    return total


def _folded(x: Array, axes: Sequence[int], fold: int) -> Array:
    """`x` with `fold` entries at a time along one of the axes added up, or fewer, or as it is.

    The axis is one that eight devices could share, each with folds of its own.
    """
    sizes = {axis: known_size(x.shape[axis]) or 1 for axis in sorted(axes)}
    # The largest power of two that divides a size.
    folds = {axis: min(fold, (size & -size) // 8) for axis, size in sizes.items()}
    axis = max(folds, key=lambda axis: folds[axis], default=0)
    fold = folds.get(axis, 0)
    if fold < _SHORTEST:
        return x
    shape = (*x.shape[:axis], x.shape[axis] // fold, fold, *x.shape[axis + 1 :])
    return _sum_in_loop(x.reshape(shape), axis + 1)


_SHORTEST = 8


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_in_loop(x: Array, axis: int) -> Array:
    # The `abs` changes nothing, but makes it no sum to XLA, which leaves sums to its library.
    return lax.reduce(x, x.dtype.type(0), lambda total, y: total + lax.abs(y), [axis])


@_sum_in_loop.defjvp
def _(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _sum_in_loop(*primals, axis), lax.reduce_sum(*tangents, [axis])


def _apart(sums: Array, axis: int) -> Array:
    """Sums that XLA on CPU does not merge with those that are taken of them over an axis."""
    # `abs` changes nothing, and is fused into the sum over a short axis. A long one is summed in
    # windows, with which XLA fuses nothing, and before it removes the barrier.
    is_long = (known_size(sums.shape[axis]) or 0) > _WINDOW
    return lax.optimization_barrier(sums) if is_long else lax.abs(sums)


_WINDOW = 32


def sum_of(arrays: Sequence[Array]) -> Array:
    """The sum of arrays `[...]` of one shape."""
    return _combined(lax.add, lambda x, axes: sum_over(x, tuple(axes)), arrays)


def largest_of(arrays: Sequence[Array]) -> Array:
    """The largest numbers of arrays `[...]` of one shape."""
    return _combined(lax.max, lambda x, axes: jnp.max(x, axis=tuple(axes)), arrays)


def _combined(
    combine: Callable[[Array, Array], Array],
    reduce: Callable[[Array, Sequence[int]], Array],
    arrays: Sequence[Array],
) -> Array:
    """Combines arrays by few, so that rounding grows slowly."""
    count = len(arrays)
    if count < 2:
        return arrays[0]
    if count <= _FEW:
        first, second = arrays[: count // 2], arrays[count // 2 :]
        return combine(*(_combined(combine, reduce, half) for half in (first, second)))
    # What is stacked is stored first, and takes one step to compute from then on.
    rank = math.ceil(math.log(count, _SIDE))
    side = math.ceil(count ** (1 / rank))
    shape, dtype = arrays[0].shape, arrays[0].dtype
    nothing = np.zeros((side**rank - count, *shape), dtype)
    rows = [_stacked(arrays[start : start + _ROW]) for start in range(0, count, _ROW)]
    stack = lax.concatenate([*rows, nothing], 0)
    return reduce(stack.reshape((side,) * rank + shape), range(rank))


_FEW, _SIDE, _ROW = 16, 8, 25


# Compiled by itself so that it is traced once for all rows.
@jax.jit
def _stacked(arrays: list[Array]) -> Array:
    return lax.concatenate([lax.expand_dims(array, (0,)) for array in arrays], 0)

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

from optaxclip._base.numerics import known_size


def sum_over(x: Array, axes: tuple[int, ...], *, fused: bool = False) -> Array:
    """Sums over axes.

    Args:
      x: summands.
      axes: which axes to sum over; they are removed.
      fused: whether XLA on CPU would store `x` for its library to sum, and is to be kept from it.
    """
    if len(axes) < 2 and not (fused and axes):
        return lax.reduce_sum(x, axes)
    return _sum_on_platform(x, axes=axes, fused=fused)


# Compiled by itself so that it is traced once for all leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "fused"))
def _sum_on_platform(x: Array, *, axes: tuple[int, ...], fused: bool) -> Array:
    # Where all axes are summed over at once a partitioner reduces over devices once, and numbers
    # in the place of arrays.
    return lax.platform_dependent(
        x,
        cpu=functools.partial(_sum_on_cpu, axes=axes, fused=fused),
        default=functools.partial(lax.reduce_sum, axes=axes),
    )


def _sum_on_cpu(x: Array, *, axes: tuple[int, ...], fused: bool) -> Array:
    """Sums over axes, one after the other.

    XLA on CPU adds up to thousands of entries of several axes one after another, and rounds as
    often.
    """
    ordered = sorted(axes, reverse=True)
    total = lax.reduce_sum(_folded(x, axes) if fused else x, ordered[:1])
    for axis in ordered[1:]:
        total = lax.reduce_sum(_apart(total, axis), [axis])
    return total


def _folded(x: Array, axes: tuple[int, ...]) -> Array:
    """`x` with up to `_FOLD` entries along one axis added up, each time in the step that has them.

    Along an axis that eight devices can share, each with entries of its own to add up.
    """
    sizes = {axis: known_size(x.shape[axis]) or 1 for axis in axes}
    # `size & -size` is the largest power of two that divides a size.
    twos = {axis: (size & -size) // 8 for axis, size in sizes.items()}
    axis = max(axes, key=lambda axis: min(twos[axis], _FOLD * _BESIDE))
    fold = min(_FOLD, twos[axis])
    if fold < _FOLD // 8:
        return x
    beside = min(_BESIDE, twos[axis] // fold)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    rows = (*before, x.shape[axis] // (fold * beside), fold, beside, *after)
    # Sums of complex numbers XLA computes itself, and fuses with what comes before.
    sums = lax.real(lax.reduce_sum(lax.complex(x, jnp.zeros_like(x)).reshape(rows), [axis + 1]))
    return sums.reshape(*before, x.shape[axis] // fold, *after)


# Summands of one sum, and sums whose summands lie side by side in memory.
_FOLD, _BESIDE = 32, 8


def _apart(sums: Array, axis: int) -> Array:
    """Sums that XLA on CPU does not merge with those that are taken of them over an axis."""
    # `abs` changes nothing, and is fused into the sum over a short axis. A long one is summed in
    # windows, with which XLA fuses nothing, and before it removes the barrier.
    is_long = (known_size(sums.shape[axis]) or 0) > _WINDOW
    return lax.optimization_barrier(sums) if is_long else lax.abs(sums)


_WINDOW = 32


def sum_of(arrays: Sequence[Array]) -> Array:
    """The sum of arrays `[...]` of one shape."""
    return _combined(lax.add, sum_over, arrays)


def largest_of(arrays: Sequence[Array]) -> Array:
    """The largest numbers of arrays `[...]` of one shape."""
    return _combined(lax.max, lax.reduce_max, arrays)


def _combined(
    combine: Callable[[Array, Array], Array],
    reduce: Callable[[Array, tuple[int, ...]], Array],
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
    return reduce(stack.reshape((side,) * rank + shape), tuple(range(rank)))


_FEW, _SIDE, _ROW = 16, 8, 25


# Compiled by itself so that it is traced once for all rows.
@jax.jit
def _stacked(arrays: list[Array]) -> Array:
    return lax.concatenate([lax.expand_dims(array, (0,)) for array in arrays], 0)

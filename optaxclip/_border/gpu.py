"""Code for XLA on GPUs alone, with what it saves.

XLA (JAX 0.10.2) runs a variadic reduction over all axes of a leaf as one kernel. But over only some
axes, it stores the summands of a variadic reduction, and runs three plain sums as several kernels.
For a leaf that the compiler splits over devices, a variadic reduction first gathers the leaf on
each device. One sum in float64, which has the range of all three sums, avoids all of this. As
compiled for an H100 (a transformer of 4 layers of 2048), AGC takes 2.02 reads with it and 4.05 with
three sums; on an automatic mesh of eight, global norm adds 70 kernels (Optax 62), and with three
sums about 100 more.

This sum needs fast float64 arithmetic, which GPUs such as the H100 have; on other GPUs, such as the
B300, it may take longer than the read.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import entries, fixed_size
from optaxclip.norms import Norm


def sum_of_columns(
    leaf: Array,
    *,
    axes: tuple[int, ...],
    norm: Norm,
    scales: tuple[float, ...],
    in_one_piece: bool,
) -> tuple[Array, ...]:
    """A leaf's float32 sums at all scales, from one sum in float64; no leaf is wider than float32.

    `scales` are the powers of two by which entries would be multiplied; `in_one_piece` says that no
    axis may be split over devices.
    """
    with jax.enable_x64(True):
        if leaf.dtype == jnp.float32:
            # `abs` changes no power, but without it XLA stores more intermediate results (JAX
            # 0.10.2, H100, 256 gradients of examples at once: 29.6 reads and writes with it, 31.8
            # without).
            x = jnp.abs(entries(leaf, jnp.float32)).astype(jnp.float64)
        else:
            x = entries(leaf, jnp.float64)
        powers = norm.map(x)
        if jnp.finfo(leaf.dtype).bits < 32:
            powers = _folded(powers, axes, in_one_piece)
        wide = lax.reduce_sum(powers, axes)
        return tuple((wide * by**norm.degree).astype(jnp.float32) for by in scales)


def _folded(x: Array, axes: tuple[int, ...], in_one_piece: bool) -> Array:
    """Partial sums of up to 256 entries along the last summed axes, if the columns are few.

    Without these, XLA (JAX 0.10.2) stores the converted entries of narrow dtypes, and AGC of
    matrices `[4096, 1024]` in bfloat16 moves 18 times the gradients; with partial sums, 2.1 times.
    """
    last = max(axes, default=-1)
    columns = x.shape[last + 1 :]
    if fixed_size(x.size) is None or not (axes and columns) or math.prod(columns) >= _MANY_COLUMNS:
        return x
    first = last
    # Adjacent axes count as one, because convolutions have few channels: AGC of a ResNet-50 moves
    # 2.28 times the gradients, and 2.46 times if only the last axis counts. If one of these axes
    # may be split over devices, its parts would have to be gathered.
    while in_one_piece and first - 1 in axes:
        first -= 1
    front, count = x.shape[:first], math.prod(x.shape[first : last + 1])
    # With fewer than 64 entries for each sum, there would be too many sums to store. The sums of a
    # leaf that eight devices may share must be a multiple of eight.
    least, sums = (min(count, 64), 1) if in_one_piece else (8, 8)
    fold = max((n for n in range(least, 257) if count % (sums * n) == 0), default=1)
    if fold == 1:
        return x
    rows = lax.reduce_sum(x.reshape(*front, count // fold, fold, *columns), [first + 1])
    ones = (1,) * (last - first)
    return lax.optimization_barrier(rows.reshape(*front, *ones, count // fold, *columns))


_MANY_COLUMNS = 1536
"""With this many columns or more, XLA stores no converted entries (JAX 0.10.2, for an H100)."""

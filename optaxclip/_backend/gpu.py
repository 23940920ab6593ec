"""Code for XLA on GPUs alone, with what it saves.

XLA (JAX 0.10.2) runs a variadic reduction over all axes of a leaf as one kernel. But over only some
axes, it stores the summands of a variadic reduction, and runs three plain sums as several kernels.
For a leaf that the compiler splits over devices, a variadic reduction first gathers the leaf on
each device. One sum in float64, which has the range of all three sums, avoids all of this. As
compiled for an H100 (a transformer of 4 layers of 2048), AGC takes 2.02 reads with it and 4.05 with
three sums; on an automatic mesh of eight, global norm adds 70 kernels (Optax 62), and with three
sums about 100 more.

An H100 computes in float64 at half the speed of float32, and then all norms of float32 take this
sum: it is 7 instructions for each entry, three sums are 13 (Optax's 5), and to compile takes as
long as Optax's (three sums: 1.3 times as long). Other GPUs, such as the B300, are so slow in
float64 that it may take longer than the read; they take it only where three sums are as above.
"""

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from optaxclip._base.numerics import cast_elements, static_size_or_none
from optaxclip.norms import Norm


@functools.cache
def has_fast_float64() -> bool:
    """Whether JAX has a GPU here that computes in float64 at half the speed of float32."""
    try:
        gpu: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return False
    return gpu.compute_capability in ("6.0", "7.0", "8.0", "9.0", "10.0")


def sums_in_float64(
    leaves: Sequence[Array],
    *,
    axes: Sequence[tuple[int, ...]],
    groups: Sequence[int],
    norm: Norm,
    in_one_piece: bool,
) -> list[Array]:
    """For each leaf the sum of powers of its entries, with 64-bit types enabled.

    Small leaves that are alike are added up entry by entry before they are summed, if their groups
    (by number) are the same: the first one's sum is that of all, and the others' are 0. This takes
    two kernels for 16 leaves, where a sum for each takes 16.
    """
    batches = collections.defaultdict[Any, list[int]](list)
    for i, x in enumerate(leaves):
        is_small = (
            in_one_piece
            and len(axes[i]) == x.ndim
            and (static_size_or_none(x.size) or _SMALL) < _SMALL
        )
        batches[(groups[i], x.shape, x.dtype) if is_small else i].append(i)
    sums = [jnp.zeros(())] * len(leaves)
    for members in batches.values():
        for start in range(0, len(members), _BATCH_SIZE):
            few = members[start : start + _BATCH_SIZE]
            each = tuple(leaves[i] for i in few)
            sums[few[0]] = _sum(each, axes[few[0]], norm, in_one_piece)
    return sums


def sum_leading_axis(x: Array) -> Array:
    """The sum along the first axis."""
    return lax.reduce_sum(x, [0])


# A compiled function of its own, so that it is traced once for leaves that are alike.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sum(leaves: tuple[Array, ...], axes: tuple[int, ...], norm: Norm, in_one_piece: bool) -> Array:
    """The sum over all of these leaves, which are alike."""
    powers = functools.reduce(lax.add, [norm.map(_convert_to_float64(leaf)) for leaf in leaves])
    if jnp.finfo(leaves[0].dtype).bits < 32:
        powers = _partial_sums(powers, axes, in_one_piece)
    return lax.reduce_sum(powers, axes)


def _convert_to_float64(leaf: Array) -> Array:
    if leaf.dtype != jnp.float32:
        return cast_elements(leaf, jnp.float64)
    # `abs` changes no power, but without it XLA stores more intermediate results (JAX 0.10.2, H100,
    # 256 gradients of examples at once: 29.6 reads and writes with it, 31.8 without).
    return jnp.abs(leaf).astype(jnp.float64)


def _partial_sums(x: Array, axes: tuple[int, ...], in_one_piece: bool) -> Array:
    """Partial sums of up to 256 entries along the last summed axes, if the columns are few.

    Without these, XLA (JAX 0.10.2) stores the converted entries of narrow dtypes, and AGC of
    matrices `[4096, 1024]` in bfloat16 moves 18 times the gradients; with partial sums, 2.1 times.
    """
    last = max(axes, default=-1)
    columns = x.shape[last + 1 :]
    if (
        static_size_or_none(x.size) is None
        or not (axes and columns)
        or math.prod(columns) >= _MAX_FOLDED_COLUMNS
    ):
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


_MAX_FOLDED_COLUMNS = 1536
"""With this many columns or more, XLA stores no converted entries (JAX 0.10.2, for an H100)."""

_SMALL, _BATCH_SIZE = 2**16, 16
"""From how many entries on a leaf has a kernel of its own; how many smaller ones share one."""

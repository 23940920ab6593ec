"""Totals: sums of powers of entries at several scales, of leaves, of groups, over devices.

Summands are powers of entries, at least 0. In float32 a sum of squares is exact to rounding for
norms from 2**-51 times the root of the number of entries to 2**64. Of entries that are multiplied
by 2**-88 or by 2**88 first it is so for all others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import optaxclip._base.devices as devices
from optaxclip._base.devices import Axes
from optaxclip._base.grouping import Grouping
from optaxclip._base.numerics import known_size, select
from optaxclip._base.trees import is_sparse, with_data
from optaxclip._engine.placement import of_groups, split_over
from optaxclip.norms import Norm

Totals = tuple[Array, ...]
"""For each scale the total of a leaf, of a group, or of an array of groups."""

_VERY_MANY = 2**40
"""Stands for a symbolic number of entries where a bound will do."""


def far(dtype: jax.typing.DTypeLike) -> float:
    """Far enough for squares, and not so far that entries next to the thresholds are lost.

    That is 2**88 in float32, in float64 as large a share of its range.
    """
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


def scales(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """By what entries are multiplied before they are mapped: 1, far down; for squares, far up."""
    plain_and_down = (1.0, 1 / far(dtype))
    return (*plain_and_down, far(dtype)) if norm.degree == 2 else plain_and_down


def entries(leaf: Any, dtype: jax.typing.DTypeLike) -> Array:
    """A leaf's entries as they are summed; of `BCOO` duplicates are added and padding left out."""
    if not is_sparse(leaf):
        wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
        return leaf.astype(wide if jnp.iscomplexobj(leaf) else dtype)
    data = entries(leaf.data, dtype)
    return with_data(leaf, jnp.where(stored(leaf), data, 0)).sum_duplicates(nse=leaf.nse).data


def stored(leaf: Any) -> Array:
    """Which data of a `BCOO` are entries of it, and no padding; broadcasts to the data."""
    bounds = np.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    bounds = jnp.broadcast_to(bounds.astype(leaf.indices.dtype), leaf.indices.shape)
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    return lax.expand_dims(inside, range(inside.ndim, leaf.data.ndim))


def times(x: Array, by: Array | float) -> Array:
    """Entries times a real number; parts of complex ones by themselves, lest 0 meets infinity."""
    if jnp.iscomplexobj(x):
        return lax.complex(x.real * by, x.imag * by)
    return x * by


def summands(leaf: Any, norm: Norm, dtype: jnp.dtype) -> Totals:
    """What is summed of a leaf at each scale."""
    x = entries(leaf, dtype)
    return tuple(norm.map(x if by == 1 else times(x, by)) for by in scales(norm, dtype))


# Compiled by itself so that it is traced once for leaves alike.
@functools.partial(jax.jit, static_argnames=("axes", "dtype"))
def largest_bits(leaf: Any, by: float, *, axes: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The largest modulus as an integer.

    The bits of floats of at least 0 are in the order of the floats, with NaN above infinity: so no
    maximum over devices loses a NaN, as XLA's collective on CPU does with floats.
    """
    modulus = jnp.abs(times(entries(leaf, dtype), by))
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    bits = lax.bitcast_convert_type(modulus, integer) & integer.type(jnp.iinfo(integer).max)
    return jnp.max(bits, axes, initial=0)


def least(size: Any, dtype: jax.typing.DTypeLike) -> float:
    """The total of `size` squares below which so much underflowed that it shows in the norm."""
    info = jnp.finfo(dtype)
    count = known_size(size)
    return (_VERY_MANY if count is None else count) * (float(info.tiny) / float(info.eps))


def is_out(plain: Array, low: Any) -> Array:
    """Where a total of entries as they are overflowed or lost too much."""
    return ~((plain >= low) & (plain <= jnp.finfo(plain.dtype).max))


def usable(found: Totals, low: Any) -> tuple[Array, Array]:
    """The total to use of each group, and the unit of its norm: a power of two.

    Args:
      found: the totals at all scales.
      low: for squares `least` of each group.
    """
    plain, down, *up = found
    distance = far(plain.dtype)
    is_high = ~(plain <= jnp.finfo(plain.dtype).max)
    total = select(is_high, down, plain)
    unit = select(is_high, distance, jnp.ones_like(plain))
    if up:
        is_low = (plain < low) & (up[0] > 0)
        total, unit = select(is_low, up[0], total), select(is_low, 1 / distance, unit)
    return total, unit


def combined(
    parts: list[Totals], grouping: Grouping, leaves: list[Any], *, by_max: bool = False
) -> list[Totals]:
    """From the totals of leaves to those of all norms: over a group's leaves, then over devices.

    Args:
      parts: for each leaf the totals of what this device holds.
      grouping: the groups.
      leaves: the leaves, whose types may say over which devices they are split.
      by_max: whether the largest counts, not the sum.

    Returns:
      One for each array of norms, as `Grouping.joined` has them.
    """
    split = split_over(leaves, grouping)
    groups, over = grouping.groups, of_groups(grouping, split)
    singles = [n for n, group in enumerate(groups) if group.members and not group.shape]
    arrays = [([n], over[n]) for n, group in enumerate(groups) if group.shape]
    # Single groups go over devices together.
    together = Axes().union(*(over[n] for n in singles))
    like = parts[0] if parts else (jnp.zeros(()),)
    found: list[Totals] = [tuple(jnp.zeros(g.shape, x.dtype) for x in like) for g in groups]
    for batch, axes in [(singles, together), *arrays]:
        shares = [
            [_share(parts[i], axes - split[i], axes, by_max) for i in groups[n].members]
            for n in batch
        ]
        totals = [_over_leaves(each, by_max) for each in shares]
        if totals and axes:
            totals = _over_devices(totals, axes, by_max)
        for n, total in zip(batch, totals, strict=True):
            found[n] = total
    columns = [grouping.joined(column) for column in zip(*found, strict=True)]
    return list(zip(*columns, strict=True))


def _over_leaves(shares: list[Totals], by_max: bool) -> Totals:
    combine = lax.max if by_max else lax.add
    return tuple(_by_halves(column, combine) for column in zip(*shares, strict=True))


def _by_halves(arrays: Sequence[Array], combine: Callable[[Array, Array], Array]) -> Array:
    """What `combine` makes of arrays of one shape; by halves, for few roundings."""
    if len(arrays) == 1:
        return arrays[0]
    middle = len(arrays) // 2
    return combine(_by_halves(arrays[:middle], combine), _by_halves(arrays[middle:], combine))


def _share(totals: Totals, replicated: Axes, over: Axes, by_max: bool) -> Totals:
    """This device's share of totals that will be combined over devices.

    Those that are replicated along some of the axes are divided, so that a sum counts them once.
    """
    replicas = 1 if by_max else devices.num_devices(replicated)
    varying = over & devices.manual_axes()
    return tuple(devices.vary(x if replicas == 1 else x / replicas, varying) for x in totals)


def _over_devices(totals: list[Totals], axes: Axes, by_max: bool) -> list[Totals]:
    """Totals of one shape over the devices along these axes, in one collective."""
    stack = jnp.stack([jnp.stack(total) for total in totals])
    combine = devices.largest if by_max else devices.sum_over_devices
    return [tuple(row[k] for k in range(len(row))) for row in combine(stack, axes)]

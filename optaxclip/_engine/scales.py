"""Sums of powers at several scales, and which of them can be used.

Summands are powers of entries, at least 0. In float32 a sum of squares is exact to rounding for
norms from 2**-51 times the root of the number of entries to 2**64. Of entries that are multiplied
by 2**-88 or by 2**88 first it is so for all others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import known_size, select
from optaxclip._base.trees import is_sparse, with_data
from optaxclip.norms import Norm

Totals = tuple[Array, ...]
"""For each scale the total of a leaf, of a group, or of an array of groups."""

_VERY_MANY = 2**40
"""Stands for a symbolic number of entries where a bound will do."""


def far(dtype: jax.typing.DTypeLike) -> float:
    """Far enough for squares, and not so far that entries next to the thresholds are lost."""
    return 2.0 ** int(0.6875 * jnp.finfo(dtype).maxexp)


def scales(norm: Norm, dtype: jax.typing.DTypeLike) -> tuple[float, ...]:
    """By what entries are multiplied before they are mapped: 1, far down; for squares, far up."""
    return (1.0, 1 / far(dtype), far(dtype))[: int(norm.degree) + 1]


def entries(leaf: Any, dtype: jax.typing.DTypeLike) -> Array:
    """A leaf's entries as they are summed; of `BCOO` duplicates are added and padding left out."""
    if not is_sparse(leaf):
        wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
        return leaf.astype(wide if jnp.iscomplexobj(leaf) else dtype)
    bounds = np.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    bounds = jnp.broadcast_to(bounds.astype(leaf.indices.dtype), leaf.indices.shape)
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    inside = lax.expand_dims(inside, range(inside.ndim, leaf.data.ndim))
    data = entries(leaf.data, dtype)
    return with_data(leaf, jnp.where(inside, data, 0)).sum_duplicates(nse=leaf.nse).data


def times(x: Array, by: Array | float) -> Array:
    """Entries times a real number; parts of complex ones by themselves, lest 0 meets infinity."""
    if jnp.iscomplexobj(x):
        return lax.complex(x.real * by, x.imag * by)
    return x * by


def joined(arrays: Sequence[Array], combine: Callable[[Array, Array], Array] = lax.add) -> Array:
    """The sum of arrays of one shape, or what `combine` makes of them, by halves: few roundings."""
    if len(arrays) == 1:
        return arrays[0]
    middle = len(arrays) // 2
    return combine(joined(arrays[:middle], combine), joined(arrays[middle:], combine))


def least(size: Any, dtype: jax.typing.DTypeLike) -> float:
    """The total of `size` squares below which so much underflowed that it shows in the norm."""
    info = jnp.finfo(dtype)
    count = known_size(size)
    return (_VERY_MANY if count is None else count) * (float(info.tiny) / float(info.eps))


def is_out(plain: Array, low: Any, norm: Norm) -> Array:
    """Where a total of entries as they are overflowed or, for squares, lost too much."""
    is_high = ~(plain <= jnp.finfo(plain.dtype).max)
    return is_high | (plain < low) if norm.degree == 2 else is_high


def usable(found: Totals, low: Any) -> tuple[Array, Array]:
    """The total to use of each group, and the unit of its norm: a power of two.

    Args:
      found: the totals at all scales.
      low: `least` of each group.
    """
    plain, down, *up = found
    distance = far(plain.dtype)
    is_high = ~(plain <= jnp.finfo(plain.dtype).max)
    total = select(is_high, down, plain)
    unit = select(is_high, distance, jnp.ones_like(plain))
    if up:
        is_low = plain < low
        total, unit = select(is_low, up[0], total), select(is_low, 1 / distance, unit)
    return total, unit

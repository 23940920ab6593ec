"""The entries of a leaf, as they are measured and changed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.numerics import by_parts, multiply
from optaxclip._base.trees import is_sparse, with_data


def as_arrays(leaves: list[Any]) -> list[Any]:
    """Leaves, of which some may be numbers, as arrays; a `BCOO` stays as it is."""
    return [leaf if is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]


def entries(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Real entries in `dtype`, complex ones with parts in it."""
    wide = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    return x.astype(wide if jnp.iscomplexobj(x) else dtype)


def measured_entries(
    leaf: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, tuple[int, ...]]:
    """A leaf as one array, and the axes over which its entries share a norm.

    Of a `BCOO` these are the stored values in `dtype`, with duplicates added up and padding 0, and
    all of their axes.
    """
    if not is_sparse(leaf):
        return leaf, axes
    data = jnp.where(not_padding(leaf), entries(leaf.data, dtype), 0)
    x = with_data(leaf, data).sum_duplicates(nse=leaf.nse).data
    return x, tuple(range(x.ndim))


def entries_of_both(
    leaf: Any, other: Any, axes: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[Array, Array, tuple[int, ...]]:
    """The entries of two leaves of one shape, in pairs, and the axes over which they share a norm.

    Pairs that a `BCOO` lacks are left out.
    """
    if is_sparse(other):
        other = other.todense()
    if is_sparse(leaf):
        from jax.experimental.sparse import bcoo_extract

        # Products are linear in the leaf, so that duplicates need not be added first.
        other = bcoo_extract(leaf, other, assume_unique=True).data
        leaf = jnp.where(not_padding(leaf), leaf.data, 0)
        axes = tuple(range(leaf.ndim))
    return entries(leaf, dtype), entries(other, dtype), axes


def sums_of_stored(leaf: Any, dtype: jax.typing.DTypeLike) -> Array:
    """For each stored value of a `BCOO` the entry that it is a part of; 0 for padding."""
    data = jnp.where(not_padding(leaf), entries(leaf.data, dtype), 0)
    sums = _sums_of_equal
    for _ in range(leaf.n_batch):
        sums = jax.vmap(sums)
    return sums(data, leaf.indices)


def _sums_of_equal(data: Array, indices: Array) -> Array:
    size = len(indices)
    _, segments = jnp.unique(indices, axis=0, size=size, return_inverse=True)
    return jax.ops.segment_sum(data, segments, size)[segments]


def not_padding(leaf: Any) -> Array:
    """Which stored values of a `BCOO` are entries, not padding; broadcasts to its data."""
    bounds = np.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    bounds = jnp.broadcast_to(bounds.astype(leaf.indices.dtype), leaf.indices.shape)
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    return lax.expand_dims(inside, range(inside.ndim, leaf.data.ndim))


def any_entry(leaf: Any, flags: Array, axes: tuple[int, ...]) -> Array:
    """Over some axes of a leaf, whether one of its stored values that is an entry has a flag."""
    return jnp.any(flags & not_padding(leaf)) if is_sparse(leaf) else jnp.any(flags, axes)


def on_data(fn: Callable[..., Array], leaf: Any, axes: tuple[int, ...]) -> Any:
    """`fn(leaf, axes=axes)`; of a `BCOO` the stored values are changed, which share all axes."""
    if not is_sparse(leaf):
        return fn(leaf, axes=axes)
    return with_data(leaf, fn(leaf.data, axes=tuple(range(leaf.data.ndim))))


def times(x: Array, by: Array | float) -> Array:
    """Entries times a real number; complex ones part by part, as 0 times infinity would be NaN."""
    if isinstance(by, float) and by == 1:
        return x
    return by_parts(functools.partial(multiply, y=by), x)

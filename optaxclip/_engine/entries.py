"""The entries of a leaf, as they are measured."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optaxclip._base.trees import is_sparse, with_data


def entries(leaf: Any, dtype: jax.typing.DTypeLike) -> Array:
    """A leaf's entries, real or complex; of `BCOO` duplicates are added and padding left out.

    Args:
      leaf: a floating or complex array, or a `BCOO`.
      dtype: of the real entries, or of the parts of complex ones.
    """
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


def measured_axes(leaf: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a leaf's entries over which it is reduced: of a sparse one, all of its data's."""
    return tuple(range(leaf.data.ndim)) if is_sparse(leaf) else axes


def times(x: Array, by: Array | float) -> Array:
    """Entries times a real number; parts of complex ones by themselves, lest 0 meets infinity."""
    if jnp.iscomplexobj(x):
        return lax.complex(x.real * by, x.imag * by)
    return x * by

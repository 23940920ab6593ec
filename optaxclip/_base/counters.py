"""Parts of states: counters that never overflow, and arrays that can be donated."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.types import PyTree


@functools.partial(jax.jit, static_argnames="period", inline=True)
def increased(count: Array, where: Array | bool = True, *, period: int = 1) -> Array:
    """Counters plus 1 where `where` is True; the largest value of the dtype is never exceeded.

    Args:
      count: signed integers of at least 0.
      where: bool, which of them to increase.
      period: a counter at the dtype's largest value does not grow, but falls by `period - 1`. With
        1 it stays there, as Optax's counters do. With the length of a ring buffer, the place in the
        buffer, `count % period`, moves on by one as at every other step.

    Raises:
      TypeError: for counters of another dtype.
    """
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"a counter of the state has the dtype {count.dtype}, in which it would stand still; "
            "cast only the floating-point leaves of a state"
        )
    is_full = count == jnp.iinfo(count.dtype).max
    step = jnp.where(is_full, 1 - period, 1)
    # A product, because JAX 0.10.2 cannot `vmap` a select in a `jit` over an explicit mesh.
    return count + step.astype(count.dtype) * jnp.asarray(where, count.dtype)


def own_arrays(state: PyTree) -> PyTree:
    """A copy of the state, which can be donated: no other pytree holds its arrays."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, Array) else x, state)

"""What states are made of: counters that never wrap, arrays that nothing else holds."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from optaxclip._base.types import PyTree


@functools.partial(jax.jit, static_argnames="period", inline=True)
def increased(count: Array, where: Array | bool = True, *, period: int = 1) -> Array:
    """A counter with one more, where `where`; at its largest value it stays, as Optax's do.

    Args:
      count: signed integers of at least 0.
      where: bool, which of them to increase.
      period: places in a ring that the counter goes round. It then goes back by one round in the
        place of staying, so that no place is left out.
    """
    is_full = count == jnp.iinfo(count.dtype).max
    step = jnp.where(is_full, 1 - period, 1)
    return count + jnp.where(where, step, 0).astype(count.dtype)


def own_arrays(state: PyTree) -> PyTree:
    """The same state in arrays that nothing else holds, without which it cannot be donated."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, Array) else x, state)

"""Many small networks trained at once: seeds under `vmap`, steps in a `scan`."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.times.effort import Effort
from optaxclip._base.types import PyTree


def networks(effort: Effort, dtype: str) -> tuple[PyTree, tuple[Array, Array]]:
    """The parameters of small networks, leaves `[seeds, ...]`, and batches `[steps, examples]`."""
    rng, shape = np.random.default_rng(0), (effort.scanned, effort.seeds)
    params = [
        {
            "kernel": jnp.asarray(rng.normal(0, n**-0.5, (effort.seeds, n, m)), dtype),
            "bias": jnp.zeros((effort.seeds, m), dtype),
        }
        for n, m in itertools.pairwise(effort.network)
    ]
    inputs = jnp.asarray(rng.normal(size=(*shape, effort.network[0])), dtype)
    return params, (inputs, jnp.asarray(rng.integers(effort.network[-1], size=shape)))


def trained(tx: optax.GradientTransformation, loss: Callable[..., Array]) -> Callable[..., Any]:
    """Steps in a `scan`, of which each turns a batch to many networks at once.

    Args:
      tx: the optimizer of one network.
      loss: `params, x, y -> float[]`, of one example.

    Returns:
      `(params, state), batches -> (params, state)`: leaves `[seeds, ...]`, batches
      `[steps, examples, ...]`.
    """

    def mean_loss(params: PyTree, xs: Array, ys: Array) -> Array:
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(params, xs, ys))

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(mean_loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    by_seed: Any = partial(jax.lax.scan, jax.vmap(step, in_axes=(0, None)))
    return lambda carry, batches: by_seed(carry, batches)[0]


def loss(params: PyTree, x: Array, y: Array) -> Array:
    """Of a network of dense layers for one example."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ params[-1]["kernel"] + params[-1]["bias"]
    # Not an index, whose derivative a TPU computes in a loop.
    chosen = jax.nn.one_hot(y, logits.size)
    return -jnp.sum(chosen * jax.nn.log_softmax(logits.astype(jnp.float32)))

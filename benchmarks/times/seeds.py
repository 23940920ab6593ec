"""Trains many small networks together, with `vmap` over seeds and `scan` over steps."""

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


def draw_networks(effort: Effort, dtype: str) -> tuple[PyTree, tuple[Array, Array]]:
    """Draws parameters `[seeds, ...]` of small networks, and batches `[steps, examples]`."""
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


def build_training(
    tx: optax.GradientTransformation, loss: Callable[..., Array]
) -> Callable[..., Any]:
    """Returns a function that trains many networks on the same batches.

    Args:
      tx: The optimizer of a network.
      loss: `params, x, y -> float[]` for one example.

    Returns:
      `(params, state), batches -> (params, state)` with leaves `[seeds, ...]` and batches
      `[steps, examples, ...]`.
    """

    def mean_loss(params: PyTree, xs: Array, ys: Array) -> Array:
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(params, xs, ys))

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(mean_loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    train: Any = partial(jax.lax.scan, jax.vmap(step, in_axes=(0, None)))
    return lambda carry, batches: train(carry, batches)[0]


def compute_loss(params: PyTree, x: Array, y: Array) -> Array:
    """Computes the cross entropy of a dense network for one example."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ params[-1]["kernel"] + params[-1]["bias"]
    # TPUs would compute the derivative of an index in a loop.
    chosen = jax.nn.one_hot(y, logits.size)
    return -jnp.sum(chosen * jax.nn.log_softmax(logits.astype(jnp.float32)))

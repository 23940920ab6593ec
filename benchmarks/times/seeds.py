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

from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import Row
from benchmarks.times.steps import OPTIMIZERS, PLAIN, by_global_norm, step_rows
from benchmarks.times.timing import Program
from benchmarks.times.trees import num_bytes
from optaxclip._base.types import PyTree


def scanned(effort: Effort, tell: Tell) -> list[Row]:
    """The clip by the global norm in a whole scan."""
    case = f"{effort.seeds} seeds, {effort.scanned} steps"
    tell(case)
    rng, shape = np.random.default_rng(0), (effort.scanned, effort.seeds)
    params = [
        {
            "kernel": jnp.asarray(rng.normal(0, n**-0.5, (effort.seeds, n, m)), jnp.float32),
            "bias": jnp.zeros((effort.seeds, m)),
        }
        for n, m in itertools.pairwise(effort.network)
    ]
    inputs = jnp.asarray(rng.normal(size=(*shape, effort.network[0])), jnp.float32)
    batches = inputs, jnp.asarray(rng.integers(effort.network[-1], size=shape))
    programs = {}
    for way, clip in {PLAIN: optax.identity(), **by_global_norm()}.items():
        tx = optax.chain(clip, OPTIMIZERS["AdamW"]())
        carry = params, jax.vmap(tx.init)(params)
        programs[way] = Program(trained(tx, loss), carry, batches)
    return step_rows(case, programs, num_bytes(params), effort.rounds)


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

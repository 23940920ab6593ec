"""Programs beside a plain AdamW step: many small networks in a loop, and examples one by one."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accelerators.devices import devices
from benchmarks.accelerators.methods import THEIRS, Step
from benchmarks.accelerators.steps import Compiled, timed
from benchmarks.times.effort import FULL
from benchmarks.times.seeds import loss, trained
from optaxclip import per_example

SMALL, SEEDS, STEPS = FULL.network, FULL.seeds, FULL.scanned
LARGE, BATCH, THRESHOLD = (784, 256, 256, 10), 256, 1.0


def seeds(tx: Step, device: str) -> Compiled:
    """A step of `STEPS` in a `scan`, of `SEEDS` small networks at once, by `vmap`."""
    layers = [_layer(n, m, SEEDS) for n, m in itertools.pairwise(SMALL)]
    params = _on(device, layers, jnp.float32)
    state = jax.eval_shape(jax.vmap(tx.init), params)
    state = jax.tree.map(lambda x: _at(device, x.shape, x.dtype), state)
    batches = _batches(device, (STEPS, SEEDS), SMALL, jnp.float32)
    return timed(trained(tx, loss), ((params, state), batches), 1, donated=(0,), in_loop=True)


def examples(way: str, device: str, dtype: Any, size: int) -> Compiled:
    """The clipped gradients of `BATCH` examples, `size` at a time."""
    layers = [_layer(n, m) for n, m in itertools.pairwise(LARGE)]
    params = _on(device, layers, dtype)
    batch = _batches(device, (BATCH,), LARGE, dtype)
    run = _with_jax_privacy(size) if way == THEIRS else _with_ours(size)
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return timed(run, (params, *batch), gradients, donated=(), turns=BATCH // size)


def _with_ours(size: int) -> Any:
    clipped = per_example.clipped_grad(loss, THRESHOLD, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def _with_jax_privacy(size: int) -> Any:
    from jax_privacy import clipping

    return clipping.clipped_grad(
        loss,
        l2_clip_norm=THRESHOLD,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=None if size == BATCH else size,
        dtype=jnp.float32,  # as ours
    )


def _layer(n: int, m: int, *before: int) -> dict[str, tuple[int, ...]]:
    return {"kernel": (*before, n, m), "bias": (*before, m)}


def _batches(device: str, shape: tuple[int, ...], widths: tuple[int, ...], dtype: Any) -> Any:
    return _at(device, (*shape, widths[0]), dtype), _at(device, shape, jnp.int32)


def _on(device: str, shapes: Any, dtype: Any) -> Any:
    at = functools.partial(_at, device, dtype=dtype)
    return jax.tree.map(at, shapes, is_leaf=lambda x: isinstance(x, tuple))


def _at(device: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(devices(device, 1)[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

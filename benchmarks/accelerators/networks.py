"""Compiles training loops of many small networks, and per-example clipping."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accelerators.devices import get_devices
from benchmarks.accelerators.methods import THEIRS, Step
from benchmarks.accelerators.steps import Compiled, compile_program
from benchmarks.times.effort import FULL
from benchmarks.times.seeds import build_training, compute_loss
from optaxclip import per_example

SMALL, SEEDS, STEPS = FULL.network, FULL.seeds, FULL.scanned
LARGE, BATCH, THRESHOLD = (784, 256, 256, 10), 256, 1.0


def compile_seeds(tx: Step, device: str) -> Compiled:
    """Compiles a `scan` over `STEPS` steps of `SEEDS` small networks under `vmap`."""
    layers = [_describe_layer(n, m, SEEDS) for n, m in itertools.pairwise(SMALL)]
    params = _describe_tree(device, layers, jnp.float32)
    state = jax.eval_shape(jax.vmap(tx.init), params)
    state = jax.tree.map(lambda x: _describe(device, x.shape, x.dtype), state)
    batches = _describe_batch(device, (STEPS, SEEDS), SMALL, jnp.float32)
    return compile_program(
        build_training(tx, compute_loss),
        ((params, state), batches),
        1,
        donate_argnums=(0,),
        in_loop=True,
    )


def compile_examples(variant: str, device: str, dtype: Any, size: int) -> Compiled:
    """Compiles the clipped gradients of `BATCH` examples in microbatches of `size`."""
    layers = [_describe_layer(n, m) for n, m in itertools.pairwise(LARGE)]
    params = _describe_tree(device, layers, dtype)
    batch = _describe_batch(device, (BATCH,), LARGE, dtype)
    run = _clip_with_jax_privacy(size) if variant == THEIRS else _clip_with_ours(size)
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return compile_program(
        run, (params, *batch), gradients, donate_argnums=(), trip_count=BATCH // size
    )


def _clip_with_ours(size: int) -> Any:
    clipped = per_example.clipped_grad(compute_loss, THRESHOLD, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def _clip_with_jax_privacy(size: int) -> Any:
    from jax_privacy import clipping

    return clipping.clipped_grad(
        compute_loss,
        l2_clip_norm=THRESHOLD,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=None if size == BATCH else size,
        dtype=jnp.float32,  # optaxclip also sums in float32.
    )


def _describe_layer(n: int, m: int, *leading_axes: int) -> dict[str, tuple[int, ...]]:
    return {"kernel": (*leading_axes, n, m), "bias": (*leading_axes, m)}


def _describe_batch(
    device: str, shape: tuple[int, ...], widths: tuple[int, ...], dtype: Any
) -> Any:
    return _describe(device, (*shape, widths[0]), dtype), _describe(device, shape, jnp.int32)


def _describe_tree(device: str, shapes: Any, dtype: Any) -> Any:
    describe = functools.partial(_describe, device, dtype=dtype)
    return jax.tree.map(describe, shapes, is_leaf=lambda x: isinstance(x, tuple))


def _describe(device: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(get_devices(device, 1)[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

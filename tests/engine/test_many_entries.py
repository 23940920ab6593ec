"""Trees of more entries than an int32 can count."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optaxclip
from optaxclip import monitor, ops, scopes

HUGE = {"a": jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.bfloat16), "b": 1.0}


@pytest.mark.parametrize(
    "tx",
    [
        optaxclip.clip_by_global_norm(1.0),
        optaxclip.clip_by_block_rms(1.0),
        optaxclip.clip_by(scopes.tree(), 1.0, norm="mean_abs", strict=True),
        optaxclip.adaptive_grad_clip(0.01, axis=lambda path, leaf: range(leaf.ndim)),
        optaxclip.zclip(),
        optaxclip.adagc(),
        optaxclip.clip(1.0),
        monitor.record(),
        optaxclip.skip_nonfinite(optax.identity()),
    ],
)
def test_transformations_accept_trees_beyond_int32_size(tx):
    def step(grads):
        return tx.update(grads, tx.init(grads), grads)[0]

    assert jax.eval_shape(step, HUGE)["a"] == HUGE["a"]


def test_ops_accept_trees_beyond_int32_size():
    assert jax.eval_shape(ops.global_norm, HUGE).shape == ()
    assert jax.eval_shape(lambda x: ops.clip_by_average_norm(x, 1.0), HUGE)["a"] == HUGE["a"]

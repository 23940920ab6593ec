"""What per-example clipping stores on a CPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compiling import AS_USERS, where_sums_are_fused

from optaxclip import per_example, scopes
from optaxclip._base.trees import flatten
from optaxclip.per_example._batched_clip import compute_clipped_sums
from optaxclip.responses import as_response


@pytest.mark.slow
@where_sums_are_fused
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipped_grad_on_cpu_stores_no_products(dtype):
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w)))

    args = jnp.ones((100, 50), dtype), jnp.ones((64, 100), dtype)
    compiled = jax.jit(per_example.clipped_grad(loss, 1.0), compiler_options=AS_USERS)
    memory = compiled.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert memory < 1.1 * 64 * 4 * args[0].size


@pytest.mark.slow
@where_sums_are_fused
def test_grad_norms_on_cpu_store_no_gradients():
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w)))

    args = jnp.ones((100, 50)), jnp.ones((64, 100))
    grad_norms = per_example.grad_norms(loss, method="vmap")
    compiled = jax.jit(grad_norms, compiler_options=AS_USERS).lower(*args).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    assert memory < 0.1 * 64 * 4 * args[0].size


@pytest.mark.slow
@where_sums_are_fused
def test_clip_sum_in_eager_mode_copies_no_gradients():
    grads = jnp.ones((64, 100, 50))
    grouping = scopes.tree()(flatten(grads[0], "grads"))

    def clip(grads, *, are_inputs):
        return compute_clipped_sums(
            [grads],
            [jnp.ones(())],
            jnp.zeros(64, bool),
            grouping=grouping,
            response=as_response("clip"),
            are_inputs=are_inputs,
        ).leaves

    def temporary_memory(are_inputs):
        fn = jax.jit(functools.partial(clip, are_inputs=are_inputs), compiler_options=AS_USERS)
        return fn.lower(grads).compile().memory_analysis().temp_size_in_bytes

    assert temporary_memory(True) < 0.1 * grads.nbytes < temporary_memory(False)

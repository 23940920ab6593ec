"""What per-example clipping stores on a CPU."""

import jax
import jax.numpy as jnp
import pytest
from compiling import AS_USERS, where_sums_are_fused

from optaxclip import per_example


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

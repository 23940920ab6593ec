"""What per-example clipping stores on a CPU."""

import jax
import jax.numpy as jnp
from compiling import AS_USERS, where_sums_are_fused

from optaxclip import per_example


@where_sums_are_fused
def test_products_are_not_stored_beside_the_gradients():
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w)))

    args = jnp.ones((100, 50)), jnp.ones((64, 100))
    compiled = jax.jit(per_example.clipped_grad(loss, 1.0), compiler_options=AS_USERS)
    memory = compiled.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert memory < 1.1 * 64 * 4 * args[0].size

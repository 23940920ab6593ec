"""What of the threshold each group has where groups have thresholds of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import optaxclip
from optaxclip import per_example, scopes


def test_split_by_size_uses_elements_of_group():
    scope = scopes.group(lambda path, leaf: "odd" if path == "1" else "even")
    grads = [jnp.full((1, n), 9.0) for n in (1, 2, 4)]
    for leaves in (grads[:1], grads):
        found = per_example.clip_sum(leaves, 1.0, scope=scope, split="size").grads
        entries = sum(leaf.size for leaf in leaves)
        for leaf in found:
            np.testing.assert_allclose(leaf, np.full(leaf.shape, entries**-0.5), rtol=2e-6)


def test_scope_none_clips_whole_example():
    grads = {"w": jnp.array([[3.0]]), "b": jnp.array([[4.0]])}
    assert per_example.clip_sum(grads, 1.0, scope=None).norms == 5


def test_nothing_is_above_a_threshold_of_zero():
    found = per_example.clip_sum(jnp.array([[0.0, 0.0], [0.0, 1e-20]]), 0.0)
    assert (int(found.num_clipped), int(found.num_unclipped)) == (1, 1)
    assert not np.any(found.grads)


def test_clip_sum_combines_huge_and_small_examples():
    grads = jnp.array([[3e30, 4e30], [0.3, 0.4]])
    np.testing.assert_allclose(per_example.clip_sum(grads, 1.0).grads, [0.9, 1.2], rtol=2e-6)


def test_normalize_survives_factors_beyond_float32():
    """For the first example the threshold is 2e49 times its norm."""
    grads = jnp.array([[3e-30, 4e-30], [0.3, 0.4]])
    found = per_example.clip_sum(grads, 1e20, response="normalize").grads
    np.testing.assert_allclose(found, [1.2e20, 1.6e20], rtol=2e-6)


def test_clip_sum_accepts_trees_without_float_leaves():
    found = jax.jit(per_example.clip_sum)({"count": jnp.ones(4, int)}, 1.0)
    np.testing.assert_array_equal(found.norms, np.zeros(4))
    assert (int(found.num_unclipped), int(found.num_dropped)) == (4, 0)
    by_name = functools.partial(per_example.clip_sum, threshold={"w": 1.0}, scope=scopes.leaf())
    assert jax.eval_shape(by_name, {}).norms.shape == (0, 0)


def test_a_response_above_the_threshold_is_brought_to_it():
    found = per_example.clip_sum(jnp.array([[0.3, 0.4]]), 1.0, response=lambda *numbers: 9.0)
    np.testing.assert_allclose(found.grads, [0.6, 0.8], rtol=2e-6)


def test_per_example_optax_functions_reject_sparse_leaves():
    rows = sparse.BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 2))
    with pytest.raises(TypeError, match="leaf 'w' of grads must be dense"):
        optaxclip.per_example_global_norm_clip({"w": rows}, 1.0)

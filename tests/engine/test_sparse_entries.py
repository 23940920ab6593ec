"""Sparse leaves: what `todense` would hold is what counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optaxclip
from optaxclip._backend.elementwise import coalesce_values


@pytest.mark.by_day(1)
@pytest.mark.parametrize("norm", ["l2", "l1", "linf", optaxclip.norms.lp(3)], ids=str)
def test_sparse_norm_ignores_indices_out_of_range(norm):
    data, indices = np.float32([3.0, 100.0, 4.0, 1e30]), np.int32([[1], [5], [2], [9]])
    rows, places = np.float32([[3.0, 9.0], [7.0, 4.0]]), np.int32([[[0], [3]], [[4], [2]]])
    in_two = np.int32([[1, 0], [1, 2], [2, 1], [9, 1]])
    leaves = [
        BCOO((data, indices), shape=(5,)),
        BCOO((data, in_two), shape=(5, 2)),
        BCOO((np.where(data == data.max(), np.inf, data), indices), shape=(5,)),
        BCOO((rows, places), shape=(2, 3)),
    ]

    @jax.jit
    def all_norms(leaves):
        rows = [(x, x.todense()) for x in leaves]
        return jnp.array([[optaxclip.ops.global_norm(x, norm=norm) for x in row] for row in rows])

    found = all_norms(leaves)
    np.testing.assert_allclose(found[:, 0], found[:, 1], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], found[0, 1], rtol=1e-6)


def test_coalesced_values_sum_duplicates_in_batches():
    data, indices = np.float32([[3, 1, 3], [1, 6, 1]]), np.int32([[2, 0, 2], [2, 0, 9]])
    leaf = BCOO((data, indices[..., None]), shape=(2, 5))
    found = jax.jit(lambda leaf: coalesce_values(leaf, jnp.float32)[0])(leaf)
    np.testing.assert_array_equal(found, [[6, 1, 6], [1, 6, 0]])


def test_mask_policy_zeros_nonfinite_sparse_elements():
    sparse = BCOO((np.float32([3.0, jnp.nan, 4.0]), np.int32([[1], [2], [4]])), shape=(5,))
    grads = {"bad": sparse, "good": np.float32([0.6, 0.8])}
    tx = optaxclip.clip_by_norm(2.5, nonfinite="mask")
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["bad"].todense(), [0, 1.5, 0, 0, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(updates["good"], grads["good"])
    assert list(state.info.num_nonfinite) == [1, 0]
    np.testing.assert_allclose(state.info.norm, [5, 1], rtol=1e-6)


def test_sparse_norm_ignores_rows_out_of_range():
    rows = np.float32([[3.0, 0.0], [0.0, 4.0], [100.0, jnp.inf]])
    leaf = BCOO((rows, np.int32([[1], [0], [5]])), shape=(5, 2))
    assert leaf.n_dense == 1
    np.testing.assert_allclose(optaxclip.ops.global_norm(leaf), 5, rtol=1e-6)
    updates, _ = optaxclip.clip_tree(leaf, 2.5, scope=optaxclip.scopes.leaf())
    np.testing.assert_allclose(updates.data[:2], rows[:2] / 2, rtol=3e-6)


def test_mask_policy_ignores_nonfinite_padding():
    padded = BCOO((np.float32([3.0, jnp.nan]), np.int32([[0], [9]])), shape=(4,))
    tx = optaxclip.clip_by_global_norm(1.0, nonfinite="mask")
    info = tx.update(padded, tx.init(padded))[1].info
    assert (info.norm, info.num_nonfinite) == (3, 0)


def test_clip_by_value_adds_repeated_indices():
    """What `todense` would hold is bounded, and an entry within its bounds is kept as stored."""
    entries = BCOO(
        (np.float32([0.9, 0.5, 0.9, 0.9, 7]), np.int32([[1], [2], [1], [1], [9]])), shape=(4,)
    )
    rows = BCOO((np.float32([[3, -2], [-3, -2]]), np.int32([[1], [1]])), shape=(2, 2))
    batch = BCOO((np.float32([[3, 3], [0.2, 4]]), np.int32([[[1], [1]], [[0], [3]]])), shape=(2, 4))
    narrow = BCOO((jnp.bfloat16([0.9, 0.9]), np.int32([[1], [1]])), shape=(4,))
    turned = BCOO((np.complex64([3j, 4, 0.1]), np.int32([[1], [1], [0]])), shape=(4,))
    tree = [entries, rows, batch, narrow, turned]
    tx = optaxclip.clip(1.0)

    @jax.jit
    def clipped(tree):
        by_stage = tx.update(tree, tx.init(tree))[0]
        return by_stage, optaxclip.ops.clip_by_value(tree, -1.0, 1.0)

    for found in clipped(tree):
        dense = [leaf.todense() for leaf in found]
        np.testing.assert_allclose(dense[0], [0, 1, 0.5, 0])
        np.testing.assert_array_equal(found[0].data[4], 7)
        np.testing.assert_allclose(dense[1], [[0, 0], [0, -1]])
        np.testing.assert_array_equal(found[1].data[:, 0], [3, -3])
        np.testing.assert_allclose(dense[2], [[0, 1, 0, 0], [np.float32(0.2), 0, 0, 1]])
        assert (dense[3].dtype, dense[3][1]) == (jnp.bfloat16, 1)
        np.testing.assert_allclose(dense[4], [0.1, 0.8 + 0.6j, 0, 0], rtol=1e-6)

"""The record of a leaf with many groups is that of one of them: the worst, whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optaxclip
from optaxclip import scopes


def record(tx, grads, params=None):
    info = tx.update(grads, tx.init(grads), params)[1].info
    return [float(x[0]) for x in (info.norm, info.threshold, info.factor)], info


def test_info_reports_unit_with_largest_norm_to_threshold():
    params, grads = np.float32([[1.0, 10.0], [0, 0]]), np.float32([[1.0, 2.0], [0, 0]])
    found, _ = record(optaxclip.adaptive_grad_clip(0.1), grads, params)
    np.testing.assert_allclose(found, [1, 0.1, 0.1], rtol=1e-5)


def test_a_unit_with_threshold_0_is_worse_than_any_other():
    # Zeros under a threshold of 0 stay as they are, and are not bad at all.
    params = np.float32([[0.0, 1e-3, 1.0, 0], [0, 0, 0, 0]])
    grads = np.float32([[3.0, 1e30, 0.1, 0], [4.0, 0, 0, 0]])
    tx = optaxclip.clip_by(scopes.unit(), optaxclip.thresholds.relative_to_params(0.1, eps=0.0))
    found, _ = record(tx, grads, params)
    np.testing.assert_allclose(found, [5, 0, 0], rtol=1e-6)
    tiny, _ = record(tx, np.float32([[1e-37, 1.0], [0, 0]]), np.float32([[0.0, 0.1], [0, 0]]))
    np.testing.assert_allclose(tiny, [1e-37, 0, 0], rtol=1e-6)


def test_the_share_of_units_above_their_threshold():
    grads = {"a": np.float32([[3.0, 0.5, 2.0], [4.0, 0, 0]]), "b": np.float32([[0.1], [0.2]])}
    grads |= {"none": np.zeros((3, 0)), "one": np.float32([[3.0], [4.0]])}
    _, info = record(optaxclip.clip_by(scopes.unit(), 1.0), grads)
    np.testing.assert_allclose(info.fraction, [2 / 3, 0, 0, 1], rtol=1e-6)
    assert list(info.num_clipped) == [1, 0, 0, 1]
    assert (info.norm[2], info.threshold[2], info.factor[2]) == (0, np.inf, 1)


def test_info_reports_nonfinite_unit_as_worst():
    grads = np.float32([[jnp.nan, 30.0], [1.0, 40.0]])
    for policy, factor in {"nan": np.nan, "zero": 0}.items():
        found, info = record(optaxclip.clip_by(scopes.unit(), 1.0, nonfinite=policy), grads)
        np.testing.assert_array_equal(found, [np.nan, 1, factor])
        assert (info.num_nonfinite, info.num_clipped) == (1, 1)
        tree, _ = record(optaxclip.clip_by_norm(1.0, nonfinite=policy), grads)
        np.testing.assert_array_equal(tree, [np.nan, 1, factor])


def test_info_counts_masked_unit_by_remaining_norm():
    grads = np.float32([[jnp.nan, 3.0], [1e-3, 4.0]])
    found, info = record(optaxclip.clip_by(scopes.unit(), 1.0, nonfinite="mask"), grads)
    np.testing.assert_allclose(found, [5, 1, 0.2], rtol=1e-5)
    assert (info.num_nonfinite, info.num_clipped) == (1, 1)


def test_info_counts_nonfinite_elements_by_layer():
    grads = np.float32([[jnp.nan, 3.0], [4.0, 1.0]])
    for policy in ("nan", "zero", "mask"):
        scope = scopes.leaf(stacked=1)
        _, info = record(optaxclip.clip_by(scope, 5.0, nonfinite=policy), grads)
        assert list(info.num_nonfinite) == [1, 0]


# The norms and thresholds of two groups, and those of the worse.
CASES = {
    "two without a threshold": ([5, 3], [0, 0], (5, 0)),
    "twice the same ratio": ([2, 4], [1, 2], (4, 2)),
    "the smaller is further above": ([10, 1], [100, 0.5], (1, 0.5)),
    "zero under a threshold of 0": ([0, 0.25], [0, 0.5], (0.25, 0.5)),
    "infinite": ([np.inf, 1e30], [1, 1e-30], (np.inf, 1)),
    "NaN": ([np.nan, np.inf], [1, 2], (np.nan, 1)),
    "nothing above": ([0, 0], [1, 1], (0, 1)),
    "no thresholds": ([0.5, 0], [np.inf, np.inf], (0.5, np.inf)),
}


def test_info_selects_worst_of_two_groups():
    *columns, expected = (np.float32(x) for x in zip(*CASES.values(), strict=True))
    norms, thresholds = (np.concatenate([x, x[:, ::-1]]) for x in columns)

    @jax.jit
    @jax.vmap
    def record_of(norms, thresholds):
        each = {"leaf": thresholds}
        both = optaxclip.Thresholds(each, each)
        return optaxclip.clip_tree(norms[:, None], both, scope=scopes.axes(-1))[1]

    info = record_of(norms, thresholds)
    found = np.stack([info.norm, info.threshold], 1)[..., 0]
    np.testing.assert_array_equal(found, np.concatenate([expected] * 2))
    bad = ~np.isfinite(norms)
    np.testing.assert_array_equal(info.fraction[:, 0], ((norms > thresholds) & ~bad).mean(1))
    np.testing.assert_array_equal(info.num_nonfinite[:, 0], bad.any(1))


def test_info_finds_worst_of_many_units():
    grads = [np.full((2, 2**18 + 1), 0.1, np.float32), np.full((2, 3), 0.2, np.float32)]
    grads[0][:, 70_000] = 3, 4
    found, info = record(optaxclip.clip_by(scopes.unit(), 1.0), jax.tree.map(jnp.asarray, grads))
    np.testing.assert_allclose(found, [5, 1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(info.norm[1], 0.2 * np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(info.fraction, [1 / (2**18 + 1), 0], rtol=1e-6)
    assert list(info.num_clipped) == [1, 0]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("columns", [2**17, 2**18 + 1])
def test_column_norms_use_single_array(columns):
    leaves = [jax.ShapeDtypeStruct((2, columns), jnp.float32)] * 20
    tx = optaxclip.adaptive_grad_clip(0.1)
    state = jax.eval_shape(tx.init, leaves)
    program = str(jax.make_jaxpr(tx.update)(leaves, state, leaves))
    assert f"f32[{20 * columns}]" in program


@pytest.mark.parametrize(
    "tx", [optaxclip.adaptive_grad_clip(0.1, axis=0), optaxclip.clip_by_norm(1.0, 0)]
)
def test_many_norms_from_stacked_leaves_warn(tx):
    few = {"stacked": jax.ShapeDtypeStruct((2, 4, 2**22), jnp.float32)}
    leaves = few | {"vector": jax.ShapeDtypeStruct((2, 1), jnp.float32)}
    jax.eval_shape(tx.init, few)
    with pytest.warns(UserWarning, match=r"'stacked'; pass axis .*stacked=") as warned:
        jax.eval_shape(tx.init, leaves)
    assert warned[0].filename == __file__

"""Clips of updates: Adafactor's behind an optimizer, StableAdamW's inside of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from methods_table import assert_close

import optaxclip
from optaxclip import monitor

GRADS = np.float32([[1, 1], [1.2, 1], [0.8, 1], [1, 1], [5, 1], [1.1, 1]])
RMS = [1, 1.043853, 0.901142, 0.995329, 1.616884, 0.786402]
FACTORS = [1, 0.957989, 1, 1, 0.618474, 1]


def test_clip_by_block_rms_clips_stacked_layers_separately():
    tx = optaxclip.clip_by_block_rms(1.0, stacked={"layers": 1, "head": 0})
    layers = jnp.stack([jnp.full((2, 3), 0.5), jnp.full((2, 3), 4.0)])
    grads = {"layers": layers, "head": jnp.full(3, 2.0)}
    updates, state = tx.update(grads, tx.init(grads))
    assert list(state.info.names) == ["head", "layers/0", "layers/1"]
    np.testing.assert_array_equal(state.info.norm, [2, 0.5, 4])
    np.testing.assert_array_equal(updates["layers"][0], 0.5)
    np.testing.assert_allclose(updates["layers"][1], 1, rtol=1e-6)


@pytest.mark.parametrize("make", [optaxclip.clip_by_block_rms, optaxclip.scale_by_stable_adam])
def test_stacked_default_allows_injected_hyperparams(make):
    tx = optax.inject_hyperparams(make)(0.9)
    jax.eval_shape(tx.update, jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(TypeError, match=r"static_args=\('stacked',\)"):
        optax.inject_hyperparams(make)(0.9, stacked=1).init(jnp.ones(2))


def steps(tx, sequence, params=None):
    """Updates and states of all steps."""
    update, rows = jax.jit(tx.update), []
    state = tx.init(sequence[0] if params is None else params)
    for grads in sequence:
        updates, state = update(grads, state, params)
        rows.append((updates, state))
    return rows


def reference(sequence, b1, b2, eps, threshold):
    """StableAdamW's direction as published, in float64."""
    m = v = 0.0
    for t, grad in enumerate(np.asarray(sequence, np.float64), start=1):
        beta1, beta2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        rms = np.sqrt(np.mean(grad**2 / np.maximum(v, eps**2)))
        yield m / (np.sqrt(v) + eps) / max(1, rms / threshold)


def test_stable_adam_matches_published_ratios_and_factors():
    rows = steps(optaxclip.scale_by_stable_adam(), list(jnp.asarray(GRADS)))
    infos = [monitor.read(state)["clip/scale_by_stable_adam"] for _, state in rows]
    np.testing.assert_allclose([info.norm[0] for info in infos], RMS, rtol=2e-6)
    np.testing.assert_allclose([info.factor[0] for info in infos], FACTORS, rtol=2e-6)
    assert infos[-1].num_clipped[0] == 2
    expected = list(reference(GRADS, 0.9, 0.99, 1e-8, 1.0))
    np.testing.assert_allclose([updates for updates, _ in rows], expected, rtol=3e-6)


def test_stable_adam_with_infinite_threshold_matches_adam():
    ours = optaxclip.scale_by_stable_adam(0.8, 0.95, 1e-4, jnp.inf)
    rng = np.random.default_rng(0)
    sequence = [{"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)} for _ in range(5)]
    found = [updates for updates, _ in steps(ours, sequence)]
    with jax.numpy_dtype_promotion("standard"):
        theirs = [x for x, _ in steps(optax.scale_by_adam(0.8, 0.95, 1e-4), sequence)]
    assert_close(found, theirs, rtol=2e-5)


def test_stable_adam_treats_stacked_layers_separately():
    apart = [{"a": jnp.asarray(g), "b": jnp.asarray(g[::-1] ** 2)} for g in GRADS]
    stack = [{"ab": jnp.stack([x["a"], x["b"]])} for x in apart]
    expected = [
        jnp.stack([x["a"], x["b"]]) for x, _ in steps(optaxclip.scale_by_stable_adam(), apart)
    ]
    rows = steps(optaxclip.scale_by_stable_adam(stacked=1), stack)
    assert_close([x["ab"] for x, _ in rows], expected)


def test_stable_adam_keeps_dtypes():
    tolerance = {"bfloat16": 1e-2, "float16": 1e-3, "complex64": 3e-6}
    turned = {"bfloat16": 1, "float16": 1, "complex64": 1j}
    sequence = [{x: jnp.asarray(g * turned[x]).astype(x) for x in turned} for g in GRADS]
    updates, state = steps(optaxclip.scale_by_stable_adam(), sequence)[-1]
    (*_, last) = reference(GRADS, 0.9, 0.99, 1e-8, 1.0)
    for dtype, rtol in tolerance.items():
        assert updates[dtype].dtype == dtype
        assert state.nu[dtype].dtype == jnp.float32
        found = np.asarray(updates[dtype], complex)
        np.testing.assert_allclose(found, last * turned[dtype], rtol=rtol)


def test_stable_adam_counts_steps_per_leaf():
    tx, params = optaxclip.scale_by_stable_adam(), {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    sequence = [
        {"a": jnp.ones(2), "b": None},
        {"a": jnp.ones(2).at[0].set(jnp.nan), "b": jnp.array([4.0, -2.0])},
    ]
    rows = steps(tx, sequence, params)
    assert [state.count.tolist() for _, state in rows] == [[1, 0], [1, 1]]
    # So the first step of a leaf is not held for its second.
    np.testing.assert_allclose(rows[1][0]["b"], [1, -1], rtol=1e-6)


def test_stable_adam_stays_finite_at_extremes_and_zeros():
    tx = optaxclip.scale_by_stable_adam(clipping_threshold=2.0, eps=0.0)
    sequence = [jnp.full(2, jnp.float32(size)) for size in (0.0, 1.0, 1e25, 3e38, 1e-30, 0.0)]
    for updates, state in steps(tx, sequence):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((updates, state.mu, state.nu)))
        assert np.all(np.abs(updates) <= 2.5)


def test_stable_adam_skips_elements_with_zero_second_moment():
    tx, zeros = optaxclip.scale_by_stable_adam(eps=0.0), jnp.zeros(2)
    # The average of squares underflows sooner than that of gradients, if its decay is the smaller.
    late = {"count": jnp.array([1000]), "mu": jnp.float32([0.5, 0.0])}
    state = tx.init(zeros)._replace(**late)
    updates, state = tx.update(zeros, state)
    assert updates.tolist() == [0, 0]
    assert state.nu.tolist() == [0, 0]


def test_stable_adam_leaves_weight_decay_unclipped():
    direction, params = optaxclip.scale_by_stable_adam(), jnp.ones(2)
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(direction, optax.add_decayed_weights(0.2), optax.scale(-0.5))
        rows = steps(tx, list(jnp.asarray(GRADS)), params)
    alone = steps(direction, list(jnp.asarray(GRADS)))
    assert_close([x for x, _ in rows], [-0.5 * (x + 0.2) for x, _ in alone])


def test_stable_adam_accepts_zero_decay():
    optaxclip.scale_by_stable_adam(b1=0.0, b2=0.0)


@pytest.mark.parametrize("make", [optaxclip.scale_by_stable_adam, optaxclip.clip_by_second_moment])
@pytest.mark.parametrize("shape", [(1,), (), (2, 2)])
def test_moments_of_other_shape_raise(make, shape):
    tx = make(name="mine")
    with pytest.raises(
        ValueError,
        match=r"^mine: leaf 'w' has shape \(2,\), but had shape .*; reinitialize the state$",
    ):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(shape)}))

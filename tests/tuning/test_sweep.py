"""`sweep`: every run is what it would be alone, and the named threshold is the right one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import ops, tuning

STEPS = 60
TARGETS = np.random.default_rng(0).normal(5.0, 0.1, (STEPS, 3)).astype(np.float32)


def init_fn(key):
    return jax.random.normal(key, (3,))


def step_fn(params, target, threshold, rate=0.2):
    loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
    clipped, norm = ops.clip_by_global_norm(grads, threshold)
    return params - rate * clipped, loss, norm


def sweep(thresholds, step=step_fn, key=0, **options):
    return tuning.sweep(init_fn, step, thresholds, STEPS, key=key, data=TARGETS, **options)


def test_sweep_equals_separate_runs():
    result = sweep([5.0, 0.5, 50.0])
    assert result.thresholds.tolist() == [0.5, 5.0, 50.0]
    assert result.loss.shape == result.norm.shape == result.clipped_fraction.shape == (3, STEPS)
    one_step = jax.jit(step_fn)
    for i, threshold in enumerate(result.thresholds):
        params = init_fn(jax.random.key(0))
        for step, target in enumerate(TARGETS):
            params, loss, norm = one_step(params, target, threshold)
            np.testing.assert_allclose(result.loss[i, step], loss, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(result.norm[i, step], norm, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(result.clipped_fraction[i], result.norm[i] > threshold)
    np.testing.assert_allclose(result.final_loss, result.loss[:, -6:].mean(axis=1), rtol=1e-6)


def test_sweep_names_largest_good_threshold():
    def step(params, target, threshold):
        # The rate is too high without clipping.
        return step_fn(params, target, threshold, rate=1.05)

    result = sweep([0.01, 0.3, 1e4], step)
    assert result.diverged.tolist() == [False, False, True]
    assert result.threshold == pytest.approx(0.3)
    assert np.isinf(result.final_loss[2])
    text = str(result)
    assert "<- suggested" in text.splitlines()[2]
    assert "diverged" in text.splitlines()[3]
    lost = sweep([1e4], step)
    assert np.isnan(lost.threshold)
    assert "no threshold is suggested" in str(lost)


def test_sweep_rejects_step_results():
    for step, message in (
        (lambda p, x, c: p, "must return three values"),
        (lambda p, x, c: (p[:2], 0.0, 0.0), "must return a state with the same structure, shapes"),
        (lambda p, x, c: (p, p, 0.0), "must return a scalar loss"),
    ):
        with pytest.raises(TypeError, match=message):
            sweep([1.0], step)
    for key in ("a", True, jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match="key must be a single JAX PRNG key"):
            sweep([1.0], key=key)

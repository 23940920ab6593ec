"""Norms in float64: rules keep float32, which rounds them, and holds none above 3.4e38."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by, monitor, scopes, thresholds

pytestmark = pytest.mark.usefixtures("x64")
MOST = float(np.finfo(np.float32).max)
# By rule: the options for a memory of two norms, and the threshold of the third after 1.0 and 1.1.
RULES = {
    "percentile": ({"window": 2}, 1.095),
    "window": ({"window": 2, "warmup_steps": 2}, 1.2),
    "zscore": ({"warmup_steps": 2, "option": "percentile"}, 1.175),
    "ema": ({}, 2.01),
    "adagc": ({"warmup_steps": 2}, 1.04),
    "quantile": ({}, 0.12214),
}


def run(tx, norms):
    """What one entry of each size becomes, and the last state."""
    state, found = tx.init(jnp.zeros(1)), []
    for norm in norms:
        updates, state = tx.update(jnp.array([norm]), state)
        found.append(float(updates[0]))
    return found, state


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [1e39, 1e300])
@pytest.mark.parametrize("name", RULES)
def test_rules_clip_norms_beyond_float32(name, size):
    options, threshold = RULES[name]
    rule = getattr(thresholds, name)(**options)
    found, state = run(clip_by(scopes.tree(), rule), [1.0, 1.1, size, 1.0])
    assert state.info.num_nonfinite == 0
    assert found[2] <= threshold * (1 + 1e-3)
    assert found[2] > threshold * 0.99
    assert np.isfinite(found[3])


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", [*RULES, "median", "log_tracker"])
def test_where_all_norms_are_beyond_float32_only_a_threshold_of_the_users_clips(name):
    options, _ = RULES.get(name, ({}, None))
    norms = [1e39, 1.1e39, 1e39, 5e39]
    found, state = run(clip_by(scopes.tree(), getattr(thresholds, name)(**options)), norms)
    assert state.info.num_nonfinite == 0
    expected = {"adagc": [1, 1, 1.04, 1.04], "quantile": [0.1, 0.111, 0.122, 0.135]}
    np.testing.assert_allclose(found, expected.get(name, norms), rtol=6e-3)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [1e18, 1e19, 3e38, 1e50])
def test_first_step_never_enlarges_elements(size):
    found, state = run(optaxclip.clip_by_moving_max(), [size])
    assert found == [size]
    np.testing.assert_allclose(state.info.norm, [min(size, MOST)], rtol=1e-6)
    percent = optaxclip.autoclip(percentile=100.0)
    assert run(percent, [size])[0] == [size]


def test_max_norm_caps_norms_beyond_float32():
    rule = thresholds.zscore(max_norm=2.0)
    found, _ = run(clip_by(scopes.tree(), rule), [1e39, 1e300, 1.0])
    np.testing.assert_allclose(found, [2, 2, 1], rtol=1e-6)


def test_records_of_finite_float64_norms_stay_finite():
    skip = optaxclip.skip_above(optax.sgd(1.0), thresholds.zscore(warmup_steps=2))
    _, state = run(skip._replace(update=jax.jit(skip.update)), [1.0, 1.1, 1e39])
    assert (state.num_skipped, state.info.num_nonfinite) == (1, 0)
    assert state.info.norm == np.float32(MOST)
    agc = optaxclip.adaptive_grad_clip(0.1)
    grads = np.array([1e300])
    info = agc.update(grads, agc.init(grads), grads)[1].info
    np.testing.assert_array_equal([*info.norm, *info.threshold], [np.float32(MOST)] * 2)
    _, state = run(monitor.record(1), [1e300])
    np.testing.assert_array_equal(monitor.history(state), [np.float32(MOST)])


def test_adagc_warmup_clips_near_float32_maximum():
    grads = {"a": np.float32([3e38]), "b": np.float32([1.0])}
    tx = optaxclip.adagc()
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["a"], [1], rtol=1e-6)


def test_adagc_warmup_survives_overflowing_global_norm():
    grads = {"a": np.float32([2.6e38, 0.0]), "b": np.float32([0.0, 2.6e38])}

    @jax.jit
    @jax.vmap
    def clipped(largest):
        tx = optaxclip.adagc(lambda_abs=largest)
        return tx.update(grads, tx.init(grads))[0]["a"][0]

    threshold_values = np.float32([1.0, 1e30, 3e38, np.inf])
    expected = np.minimum(threshold_values / np.sqrt(2), grads["a"][0])
    np.testing.assert_allclose(clipped(threshold_values), expected, rtol=1e-6)

"""The response `band`: a lower edge beside the threshold, and bounds on the factor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import clip_by, responses, scopes, thresholds

NORMS = np.float32([0, 1e-30, 1e-3, 0.2, 0.5, 0.7, 1, 1.5, 40, 1e30])


def new_norms(target, trigger=None, **options):
    """What groups of these norms are brought to, one group a row."""
    rows = jnp.asarray(NORMS)[:, None]
    threshold_values = [jnp.full(len(NORMS), x, jnp.float32) for x in (trigger or target, target)]
    tree, info = optaxclip.clip_tree(
        rows,
        optaxclip.Thresholds(*({"leaf": x} for x in threshold_values)),
        scope=scopes.axes(-1),
        response=responses.band(**options),
    )
    assert np.isfinite(info.factor)
    return np.asarray(tree)[:, 0]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_band_bounds_norms_from_both_sides():
    close(new_norms(1.0, low=0.5), np.where(NORMS == 0, 0, np.clip(NORMS, 0.5, 1)))
    inside = (NORMS == 0) | ((NORMS >= 0.5) & (NORMS <= 1))
    np.testing.assert_array_equal(new_norms(1.0, low=0.5)[inside], NORMS[inside])
    close(new_norms(1.0, low=0.0), np.minimum(NORMS, 1))
    close(new_norms(1.0, low=1.0), np.sign(NORMS))
    far = np.where(NORMS > 30, 1, np.maximum(NORMS, 0.2 * (NORMS > 0)))
    close(new_norms(1.0, trigger=30.0, low=0.2), far)


def test_where_there_is_no_threshold_there_is_no_band():
    np.testing.assert_array_equal(new_norms(np.inf, low=0.5), NORMS)
    close(new_norms(1e-8, low=0.5), np.where(NORMS == 0, 0, np.clip(NORMS, 5e-9, 1e-8)))


def test_band_applies_factor_bounds_last():
    ratio = np.clip(1 / np.maximum(NORMS, 1e-38), 0.1, 10)
    close(new_norms(1.0, low=1.0, min_factor=0.1, max_factor=10.0), ratio * NORMS)
    only_up = np.maximum(NORMS, np.sign(NORMS))
    np.testing.assert_array_equal(new_norms(1.0, low=1.0, min_factor=1.0)[6:], NORMS[6:])
    close(new_norms(1.0, low=1.0, min_factor=1.0), only_up)


def test_band_reproduces_published_aggc_sequence():
    """The printed sequence: clipped norms are recorded, in an average begun with the first."""
    rule = thresholds.ema(0.98, 1.5, patience=None, floor=0.0)
    labels = {"q": "attention", "k": "attention", "w": "mlp"}
    tx = clip_by(scopes.group(labels), rule, response=responses.band(0.5 / 1.5))
    update, found = jax.jit(tx.update), []
    zeros = {"q": jnp.zeros(1), "k": jnp.zeros(1), "w": jnp.zeros(1)}
    state = tx.init(zeros)
    for norm in (1.0, 1.2, 0.8, 1.0, 5.0, 1.1, 0.2):
        grads = {"q": jnp.array([0.6 * norm]), "k": jnp.array([0.8 * norm]), "w": jnp.ones(1)}
        updates, state = update(grads, state)
        found.append(np.hypot(updates["q"], updates["k"])[0])
        assert updates["w"] == 1
    close(found, [1, 1.2, 0.8, 1, 1.499882, 1.1, 0.505861])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("low", "high"), [(0.0, 10.0), (0.5, 2.0), (1.0, 1.0)])
def test_band_reproduces_lamb_trust_ratio(low, high):
    rng = np.random.default_rng(0)
    sizes = np.array([1e-3, 0.3, 1, 5, 1e3])
    params = {str(i): jnp.asarray(rng.normal(size=4), jnp.float32) for i in range(5)}
    updates = {
        str(i): jnp.asarray(size * rng.normal(size=4), jnp.float32) for i, size in enumerate(sizes)
    }
    response = responses.band(1.0, min_factor=low, max_factor=high)
    rule = thresholds.relative_to_params(1.0, eps=0.0)
    trust = clip_by(scopes.leaf(), rule, response=response)
    found, _ = optax.chain(trust, optax.scale(-0.1)).update(
        updates, (trust.init(params), optax.ScaleState()), params
    )
    for name, u in updates.items():
        ratio = np.clip(np.linalg.norm(params[name]) / np.linalg.norm(u), low, high)
        close(found[name], -0.1 * ratio * u)


def test_band_derivatives_stay_finite():
    def new(norm, target, **options):
        return responses.band(0.5, **options)(norm, target, target)

    points = jnp.asarray([0.0, 0.01, 0.5, 1.0, 40.0], jnp.float32)
    for options in ({}, {"min_factor": 0.1, "max_factor": 10.0}):
        slopes = jax.vmap(jax.value_and_grad(functools.partial(new, **options), (0, 1)), (0, None))
        for target in (0.0, 1.0, jnp.inf):
            norms, grads = slopes(points, jnp.float32(target))
            assert norms[0] == 0
            assert np.all(np.isfinite(grads))


def test_clip_by_accepts_response_name_band():
    grads = {"a": np.float32([3.0, 4.0]), "b": np.float32([0.1])}
    updates, state = clip_by(scopes.leaf(), 1.0, response="band").update(grads, None)
    close(updates["b"], [1 / 3])
    close(state.info.factor, [0.2, 10 / 3])


def test_responses_treat_numpy_scalars_as_numbers():
    numpys = [make(0.5) for make in (np.float16, np.float32, np.float64)] + [np.array(0.5)[()]]
    assert {responses.band(x) for x in numpys} == {responses.band(0.5)}
    assert responses.band(max_factor=np.int64(2)) == responses.band(max_factor=2.0)
    assert responses.clip_with_eps(np.float32(0.25)) == responses.clip_with_eps(0.25)

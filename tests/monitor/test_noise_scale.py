"""The noise scale: that of gradients whose covariance is known, and what is made of odd sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optaxclip import accumulate, monitor
from optaxclip.monitor import NoiseScaleState

SIZE, SMALL, LARGE, STEPS = 32, 4, 64, 3000
SIGNAL = 1.0


@functools.cache
def variances():
    """Of the entries of one example's gradient, over three orders of magnitude."""
    return np.geomspace(0.003, 6.0, SIZE).astype(np.float32)


def one_step(key, tokens):
    """Gradients of 64 examples around a vector of norm 1; one of `n` tokens varies by 1/n of it."""
    noise = jax.random.normal(key, (LARGE, SIZE)) * np.sqrt(variances())[None]
    return SIZE**-0.5 + noise / jnp.sqrt(tokens)[:, None]


def loss_fn(w, x, tokens):
    return jnp.sum(tokens[:, None] * x * w[None]) / jnp.sum(tokens)


def after_steps(tokens, decay=0.999, steps=STEPS, **options):
    """The state after so many steps, and their sums."""
    by_parts = accumulate.value_and_grad(
        loss_fn, batch_argnums=(1, 2), microbatch_size=SMALL, **options
    )
    tx, w = monitor.noise_scale(decay), jnp.zeros(SIZE)

    def step(state, key):
        _, grads, found = by_parts(w, one_step(key, tokens), tokens)
        return tx.update(grads, state, noise=found.noise)[1], found.noise

    keys = jax.random.split(jax.random.key(0), steps)
    return jax.jit(lambda: jax.lax.scan(step, tx.init(w), keys))()


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_noise_scale_estimates_known_covariance(unequal):
    tokens = jnp.ones(LARGE)
    options = {}
    if unequal:
        # Microbatches of 4 to 28 tokens.
        tokens = jnp.asarray(np.tile(np.arange(LARGE // SMALL) % 7 + 1.0, SMALL), jnp.float32)
        options = {"weight": lambda x, tokens: jnp.sum(tokens)}
    state, noise = after_steps(tokens, **options)
    expected = np.sum(variances()) / SIGNAL
    np.testing.assert_allclose(state.variance, np.sum(variances()), rtol=0.03)
    np.testing.assert_allclose(state.signal, SIGNAL, rtol=0.03)
    np.testing.assert_allclose(state.scale, expected, rtol=0.03)
    if not unequal:
        # The mean of the steps' own ratios is far off, which is why sums are averaged first.
        assert not np.isclose(np.mean(noise.variance / noise.signal), expected, rtol=0.03)


@pytest.mark.slow
def test_noise_scale_measures_clipped_microbatches():
    """All brought to one norm: what they differ in is direction alone, at each step."""
    tokens = jnp.ones(LARGE)
    state, _ = after_steps(tokens, steps=100, clip=0.01)
    assert float(state.signal + state.variance / SMALL) == pytest.approx(1e-4, rel=0.01)


def sums(signal, variance):
    return accumulate.NoiseSums(jnp.float32(signal), jnp.float32(variance))


def run(tx, *given):
    state = tx.init(jnp.zeros(2))
    for noise in given:
        updates, state = tx.update("untouched", state, noise=noise)
        assert updates == "untouched"
    return state


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, np.float32(0.9)])
def test_noise_scale_averages_with_decay(decay):
    given = [(1.0, 10.0), (2.0, 5.0), (-1.0, 7.0), (4.0, 1.0)]
    state = run(monitor.noise_scale(decay), *(sums(*x) for x in given))
    counts = float(decay) ** np.arange(4)[::-1]
    expected = np.average(given, axis=0, weights=counts)
    np.testing.assert_allclose([state.signal, state.variance], expected, rtol=1e-5)
    np.testing.assert_allclose(state.scale, expected[1] / expected[0], rtol=1e-5)
    assert int(state.steps) == 4


def test_noise_scale_ignores_nonfinite_sums():
    tx = monitor.noise_scale(0.9)
    bad = [sums(np.nan, 1.0), sums(1.0, np.inf), sums(np.nan, np.nan)]
    good = [sums(2.0, 8.0), sums(1.0, 5.0)]
    with_bad = run(tx, bad[0], good[0], bad[1], bad[2], good[1])
    for x, y in zip(jax.tree.leaves(with_bad), jax.tree.leaves(run(tx, *good)), strict=True):
        assert x == y
    assert np.isnan(run(tx, *bad).scale)


@pytest.mark.parametrize(
    ("signal", "variance", "scale"),
    [(-1.0, 2.0, np.inf), (0.0, 0.0, np.inf), (2.0, -1.0, 0.0), (0.5, 1.0, 2.0)],
)
def test_noise_scale_handles_nonpositive_sums(signal, variance, scale):
    assert run(monitor.noise_scale(), sums(signal, variance)).scale == scale


def test_scalars_contain_noise_scale():
    tx = optax.chain(monitor.noise_scale(0.9, name="batch"), optax.sgd(0.1))
    state = tx.init(jnp.zeros(2))
    state = tx.update(jnp.ones(2), state, noise=sums(2.0, 8.0))[1]
    expected = {"batch/scale": 4.0, "batch/signal": 2.0, "batch/variance": 8.0}
    assert monitor.scalars(state) == expected
    found = jax.jit(monitor.metrics)(state)
    assert {name: float(x) for name, x in found.items()} == expected
    seeds = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    assert monitor.scalars(seeds) == expected


def test_noise_scale_keeps_state_structure():
    tx, traced = monitor.noise_scale(), []

    @jax.jit
    def step(state, noise):
        traced.append(noise)
        return tx.update(None, state, noise=noise)[1]

    state = tx.init(None)
    for x in (1.0, 2.0, np.nan):
        state = step(state, sums(x, x))
    assert isinstance(state, NoiseScaleState)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: monitor.noise_scale(1.0), ValueError, "decay must be .* below 1, got 1.0"),
        (
            lambda: monitor.noise_scale(1 - 1e-9),
            ValueError,
            "below 1 after rounding to float32, got .*; use 0.99999994 or less$",
        ),
        (lambda: monitor.noise_scale(-0.1), ValueError, "decay must be at least 0 .* got -0.1"),
        (lambda: monitor.noise_scale(1.5), ValueError, "decay must be .* below 1, got 1.5"),
        (lambda: monitor.noise_scale(np.nan), ValueError, "decay must be .* below 1, got nan"),
        (lambda: monitor.noise_scale("0.9"), TypeError, "decay must be a number"),
        (
            lambda: run(monitor.noise_scale(), None),
            ValueError,
            "noise is required; pass",
        ),
        (lambda: run(monitor.noise_scale(), 3.0), TypeError, "noise must be the NoiseSums"),
    ],
)
def test_noise_scale_rejects_invalid_arguments(make, kind, message):
    with pytest.raises(kind, match=message):
        make()

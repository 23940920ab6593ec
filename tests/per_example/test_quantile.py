"""The threshold that follows a quantile of the examples' norms, and its privacy accounting."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import per_example, scopes
from optaxclip import per_example_clip_and_aggregate as aggregate


@functools.cache
def moves():
    """By how much one example can change the count and the sum: added, and replaced by another.

    The count is read from the threshold, which moves by the count over the batch size.
    """
    grads = jnp.array([[0.3, 0.4], [0.6, 0.8], [3.0, 4.0], [-6.0, -8.0], [0.0, 0.0], [jnp.nan, 0]])
    rule = per_example.quantile_threshold(0.5, 1.0, 1.0, geometric=False)
    tx = aggregate(rule, 0.0, reduction="sum", batch_size=64)

    def released(chosen):
        total, state = tx.update(grads, tx.init(grads[0]), is_padding=~chosen)
        return jnp.append(64 * (1 - state.threshold), total)

    batches = (np.arange(64)[:, None] >> np.arange(6)) % 2 == 1
    found = np.asarray(jax.jit(jax.vmap(released))(batches))
    moved = np.abs(found[:, None, :1] - found[None, :, :1])[..., 0]
    moved = np.stack([moved, np.linalg.norm(found[:, None, 1:] - found[None, :, 1:], axis=-1)])
    differ = np.sum(batches[:, None] != batches[None], -1)
    same_size = np.sum(batches, 1)[:, None] == np.sum(batches, 1)
    return [moved[:, differ == 1].max(1), moved[:, (differ == 2) & same_size].max(1)]


def test_quantile_count_has_half_sensitivity_of_sum():
    """Any batch of six examples, padded, and each of its neighbours."""
    added, replaced = moves()
    np.testing.assert_allclose(added, [0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(replaced, [1.0, 2.0], rtol=1e-6)


@pytest.mark.slow
def test_sum_and_count_noise_matches_accountant():
    accounting = pytest.importorskip("dp_accounting")
    gaussian = accounting.GaussianDpEvent

    def epsilon(*events):
        step = accounting.PoissonSampledDpEvent(0.1, accounting.ComposedDpEvent(list(events)))
        return accounting.rdp.RdpAccountant().compose(step, 300).get_epsilon(1e-5)

    noise_multiplier, count_noise = 1.1, 1.0
    of_sum = float(per_example.adjust_noise_multiplier(noise_multiplier, count_noise))
    for of_count, change in np.asarray(moves()) / [[1], [2]]:
        both = epsilon(gaussian(of_sum / change), gaussian(count_noise / of_count))
        assert both == pytest.approx(epsilon(gaussian(noise_multiplier)), rel=1e-4)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("options", "records", "thresholds", "sums"),
    [
        ((0, 1, 10, False), [8.5, -7.25], [10, 9, 8, 7.5, 7, 7], [1.25, 1.25, 0.75, 0.25, 0]),
        (
            (0, math.log(2), 16, True),
            [5, -2.5],
            [16, 8, 4, 2.8284, 2, 2],
            [2.5, 2.5, 1.5, 0.3284, 0],
        ),
        ((1, 1, 0, False), [-1.5, 2.75], [0, 1, 2, 2.5, 3, 3], [0, 0, 0.5, 1, 1.25]),
        ((1, math.log(2), 0.5, True), [-1.5, 3], [0.5, 1, 2, 2.8284, 4], [0, 0, 0.5, 1.3284, 1.5]),
    ],
)
def test_quantile_limit_matches_published_vectors(options, records, thresholds, sums):
    target, learning_rate, init_threshold, geometric = options
    rule = per_example.quantile_threshold(
        target, learning_rate, init_threshold, geometric=geometric
    )
    tx = aggregate(rule, 0.0, reduction="sum")
    grads, state, update = jnp.array(records), tx.init(jnp.zeros(())), jax.jit(tx.update)
    found = []
    for _ in thresholds:
        found.append(float(state.threshold))
        total, state = update(grads, state)
        if len(found) <= len(sums):
            np.testing.assert_allclose(total, sums[len(found) - 1], atol=1e-4)
    np.testing.assert_allclose(found, thresholds, rtol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("init_threshold", "batch_size", "thresholds"),
    [
        (1.0, None, [0.951229, 0.951229]),
        (1.0, 8, [math.exp(-0.025), math.exp(-0.025)]),
        (3.0, None, [2.714512, 2.456192, 2.222455, 2.010960, 1.819592, 1.730849]),
    ],
)
def test_quantile_limit_counts_missing_examples_by_half(init_threshold, batch_size, thresholds):
    """Examples that a batch of the given size lacks count by halves."""
    tx = aggregate(
        per_example.quantile_threshold(0.5, 0.2, init_threshold), 0.0, batch_size=batch_size
    )
    grads, state, found = jnp.array([0.2, 0.6, 1.0, 2.0]), tx.init(jnp.zeros(())), []
    update = jax.jit(tx.update)
    for _ in thresholds:
        _, state = update(grads, state)
        found.append(float(state.threshold))
    np.testing.assert_allclose(found, thresholds, rtol=1e-6)


def test_quantile_limit_counts_multi_group_examples_once():
    grads = {"a": jnp.array([3.0, 0.1]), "b": jnp.array([0.1, 0.1])}
    tx = aggregate(per_example.quantile_threshold(init_threshold=1.0), 0.0, scope=scopes.leaf())
    _, state = jax.jit(tx.update)(grads, tx.init(jax.tree.map(lambda x: x[0], grads)))
    assert float(state.threshold) == 1.0
    assert int(state.num_clipped) == 1


def test_noise_on_the_count_and_range_of_the_threshold():
    rule = per_example.quantile_threshold(
        0.5, 1.0, 1.0, count_noise=10.0, min_threshold=0.9, max_threshold=1.3
    )
    keys = jax.random.split(jax.random.key(0), 200)
    moved = jax.jit(jax.vmap(lambda key: rule.update(jnp.ones(()), 50, 100, key, batch_size=100)))(
        keys
    )
    assert np.std(np.log(np.clip(moved, 0.91, 1.29))) > 0.05
    assert np.min(moved) == np.float32(0.9)
    assert 1 < np.max(moved) <= np.float32(1.3)
    assert per_example.quantile_threshold(init_threshold=5.0, max_threshold=0.5).init() == 0.5
    rule = per_example.quantile_threshold(0.0, 1.0, count_noise=10.0, geometric=False)
    moved = jax.jit(jax.vmap(lambda key: rule.update(jnp.ones(()), 50, 100, key, batch_size=100)))(
        keys
    )
    assert np.std(100 * moved) == pytest.approx(10, rel=0.1)


def test_quantile_limit_accepts_numbers_of_any_dtype():
    numbers = (0.5, 0.25, 1.0, 2.0, 0.5, 4.0)
    for dtype in (jnp.bfloat16, np.float64):
        _, rate, init, noise, low, high = map(dtype, numbers)
        target = np.float32(numbers[0])  # refused in dtypes with fewer digits
        rule = per_example.quantile_threshold(
            target, rate, init, count_noise=noise, min_threshold=low, max_threshold=high
        )
        update = functools.partial(rule.update, batch_size=4)
        threshold = jax.eval_shape(update, rule.init(), 3, 4, jax.random.key(0))
        assert threshold.dtype == jnp.float32


SHARES = [(500, 100, 1), (-300, 100, 0), (0, 0, 0.5), (1, 1, 1)]


@pytest.mark.parametrize(("count", "examples", "share"), SHARES)
def test_quantile_limit_clips_noisy_fraction_to_unit_interval(count, examples, share):
    """As noise can make it, or a batch that is larger than expected; of none it is a half."""
    rule = per_example.quantile_threshold(0.5, 1.0, 1.0)
    moved = rule.update(jnp.ones(()), count, examples, batch_size=examples)
    np.testing.assert_allclose(moved, math.exp(0.5 - share), rtol=1e-6)


@pytest.mark.parametrize("numbers", [(-1.0, 5.0), (0.0, -5.0)])
def test_adjusted_noise_multiplier_rejects_negative_noise(numbers):
    with pytest.raises(ValueError, match="must not be negative"):
        per_example.adjust_noise_multiplier(*numbers)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("count_noise", "adjusted"), [(5.0, 1.0050378), (0.6, 1.8090681)])
def test_adjusted_noise_multiplier_matches_formula(count_noise, adjusted):
    assert float(per_example.adjust_noise_multiplier(1.0, count_noise)) == pytest.approx(adjusted)
    zeros = jnp.zeros((2, 300, 300))
    rule = per_example.quantile_threshold(init_threshold=1.0, count_noise=count_noise)
    tx = aggregate(rule, 1.0, 0, reduction="sum")
    noise, _ = jax.jit(tx.update)(zeros, tx.init(zeros[0]))
    assert np.std(noise) == pytest.approx(adjusted, rel=0.02)


def test_adjusted_noise_multiplier_accepts_traced_values():
    adjusted = jax.jit(per_example.adjust_noise_multiplier)
    np.testing.assert_allclose(adjusted(0.0, 0.0), 0)
    np.testing.assert_allclose(adjusted(2.0, 1.0), np.inf)

"""Where there is no threshold, or none yet: the group stays, and so do its derivatives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import per_example, responses, scopes, thresholds

RESPONSES = {
    **{name: name for name in ("clip", "normalize", "smooth", "auto_s", "band")},
    "auto_s(0)": responses.auto_s(0.0),
    "clip_with_eps": responses.clip_with_eps(),
    "clip_with_eps(0)": responses.clip_with_eps(0.0),
    "band with bounds": responses.band(0.5, min_factor=0.1, max_factor=10.0),
}
RULES = {
    "constant": functools.partial(thresholds.constant, math.inf),
    "schedule": functools.partial(thresholds.schedule, lambda count: jnp.inf),
    "relative_to_params": functools.partial(thresholds.relative_to_params, math.inf),
    **{
        name: getattr(thresholds, name)
        for name in ("percentile", "window", "median", "zscore", "log_tracker")
    },
    "adagc": functools.partial(thresholds.adagc, warmup_steps=0),
    "ema": functools.partial(thresholds.ema, warmup_steps=1),
    "zscore to the mean": functools.partial(thresholds.zscore, option="mean"),
}
GRADS = {
    "a": np.float32([3.0, -4.0]),
    "small": np.float32([1e-20, 0.0]),
    "zero": np.zeros(2, np.float32),
}


def first_step(rule, response, grads, params):
    tx = optaxclip.clip_by(scopes.leaf(), RULES[rule](), response=RESPONSES[response])
    return tx.update(grads, tx.init(params), params)


# All rules with the response whose factor is taken as it is, all responses with one rule.
PAIRS = [(rule, "clip_with_eps(0)") for rule in RULES]
PAIRS += [("constant", response) for response in RESPONSES if response != "clip_with_eps(0)"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("rule", "response"), PAIRS)
def test_a_group_without_a_threshold_stays_and_so_do_its_derivatives(rule, response):
    def loss(grads, params):
        updates, state = first_step(rule, response, grads, params)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(updates)), (updates, state.info)

    @jax.jit
    def derivatives(grads, params):
        _, push, (updates, info) = jax.linearize(loss, grads, params, has_aux=True)
        reverse = jax.linear_transpose(push, grads, params)(1.0)
        ones = jax.tree.map(jnp.ones_like, (grads, params))
        return reverse, updates, info, push(*ones)

    params = jax.tree.map(lambda x: x + 1, GRADS)
    (of_grads, of_params), updates, info, forward = derivatives(GRADS, params)
    jax.tree.map(np.testing.assert_array_equal, updates, GRADS)
    np.testing.assert_array_equal(info.threshold, [math.inf] * 3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, np.cos(x)), GRADS, of_grads)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), of_params)
    np.testing.assert_allclose(forward, sum(np.sum(np.cos(x)) for x in GRADS.values()), rtol=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("response", ["normalize", "clip_with_eps"])
def test_derivatives_are_finite_far_from_the_threshold(response):
    """Those of the factor leave the range, those of what comes out do not."""

    def loss(x, threshold):
        options = {"scope": scopes.leaf(), "response": RESPONSES[response]}
        return jnp.sum(optaxclip.clip_tree({"x": x}, threshold, **options)[0]["x"])

    @jax.jit
    def both(x, threshold):
        direction = jnp.ones_like(x)
        return jax.grad(loss, (0, 1))(x, threshold), jax.jvp(
            lambda x: loss(x, threshold), (x,), (direction,)
        )

    for x, threshold in (([1e-20, 0.0], 0.1), ([1e30, 1.0], 2.0), ([1e-30, 1e-31], 1e-8)):
        found = both(np.float32(x), np.float32(threshold))
        assert all(np.all(np.isfinite(each)) for each in jax.tree.leaves(found)), (x, threshold)
        (slope, _), (_, forward) = found
        if response == "normalize":
            np.testing.assert_allclose(np.sum(slope), forward, rtol=1e-4)


@functools.cache
def slopes_of_sums(response):
    def loss(grads, threshold):
        clip = functools.partial(per_example.clip_sum, response=response, scope=scopes.leaf())
        return jnp.sum(jnp.sin(clip({"a": grads}, threshold).grads["a"]))

    return jax.jit(jax.grad(loss, (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("response", ["clip", "auto_s"])
def test_dropped_example_has_zero_derivative(response, bad):
    kept = np.float32([[3, 4], [0.1, 0.2]])
    expected, expected_threshold = slopes_of_sums(response)(kept, 1.0)
    found, of_threshold = slopes_of_sums(response)(np.append(kept, np.float32([[bad, 1]]), 0), 1.0)
    np.testing.assert_allclose(found, [*expected, [0, 0]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_threshold, expected_threshold, rtol=1e-5)


# None that warms up by a threshold of the user's, as AdaGC, or begins with one, as the quantile.
AT_ONCE = {
    "percentile": thresholds.percentile,
    "window": thresholds.window,
    "zscore": thresholds.zscore,
    "zscore, debiased": functools.partial(thresholds.zscore, debias=True),
    "zscore to the mean": functools.partial(thresholds.zscore, option="mean"),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("patience", [20, None])
@pytest.mark.parametrize("name", AT_ONCE)
def test_rules_wait_for_first_recorded_norm(name, patience):
    rule = AT_ONCE[name](warmup_steps=0, patience=patience)
    state, update = rule.init(jnp.zeros(())), jax.jit(rule.update)
    # The first is below the floor, the second is not finite: neither is recorded.
    for norm in (1e-9, jnp.nan, 3.0):
        threshold_values, state = update(jnp.float32(norm), state, None)
        assert threshold_values.trigger == threshold_values.target == math.inf
    # What came first is all that is known.
    np.testing.assert_allclose(update(jnp.float32(2.9), state, None)[0].trigger, 3, rtol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["zscore", "window", "percentile"])
def test_loss_limit_waits_for_first_recorded_loss(name):
    rule = AT_ONCE[name](warmup_steps=0)
    tx = optaxclip.skip_above(optax.sgd(1.0), jnp.inf, loss_threshold=rule)
    ones, update = np.ones(2, np.float32), jax.jit(tx.update)
    state, skipped = tx.init(ones), []
    for loss in (-3.0, -3.1, np.nan, -3.2, 100.0):
        _, state = update(ones, state, None, value=np.float32(loss))
        skipped.append(int(state.num_skipped))
    assert skipped == [0, 0, 1, 1, 2]


def test_normalize_without_target_keeps_gradients():
    tx = optaxclip.clip_by(scopes.tree(), thresholds.mean_over_rms(), response="normalize")
    tiny = np.float32([1e-9, 0.0])
    np.testing.assert_array_equal(tx.update(tiny, tx.init(tiny))[0], tiny)

"""Microbatches clipped and rejected by the engine's clips and rules, one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip import accumulate, monitor, scopes, thresholds


def loss_fn(params, x):
    """Its gradient is the mean of the rows of `x`: three columns for `w`, the last for `b`."""
    return jnp.mean(x[:, :3] @ params["w"] + x[:, 3] * params["b"])


PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}
NORMS = np.array([1.0, 2.0, 1.5, 40.0, 1.2, 0.5, np.inf, 1.1], np.float32)


def batch_of(norms):
    """One example a microbatch, in directions that differ, of these norms."""
    rows = np.random.default_rng(0).normal(size=(len(norms), 4)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * norms[:, None]


def as_tree(row):
    return {"w": row[:3], "b": row[3]}


def one_by_one(clip, rule, rows):
    """The mean as a loop of plain Python makes it."""
    clip_state, rule_state = clip.init(PARAMS), rule.init(jnp.zeros(()))
    update_clip, update_rule = jax.jit(clip.update), jax.jit(rule.update)
    total, rejected = np.zeros(4), []
    for row in rows:
        norm = np.linalg.norm(row)
        threshold_values, rule_state = update_rule(norm, rule_state, None)
        rejected.append(not norm <= threshold_values.trigger)
        if not rejected[-1]:
            clipped, clip_state = update_clip(as_tree(row), clip_state, PARAMS)
            total += np.append(clipped["w"], clipped["b"])
    return total / (len(rows) - sum(rejected)), rejected, clip_state, rule_state


CLIPS = {
    "zclip": optaxclip.zclip(warmup_steps=1, max_norm=1.4),
    "by leaf": optaxclip.clip_by_norm(1.0),
    "chain": optax.chain(optaxclip.clip_by_global_norm(1.2), optax.trace(0.5)),
}
RULES = {
    "constant": thresholds.constant(1.6),
    "zscore": thresholds.zscore(warmup_steps=2),
    "window": thresholds.window(3.0, 4, warmup_steps=2),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("clip", "rule"), list(zip(CLIPS, RULES, strict=True)))
def test_accumulate_matches_python_loop(clip, rule):
    clip, rule = CLIPS[clip], RULES[rule]
    judged = accumulate.value_and_grad(loss_fn, microbatch_size=1, clip=clip, reject_rule=rule)
    rows = batch_of(NORMS)
    _, grads, found = jax.jit(judged)(PARAMS, rows, state=judged.init(PARAMS, rows))
    mean, rejected, clip_state, rule_state = one_by_one(clip, rule, rows)
    np.testing.assert_allclose(np.append(grads["w"], grads["b"]), mean, rtol=1e-5)
    assert list(found.rejected) == rejected
    assert 0 < sum(rejected) < len(rows)
    np.testing.assert_allclose(found.norm, NORMS, rtol=1e-6)
    expected = accumulate.AccumulateState(clip_state, rule_state)
    assert jax.tree.structure(found.state) == jax.tree.structure(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found.state, expected)


def test_clip_number_bounds_global_norm_per_microbatch():
    rows = batch_of(NORMS[:6])
    judged = accumulate.value_and_grad(loss_fn, microbatch_size=1, clip=1.0)
    _, grads, found = jax.jit(judged)(PARAMS, rows)
    expected = np.mean(batch_of(np.minimum(NORMS[:6], 1)), axis=0)
    np.testing.assert_allclose(np.append(grads["w"], grads["b"]), expected, rtol=1e-5)
    (info,) = monitor.read(found.state).values()
    assert (int(info.num_clipped), float(info.threshold)) == (4, 1.0)
    np.testing.assert_allclose(info.norm, NORMS[5], rtol=1e-6)


def test_clip_schedule_counts_microbatches():
    rows = batch_of(NORMS[:3])
    judged = accumulate.value_and_grad(
        loss_fn, microbatch_size=1, clip=optax.linear_schedule(1.0, 0.8, 2)
    )
    grads = jax.jit(judged)(PARAMS, rows, state=judged.init(PARAMS, rows))[1]
    expected = np.mean(batch_of(np.array([1.0, 0.9, 0.8], np.float32)), axis=0)
    np.testing.assert_allclose(np.append(grads["w"], grads["b"]), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_accumulate_rejects_only_nonfinite_microbatches(bad):
    rows = batch_of(NORMS[:6])
    kept = np.delete(rows, 2, axis=0)
    rows[2, 1] = bad
    step = jax.jit(accumulate.value_and_grad(loss_fn, microbatch_size=1))
    value, grads, found = step(PARAMS, rows)
    assert list(found.rejected) == [False, False, True, False, False, False]
    expected = step(PARAMS, kept)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), (value, grads), expected[:2]
    )
    np.testing.assert_allclose(found.noise, expected[2].noise, rtol=1e-5)
    everything = accumulate.value_and_grad(loss_fn, microbatch_size=1, reject_rule=None)
    of_all = jax.jit(everything)(PARAMS, rows)[1]["w"]
    assert np.isnan(of_all[1]) or bad == np.inf
    assert not np.all(np.isfinite(of_all))


def test_accumulate_rejects_nonfinite_losses():
    def loss(w, x):
        return jnp.mean(x[:, 0] * w) + jnp.mean(x[:, 1])

    rows = jnp.array([[1.0, 0.0], [2.0, jnp.inf], [3.0, 0.0]])
    judged = accumulate.value_and_grad(loss, microbatch_size=1)
    all_count = accumulate.value_and_grad(loss, microbatch_size=1, reject_rule=None)
    both = jax.jit(lambda *args: (judged(*args), all_count(*args)))
    (value, grads, found), (of_all, *_, kept) = both(jnp.float32(1), rows)
    assert np.isinf(of_all)
    assert not np.any(kept.rejected)
    assert list(found.rejected) == [False, True, False]
    assert (float(value), float(grads)) == (2.0, 2.0)


def test_accumulate_returns_nan_if_all_rejected():
    tx = optaxclip.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    judged = accumulate.value_and_grad(loss_fn, microbatch_size=1)
    value, grads, found = jax.jit(judged)(PARAMS, batch_of(np.full(3, np.inf, np.float32)))
    assert np.all(found.rejected)
    assert np.isnan(value)
    assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves((grads, found.noise)))
    updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert int(state.num_skipped) == 1


def test_clip_state_ignores_rejected_and_zero_weight_microbatches():
    rows = batch_of(NORMS)

    def weight(x):
        return jnp.where(jnp.abs(jnp.linalg.norm(x) - 1.2) < 0.01, 0.0, 1.0)

    judged = accumulate.value_and_grad(
        loss_fn, microbatch_size=1, clip=1.0, reject_rule=5.0, weight=weight
    )
    found = jax.jit(judged)(PARAMS, rows)[2]
    assert list(np.flatnonzero(found.rejected)) == [3, 6]
    assert list(np.flatnonzero(found.weight == 0)) == [4]
    assert int(found.state.clip.steps) == 5


def test_zero_weight_microbatches_add_nothing():
    def loss(w, x):
        return jnp.sum(w * x) / jnp.sum(x != 0).astype(jnp.float32)

    rows = jnp.array([[1.0], [0.0], [3.0]])
    for options in ({}, {"reject_rule": None}, {"reject_rule": None, "compute_norms": False}):
        counted = accumulate.value_and_grad(
            loss, microbatch_size=1, weight=lambda x: jnp.sum(x != 0), **options
        )
        value, grads, found = jax.jit(counted)(jnp.float32(1.0), rows)
        assert (float(value), float(grads)) == (2.0, 2.0)
        assert not np.any(found.rejected)
        assert np.isnan(found.loss[1])


def test_reject_accepts_rule_relative_to_params():
    # Their norm is 2.
    judged = accumulate.value_and_grad(
        loss_fn, microbatch_size=1, reject_rule=thresholds.relative_to_params(0.61)
    )
    found = jax.jit(judged)(PARAMS, batch_of(NORMS))[2]
    np.testing.assert_array_equal(found.rejected, ~(NORMS <= 1.2))


def test_clip_accepts_rule_relative_to_params():
    clip = optaxclip.clip_by(scopes.leaf(), thresholds.relative_to_params(0.1))
    judged = accumulate.value_and_grad(loss_fn, microbatch_size=1, clip=clip)
    grads = jax.jit(judged)(PARAMS, batch_of(NORMS))[1]
    assert abs(float(grads["b"])) <= 0.1
    assert np.linalg.norm(grads["w"]) <= 0.1 * 3**0.5 * (1 + 1e-6)


@pytest.mark.slow
def test_accumulate_without_measuring_returns_same_mean():
    rows = batch_of(NORMS[:6])
    plain = accumulate.value_and_grad(
        loss_fn, microbatch_size=2, reject_rule=None, compute_norms=False
    )
    value, grads, found = plain(PARAMS, rows)
    expected = accumulate.value_and_grad(loss_fn, microbatch_size=2)(PARAMS, rows)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), (value, grads), expected[:2]
    )
    assert np.all(np.isnan(found.norm))
    assert np.all(np.isnan(found.noise))
    np.testing.assert_allclose(found.loss, expected[2].loss, rtol=1e-6)


def test_the_noise_of_what_a_threshold_leaves_where_the_factor_is_no_number():
    """A norm of 1e25 is brought to 1e-15: in float32 the factor 1e-40 is 0 on a CPU."""
    judged = accumulate.value_and_grad(loss_fn, microbatch_size=1, clip=1e-15)
    rows = batch_of(np.full(8, 1.0, np.float32))
    run = jax.jit(judged)
    found, expected = (run(PARAMS, rows * size)[2].noise for size in (1e25, np.float32(1.0)))
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-5)
    assert found.variance > 0


@pytest.mark.by_day(1)
@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0, np.nan, 1.0]])
@pytest.mark.parametrize("options", [{}, {"reject_rule": None, "compute_norms": False}])
def test_invalid_traced_weights_return_nan(weights, options):
    """All 0, negative, NaN: of a traced weight there is no telling beforehand."""

    def loss(w, x, weights):
        return jnp.mean(x) * w

    made = accumulate.value_and_grad(
        loss, batch_argnums=(1, 2), microbatch_size=1, weight=lambda x, w: jnp.sum(w), **options
    )
    value, grads, _ = jax.jit(made)(
        jnp.float32(2.0), jnp.ones((3, 2)), jnp.asarray(weights, jnp.float32)
    )
    assert np.isnan(value)
    assert np.isnan(grads)

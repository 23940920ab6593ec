"""Sweeps: every run is what it would be alone, and the named threshold is the right one."""

import os
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
import optaxclip.tuning.replaying as replaying
import optaxclip.tuning.runs as runs
import optaxclip.tuning.sweeping as sweeping
from optaxclip import ops, tuning

STEPS = 60
KEY = jax.random.key(0)
TARGETS = np.random.default_rng(0).normal(5.0, 0.1, (STEPS, 3)).astype(np.float32)


def init_fn(key):
    return jax.random.normal(key, (3,))


def step_fn(params, target, threshold, rate=0.2):
    loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target) ** 2))(params)
    clipped, norm = ops.clip_by_global_norm(grads, threshold)
    return params - rate * clipped, loss, norm


def swept(thresholds, steps=STEPS, step=step_fn, key=KEY, **options):
    return tuning.sweep(init_fn, step, thresholds, steps, key=key, data=TARGETS, **options)


one_step = jax.jit(step_fn)


def alone(threshold, key, rate=0.2):
    params, losses, norms = init_fn(key), [], []
    for target in TARGETS:
        params, loss, norm = one_step(params, target, jnp.float32(threshold), rate)
        losses.append(loss)
        norms.append(norm)
    return np.array(losses), np.array(norms)


def test_each_run_is_what_it_would_be_alone_and_a_terminal_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    thresholds = [0.5, 5.0, 50.0]
    result = swept(thresholds, progress=True)
    assert "sweep" in capsys.readouterr().err
    (key,) = jax.random.split(KEY, 1)
    assert result.loss.shape == result.norm.shape == result.share_clipped.shape == (3, STEPS)
    for i, threshold in enumerate(thresholds):
        loss, norm = alone(threshold, key)
        np.testing.assert_allclose(result.loss[i], loss, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(result.norm[i], norm, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(result.share_clipped[i], result.norm[i] > threshold)
    np.testing.assert_allclose(result.final_loss, result.loss[:, -6:].mean(axis=1), rtol=1e-6)


def test_learning_rates_and_seeds():
    result = swept([50.0, 0.5], learning_rates=[0.1, 0.3], seeds=2)
    assert result.thresholds.tolist() == [0.5, 50.0]
    assert result.loss.shape == (2, 2, 2, STEPS)
    for i, threshold in enumerate((0.5, 50.0)):
        for j, rate in enumerate((0.1, 0.3)):
            for k, key in enumerate(jax.random.split(KEY, 2)):
                loss = alone(threshold, key, rate)[0]
                np.testing.assert_allclose(result.loss[i, j, k], loss, rtol=1e-3, atol=1e-5)
    assert result.learning_rate in (np.float32(0.1), np.float32(0.3))
    assert f"learning rate {result.learning_rate:.4g}" in str(result)
    best = (
        int(result.threshold == np.float32(50.0)),
        int(result.learning_rate == np.float32(0.3)),
        0,
    )
    unchosen = replaying.replayed(result.norm[best].astype(np.float64), "unchosen")[1]
    assert result.unchosen_threshold == unchosen
    assert f"ends at {unchosen:.3g}, " in str(result)
    assert swept([0.5, 50.0], seeds=3).loss.shape == (2, 3, STEPS)


FIVE = [0.5, 1.0, 5.0, 20.0, 50.0]


@pytest.fixture(scope="module")
def expected():
    """The sweep of five thresholds."""
    return swept(FIVE)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("parallel", [1, 2, 3, 9])
def test_fewer_at_a_time_are_the_same(expected, parallel):
    result = swept(FIVE, parallel=parallel)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert result.threshold == expected.threshold


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("cores", "parallel"), [(1, None), (2, None), (64, 1), (3, 2), (2, 5)])
def test_cores_that_share_the_runs_change_nothing(expected, monkeypatch, cores, parallel):
    monkeypatch.setattr(runs, "_cores", lambda: cores)
    groups, at_once = runs.in_groups(len(FIVE), parallel)
    assert len({len(group) for group in groups}) == 1
    assert np.unique(np.concatenate(groups)).tolist() == [0, 1, 2, 3, 4]
    assert len(groups) * at_once <= (parallel or cores)
    result = swept(FIVE, parallel=parallel)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_runs_are_shared_out_over_the_cores(monkeypatch):
    # By cores, how many at once, and runs: the number of groups, and how many at once in each.
    for cores, parallel, count, expected in (
        *((1, None, 5, (1, 1)), (2, None, 5, (2, 1)), (2, None, 1, (1, 1)), (64, None, 5, (5, 1))),
        *((64, 1, 5, (1, 1)), (3, 2, 5, (2, 1)), (2, 5, 5, (2, 2)), (4, 9, 10, (4, 2))),
        *((4, None, 6, (3, 1)), (1, 3, 5, (1, 3))),
    ):
        monkeypatch.setattr(runs, "_cores", lambda cores=cores: cores)
        groups, at_once = runs.in_groups(count, parallel)
        assert (len(groups), at_once) == expected
        assert len({len(group) for group in groups}) == 1
        assert np.unique(np.concatenate(groups)).tolist() == list(range(count))


def test_cores_are_counted_where_the_system_does_not_say_which_are_ours(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, cores in ((4, 4), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert len(runs.in_groups(12, None)[0]) == cores


def test_an_accelerator_has_all_at_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for parallel in (None, 2):
        (group,), at_once = runs.in_groups(5, parallel)
        assert group.tolist() == [0, 1, 2, 3, 4]
        assert at_once == parallel


@pytest.mark.slow
def test_64_bits_and_errors_on_several_cores(monkeypatch, x64):
    monkeypatch.setattr(runs, "_cores", lambda: 2)
    wide = lambda key: jax.random.normal(key, (3,), jnp.float64)  # noqa: E731
    data = TARGETS.astype(np.float64)
    result = tuning.sweep(wide, step_fn, [1.0, 50.0], STEPS, key=KEY, data=data)
    assert result.threshold == 50.0

    def broken(params, target, threshold):
        jax.debug.callback(lambda: 1 / 0)
        return step_fn(params, target, threshold)

    with pytest.raises(Exception, match="division by zero"):
        tuning.sweep(wide, broken, [1.0, 50.0], STEPS, key=KEY, data=data)


@pytest.mark.slow
def test_steps_that_spread_over_devices(monkeypatch):
    monkeypatch.setattr(runs, "_cores", lambda: 2)
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(params, target, threshold):
        spread = jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
        )
        return step_fn(params, jnp.broadcast_to(spread(target) / 3, (3,)), threshold)

    assert swept([0.5, 50.0, 60.0], step=step).loss.shape == (3, STEPS)


@pytest.mark.slow
def test_one_compiled_program_whatever_the_steps():
    whole = swept([1.0, 2.0])
    for steps in (1, 24, 53, STEPS):
        done = []
        chex.clear_trace_counter()
        # For the check of shapes, and to compile.
        step = chex.assert_max_traces(step_fn, n=2)
        result = swept([1.0, 2.0], steps, step, progress=done.append)
        assert sum(done) == steps
        np.testing.assert_array_equal(result.loss, whole.loss[:, :steps])


def cliff(params, noise, threshold):
    """A descent on which thresholds 1 and 10 differ only by noise, and 100 explodes."""
    grads = jnp.where(threshold > 50.0, -params, params)
    loss = jnp.sum(params**2) + noise * jnp.where(threshold > 5.0, -1.0, 1.0)
    return params - 0.5 * grads, loss, ops.global_norm(grads)


def test_the_largest_threshold_within_noise_of_the_best():
    noise = np.random.default_rng(0).normal(0.0, 0.1, STEPS).astype(np.float32)
    result = tuning.sweep(init_fn, cliff, [1.0, 10.0, 100.0], STEPS, key=KEY, data=noise)
    assert result.threshold == 10.0
    assert result.diverged.tolist() == [False, False, True]
    assert np.isinf(result.final_loss[2])
    assert 0.0 < result.final_loss[1] - result.final_loss[0] < result.noise
    table = str(result)
    assert "100    diverged" in table
    assert "threshold 10: the largest within noise of the best final loss\n" in table
    assert result.noises[:2].tolist() == [0.0, result.noise]
    assert f"  {result.noise:.2g}  " in next(line for line in table.splitlines() if "<-" in line)
    assert table.endswith("diverged: the final loss is not finite, or above the first loss")
    assert next(line for line in table.splitlines() if "<- suggested" in line).split()[0] == "10"


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seeds", [1, 3])
def test_an_unstable_run_is_not_as_good_as_the_best(seeds):
    # A user's RNN: under the largest threshold the loss is ten times the best, and swings by as much.
    means = jnp.float32([0.110, 0.125, 0.175, 0.546, 0.258, 0.433, 1.145])
    swings = jnp.float32([0.023, 0.046, 0.078, 0.268, 0.095, 0.345, 1.219])
    keys = jax.random.key_data(jax.random.split(KEY, seeds))

    def of_the_seed(key):
        seed = jnp.argmax(jnp.all(keys == jax.random.key_data(key)[None], axis=1))
        return jnp.float32([1, -1, 0])[seed]

    def step(side, batch, threshold):
        at = jnp.round(threshold).astype(jnp.int32) - 1
        first, side_of_batch = batch
        swing = swings[at] * (side_of_batch if seeds == 1 else side)
        return side, 3.0 * first + means[at] + swing, threshold

    data = np.float32(np.arange(STEPS) == 0), np.resize(np.float32([1, -1]), STEPS)
    result = tuning.sweep(of_the_seed, step, range(1, 8), STEPS, key=KEY, data=data, seeds=seeds)
    assert not result.diverged.any()
    assert result.threshold == 2.0
    best = swings[0] if seeds == 1 else 2 * swings[0] / np.sqrt(3)
    np.testing.assert_allclose(result.noises[2:], best, rtol=1e-3)
    assert ("pass seeds=3 or more" in str(result)) == (seeds == 1)


def test_of_several_seeds_the_mean_counts():
    """Of the larger threshold the mean is the best of both, and the worst seed is the worst."""
    losses = {1.0: (2.0, 2.2), 2.0: (0.0, 3.9)}
    keys = jax.random.key_data(jax.random.split(KEY, 2))

    def init(key):
        return jnp.argmax(jnp.all(keys == jax.random.key_data(key)[None], axis=1))

    def step(seed, first, threshold):
        rows = jnp.array(list(losses.values()))
        return (
            seed,
            9.0 * first + rows[(threshold > 1).astype(int), seed],
            threshold + seed.astype(threshold.dtype),
        )

    first = np.float32(np.arange(STEPS) == 0)
    result = tuning.sweep(init, step, [1.0, 2.0], STEPS, key=KEY, data=first, seeds=2)
    assert result.threshold == 2.0
    rows = [line.split() for line in str(result).splitlines()[1:3]]
    # The loss, and the share of steps with a norm above the threshold, which is that of one seed.
    assert [(row[1], row[3]) for row in rows] == [("2.1", "50.0%"), ("1.95", "50.0%")]


def result_of(losses, rates=None, thresholds=(0.5, 2.0)):
    """The result of losses [thresholds, learning rates, seeds, steps], without norms."""
    losses = np.float32(losses)
    shape = [*losses.shape[:1], *losses.shape[1:2] * (rates is not None)]
    shape += [*losses.shape[2:3] * (losses.shape[2] > 1), losses.shape[3]]
    rows = losses.reshape(shape)
    rates = None if rates is None else np.float32(rates)
    nothing = np.zeros_like(rows)
    found = sweeping._result(np.float32(thresholds), rates, rows, nothing, nothing, losses.shape[2])
    assert found.final_loss.shape == found.diverged.shape == rows.shape[:-1]
    return found


def test_a_result_where_every_run_is_lost():
    away = [[[[1.0, 1.5]], [[1.0, np.nan]]], [[[1.0, np.inf]], [[1.0, 1.1]]]]
    signs = [[[[np.inf, -np.inf, np.inf]]]] * 2
    for found in (result_of(away, rates=[0.1, 0.3]), result_of(signs)):
        assert found.diverged.all()
        assert np.isinf(found.final_loss).all()
        assert np.isnan(
            [found.threshold, found.noise, found.unchosen_threshold, *found.noises]
        ).all()
        remedy = "try lower thresholds or a lower learning rate"
        assert f"\nno threshold is suggested: runs of each diverged; {remedy}\n" in str(found)
        assert "nan" not in str(found)


def test_a_result_where_some_seeds_are_lost_or_there_is_one_step():
    found = result_of([[[[1.0, 0.9], [1.0, 0.8]]], [[[1.0, 0.1], [1.0, np.nan]]]])
    assert found.diverged.tolist() == [[False, False], [False, True]]
    assert (found.threshold, found.learning_rate) == (0.5, None)
    lost = str(found).splitlines()[2].split()
    assert lost[:3] == ["2", "50%", "div."]
    assert "0.85" in str(found).splitlines()[1]
    # The last and only step is the first one, and above no other.
    only = result_of([[[[3.0]]], [[[2.0]]]])
    assert not only.diverged.any()
    assert only.threshold == 2.0
    # Even if the noise of the best losses is infinite, as squares of losses are here.
    huge = np.r_[4e30, np.full(18, 3e30), 1e30, 2e30]
    assert result_of([[[huge]], [[huge[::-1]]]]).threshold == 0.5
    # A loss as high as the first one that is finite has not diverged.
    for first in ([], [np.nan], [np.inf, np.nan]):
        assert not result_of([[[[*first, 1.0, 0.5, 1.0]]]], thresholds=[1.0]).diverged.any()
        assert result_of([[[[*first, 1.0, 0.5, 1.1]]]], thresholds=[1.0]).diverged.all()


def test_the_final_loss_is_the_mean_over_a_tenth_and_the_best_rate_is_the_suggested_thresholds():
    tail = np.r_[9.0, np.full(28, 5.0), 1.0, 3.0]  # 31 steps, of which 3 are the last tenth
    rows = np.stack([[[tail], [tail + 2]], [[tail + 4], [tail - 0.5]]])
    found = result_of(rows, rates=[0.1, 0.3])
    np.testing.assert_allclose(found.final_loss, [[3, 5], [7, 2.5]])
    assert (found.threshold, found.learning_rate) == (2.0, np.float32(0.3))
    assert found.noises[1] == found.noise == 0
    assert [float(x) for x in found.by_threshold(found.final_loss).ravel()] == [5, 2.5]


@pytest.mark.slow
def test_keys_of_every_kind_and_keys_as_data():
    def step(params, key, threshold):
        return step_fn(params, jax.random.normal(key, (3,)), threshold)

    results = [
        tuning.sweep(init_fn, step, [1.0], STEPS, key=key, data=jax.random.split(KEY, STEPS))
        for key in (KEY, jax.random.key_data(KEY))
    ]
    np.testing.assert_array_equal(*(result.loss for result in results))


def test_norms_of_several_groups():
    def step(params, target, threshold):
        params, loss, _ = step_fn(params, target, threshold)
        return params, loss, jnp.array([3.0, 4.0], jnp.float16)

    result = swept([3.5], step=step)
    np.testing.assert_allclose(result.norm, 5.0)
    np.testing.assert_allclose(result.share_clipped, 0.5)


def test_a_transformation_in_the_state():
    sgd = optax.sgd(0.1)

    def init(key):
        params = {"w": init_fn(key)}
        return params, optaxclip.clip_by_global_norm(1.0).init(params), sgd.init(params)

    def step(state, target, threshold):
        params, clip_state, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: jnp.sum((p["w"] - target) ** 2))(params)
        clip = optaxclip.clip_by_global_norm(threshold)
        grads, clip_state = clip.update(grads, clip_state, params)
        updates, opt_state = sgd.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, clip_state, opt_state), loss, clip_state.info.norm

    result = tuning.sweep(init, step, [0.5, 5.0], STEPS, key=KEY, data=TARGETS)
    assert result.final_loss[1] < result.final_loss[0]

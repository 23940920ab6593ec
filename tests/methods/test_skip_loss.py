"""Skipping on the loss: published rules, losses of any sign, and who is handed the loss."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import from_bytes, to_bytes

import optaxclip
from optaxclip import monitor, skip_above, thresholds

S = [1.0, 1.2, 0.8, 1.0, 5.0, 1.1, 5.0, 1.0]  # methods.md, D2
THRESHOLDS = [np.inf, np.inf, 1.382843, 1.4, 1.326599, 5.388872, 4.943804, 6.463879]


def olmo_core(num_std=6.0, window=128):
    return thresholds.window(num_std, window, ddof=1, min_std=0.0, warmup_steps=window // 2 - 1)


def levanter(num_std=6.0, window=128):
    return thresholds.window(num_std, window)


def run_all(tx, losses, norms=None):
    """The states of all steps of several runs, in one program, and which were skipped."""
    norms = np.ones_like(losses) if norms is None else norms

    def step(state, row):
        state = tx.update(row[:1], state, jnp.ones(1), value=row[1])[1]
        return state, state

    rows = np.stack([np.float32(x) for x in (norms, losses)], axis=-1)
    scan = jax.jit(jax.vmap(lambda rows: jax.lax.scan(step, tx.init(jnp.ones(1)), rows)[1]))
    states = jax.tree.map(np.asarray, scan(rows))
    return states, (states.info.factor == 0).astype(int).tolist()


def run(tx, losses):
    """Those of one run."""
    states, (skipped,) = run_all(tx, np.asarray(losses)[None])
    return jax.tree.map(lambda x: x[0], states), skipped


SHIFTS = np.array([[0.0], [-10.0]])


def judged(x, past, num_std, ddof, window, need):
    past = np.asarray(past[-window:])
    if len(past) < need:
        return False
    std = max(np.std(past, ddof=ddof), 0.0 if ddof else 1e-6)
    return x - np.mean(past) > num_std * std


PUBLISHED = {"OLMo-core, MaxText": (olmo_core, 1, 63), "Levanter": (levanter, 0, 64)}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rules_skip_if_norm_or_loss_exceeds(name):
    make, ddof, need = PUBLISHED[name]
    rng = np.random.default_rng(0)
    losses, norms = rng.normal(-1.0, 0.1, 200), rng.normal(3.0, 0.2, 200)
    losses[[10, 100, 150, 199]] += 50.0
    norms[[11, 101, 150]] += 50.0
    tx = skip_above(optax.sgd(1.0), make(), None, loss_threshold=make())
    _, (skipped,) = run_all(tx, losses[None], norms[None])
    losses, norms = np.float32(losses), np.float32(norms)
    expected = [
        int(any(judged(x[t], x[:t], 6.0, ddof, 128, need) for x in (losses, norms)))
        for t in range(200)
    ]
    assert skipped == expected
    assert [t for t in range(200) if skipped[t]] == [100, 101, 150, 199]


RULES = {
    "window": thresholds.window(2.0, 6),
    "zscore": thresholds.zscore(0.9, 2.0, 3, option="percentile"),
    "percentile": thresholds.percentile(80.0, 4, warmup_steps=2),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", RULES)
def test_shifted_losses_have_shifted_thresholds(name):
    tx = skip_above(optax.sgd(1.0), np.inf, loss_threshold=RULES[name])
    states, (skipped, below) = run_all(tx, S + SHIFTS)
    assert skipped == below
    assert 1 in skipped
    up, down = states.loss.info.threshold
    np.testing.assert_allclose(down, up - 10, rtol=0, atol=2e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("rule", "threshold"), [(thresholds.ema(0.5, 1.5), -1), (thresholds.median(1.5, 12), 0)]
)
def test_loss_limit_exceeds_negative_average(rule, threshold):
    losses = np.array([-2.0] * 30 + [-0.9, -2.0])
    tx = skip_above(optax.sgd(1.0), np.inf, loss_threshold=rule)
    states, skipped = run_all(tx, [losses, -losses])
    assert skipped == [[0] * 30 + [1, 0], [0] * 32]
    # The median's early thresholds are twice as far above.
    assert states.loss.info.threshold[0, 10] == threshold


def test_loss_limit_accepts_custom_threshold():
    threshold_values = optaxclip.Thresholds(jnp.float32(1), jnp.float32(1))
    rule = optaxclip.ThresholdRule(
        lambda losses: (), lambda losses, state, _: (threshold_values, state)
    )
    tx = skip_above(optax.identity(), np.inf, loss_threshold=rule)
    update = jax.jit(tx.update)
    for loss, factor in ((0.5, 1), (1.5, 0)):
        _, state = update(jnp.ones(1), tx.init(jnp.ones(1)), value=loss)
        assert state.info.factor == factor


def test_nonfinite_losses_skip_and_leave_no_record():
    losses = [1.0, np.nan, 1.2, np.inf, 0.8, -np.inf, 1.0]
    rule = olmo_core(2.0, 6)
    states, skipped = run(skip_above(optax.sgd(1.0), np.inf, loss_threshold=rule), losses)
    assert skipped == [0, 1, 0, 1, 0, 1, 0]
    assert states.loss.info.num_nonfinite[-1] == 3
    assert states.info.num_nonfinite[-1] == 0
    assert states.loss.info.threshold[-1] == pytest.approx(THRESHOLDS[3])


def test_zscore_stays_finite_after_large_negative_loss():
    rule = thresholds.zscore(0.9, 2.0, 3)
    states, _ = run(
        skip_above(optax.sgd(1.0), np.inf, loss_threshold=rule), [1, 1.2, 0.8, -1e30, 1, 1]
    )
    assert not np.any(np.isnan(states.loss.info.threshold))


def test_max_consecutive_takes_next_finite_step():
    losses = [5.0, 5.0, np.nan, 5.0, 5.0, 5.0]
    _, skipped = run(skip_above(optax.sgd(1.0), np.inf, 2, loss_threshold=1.0), losses)
    assert skipped == [1, 1, 1, 0, 1, 1]


def test_loss_limit_accepts_schedules_and_injected_hyperparams():
    falling = optax.linear_schedule(2.0, -2.0, 4)
    _, skipped = run(skip_above(optax.sgd(1.0), np.inf, loss_threshold=falling), [0.5] * 5)
    assert skipped == [0, 0, 1, 1, 1]
    make = optax.inject_hyperparams(
        lambda loss_threshold: skip_above(optax.sgd(1.0), jnp.inf, loss_threshold=loss_threshold)
    )
    tx = make(loss_threshold=-1.0)
    update, state = jax.jit(chex.assert_max_traces(tx.update, n=1)), tx.init(jnp.ones(1))
    for threshold, factor in ((-1.0, 1), (-3.0, 0)):
        state.hyperparams["loss_threshold"] = jnp.float32(threshold)
        _, state = update(jnp.ones(1), state, value=-2.0)
        assert state.inner_state.info.factor == factor


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_loss_accepts_all_dtypes():
    tx = skip_above(optax.identity(), np.inf, loss_threshold=-3.0)
    state = tx.init(jnp.ones(1))
    structure = jax.tree.map(jax.typeof, state)
    dtypes = ("bfloat16", "float16", "float32", "float64", "int32")
    arrays = [make(-2, dtype) for make in (np.asarray, jnp.asarray) for dtype in dtypes]
    for loss in (-2, -2.0, *arrays):
        _, state = tx.update(jnp.ones(1), state, value=loss, loss=None)
        assert (state.loss.info.norm, state.info.factor) == (-2, 0)
    assert jax.tree.map(jax.typeof, state) == structure
    _, state = tx.update(jnp.ones(1), state, value=np.float64(-3 + 1e-12))
    assert state.info.factor == 0


@pytest.mark.slow
def test_skip_above_wraps_lbfgs():
    def loss(x):
        return jnp.sum((x - 1.0) ** 2) - 100.0

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx = skip_above(optax.lbfgs(), np.inf, loss_threshold=thresholds.window(6.0, 4))
        x = jnp.zeros(2)
        value, grad = jax.value_and_grad(loss)(x)
        updates, state = jax.jit(functools.partial(tx.update, value_fn=loss))(
            grad, tx.init(x), x, value=value, grad=grad
        )
    assert loss(x + updates) < value
    assert state.loss.info.norm == value


def test_monitor_reports_loss():
    tx = optax.chain(skip_above(optax.sgd(1.0), 9.0, loss_threshold=-1.0, name="mine"))
    state = tx.init(jnp.ones(1))
    names = list(monitor.scalars(state))
    assert list(monitor.read(state)) == ["0/mine", "0/mine/loss"]
    update = jax.jit(tx.update)
    for loss in (-3.0, 2.0):
        _, state = update(jnp.ones(1), state, value=loss)
        assert list(monitor.scalars(state)) == names
    numbers = monitor.scalars(state)
    assert (numbers["mine/loss"], numbers["mine/loss_threshold"]) == (2.0, -1.0)
    info = monitor.read(state)["0/mine/loss"]
    assert (info.norm, info.threshold, info.factor, info.num_clipped) == (2.0, -1.0, 0.0, 1)
    restored = from_bytes(tx.init(jnp.ones(1)), to_bytes(state))
    assert monitor.scalars(restored) == numbers
    batch = jax.jit(jax.vmap(lambda loss: tx.update(jnp.ones(1), state, value=loss)[1]))
    for losses, worst in (([-3.0, 0.5, -9.0], 0.5), ([9.0, jnp.nan, 1.0], np.nan)):
        found = monitor.scalars(batch(np.float32(losses)))["mine/loss"]
        np.testing.assert_array_equal(found, worst)
    plain = skip_above(optax.sgd(1.0), 9.0).init(jnp.ones(1))
    assert not any("loss" in name for name in monitor.scalars(plain))


def test_record_stores_losses():
    tx = optax.chain(
        monitor.record(3, loss=True, name="losses"), monitor.record(3), optax.trace(0.9)
    )
    state, update = tx.init(jnp.ones(1)), jax.jit(tx.update)
    for loss in (-1.0, 2.0, np.nan, np.int32(4)):
        _, state = update(jnp.ones(1), state, value=loss)
    np.testing.assert_array_equal(monitor.history(state, "losses"), [2.0, np.nan, 4.0])
    assert monitor.history_names(state, "losses") == ("loss",)
    np.testing.assert_array_equal(monitor.history(state, "record"), [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"^losses: value or loss is required; call update"):
        tx.update(jnp.ones(1), state)


def test_invalid_loss_raises():
    tx = skip_above(optax.sgd(1.0), 1.0, loss_threshold=1.0, name="mine")
    state = tx.init(jnp.ones(1))
    with pytest.raises(ValueError, match=r"^mine: .* value=loss"):
        tx.update(jnp.ones(1), state)
    with pytest.raises(
        ValueError, match=r"^mine: value must be a scalar, got shape \(8,\); pass the mean loss"
    ):
        tx.update(jnp.ones(1), state, value=jnp.ones(8))
    with pytest.raises(TypeError, match=r"^mine: loss must be a real number, got 'a'"):
        tx.update(jnp.ones(1), state, loss="a")
    without = optaxclip.skip_above(optax.sgd(1.0), 1.0)
    without.update(jnp.ones(1), without.init(jnp.ones(1)), value=jnp.ones(8))

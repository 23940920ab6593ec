"""Suggested thresholds: spikes that are known are found, and the demo trains with what comes out."""

import dataclasses
import json
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_unless

import optaxclip
import optaxclip.tuning.doubts as doubts
import optaxclip.tuning.replaying as replaying
import optaxclip.tuning.spread as spreads
import optaxclip.tuning.suggesting as suggesting
from examples import demo
from optaxclip import monitor, tuning

STEPS = 1000
SHAPES = {
    "stationary": lambda t: 0.0 * t,
    "drifting": lambda t: -2.0 * t,
    "stepped": lambda t: np.where(t > 0.6, 1.5, 0.0),
    "warm-up": lambda t: 3.0 * np.exp(-t / 0.03),
}


def synthetic(seed, spread, shape="stationary", steps=STEPS, share=0.02, gap=7.0):
    """Norms, and which of them are spikes: a factor 3 above the level, and `gap` spreads."""
    rng = np.random.default_rng(seed)
    logs = SHAPES[shape](np.arange(steps) / steps) + spread * rng.normal(size=steps)
    is_spike = rng.random(steps) < share
    logs[is_spike] += np.log(3.0) + gap * spread + 3.0 * rng.random(is_spike.sum())
    return np.exp(logs), is_spike


def recall_and_precision(suggestion, is_spike):
    """The shares of the spikes after the warm-up that are found, and of what is found that is."""
    hits = is_spike[suggestion.spikes].sum()
    return hits / is_spike[suggestion.warmup_steps :].sum(), hits / len(suggestion.spikes)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("spread", "shape"),
    slow_unless(
        lambda spread, shape: spread in (0.1, 0.5), product([0.02, 0.1, 0.2, 0.3, 0.5], SHAPES)
    ),
)
def test_known_spikes_are_found(shape, spread):
    scores = []
    for seed in range(20):
        norms, is_spike = synthetic(seed, spread, shape)
        scores.append(recall_and_precision(tuning.suggest(norms), is_spike))
    assert np.min(np.mean(scores, axis=0)) >= 0.95


@pytest.mark.by_day(1)
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("steps", [300, 5000])
def test_stationary_norms(spread, steps):
    for seed in range(5):
        norms, is_spike = synthetic(seed, spread, steps=steps)
        found = tuning.suggest(norms)
        assert norms[~is_spike].max() <= found.threshold * 1.01
        assert found.threshold < norms[is_spike].min()
        assert found.regime == "stationary"
        assert found.share_clipped == pytest.approx(is_spike.mean(), abs=1 / steps)
        assert found.spread == pytest.approx(spread, rel=0.3)
        assert found.typical_norm == pytest.approx(1.0, rel=0.1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shape", ["stationary", "drifting", "stepped"])
def test_the_regime_and_its_rule(shape):
    rules = {"stationary": "autoclip(", "drifting": "zclip(", "stepped": "clip_by_window_norm("}
    for seed in range(5):
        found = tuning.suggest(synthetic(seed, 0.1, shape)[0])
        assert found.regime == shape
        assert found.warmup_steps == 0
        assert found.adaptive.call.startswith(rules[shape])
        assert 0.0 < found.adaptive.share_clipped < 0.2
        assert any("adaptive" in note for note in found.notes) == (shape != "stationary")


def test_the_shape_of_known_norms():
    regimes = {"warm-up": "stationary"}
    for shape in SHAPES:
        for seed, spread in ((0, 0.05), (1, 0.2)):
            norms, is_spike = synthetic(seed, spread, shape)
            found = spreads.shape_of(np.log(norms))
            assert found.regime == regimes.get(shape, shape)
            assert (50 < found.warmup < 200) == (shape == "warm-up")
            assert (found.warmup > 0) == (shape == "warm-up")
            assert found.spread == pytest.approx(spread, rel=0.3)
            np.testing.assert_array_equal(found.spikes[200:], is_spike[200:])


def test_the_warmup_is_told_from_what_follows():
    for seed in range(5):
        norms, _ = synthetic(seed, 0.1, "warm-up")
        found = tuning.suggest(norms)
        assert 50 < found.warmup_steps < 200
        assert found.regime == "stationary"
        assert found.threshold < 2.0 < norms[0]


def test_a_level_is_a_median_of_as_many_steps_before_as_after():
    logs = np.log(synthetic(0, 0.2, "drifting", steps=200)[0])
    assert spreads.shape_of(logs).level[100] == np.median(logs[90:111])


def test_the_threshold_of_a_level_that_hardly_moves_is_above_its_highest_place():
    wave = np.exp(0.15 * np.sin(np.linspace(0, 9, STEPS)))
    found = tuning.suggest(wave * np.exp(0.02 * np.random.default_rng(0).normal(size=STEPS)))
    assert found.regime == "stationary"
    assert found.threshold == pytest.approx(1.5 * np.exp(0.15), rel=0.05)


def test_scale_free_and_deterministic():
    norms, _ = synthetic(0, 0.2)
    first, again, scaled = (tuning.suggest(x) for x in (norms, norms, 1e-12 * norms))
    assert first.to_dict() == again.to_dict()
    assert scaled.threshold == pytest.approx(1e-12 * first.threshold, rel=0.01)
    np.testing.assert_array_equal(scaled.spikes, first.spikes)


def test_steps_that_are_not_finite_are_counted_and_left_out():
    norms, is_spike = synthetic(0, 0.1)
    with_bad = np.insert(norms, [100, 500], [np.nan, np.inf])
    clean, found = tuning.suggest(norms), tuning.suggest(with_bad)
    assert (found.num_nonfinite, clean.num_nonfinite) == (2, 0)
    assert (found.threshold, found.share_clipped) == (clean.threshold, clean.share_clipped)
    np.testing.assert_array_equal(with_bad[found.spikes], norms[is_spike])
    assert "skip_nonfinite" in str(found)
    assert "skip_nonfinite" not in str(clean)
    assert tuning.suggest(np.append([np.nan, 0.0], norms)).warmup_steps == clean.warmup_steps == 0


@pytest.mark.by_day(1)
@pytest.mark.parametrize("below", [0, 40], ids=["equal", "never above their level"])
def test_ordinary_norms_that_are_equal_hide_no_spikes(below):
    norms = np.ones(200)
    norms[100 : 100 + below] = 0.99
    norms[[50, 60, 180]] = 10.0, 50.0, 1e40  # beyond float32
    found = tuning.suggest(norms)
    assert found.spikes.tolist() == [50, 60, 180]
    assert 1.0 < found.threshold < 2.0
    assert found.spread < 0.01
    assert found.doubts == ()
    assert found.adaptive.share_clipped == np.float32(3 / 200)


def test_shares_are_those_of_the_steps():
    norms, _ = synthetic(3, 0.2)
    found = tuning.suggest(norms)
    assert found.share_clipped == np.mean(norms > found.threshold)
    percent = round(100 * (1 - found.share_clipped), 1)
    assert 97 < percent < 99
    assert found.adaptive.call == f"autoclip({percent:g}, window=100)"
    assert found.typical_norm == np.median(np.delete(norms, found.spikes)) < np.median(norms)
    for other, share in zip(found.percentiles, (0.1, 0.05, 0.01), strict=True):
        assert other.share_clipped == pytest.approx(share, abs=0.01)


def test_shares_and_percentiles_leave_out_the_same_steps():
    norms = np.insert(synthetic(0, 0.1, "warm-up")[0], [300, 400], [0.0, np.nan])
    found = tuning.suggest(norms)
    after = norms[found.warmup_steps :]
    after = after[np.isfinite(after) & (after > 0)]
    assert 50 < found.warmup_steps < 200
    np.testing.assert_array_equal(norms[found.counted], after)
    assert found.to_dict()["num_counted"] == len(after)
    assert found.share_clipped == np.mean(after > found.threshold)
    for other, percent in zip(found.percentiles, (90, 95, 99), strict=True):
        assert other.share_clipped == pytest.approx(1 - percent / 100, abs=0.003)
    # AutoClip at the threshold's percentile: it sees the large norms of the warm-up, and clips later.
    assert found.adaptive.call.startswith("autoclip")
    assert found.adaptive.share_clipped < 0.06


def test_autoclip_gets_a_percentile_from_90_to_99():
    for share, percent in (0.3, "90"), (0.0754, "92.5"), (0.001, "99"):
        found = suggesting._adaptive("stationary", share, STEADY, 0)
        assert found.call == f"autoclip({percent}, window=100)"


@pytest.mark.parametrize(("steps", "shape"), [(1200, "stationary"), (1050, "warm-up")])
def test_of_many_norms_the_rule_is_replayed_on_the_last(steps, shape, monkeypatch):
    for module in (suggesting, replaying):
        monkeypatch.setattr(module, "MAX_REPLAYED", 1000)
    norms, _ = synthetic(0, 0.1, shape, steps=steps)
    norms[:200] *= np.where(np.arange(200) % 10 == 0, 6.0, 1.0)
    found = tuning.suggest(norms)
    calls = found.adaptive.call, found.unchosen.call
    clips = [eval(call, vars(optaxclip)) for call in calls]

    def step(states, norm):
        states = [clip.update(norm, state)[1] for clip, state in zip(clips, states, strict=True)]
        return states, [(state.info.fraction > 0, state.info.threshold) for state in states]

    replayed = jnp.float32(norms[-1000:])
    started = [clip.init(replayed[0]) for clip in clips]
    rows = jax.jit(lambda x: jax.lax.scan(step, started, x)[1])(replayed)
    after = max(found.warmup_steps - (steps - 1000), 0)
    for alternative, (clipped, _) in zip((found.adaptive, found.unchosen), rows, strict=True):
        assert alternative.share_clipped == np.mean(np.asarray(clipped[after:]))
    assert found.unchosen_threshold == pytest.approx(rows[1][1].item(-1), rel=1e-5)
    assert f"ends at {found.unchosen_threshold:.3g}" in found.unchosen.why
    assert ("of the last 1000 steps" in found.adaptive.why) == (shape == "stationary")
    assert (found.warmup_steps > 50) == (shape == "warm-up")


def test_how_far_a_threshold_is_from_another():
    assert replaying.beside(1.0, 2.5) == "2.5 times below 2.5"
    assert replaying.beside(5.0, 2.0) == "2.5 times above 2"
    assert replaying.beside(2.02, 2.0) == "as the threshold here"
    assert replaying.beside(1.0, 1.1) == "1.1 times below 1.1"
    assert replaying.beside(1.1, 1.0) == "1.1 times above 1"


def test_what_is_no_array_of_norms_is_told_where_they_are():
    tx = optax.chain(monitor.record(20), optax.sgd(0.1))
    state, words = tx.init(jnp.ones(3)), doubts.words("none", 1.0, "", ())
    for norms in (state, state[0], {"norm": [1.0, 2.0]}, None, words):
        with pytest.raises(
            TypeError, match=r"got .*monitor.record, optaxclip\.monitor\.history\(state\)"
        ):
            tuning.suggest(norms)


def test_what_is_printed():
    found = tuning.suggest(synthetic(0, 0.1)[0])
    lines, sizes = str(found).splitlines(), found.norms[found.spikes]
    assert lines[0] == f"threshold {found.threshold:g}"
    assert lines[1].startswith(f"{STEPS} steps, 0 of them not finite; 0 of warm-up, then {STEPS} ")
    assert lines[2] == (
        f"typical norm {found.typical_norm:.3g}, most within a factor of "
        f"{np.exp(found.spread):.2f}; {len(sizes)} spikes from {min(sizes):.3g} to {max(sizes):.3g}"
    )
    assert len({line.index("  clips ") for line in lines if "  clips " in line}) == 1
    assert sum(" clips " in line for line in lines) == 6
    assert json.loads(json.dumps(found.to_dict()))["spikes"] == found.spikes.tolist()
    assert "spikes\n" in str(tuning.suggest(np.geomspace(1.0, 1.1, 200)))
    # A suggestion is a thing of its own, and its `repr` leaves out the norms, which may be many.
    assert found == found != tuning.suggest(found.norms)
    assert "norms=" not in repr(found)
    assert "np.float64(" not in repr(found)


def test_all_fields_but_the_norms_are_in_the_json():
    found = tuning.suggest(synthetic(0, 0.1)[0])
    read = json.loads(json.dumps(found.to_dict()))
    fields = {field.name for field in dataclasses.fields(found)}
    assert set(read) == fields - {"norms", "steps"} | {"num_steps", "num_counted"}
    assert (read["num_steps"], read["num_counted"]) == (STEPS, STEPS)
    for name in ("adaptive", "unchosen"):
        assert read[name] == dataclasses.asdict(getattr(found, name))
    assert read["percentiles"] == [dataclasses.asdict(each) for each in found.percentiles]
    assert (read["notes"], read["doubts"]) == ([*found.notes], [])


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ([], "at least 10 .* got 0 among 0"),
        ([1.0] * 9, "at least 10 .* got 9 among 9"),
        ([np.nan] * 50, "got 0 among 50"),
        ([0.0] * 50, "got 0 among 50"),
        ([2.0] * 50, "all equal, got only 2; record the raw"),
        ([1.0, -3.0], "must not be negative, got -3 at step 1"),
        (np.ones((20, 2)), r"one axis, got the shape \(20, 2\)"),
        (1.0, r"one axis, got the shape \(\)"),
    ],
)
def test_norms_that_say_nothing(norms, message):
    with pytest.raises(ValueError, match=message):
        tuning.suggest(norms)


def test_what_are_no_norms():
    for norms in ([True] * 20, [1j] * 20, [None] * 20, [[1.0], [1.0, 2.0]]):
        with pytest.raises(TypeError, match="norms must be real numbers"):
            tuning.suggest(norms)
    with pytest.raises(TypeError, match="norms must be an array of norms, or the path of a file"):
        tuning.suggest(([1.0], [1.0, 2.0]))
    with pytest.raises(ValueError, match="column is for files"):
        tuning.suggest(np.ones(20), column="norm")


def test_doubtful_norms_warn():
    norms = synthetic(0, 0.1)[0]
    with pytest.warns(UserWarning, match="only 40 norms") as warned:
        tuning.suggest(norms[:40])
    assert warned[0].filename == __file__
    assert tuning.suggest(norms[:100]).doubts == ()
    rounded = np.linspace(0.9995, 1.0, len(norms))
    with pytest.warns(UserWarning, match="clipped already"):
        found = tuning.suggest(np.minimum(norms, np.median(norms)) * rounded)
    assert "clipped already" in str(found)


STEADY = np.exp(0.2 * np.random.default_rng(0).normal(size=500))


def exploding(start):
    """Norms that grow by a half in each step from `start` on, until they are saturated."""
    return STEADY * np.exp(np.clip(0.4 * (np.arange(500) - start), 0.0, 20.0))


def lost_rnn():
    """As those of an RNN that never learns: one spike, then norms that spread without a gap."""
    return np.append(3e4, 6.0 * np.exp(np.random.default_rng(0).normal(size=299)))


LOST = {
    "exploding from the start": (exploding(10), "level of the norms rises .*explode"),
    "exploding midway": (exploding(200), "level of the norms rises .*explode"),
    "exploding late": (exploding(420), "level of the norms rises .*explode"),
    "rising by decades": (STEADY * np.geomspace(1, 1e3, 500), "level of the norms rises"),
    "heavy-tailed": (STEADY**10, "without a gap below the spikes"),
    "never learning": (lost_rnn(), "without a gap below the spikes"),
    "ended by NaN": (np.append(STEADY, [np.nan] * 20), "last norms are not finite"),
}


@pytest.mark.parametrize("name", LOST)
def test_norms_of_a_lost_run_are_doubted(name):
    norms, doubt = LOST[name]
    with pytest.warns(UserWarning, match=doubt):
        found = tuning.suggest(norms)
    first, second = str(found).splitlines()[:2]
    assert first == f"threshold {found.threshold:g}, in doubt"
    assert second == f"doubt: {found.doubts[0]}"
    assert found.notes[: len(found.doubts)] == found.doubts
    (remedy,) = found.notes[len(found.doubts) :]
    assert str(found).endswith(remedy)
    low = float(remedy.split("such as ")[1].split()[0])
    assert 0.0 < low < 2 * np.median(norms[:50])
    assert json.loads(json.dumps(found.to_dict()))["doubts"] == list(found.doubts)


def test_a_level_that_falls_by_decades_is_doubted_and_can_be_followed():
    with pytest.warns(UserWarning, match="falls by a factor"):
        found = tuning.suggest(STEADY * np.geomspace(1, 1e-3, 500))
    assert "adaptive rule follows" in found.notes[-1]
    with_spike = np.insert(STEADY * np.geomspace(1, 1e-3, 500), 300, 50.0)
    with pytest.warns(UserWarning, match="falls by a factor"):
        found = tuning.suggest(with_spike)
    assert found.verdict == "adaptive"
    lines = str(found).splitlines()
    assert lines[0] == f"{found.adaptive.call}, in doubt, as no constant threshold fits"
    (suggested,) = (line for line in lines if "suggested" in line)
    assert suggested.endswith(f"suggested, in doubt, {found.adaptive.why}")


@pytest.mark.parametrize("shape", SHAPES)
def test_ordinary_norms_are_not_doubted(shape):
    for spread in (0.02, 0.2, 0.5):
        found = tuning.suggest(synthetic(0, spread, shape)[0])
        assert found.doubts == ()
        assert "lost" not in str(found)


def test_a_threshold_above_all_norms_is_said_to_change_nothing():
    assert tuning.suggest(STEADY).adaptive.call == "autoclip(99, window=100)"
    assert tuning.suggest(STEADY).notes == (
        "no norm is above the threshold, which would have changed nothing in this run",
    )
    assert tuning.suggest(np.append(STEADY, 50.0)).notes == ()
    falling = tuning.suggest(STEADY * np.exp(np.linspace(2.5, 0.0, len(STEADY))))
    assert falling.verdict == "adaptive"
    assert "times the lowest level" in falling.notes[0]


def test_a_run_that_ends_by_one_bad_step_is_not_lost():
    for bad in range(1, 3):
        assert tuning.suggest(np.append(STEADY, [np.nan] * bad)).doubts == ()
    with pytest.warns(UserWarning, match="last norms are not finite"):
        tuning.suggest(np.append(STEADY, [np.nan] * 3))


def test_norms_may_be_of_narrow_floats_and_integers():
    for dtype in (jnp.bfloat16, np.float16, np.int32):
        norms = np.append(np.resize(np.arange(1, 9), 120), 9).astype(dtype)
        np.testing.assert_array_equal(tuning.suggest(norms).norms, np.float64(norms))


@pytest.fixture(scope="module")
def real():
    """Norms of the demo's network: [320] of a run with a clip, and what trains it again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LENGTH": 80, "BATCH": 4, "HELD_OUT_WINDOWS": 8}.items():
            patch.setattr(demo, name, value)
        corpus = demo.encode(demo.help_topics())

        def train(threshold):
            optimizer = optax.chain(optaxclip.clip_by_global_norm(threshold), demo.sgd(320))
            return demo.train(corpus, optimizer, 320, seed=0)

        yield train, train(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_spikes_among_real_norms(real, seed):
    settled = np.asarray(real[1].norm[220:], np.float64)
    rng = np.random.default_rng(seed)
    is_spike = np.isin(np.arange(len(settled)), rng.choice(len(settled), 5, replace=False))
    norms = np.where(is_spike, settled * rng.uniform(8.0, 1000.0, len(settled)), settled)
    found = set(tuning.suggest(norms).spikes)
    # The last digits of a run decide whether it has spikes of its own.
    assert set(np.flatnonzero(is_spike)) <= found
    assert found <= {*np.flatnonzero(is_spike), *tuning.suggest(settled).spikes}


@pytest.mark.slow
def test_the_demo_learns_with_the_suggested_threshold(real):
    train, recorded = real
    threshold = tuning.suggest(recorded.norm).threshold
    assert np.median(recorded.norm) < threshold < np.max(recorded.norm) / 100
    history = train(threshold)
    assert np.isfinite(history.loss).all()
    assert history.held_out[-1] < recorded.held_out[-1] + 0.1


def test_a_history_of_the_monitor():
    tx = monitor.record(window=200)
    state, update, rng = tx.init(np.float32(0)), jax.jit(tx.update), np.random.default_rng(0)
    for norm in np.append(np.exp(0.1 * rng.normal(size=150)), 50.0):
        _, state = update(np.float32(norm), state)
    assert tuning.suggest(monitor.history(state)).spikes.tolist() == [150]

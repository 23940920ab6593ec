"""`suggest`: each promise about its answers, on made-up norms."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import suggesting
from optaxclip import tuning

N = 300
T = (np.arange(N) + 0.5) / N


def noise(seed=0, n=N, std=0.2):
    return np.exp(std * np.random.default_rng(seed).normal(size=n))


def suggest(norms, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tuning.suggest(norms, *args)


def test_suggest_marks_spikes_in_peaked_noise():
    marked, ordinary = 0, 0.0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        norms = np.exp(0.2 * rng.laplace(size=N))
        at = rng.choice(np.arange(40, N), 8, replace=False)
        norms[at] = rng.uniform(8, 40, 8)
        found = suggest(norms)
        marked += np.isin(at, found.spikes).sum()
        ordinary += found.is_spike.mean() - found.is_spike[at].sum() / N
        assert np.sum(norms[at] > found.threshold) >= 6
    assert marked >= 78
    assert ordinary / 10 <= 0.003


@pytest.mark.parametrize("runs", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_suggest_keeps_error_rates(runs):
    seeds = range(60_000, 60_000 + runs)
    rates = {
        name: suggesting.stationary_errors(draw, 200, seeds)
        for name, draw in suggesting.NOISES.items()
    }
    half = [rates[name] for name in rates if "0.5, sd" in name]
    assert np.mean([rate[0] for rate in half]) <= 0.02
    moving, other, marked, missed = np.mean([*rates.values()], axis=0)
    assert moving <= 0.02
    assert other <= 0.02
    assert marked <= 0.003
    assert missed <= 0.02
    hits = [suggesting.moving_hits(move, 200, seeds) for move in suggesting.MOVES]
    assert np.mean(hits, axis=0) == pytest.approx([1, 1], abs=0.1)
    for claim, wrong in suggesting.claims(seeds):
        assert wrong <= 0.05, claim


@pytest.mark.parametrize(
    ("norms", "reason"),
    [
        (noise() * np.where(T < 0.5, 1, np.where(T < 0.6, 1e3, 1e-3)), "explode .* then collapse"),
        (noise() * np.where(T < 0.5, 1, 50), "the level rises by a factor of"),
        (np.where(T < 0.95, noise(), np.nan), "the last norms are non-finite"),
        (np.where(T < 0.8, noise(), 0.0), "the last norms are all zero"),
        (np.minimum(noise(), 1.0), "% of the norms equal the largest norm 1, .* already clipped"),
        (np.ones(N), "100% of the norms equal the largest norm 1,"),
    ],
)
def test_suggest_recommends_nothing_with_reason(norms, reason):
    with pytest.warns(UserWarning, match=reason):
        found = tuning.suggest(norms)
    assert found.recommendation == "none"
    assert np.isnan(found.threshold)
    assert str(found).startswith("no threshold\nwarning: ")
    assert json.loads(json.dumps(found.to_dict()))["threshold"] is None


def test_suggest_distinguishes_warmup_from_slow_fall():
    slow = suggest(noise() * np.exp(-1.2 * T))
    assert slow.warmup_steps == 0
    steep = suggest(noise() * (1 + 20 * np.exp(-T * 80)))
    assert 5 <= steep.warmup_steps <= 30
    assert steep.regime == "stationary"
    assert "% of the first" in " ".join(steep.notes)
    low = suggest(noise() * (1 - 0.95 * np.exp(-T * 80)))
    assert 5 <= low.warmup_steps <= 30


def test_suggest_reports_large_falls_as_drifting():
    for path in (np.exp(-np.log(6) * T), 1 / (T + 0.1), np.where(T < 0.5, 1.0, 1 / 6)):
        found = suggest(noise() * path)
        assert found.regime == "drifting"
        assert found.recommendation == "adaptive"
        assert found.level_ratio > 4
        assert "the level falls by a factor of" in str(found)
    assert suggest(noise() * np.where(T < 0.5, 1.0, 2.5)).regime == "stepped"


def test_suggest_recommends_constant_for_wide_norms():
    found = suggest(noise(std=1.0))
    assert (found.recommendation, found.regime, found.warnings) == ("constant", "stationary", ())
    assert "no norm after the start is above the threshold" in str(suggest(noise()))


def test_suggest_states_fraction_clipped_at_start():
    found = suggest(noise(std=0.1) * (1 + 2.5 * np.exp(-T * 15)))
    (note,) = [note for note in found.notes if "of the first" in note]
    assert "the threshold clips" in note


def test_suggest_ignores_scale_rounding_and_order_of_magnitude():
    norms = noise()
    norms[[100, 200]] = 9.0, 20.0
    base = suggest(norms)
    for scale in (1e-30, 1e39, 1e300):  # 1e39 is beyond float32
        other = suggest(scale * norms)
        assert other.threshold == pytest.approx(scale * base.threshold, rel=0.01)
        assert (other.spikes.tolist(), other.regime) == ([100, 200], base.regime)
        assert other.adaptive.clipped_fraction == pytest.approx(
            base.adaptive.clipped_fraction, abs=0.02
        )
        assert other.tuning_free.call == "clip_by_global_norm(1.0)"
        assert other.tuning_free.clipped_fraction == (scale > 1)
    assert base.tuning_free.clipped_fraction == np.mean(norms > 1)
    for digits in (1, 2):
        other = suggest(norms.round(digits))
        assert other.threshold == pytest.approx(base.threshold, rel=0.15)
        assert (other.recommendation, other.spikes.tolist()) == ("constant", [100, 200])


def test_suggest_counts_zeros_and_nonfinite_norms():
    norms = noise()
    norms[50:80] = 0.0
    norms[90] = np.nan
    found = suggest(norms)
    assert (found.num_zeros, found.num_nonfinite) == (30, 1)
    assert "30 norms are zero (10.0%) and ignored" in found.notes
    assert "use optaxclip.skip_nonfinite" in str(found)
    assert found.is_used.sum() == N - 31
    assert found.warnings == ()


def test_suggest_uses_steps():
    found = suggest(noise(), np.arange(0, 10 * N, 10))
    assert any("one of 10 steps" in note for note in found.notes)
    assert found.warnings == ()
    with pytest.raises(ValueError, match=r"steps must be an int array of shape \(300,\), got"):
        suggest(noise(), [1, 2])


def test_suggest_keeps_short_logs_near_largest():
    for seed in range(10):
        norms = noise(seed, 30, 0.1 + 0.1 * seed)
        found = suggest(norms)
        assert found.threshold <= 1.6 * norms.max()
        assert "there are only 30 norms" in found.warnings[0]


def test_suggestion_agrees_with_its_text():
    norms = noise()
    norms[[100, 200]] = 9.0, 20.0
    found = suggest(norms)
    text = str(found)
    assert text.startswith(f"threshold {found.threshold:g}\n")
    assert f"clip_by_global_norm({found.threshold:g})" in text
    assert "spikes: 2, from 9 to 20" in text
    assert found.clipped_fraction == np.mean(norms > found.threshold) == 2 / N
    assert found.adaptive.call == "zclip()"
    stored = json.loads(json.dumps(found.to_dict()))
    assert (stored["recommendation"], stored["num_used"]) == ("constant", N)
    moved = suggest(noise() * np.exp(-3 * T))
    assert str(moved).startswith("zclip(), because the level changes by a factor of")
    assert "suggested, for drifting norms" in str(moved)


@pytest.mark.parametrize(
    ("norms", "error", "message"),
    [
        ("log.csv", TypeError, r"got the path 'log.csv'; pass optaxclip.tuning.read_log\(path\)"),
        (
            np.ones((4, 90)),
            ValueError,
            r"one-dimensional, got shape \(4, 90\); pass the norms of a single run",
        ),
        ([1.0, -2.0], ValueError, "must not be negative, got -2 at index 1"),
        (
            np.zeros(50),
            ValueError,
            r"at least 10 finite positive numbers, got 0 out of 50 \(50 are zero\)",
        ),
        (["a"], TypeError, "must be real numbers"),
        ({"a": 1}, TypeError, "must be an array of real numbers"),
        ([[1.0], [1.0, 2.0]], TypeError, "must be an array of real numbers"),
    ],
)
def test_suggest_rejects_wrong_norms(norms, error, message):
    with pytest.raises(error, match=message):
        tuning.suggest(norms)


def test_suggest_accepts_bfloat16():
    found = suggest(jnp.asarray(noise(), jnp.bfloat16))
    assert found.threshold == pytest.approx(suggest(noise()).threshold, rel=0.05)


def test_suggest_handles_largest_numbers():
    found = suggest(1e308 * np.minimum(noise(std=0.1), 1.5))
    assert found.threshold > 1e307

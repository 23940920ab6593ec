"""What is printed, what is counted and what the pictures mark agree."""

import json
import re
import warnings

import numpy as np
import pytest

from optaxclip import plots, tuning

Figure = pytest.importorskip("matplotlib.figure").Figure
STEPS = 300


def log_of_a_run(seed):
    """A warm-up of high norms, a level that moves, spikes, norms that are not finite."""
    rng, t = np.random.default_rng(seed), np.arange(STEPS)
    high, drift = rng.choice([0.0, 2.5]), rng.uniform(-4.0, 4.0) * rng.choice([0.0, 0.3, 1.0])
    level = high * np.exp(-t / rng.uniform(10, 25)) + drift * t / STEPS + rng.uniform(-5, 5)
    norms = np.exp(level + rng.choice([0.05, 0.2, 0.5]) * rng.normal(size=STEPS))
    spikes = rng.choice(STEPS, rng.integers(0, 9), replace=False)
    norms[spikes] *= np.exp(rng.uniform(1, 4, len(spikes)))
    norms[rng.choice(STEPS, rng.integers(0, 5), replace=False)] = rng.choice([np.nan, np.inf, 0.0])
    norms[STEPS - rng.choice([0, 0, 0, 4]) :] = np.nan  # some runs are lost
    return norms


def counts(labels):
    """The numbers in brackets behind the labels of a picture."""
    found = (re.fullmatch(r"(.*) \((\d+)\)(.*)", label) for label in labels)
    return {match[1] + match[3]: int(match[2]) for match in found if match}


def check(norms):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = tuning.suggest(norms)
    text, counted = str(found), found.counted
    above = int(np.sum(found.norms[counted] > found.threshold))

    # What is counted: the finite positive norms after the warm-up.
    later = norms[found.warmup_steps :]
    assert (
        counted.sum() == np.sum(np.isfinite(later) & (later > 0)) == found.to_dict()["num_counted"]
    )
    assert found.share_clipped == above / counted.sum()
    assert counted[found.spikes].all()

    # What is printed: one suggestion, which title, table and notes share.
    warmup, of_text = re.search(r"(\d+) of warm-up, then (\d+) that are counted", text).groups()
    assert (int(warmup), int(of_text)) == (found.warmup_steps, counted.sum())
    assert f" {len(found.spikes)} spikes" in text
    constant, adaptive = f"clip_by_global_norm({found.threshold:g})", found.adaptive.call
    rows = [line for line in text.splitlines() if " clips " in line and line.startswith("  ")]
    assert len(rows) == 6
    suggested = [line.split("  clips ")[0].strip() for line in rows if "suggested" in line]
    call = {"constant": [constant], "adaptive": [adaptive], "none": []}[found.verdict]
    assert suggested == call
    assert text.startswith(
        adaptive if found.verdict == "adaptive" else f"threshold {found.threshold:g}"
    )
    assert ("no constant threshold fits" in text) == (found.verdict == "adaptive")
    assert ("no threshold fits" in text) <= (found.verdict != "constant")
    assert ("no norm is above the threshold" in text) <= (above == 0)
    assert f"clips {found.share_clipped:6.1%}  " in rows[0]

    # What the pictures mark.
    over_steps, histogram = Figure().subplots(2)
    plots.norms_over_steps(found, ax=over_steps)
    plots.norm_histogram(found, ax=histogram)
    labels = [ax.get_legend_handles_labels()[1] for ax in (over_steps, histogram)]
    (line,) = set(labels[0]) & set(labels[1])
    name = {"constant": "", "adaptive": "best constant ", "none": "doubtful "}[found.verdict]
    assert line == f"{name}threshold {found.threshold:g}, clips {found.share_clipped:.1%}"
    marked, bars = (counts(x) for x in labels)
    assert marked["above the threshold"] == above
    assert marked.get("warm-up, not counted", 0) == found.warmup_steps
    assert marked.get("not finite", 0) == found.num_nonfinite
    assert sum(bars.values()) == counted.sum()
    assert bars.get("spikes", 0) == len(found.spikes)
    clipped_spikes = np.sum(found.norms[found.spikes] > found.threshold)
    assert bars.get("above the threshold, no spikes", 0) == above - clipped_spikes
    return found


@pytest.mark.slow
def test_a_log_with_a_warmup_whose_level_moves():
    rng, t = np.random.default_rng(2), np.arange(STEPS)
    level = 2.5 * np.exp(-t / 25) + rng.uniform(0.8, 1.2) * t / STEPS + rng.uniform(0, 1.5)
    norms = np.exp(level + rng.uniform(0.05, 0.2) * rng.normal(size=STEPS))
    norms[rng.choice(STEPS, 4, replace=False)] *= rng.uniform(3, 10, 4)
    found = check(norms)
    assert (found.warmup_steps, found.regime, found.verdict) == (25, "drifting", "constant")
    assert found.share_clipped == 3 / 275
    assert np.sum(norms > found.threshold) > 10  # most of them in the warm-up


def many_kinds(seed):
    """As `log_of_a_run`, or with steps, heavy tails, an explosion, or norms that are clipped."""
    rng, norms = np.random.default_rng(seed), log_of_a_run(seed)
    kind = seed % 6
    if kind == 1:
        norms[rng.integers(STEPS) :] *= np.exp(rng.uniform(-4, 4))
    elif kind == 2:
        norms *= np.exp(rng.choice([0.1, 0.5]) * rng.standard_t(2.5, STEPS))
    elif kind == 3:
        norms *= np.exp(np.clip(0.1 * (np.arange(STEPS) - rng.integers(STEPS)), 0, 9))
    elif kind == 4:
        norms = np.minimum(norms, np.quantile(norms[np.isfinite(norms)], rng.uniform(0.1, 1)))
    return norms


def true_sentences(found):
    """What may be said, and whether it is true; a sentence that is true need not be said."""
    above = np.any(found.norms[found.counted] > found.threshold)
    moves, is_lost = found.regime != "stationary", found.verdict == "none"
    return {
        "no constant threshold fits": found.verdict == "adaptive",
        "no threshold fits start and end": found.verdict == "adaptive" and moves,
        "the level of the norms falls": moves,
        "so no constant threshold fits": found.verdict == "adaptive" and moves,
        f"the level of the norms is {found.regime}": moves and not is_lost,
        "the adaptive rule follows": moves and not is_lost,
        "spikes are below the threshold": np.any(found.norms[found.is_spike] <= found.threshold),
        "no norm is above the threshold": not above,
        "show no good threshold": is_lost,
        "does the run explode?": is_lost,
        "was the run lost?": is_lost,
        "a threshold above them does little": is_lost,
        "use optaxclip.skip_nonfinite": found.num_nonfinite > 0,
        "suggested": not is_lost,
        " spikes from ": len(found.spikes) > 0,
    }


@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_two_sentences_contradict_each_other(runs):
    for seed in range(runs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = tuning.suggest(many_kinds(seed))
        lines = str(found).splitlines()
        said = [line.removeprefix("doubt: ").removeprefix("note: ") for line in lines]
        for sentence, is_true in true_sentences(found).items():
            times = sum(sentence in line for line in said)
            assert times == 0 or is_true, (seed, sentence, said)
            assert len(set(said)) == len(said)
        assert ("in doubt" in lines[0]) == bool(found.doubts), said
        assert sum("suggested" in line for line in said) == (found.verdict != "none"), said
        assert [line for line in found.notes if line not in said] == []
        assert ("no constant threshold fits" in lines[0]) == (found.verdict == "adaptive"), said


@pytest.mark.slow
def test_random_logs():
    found = {check(log_of_a_run(seed)).verdict for seed in range(60)}
    assert found == {"constant", "adaptive", "none"}


def test_a_verdict_is_in_the_json():
    found = check(log_of_a_run(0))
    read = json.loads(json.dumps(found.to_dict()))
    assert read["verdict"] == found.verdict
    assert read["column"] is None


def test_a_suggestion_brings_its_own_threshold_to_the_picture():
    found = check(log_of_a_run(0))
    with pytest.raises(ValueError, match=r"threshold must be None .* pass suggestion\.norms"):
        plots.norms_over_steps(found, 1.0)

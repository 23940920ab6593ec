"""What keeps a rule usable for ever: its options, its arithmetic, and how soon it recovers."""

import functools
import importlib.util
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_rules as published
from cases import slow_unless
from jax.experimental import checkify
from reference_rules import RULES, assert_same, at, drive, factors, no_nan, random_norms, run

from optaxclip import clip_by, scopes, thresholds

_SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "research" / "recovery.py"
_SPEC = importlib.util.spec_from_file_location("recovery", _SCRIPT)
recovery = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(recovery)
SUBJECTS = recovery.SUBJECTS

PUBLISHED = {"patience": None, "floor": 0.0}
each_rule = pytest.mark.parametrize("name", RULES)
long_loops = pytest.mark.usefixtures("optimized")
# Rules with all the options, none of which is set.
RECORDING = {
    "percentile": functools.partial(thresholds.percentile, 80.0, 6, warmup_steps=3),
    "window": functools.partial(thresholds.window, 2.0, 6),
    "ema": functools.partial(thresholds.ema, 0.9, 1.3),
    "zscore": functools.partial(thresholds.zscore, 0.9, 2.0, warmup_steps=5),
}
each_recording = pytest.mark.parametrize("name", RECORDING)


def multiplied(rule, norms):
    trigger, target, _ = drive(rule, norms)
    return factors(norms, np.asarray(trigger), np.asarray(target))


# Options


@pytest.mark.by_day(4)
@each_recording
@pytest.mark.parametrize("record", ["raw", "clipped", "capped", "accepted"])
@pytest.mark.parametrize("patience", [None, 1, 3])
def test_record_and_patience_select_recorded_norms(name, record, patience):
    # A long rise, so that patience runs out, comes back and runs out again.
    norms = np.where(np.arange(60) // 15 % 2, 6, 1) * random_norms(0, 60)
    rule = RECORDING[name](record=record, patience=patience, floor=0.0)
    trigger, target, state = run(rule, norms)
    above = norms > trigger
    streak = np.array(
        [np.argmin(above[t::-1]) if not above[: t + 1].all() else t + 1 for t in range(60)]
    )
    np.testing.assert_array_equal(state.num_consecutive_clipped, streak)
    gives_in = streak > (np.inf if patience is None else patience)
    learns = {"raw": norms, "clipped": target, "capped": trigger, "accepted": norms}[record]
    learned = np.where(above & ~gives_in, learns, norms)
    kept = ~(above & ~gives_in) | (record != "accepted")
    raw = run(RECORDING[name](record="raw", **PUBLISHED), learned[kept])
    np.testing.assert_array_equal(trigger[kept], raw[0])
    assert_same(at(state.statistic, kept), raw[2].statistic)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["percentile", "window"])
def test_inclusive_thresholds_come_one_step_earlier(name):
    norms = random_norms(0, 40)
    inclusive, exclusive = (
        drive(RECORDING[name](inclusive=flag, **PUBLISHED), norms)[0] for flag in (True, False)
    )
    np.testing.assert_array_equal(inclusive[:-1], exclusive[1:])


@pytest.mark.by_day(8)
@each_recording
@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_no_threshold_until_so_many_norms_are_recorded(name, steps):
    rule = RECORDING[name](warmup_steps=steps, record="raw", **PUBLISHED | {"floor": 0.01})
    norms = random_norms(0, 40)
    counted = np.arange(40) % 3 > 0
    norms[~counted] = np.where(np.arange(40) % 2, np.nan, 0.001)[~counted]
    trigger, _, state = run(rule, norms)
    np.testing.assert_array_equal(state.num_recorded, np.cumsum(counted))
    before = np.cumsum(counted) - counted
    # Nothing can be said of a percentile or a deviation of no norms at all.
    np.testing.assert_array_equal(np.isinf(trigger[before > 0]), before[before > 0] < steps)


@pytest.mark.by_day(5)
@each_rule
def test_rules_ignore_norms_below_floor(name):
    norms = np.maximum(random_norms(0, 60), np.float32(0.7))
    patience = {"patience": None} if "patience" in parameters(RULES[name]) else {}
    rule = RULES[name](floor=0.7, **patience)
    small = np.random.default_rng(0).permutation(90) >= 60
    mixed = norms[np.maximum(np.cumsum(~small) - 1, 0)]
    mixed[small] = np.resize(np.float32([0, 0.3, 0.6999]), 30)
    trigger, _, state = run(rule, mixed)
    expected = run(rule, norms)
    np.testing.assert_array_equal(trigger[~small], expected[0])
    assert_same(at(state.statistic, ~small), expected[2].statistic)
    assert np.all(mixed[small] < trigger[small])
    # At the floor they count.
    state = run(rule, np.full(5, 0.7, np.float32))[2]
    np.testing.assert_array_equal(state.num_recorded, range(1, 6))


def parameters(make):
    return inspect.signature(make).parameters


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(thresholds.ema, 0.9, 0.5),
        functools.partial(thresholds.adagc, 0.5, warmup_steps=1),
        functools.partial(thresholds.quantile, 0.0, init_threshold=1.0),
        functools.partial(thresholds.median, 0.5, every_step=True),
    ],
)
def test_no_threshold_falls_below_the_floor(make):
    trigger, target, _ = drive(make(floor=0.7), jnp.full(10, 0.75))
    assert trigger[-1] == target[-1] == np.float32(0.7)
    assert drive(make(floor=0.0), jnp.full(10, 0.75))[0][-1] < 0.7


def test_log_tracker_rejects_to_zero_despite_floor():
    target = drive(thresholds.log_tracker(0.5), jnp.ones(10))[1]
    np.testing.assert_array_equal(target, [np.inf] * 3 + [0] * 7)
    tx = clip_by(scopes.tree(), thresholds.log_tracker(0.9))
    state = tx.init(jnp.zeros(1))
    for norm in [*[1.0] * 20, 9.0]:
        updates, state = tx.update(jnp.array([norm]), state)
    np.testing.assert_array_equal(updates, [0.0])


@pytest.mark.by_day(2)
@each_rule
def test_max_norm_caps_the_thresholds_and_changes_nothing_else(name):
    norms = random_norms(0, 60)
    trigger, target, states = run(RULES[name](), norms)
    cap = np.median(trigger)
    capped_trigger, capped_target, capped_states = run(RULES[name](max_norm=cap), norms)
    assert_same(capped_states, states)
    np.testing.assert_array_equal(capped_trigger, np.minimum(trigger, cap))
    assert np.any(capped_trigger < trigger)
    brought_to = np.where(norms > trigger, np.minimum(target, cap), np.minimum(norms, cap))
    actual = np.where(norms > capped_trigger, capped_target, norms)
    np.testing.assert_array_equal(actual, brought_to)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "rule",
    [
        thresholds.percentile(50.0, 4, warmup_steps=1, max_norm=10.0),
        thresholds.quantile(0.5, 0.0, 1.0, max_norm=10.0),
    ],
)
def test_a_cap_above_the_threshold_does_not_change_what_normalize_aims_at(rule):
    tx = clip_by(scopes.tree(), rule, response="normalize")
    state = tx.init(jnp.zeros(1))
    for norm in (1.0, 1.0, 0.5):
        updates, state = tx.update(jnp.array([norm]), state)
    np.testing.assert_allclose(updates, [1.0], rtol=1e-6)


# Arithmetic


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["zscore", "debiased", "window"])
def test_variance_of_nearly_constant_norms_keeps_precision(kind):
    norms = np.float32(1e4 + 0.1 * np.random.default_rng(0).normal(size=500))
    options = {"z_thresh": 100.0, "option": "percentile"}
    rule, reference = {
        "zscore": (thresholds.zscore(**options), published.zclip(np.float64(norms), **options)),
        "debiased": (
            thresholds.zscore(**options, debias=True),
            published.axlearn(np.float64(norms), 0.97, 100.0, 25),
        ),
        "window": (
            thresholds.window(100.0, 100, warmup_steps=25),
            published.window(np.float64(norms), 100.0, 100, ddof=0, min_std=0.0, needed=25),
        ),
    }[kind]
    excess = np.asarray(drive(rule, norms)[0])[50:] - 1e4
    np.testing.assert_allclose(excess, reference.trigger[50:] - 1e4, rtol=0.02)


@pytest.mark.by_day(10)
@each_rule
@pytest.mark.parametrize("step", [0, 1, 30])
def test_rules_stay_finite_after_huge_norm(name, step):
    norms = random_norms(0, 60)
    norms[step] = 1e30
    assert no_nan(run(RULES[name](), norms))


def test_adagc_warmup_clips_huge_norms():
    norms = np.float32([[3e20, 4e20], [3, 4]])
    _, target, state = drive(thresholds.adagc(warmup_steps=2), norms)
    np.testing.assert_allclose(target, [[0.6, 0.8]] * 2, rtol=1e-6)
    np.testing.assert_allclose(state.statistic[-1], [0.6, 0.8], rtol=1e-6)
    tiny = thresholds.adagc(lambda_abs=1e-24, warmup_steps=2, floor=0.0)
    np.testing.assert_allclose(drive(tiny, norms * 1e-24)[1][1], [0.6e-24, 0.8e-24], rtol=1e-6)


INF = float("inf")
EXTREME = [
    *[("percentile", {"percentile": x, "window": w}) for x in (0.0, 100.0) for w in (1, 3)],
    *[("window", {"num_std": x, "window": 4}) for x in (0.0, INF)],
    *[("window", {"min_std": x, "window": 4}) for x in (0.0, INF)],
    *[("median", {"scale": x, "every_step": y}) for x in (0.0, INF) for y in (False, True)],
    *[("ema", {"decay": x, "debias": y}) for x in (0.0, 1.0) for y in (False, True)],
    *[("ema", {"ratio": x}) for x in (0.0, INF)],
    *[("zscore", {"alpha": x, "debias": y}) for x in (0.0, 1.0) for y in (False, True)],
    *[("zscore", {"z_thresh": x, "option": y}) for x in (0.0, INF) for y in ("adaptive", "mean")],
    *[("log_tracker", {"decay": x}) for x in (0.0, 1.0)],
    *[("log_tracker", {"num_std": x}) for x in (0.0, INF)],
    *[("log_tracker", {"min_threshold": INF})],
    *[("adagc", {"lambda_rel": x, "lambda_abs": x, "warmup_steps": 3}) for x in (0.0, INF)],
    *[("adagc", {"beta": x, "warmup_steps": y}) for x in (0.0, 1.0) for y in (0, 3)],
    *[("quantile", {"target": x, "learning_rate": y}) for x in (0.0, 1.0) for y in (0.0, 9.0)],
    *[
        ("quantile", {"init_threshold": x, "geometric": y})
        for x in (0.0, INF)
        for y in (False, True)
    ],
]


@pytest.mark.by_day(24)
@pytest.mark.parametrize(("rule", "options"), EXTREME, ids=lambda x: str(x).replace(" ", ""))
@pytest.mark.parametrize("floor", [0.0, 1e-8])
def test_rules_return_no_nan_for_extreme_arguments(rule, options, floor):
    norms = np.float32([0] * 5 + [1] * 300 + [2, 0, 0.5, 1e-6])
    assert no_nan(drive(getattr(thresholds, rule)(**options, floor=floor), norms)[:2])


@pytest.mark.by_day(2)
@each_rule
def test_checkify_accepts_rules_with_finite_norms(name):
    rule = RULES[name]()
    checked = jax.jit(checkify.checkify(rule.update, errors=checkify.float_checks))
    state = rule.init(jnp.zeros(()))
    for norm in (0.0, 1.0, 1.2, 0.8, 1.0, 5.0, 1.1, 0.0):
        error, (_, state) = checked(jnp.float32(norm), state, None)
        error.throw()


# Dynamics

# One of each rule; the others differ in their options.
FURTHER = ("AutoClip p95", "ZClip mean", "ZClip spikes skipped", "ZClip percentile")
FURTHER += ("AdaGC .99 1.04", "PDE-Transformer", "axlearn mean", "axlearn stddev", "OLMo-core")
subject_or_slow = slow_unless(lambda name: name not in FURTHER, SUBJECTS)


@pytest.mark.by_day(1)
@long_loops
@pytest.mark.parametrize("name", subject_or_slow)
def test_default_rules_recover_from_fivefold_increase(name):
    subject = SUBJECTS[name]
    (steps,) = recovery.count_recovery_steps(subject.make(), (5.0,), skips=subject.skips)
    assert steps <= 3000


@pytest.mark.slow
@long_loops
@pytest.mark.parametrize(
    "name", [case for case in subject_or_slow if SUBJECTS[case.values[0]].original]
)
def test_published_settings_recover_like_original_implementations(name):
    """But for the random sequence: by 30 steps or 5 %, also of where they stopped looking."""
    subject = SUBJECTS[name]
    steps = recovery.count_recovery_steps(subject.build_published(), skips=subject.skips)
    for ours, theirs in zip(steps, subject.original, strict=True):
        if theirs == recovery.NEVER:
            assert ours > 0.95 * recovery.AFTER
        else:
            assert abs(ours - theirs) <= max(30, 0.05 * theirs)


@pytest.mark.by_day(1)
@long_loops
@pytest.mark.parametrize(
    ("relative", "beta", "doubles_in"), [(1.05, 0.98, 694), (1.04, 0.99, 1734)]
)
def test_adagc_threshold_grows_at_published_rate(relative, beta, doubles_in):
    rule = thresholds.adagc(relative, 1.0, beta, patience=None)
    trigger = np.asarray(drive(rule, recovery.draw_norms((5.0,))[0])[0], np.float64)[101:]
    growth, fastest = trigger[1:] / trigger[:-1], 1 + (1 - beta) * (relative - 1)
    assert np.max(growth) == pytest.approx(fastest, rel=1e-6)
    assert np.all(growth[910:1200] > fastest - 1e-6)
    assert fastest**doubles_in >= 2 > fastest ** (doubles_in - 1)


@pytest.mark.by_day(1)
@long_loops
@pytest.mark.parametrize("name", subject_or_slow)
def test_rules_recover_after_zero_norms(name):
    rule = SUBJECTS[name].make()
    signal = np.float32(np.exp(0.1 * np.random.default_rng(0).normal(size=360)))
    expected = multiplied(rule, signal)
    for when in (0, 300):
        actual = multiplied(rule, np.insert(signal, when, np.zeros(40))[:360])
        np.testing.assert_array_equal(np.delete(actual, slice(when, when + 40)), expected[:320])
        ones = multiplied(rule, np.insert(np.ones(320, np.float32), when, np.zeros(40)))
        # The quantile starts at 0.1, and later moves by 10 % up and down about the median.
        least = 1 if name != "quantile" else 0.9 if when else 0.09
        assert np.all(ones[when + 40 :] >= least)


@pytest.mark.by_day(1)
@long_loops
@pytest.mark.parametrize("name", ["ZClip", "AdaGC .98 1.05"])
def test_published_settings_lock_after_zero_norms_in_warmup(name):
    norms = np.float32([0] * 40 + [1] * 1000)
    assert np.all(multiplied(SUBJECTS[name].build_published(), norms)[200:] == 0)


@pytest.mark.by_day(1)
@long_loops
@pytest.mark.parametrize("option", ["adaptive", "mean", "percentile"])
def test_zscore_recovers_from_constant_warmup(option):
    """Nor if no norm ever falls below them again, which would end the absorbing state."""
    noise = np.abs(0.1 * np.random.default_rng(0).normal(size=500))
    norms = np.float32(np.concatenate([np.ones(25), 1.01 + noise]))
    make = functools.partial(thresholds.zscore, option=option)
    assert np.mean(multiplied(make(), norms)[-300:]) > 0.95
    assert np.all(multiplied(make(**PUBLISHED), norms)[-300:] < 1)

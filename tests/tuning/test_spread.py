"""The level, the spread, the tail and the warm-up of norms whose shape is known exactly."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy import special

import optaxclip.tuning.spread as spreads
from optaxclip.tuning.regimes import regime_of


def test_levels_at_both_ends():
    """The first windows are smaller, and the last ones go back where the norms end."""
    values = np.append([9.0, 5.0], np.random.default_rng(0).normal(size=58))
    level = spreads._rolling_median(values, 21)
    assert level[:10].tolist() == [np.median(values[:n]) for n in (3, *range(3, 20, 2))]
    around = np.pad(values, 10, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, 21)
    np.testing.assert_array_equal(level[10:], np.median(windows, axis=1)[10:])


PLACES = (np.arange(999) + 0.5) / 999
NORMAL, HEAVY = 0.3 * special.ndtri(PLACES), 0.2 * special.stdtrit(3, PLACES)


def test_the_spread_is_a_standard_deviation_and_the_tail_decides_what_is_a_spike():
    assert spreads._pad_to_global(NORMAL) == pytest.approx(0.3, rel=2e-3)
    last = 0.3 * special.ndtri(1 - 0.1 / 999)  # a tenth of a norm is further away
    border, seldom = spreads._border(NORMAL)
    assert last < border < 1.5 * last
    assert seldom == pytest.approx(0.3 * special.ndtri(1 - 1 / 300), rel=1e-2)
    # Of a heavy tail a norm in 300 may be taken for a spike, and all far ones are.
    heavy, _ = spreads._border(HEAVY)
    assert np.sum(heavy < HEAVY) <= 3
    assert heavy > 1.3 * border
    for deviations in NORMAL, HEAVY:
        for spikes in 1, 10, 99:
            found, _ = spreads._border(np.append(deviations[:-spikes], np.full(spikes, np.log(10))))
            assert deviations[-spikes - 1] < found < np.log(10)


def test_a_norm_is_no_spike_near_its_level_and_always_one_far_from_it():
    for deviations, border in (0.01 * NORMAL, 1.5), (3 * NORMAL, 8.0):
        assert np.exp(spreads._border(deviations)[0]) == pytest.approx(border)


def test_the_threshold_is_some_standard_deviations_above_the_highest_level():
    """No single norm moves it far, and it is from 1.5 to 8 times that level."""
    rng = np.random.default_rng(0)
    logs = rng.permutation(NORMAL)
    threshold = spreads.shape_of(logs).threshold
    assert threshold == pytest.approx(4.5 * 0.3, rel=0.05)
    logs[500] = 1.2
    assert spreads.shape_of(logs).threshold == pytest.approx(threshold, rel=0.01)
    for scale, times in (0.01, 1.5), (3, 8.0):
        assert np.exp(spreads.shape_of(scale * logs).threshold) == pytest.approx(times, rel=0.1)
    steps = spreads.shape_of(0.1 * logs + np.repeat([0.0, 0.5, 1.0], 333))
    assert (steps.low, steps.threshold) == pytest.approx((0.0, 1.0 + np.log(1.5)), abs=0.1)


@pytest.mark.parametrize(
    ("up", "down", "expected"),
    [
        ([0.3] * 30, [0.1] * 30, 0.3),
        ([0.1] * 30, [0.3] * 30, 0.3),
        ([0.3] * 25, [0.1] * 35, 0.1),
        ([0.3] * 26, [0.1] * 34, 0.3),
    ],
    ids=["upward", "downward", "a quarter above", "more than a quarter above"],
)
def test_the_spread_is_that_of_the_wider_side_with_enough_norms(up, down, expected):
    """Norms that equal their level are on neither side."""
    spread = spreads._pad_to_global(np.array([*up, *np.negative(down), *[0.0] * 40]))
    assert spread == pytest.approx(expected / NormalDist().inv_cdf(0.75))


@pytest.mark.parametrize(
    ("start", "later", "expected"),
    [
        ([2.0] * 30, [0.0] * 170, 30),
        ([-2.0] * 30, [0.0] * 170, 30),
        ([2.0] * 30 + [0.022] * 5, [0.0] * 165, 30),
        ([2.0] * 30 + [0.028] * 5, [0.0] * 165, 35),
        ([3.5] * 30 + [2.0] * 20, np.linspace(2, 0, 150), 30),
        ([2.9] * 30 + [2.0] * 20, np.linspace(2, 0, 150), 0),
        ([0.0, 2.0, 2.0], [0.0] * 197, 0),
        ([0.38] * 30, [0.0] * 170, 0),
        ([0.42] * 30, [0.0] * 170, 30),
    ],
)
def test_the_warmup_ends_where_the_level_reaches_that_of_later_steps(start, later, expected):
    assert spreads._warmup(np.array([*start, *later]), spread=0.1) == expected


def test_a_window_is_a_tenth_of_the_steps_within_bounds_and_odd():
    sizes = {10: 11, 114: 11, 130: 13, 140: 15, 1990: 199, 2010: 201, 5000: 201}
    assert {steps: spreads._window(steps) for steps in sizes} == sizes


@pytest.mark.parametrize("sign", [1, -1])
def test_a_level_may_step_and_drift_up_or_down(sign):
    levels = {
        "stepped": np.repeat([0.0, 1.0], 100),
        "drifting": np.linspace(0, 1, 200),
        "stationary": np.linspace(0, 0.4, 200),
    }
    for regime, level in levels.items():
        assert regime_of(sign * level, sign * level, 0.1) == regime


def test_norms_that_move_far_by_chance_alone_are_stationary():
    """Each fit of so few and so wide norms moves far, and only its chance says that it is none."""
    for seed in range(40):
        logs = np.random.default_rng(seed).normal(size=64)
        assert regime_of(logs, logs, 0.1) == "stationary"


def test_few_norms_say_nothing_of_a_regime():
    for steps, regime in (32, "stationary"), (33, "drifting"):
        assert spreads.shape_of(np.linspace(0, np.log(4), steps)).regime == regime

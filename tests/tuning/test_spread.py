"""The level, the spread and the warm-up of norms whose shape is known exactly."""

from statistics import NormalDist

import numpy as np
import pytest

from optaxclip.tuning import spread as spreads


def test_levels_at_both_ends():
    """The first windows are smaller, and the last ones go back where the norms end."""
    values = np.append([9.0, 5.0], np.random.default_rng(0).normal(size=58))
    level = spreads._rolling_median(values, 21)
    assert level[:10].tolist() == [np.median(values[:n]) for n in (3, *range(3, 20, 2))]
    around = np.pad(values, 10, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, 21)
    np.testing.assert_array_equal(level[10:], np.median(windows, axis=1)[10:])


def test_the_spread_is_a_standard_deviation_and_hardly_a_norm_reaches_beyond():
    normal = NormalDist(0.0, 0.3)
    deviations = np.array([normal.inv_cdf((i + 0.5) / 999) for i in range(999)])
    expected = (0.3, normal.inv_cdf(1 - 0.01 / 999))
    np.testing.assert_allclose(spreads._spread_and_reach(deviations), expected, rtol=2e-3)


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
    spread, _ = spreads._spread_and_reach(np.array([*up, *np.negative(down), *[0.0] * 40]))
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
        assert spreads._regime(sign * level, 0.1, 21) == regime


def test_fewer_than_three_windows_say_nothing_of_a_regime():
    for steps, regime in (32, "stationary"), (33, "drifting"):
        assert spreads.shape_of(np.linspace(0, np.log(4), steps)).regime == regime

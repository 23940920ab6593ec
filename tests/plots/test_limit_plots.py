"""Pictures of thresholds: what they mark, and that they draw where they are told to."""

import dataclasses
import sys

import numpy as np
import pytest

from optaxclip import plots, tuning
from optaxclip.plots.style import legend_below
from optaxclip.tuning import SweepResult

matplotlib = pytest.importorskip("matplotlib")
Figure = pytest.importorskip("matplotlib.figure").Figure


def axes():
    return Figure().subplots()


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def test_norms_over_steps_marks_what_is_above_a_threshold():
    ax, norms = axes(), [1.0, 3.0, np.nan, 2.0, 0.0, np.inf]
    assert plots.norms_over_steps(norms, 2.0, steps=range(10, 16), ax=ax) is ax
    assert labels(ax) == ["norm", "above the threshold (1)", "threshold 2", "non-finite (2)"]
    assert line(ax, "above the threshold (1)").get_xydata().tolist() == [[11.0, 3.0]]
    assert line(ax, "non-finite (2)").get_xdata().tolist() == [12, 15]
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "gradient norm")
    assert ax.get_legend() is None


def test_pictures_of_results_say_who_returns_them():
    for draw, words in (
        (
            plots.norm_histogram,
            "suggestion must be a Suggestion returned by optaxclip.tuning.suggest",
        ),
        (plots.sweep_curve, "result must be a SweepResult returned by optaxclip.tuning.sweep"),
    ):
        with pytest.raises(TypeError, match=f"{words}, got type ndarray"):
            draw(np.ones(3))


def test_norms_over_steps_with_a_threshold_for_each_step_or_none():
    ax = plots.norms_over_steps([1.0, 2.0, 1.0], [0.5, 3.0, np.inf], ax=axes())
    assert labels(ax)[1:] == ["above the threshold (1)", "threshold"]
    np.testing.assert_array_equal(line(ax, "threshold").get_ydata(), [0.5, 3.0, np.nan])
    assert labels(plots.norms_over_steps([1.0, 2.0], ax=axes())) == ["norm"]


def test_norms_over_steps_marks_points_without_neighbors():
    ax = plots.norms_over_steps([2.0], 1.0, ax=axes())
    for label in ("norm", "threshold 1"):
        assert (line(ax, label).get_marker(), line(ax, label).get_markevery()) == ("o", [0])
    ax = plots.norms_over_steps([np.nan, 2.0, np.inf, 1.0, 3.0, 0.0, 4.0], ax=axes())
    assert line(ax, "norm").get_markevery() == [1, 6]
    assert line(plots.norms_over_steps([1.0, 2.0], ax=axes()), "norm").get_marker() == "None"


@pytest.mark.parametrize(
    ("norms", "options", "message"),
    [
        (
            [],
            {"threshold": 1.0},
            r"norms must not be empty, got shape \(0,\); record some steps first",
        ),
        (np.ones((3, 2)), {}, r"norms must be one-dimensional, got shape \(3, 2\); use one column"),
        (3.0, {}, r"norms must be one-dimensional, got shape \(\)"),
        (
            [1.0],
            {"threshold": [1.0, 2.0]},
            r"threshold must be a scalar or match the shape of norms, \(1,\), got \(2,\)",
        ),
        (
            [1.0],
            {"steps": [1, 2]},
            r"steps must have shape \(1,\) to match norms, got \(2,\)",
        ),
    ],
)
def test_norms_that_cannot_be_drawn(norms, options, message):
    with pytest.raises(ValueError, match=message):
        plots.norms_over_steps(norms, **options)


def test_without_matplotlib_the_remedy_is_said(monkeypatch):
    for module in ("matplotlib", "matplotlib.pyplot", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    for draw in (
        lambda: plots.norms_over_steps([1.0]),
        lambda: plots.loss_curves({"a": [1.0]}),
        lambda: plots.heatmap([[1.0]]),
    ):
        with pytest.raises(ModuleNotFoundError, match=r'pip install ".*\[plot\]"'):
            draw()


def norms_with_spikes(spikes=(10.0, 50.0)):
    norms = np.exp(0.2 * np.random.default_rng(0).normal(size=500))
    norms[100 : 100 + len(spikes)] = spikes
    return norms


@pytest.mark.by_day(1)
@pytest.mark.parametrize("spikes", [(), (10.0, 50.0)])
def test_histogram_counts_every_norm(spikes):
    suggestion = tuning.suggest(np.append(norms_with_spikes(spikes), [np.nan, 0.0]))
    ax = axes()
    assert plots.norm_histogram(suggestion, ax=ax) is ax
    heights = [sum(bar.get_height() for bar in bars) for bars in ax.containers]
    assert heights == [500 - len(spikes), len(spikes)][: 1 + bool(spikes)]
    assert ax.lines[0].get_xdata()[0] == suggestion.threshold
    lowest, highest = ax.get_ylim()
    assert lowest < 1 < max(bar.get_height() for bars in ax.containers for bar in bars) < highest
    assert f"threshold {suggestion.threshold:.3g}, clips" in labels(ax)[-1] + labels(ax)[0]


def test_no_ordinary_bar_lies_beyond_the_threshold():
    rng = np.random.default_rng(0)
    level = np.where(np.arange(800) < 200, 3.0, 1.0)
    suggestion = tuning.suggest(level * np.exp(0.3 * rng.normal(size=800)))
    assert suggestion.is_used.sum() > 600
    threshold = dataclasses.replace(suggestion, threshold=2.0)
    ax = plots.norm_histogram(threshold, ax=axes())
    bars = {bars.get_label().split(" (")[0]: bars for bars in ax.containers}
    assert set(bars) >= {"typical", "above the threshold, no spikes"}
    for label, of_label in bars.items():
        edges = [
            b.get_x() + b.get_width() * (label == "typical") for b in of_label if b.get_height()
        ]
        assert (max(edges) <= 2.0 * (1 + 1e-6)) if label == "typical" else (min(edges) >= 2.0)
    assert (
        sum(b.get_height() for of_label in bars.values() for b in of_label)
        == suggestion.is_used.sum()
    )


def test_heatmap_has_a_row_for_each_leaf():
    norms = np.array([[1.0, 0.0, np.nan], [10.0, 0.1, 1.0]])
    ax = axes()
    assert plots.heatmap(norms, ["a", "b", "c"], ax=ax) is ax
    shown = ax.collections[0].get_array()
    np.testing.assert_array_equal(shown.mask, np.isnan(norms).T)
    assert shown[1].tolist() == [0.1, 0.1]
    assert ax.yaxis_inverted()
    assert len(ax.figure.axes) == 2
    assert plots.heatmap(np.zeros((2, 50)), [str(i) for i in range(50)], ax=axes())


@pytest.mark.parametrize(("shape", "names"), [((3,), None), ((3, 2), ["a"]), ((3, 0), None)])
def test_heatmap_refuses_other_shapes(shape, names):
    with pytest.raises(ValueError, match=r"values must have shape \[steps, leaves\], got \(3,"):
        plots.heatmap(np.ones(shape), names)


DIVERGED = "diverged: non-finite or above the first loss"


def result(final, threshold):
    final = np.asarray(final, np.float32)
    thresholds = np.geomspace(0.1, 10.0, len(final)).astype(np.float32)
    nothing, noise = np.zeros((len(final), 1), np.float32), np.full(len(final), 0.1)
    return SweepResult(
        thresholds, nothing, nothing, nothing, final, np.isinf(final), noise, threshold
    )


def test_sweep_curve_shows_diverged_runs():
    final = [2.0, 1.0, np.inf]
    ax = axes()
    assert plots.sweep_curve(result(final, 1.0), ax=ax) is ax
    assert ax.get_xscale() == "log"
    crosses = line(ax, DIVERGED).get_xdata()
    np.testing.assert_allclose(crosses, [10.0])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [2.0, 1.0, np.nan])
    assert "suggested threshold 1" in labels(ax)
    (bars,) = ax.containers
    assert bars.get_label() == "noise: equivalent to the best if it reaches the line"
    ends = [end[:, 1].tolist() for end in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[1.9, 2.0], [0.9, 1.0]])


def test_sweep_curve_where_nothing_diverged():
    assert DIVERGED not in labels(plots.sweep_curve(result([2.0, 1.0], 10.0), ax=axes()))


def test_a_warm_up_is_shaded_and_named_where_it_lies():
    rng = np.random.default_rng(0)
    norms = np.exp(3 * (np.arange(500) < 40) + 0.1 * rng.normal(size=500))
    found = tuning.suggest(norms)
    assert 30 < found.warmup_steps <= 50
    over_steps, histogram = axes(), axes()
    plots.norms_over_steps(found, steps=range(100, 600), ax=over_steps)
    (span,) = over_steps.patches
    assert span.get_label() == f"warm-up ({found.warmup_steps}), not counted"
    left, right = span.get_x(), span.get_x() + span.get_width()
    assert (left, right) == (100, 100 + found.warmup_steps)
    # Norms of the warm-up are above the threshold, but not marked.
    assert "above the threshold (0)" in labels(over_steps)
    plots.norm_histogram(found, ax=histogram)
    assert histogram.get_ylabel() == "number of steps after the warm-up"
    assert histogram.get_xlabel() == "gradient norm"
    plots.norm_histogram(dataclasses.replace(found, warmup_steps=0), ax=(later := axes()))
    assert later.get_ylabel() == "number of steps"


def test_sweep_curve_of_nothing_but_diverged_runs():
    ax = plots.sweep_curve(result([np.inf, np.inf], np.nan), ax=axes())
    assert labels(ax) == ["final loss", DIVERGED]
    assert not len(ax.get_yticks())


@pytest.mark.parametrize("long", [True, False])
def test_a_legend_leaves_room_for_the_picture(long):
    short = {"plain": [2.0, np.nan], "zclip": [2.0, 1.0], "autoclip": [2.0, 1.5]}
    ax = plots.sweep_curve(result([2.0, 1.0, np.inf], 1.0)) if long else plots.loss_curves(short)
    ax.figure.draw_without_rendering()
    assert ax.get_window_extent().width > 0.8 * ax.figure.bbox.width
    assert ax.get_window_extent().height > (0.5 if long else 0.7) * ax.figure.bbox.height
    box = ax.get_legend().get_window_extent()
    assert 0 <= box.y0 <= box.y1 <= ax.get_window_extent().y0


@pytest.mark.parametrize(
    ("norms", "ticks"),
    [
        ([0.3, 30.0], ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]),
        ([0.8, 3000.0], ["0.1", "1", "10", "100", "1000", "10000"]),
        ([1.2, 3.5], ["1", "1.5", "2", "3", "5"]),
        ([1e-9, 1e-3], None),
    ],
)
def test_logarithmic_axes_have_plain_numbers(norms, ticks):
    ax = plots.norms_over_steps(norms, ax=axes())
    ax.figure.draw_without_rendering()
    found = [label.get_text() for label in ax.get_yticklabels()]
    if ticks is None:
        assert all("10^" in label for label in found)
    else:
        assert set(ticks) <= set(found)


def test_a_legend_of_large_letters_fits_in_the_figure():
    suggestion = tuning.suggest(norms_with_spikes())
    with matplotlib.rc_context({"font.size": 13}):
        figure = Figure(figsize=(5.0, 4.2), layout="constrained")
        suggestion = dataclasses.replace(suggestion, threshold=1.2)
        legend_below(plots.norm_histogram(suggestion, ax=figure.subplots()))
        figure.draw_without_rendering()
    box = figure.axes[0].get_legend().get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert box.y1 <= figure.axes[0].xaxis.label.get_window_extent().y0 + 1

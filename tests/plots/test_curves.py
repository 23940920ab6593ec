"""Pictures of losses and norms over the steps, a line for each run."""

import numpy as np
import pytest

from optaxclip import plots

Figure = pytest.importorskip("matplotlib.figure").Figure


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def test_loss_curves_cut_explosions_off_and_cross_them_out():
    figure = Figure()
    ax = figure.subplots()
    losses = {"plain": [4.0, 1e30, np.nan, np.nan], "clipped": [4.0, 3.0, 1e9, 2.0]}
    assert plots.loss_curves(losses, [0, 10, 20, 30], ax=ax) is ax
    assert 4.0 < ax.get_ylim()[1] < 5.0
    assert labels(ax) == ["plain", "clipped", "non-finite"]
    crosses = [line for line in ax.lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert [line.get_xdata()[-1] for line in crosses] == [20]
    at = ax.transAxes.inverted().transform(crosses[0].get_transform().transform((20, 1)))
    assert at[1] == pytest.approx(1.0)
    assert crosses[0].get_color() == ax.lines[0].get_color() != ax.lines[1].get_color()


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "thresholds", [{"ylim": (0.02, 2.0), "yscale": "log"}, {"xlim": (0.0, 0.1)}]
)
def test_crosses_stay_at_the_edge_of_axes_whose_thresholds_are_set_later(thresholds):
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    for ax in figure.subplots(1, 2):
        plots.loss_curves({"lost": [1e30, 1e3, np.nan], "clipped": [0.3, 0.2, 0.2]}, ax=ax)
        ax.set(**thresholds)
    figure.draw_without_rendering()
    whole = figure.bbox
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert ax.get_window_extent().height > 0.7 * whole.height


@pytest.mark.parametrize("losses", [[np.nan], [np.inf, np.nan], [2.0, 2.0], [np.nan, 3.0]])
def test_loss_curves_of_unusual_runs(losses):
    ax = plots.loss_curves({"run": losses}, ax=Figure().subplots())
    assert np.isfinite(ax.get_ylim()).all()
    if losses == [2.0, 2.0]:
        assert ax.get_ylim() == (1.0, 3.0)


def test_every_stretch_of_losses_that_are_not_finite_has_a_cross_and_a_rise_before_it():
    nan = np.nan
    for losses, crossed, rises in (
        ([nan, nan, 2.0], [0], 0),
        ([2.0, nan, nan, 1.0, np.inf], [1, 4], 2),
        ([nan, 2.0, nan], [0, 2], 1),
        ([2.0, 1.0], [], 0),
    ):
        ax = plots.loss_curves({"run": losses}, ax=Figure().subplots())
        found = [x for line in ax.lines if line.get_marker() == "X" for x in line.get_xdata()]
        assert (found, len(ax.patches)) == (crossed, rises)


@pytest.mark.parametrize("draw", [plots.loss_curves, plots.norm_curves])
def test_curves_mark_points_without_neighbors(draw):
    ax = draw({"one step": [2.0], "others": [1.0]}, ax=Figure().subplots())
    assert [(x.get_marker(), x.get_markevery()) for x in ax.lines] == [("o", [0])] * 2
    ax = draw({"run": [2.0, 1.0, np.nan, 3.0]}, ax=Figure().subplots())
    assert ax.lines[0].get_markevery() == [3]
    assert draw({"run": [2.0, 1.0]}, ax=Figure().subplots()).lines[0].get_marker() == "None"


def test_norm_curves_have_a_legend_on_axes_of_their_own():
    ax = plots.norm_curves({"a": np.geomspace(1, 1e9, 5)}, threshold=2.0)
    assert ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "threshold 2"]
    assert ax.lines[0].get_xdata()[0] == 0


def test_equal_runs_are_all_seen():
    ax = plots.loss_curves({name: [2.0, 1.0] for name in "abc"}, ax=Figure().subplots())
    widths = [line.get_linewidth() for line in sorted(ax.lines, key=lambda line: line.zorder)]
    assert widths == sorted(set(widths), reverse=True)


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ({}, {}, "norms must be a dict with at least one run"),
        (
            {"a": []},
            {},
            r"norms of 'a' must not be empty, got shape \(0,\); record some steps first",
        ),
        (
            {"a": np.ones((3, 2))},
            {},
            r"must be one-dimensional, got shape \(3, 2\); use one column .*",
        ),
        (
            {"a": [1.0]},
            {"steps": [1, 2]},
            r"steps must have shape \(1,\) to match norms of 'a', got \(2,\)",
        ),
    ],
)
def test_curves_that_cannot_be_drawn(series, options, message):
    with pytest.raises(ValueError, match=message):
        plots.norm_curves(series, **options)


@pytest.mark.parametrize("draw", [plots.loss_curves, plots.norm_curves])
@pytest.mark.parametrize("series", [np.ones(3), np.array(1.0), [1.0, 2.0], "log.csv", None])
def test_curves_are_given_by_the_name_of_their_run(draw, series):
    with pytest.raises(TypeError, match=r"must be a dict .*, such as \{'run': .*\}, got "):
        draw(series)


@pytest.mark.parametrize("threshold", [np.array([1.0, 1.5]), [1.0, 1.5], {"a": 1.0}, "1.0", True])
def test_norm_curves_need_number_as_threshold(threshold):
    with pytest.raises(
        TypeError, match=r"^threshold must be a number, got .*; use plots\.norms_over"
    ):
        plots.norm_curves({"a": [1.0, 2.0]}, threshold=threshold)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("values", ["log.csv", ["a", "b"], [[1.0], [2.0, 3.0]], {"a": 1.0}])
def test_curves_are_of_real_numbers(values):
    with pytest.raises(
        TypeError, match=r"norms of 'a' must be a one-dimensional array of real numbers, got "
    ):
        plots.norm_curves({"a": values})
    with pytest.raises(
        TypeError, match=r"norms must be a one-dimensional array of real numbers, got "
    ):
        plots.norms_over_steps(values)

"""Pictures of limits: what they mark, and that they draw where they are told to."""

import numpy as np
import pytest

from optaxclip import plots, tuning
from optaxclip.commands import demo
from optaxclip.tuning.sweeping import SweepResult

matplotlib = pytest.importorskip("matplotlib")
Figure = pytest.importorskip("matplotlib.figure").Figure


def axes():
    return Figure().subplots()


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def test_norms_over_steps_marks_what_a_limit_clips():
    ax, norms = axes(), [1.0, 3.0, np.nan, 2.0, 0.0, np.inf]
    assert plots.norms_over_steps(norms, 2.0, steps=range(10, 16), ax=ax) is ax
    assert labels(ax) == ["norm", "clipped (1)", "limit 2", "not finite (2)"]
    assert line(ax, "clipped (1)").get_xydata().tolist() == [[11.0, 3.0]]
    assert line(ax, "not finite (2)").get_xdata().tolist() == [12, 15]
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "gradient norm")
    assert ax.get_legend() is None


def test_norms_over_steps_with_a_limit_for_each_step_or_none():
    assert labels(plots.norms_over_steps([1.0, 2.0], [0.5, 3.0], ax=axes()))[1:] == [
        "clipped (1)",
        "limit",
    ]
    assert labels(plots.norms_over_steps([1.0, 2.0], ax=axes())) == ["norm"]


def norms_with_spikes(spikes=(10.0, 50.0)):
    norms = np.exp(0.2 * np.random.default_rng(0).normal(size=500))
    norms[100 : 100 + len(spikes)] = spikes
    return norms


@pytest.mark.parametrize("spikes", [(), (10.0, 50.0)])
def test_histogram_counts_every_norm(spikes):
    suggestion = tuning.suggest(np.append(norms_with_spikes(spikes), [np.nan, 0.0]))
    ax = axes()
    assert plots.norm_histogram(suggestion, ax=ax) is ax
    heights = [sum(bar.get_height() for bar in bars) for bars in ax.containers]
    assert heights == [500 - len(spikes), len(spikes)][: 1 + bool(spikes)]
    assert ax.lines[0].get_xdata()[0] == suggestion.limit
    assert f"limit {suggestion.limit:.3g}, clips" in labels(ax)[-1] + labels(ax)[0]


def test_heatmap_has_a_row_for_each_leaf():
    norms = np.array([[1.0, 0.0, np.nan], [10.0, 0.1, 1.0]])
    ax = axes()
    assert plots.norm_heatmap(norms, ["a", "b", "c"], ax=ax) is ax
    shown = ax.collections[0].get_array()
    np.testing.assert_array_equal(shown.mask, np.isnan(norms).T)
    assert shown[1].tolist() == [0.1, 0.1]
    assert ax.yaxis_inverted()
    assert len(ax.figure.axes) == 2
    assert plots.norm_heatmap(np.zeros((2, 50)), [str(i) for i in range(50)], ax=axes())


@pytest.mark.parametrize(("shape", "names"), [((3,), None), ((3, 2), ["a"])])
def test_heatmap_refuses_other_shapes(shape, names):
    with pytest.raises(ValueError, match=r"norms must be \[steps, leaves\], got the shape \(3,"):
        plots.norm_heatmap(np.ones(shape), names)


def result(final, limit):
    final = np.asarray(final, np.float32)
    limits = np.geomspace(0.1, 10.0, len(final)).astype(np.float32)
    nothing = np.zeros((*final.shape, 1), np.float32)
    return SweepResult(
        limits, None, nothing, nothing, nothing, final, np.isinf(final), 0.1, limit, None
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_sweep_curve_shows_diverged_runs(seeds):
    final = np.repeat([[2.0], [1.0], [np.inf]], seeds, axis=1).squeeze()
    ax = axes()
    assert plots.sweep_curve(result(final, 1.0), ax=ax) is ax
    crosses = line(ax, "diverged").get_xdata()
    np.testing.assert_allclose(crosses, [10.0] * seeds)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [2.0, 1.0, np.nan])
    assert "suggested limit 1" in labels(ax)


def test_sweep_curve_of_nothing_but_diverged_runs():
    ax = plots.sweep_curve(result([np.inf, np.inf], np.nan), ax=axes())
    assert labels(ax) == ["final loss", "diverged"]


def test_before_and_after():
    ax = plots.before_after([3.0, np.nan], [3.0, 2.0], steps=[0, 5], ax=axes())
    assert labels(ax) == ["without clipping", "with clipping", "not finite"]
    assert ax.lines[0].get_xdata().tolist() == [0, 5]


def test_every_axes_gets_its_own_legend():
    figure = plots.side_by_side()
    for i, ax in enumerate(figure.axes):
        ax.plot([1, 2], label=str(i))
    plots.legends_below(figure)
    texts = [ax.get_legend().get_texts()[0].get_text() for ax in figure.axes]
    assert texts == ["0", "1"]


def test_a_shared_legend_of_many_runs_fits_in_the_figure():
    figure = plots.side_by_side()
    series = {name: [1.0, 2.0] for name in ("none", *demo.METHODS)}
    plots.loss_curves(series, ax=figure.axes[0])
    plots.shared_legend(figure)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width

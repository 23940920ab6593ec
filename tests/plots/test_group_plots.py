"""Pictures of statistics by leaf: which color stands for what."""

import numpy as np
import pytest

import optaxclip.plots.leaves as leaves
from optaxclip import monitor, plots, scopes

matplotlib = pytest.importorskip("matplotlib")
Figure = pytest.importorskip("matplotlib.figure").Figure
NAN = np.nan


def axes():
    return Figure().subplots()


def test_heatmap_names_some_of_many_leaves():
    for count, every in ((40, 1), (41, 2), (300, 8)):
        ax = plots.heatmap(np.ones((2, count)), [f"leaf {i}" for i in range(count)], ax=axes())
        named = [label.get_text() for label in ax.get_yticklabels()]
        assert named == [f"leaf {i}" for i in range(0, count, every)]
    assert plots.heatmap(np.ones((2, 3)), ax=axes()).get_ylabel() == "leaf"


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_heatmap_draws_single_step_and_leaf(shape):
    ax = plots.heatmap(np.ones(shape), ax=axes())
    corners = ax.collections[0].get_coordinates()
    assert np.all(np.ptp(corners, axis=(0, 1)) == shape)


def test_heatmap_explains_nonfinite_color():
    values = [[1.0, NAN], [np.inf, 2.0]]
    ax = plots.heatmap(values)
    (text,) = ax.get_legend().get_texts()
    assert text.get_text() == "non-finite (2)"
    assert plots.heatmap(values, ax=axes()).get_legend_handles_labels()[1] == ["non-finite (2)"]
    assert plots.heatmap([[1.0, 2.0]]).get_legend() is None


def test_a_heatmap_has_the_ends_of_its_statistic():
    for stat, values, ends in (
        ("share", [[0.2, 0.3]], (0, 1)),
        ("cosine_param", [[-0.1, 0.1]], (-1, 1)),
        ("norm", [[3.0, 3.0]], (3, 6)),
        ("norm", [[0.0, 0.0]], (0.1, 1)),
        ("norm", [[0.0, 0.1], [10.0, np.inf]], (0.1, 10.0)),
    ):
        ax = plots.heatmap(values, ["w", "b"], range(10, 10 + len(values)), stat=stat, ax=axes())
        mesh, (_, bar) = ax.collections[0], ax.figure.axes
        assert bar.get_ylabel() == leaves.HEATMAP_STYLES[stat].label
        places = mesh.get_coordinates()[0, :, 0]
        assert ((places[1:] + places[:-1]) / 2).tolist() == [*range(10, 10 + len(values))]
        assert (mesh.norm.vmin, mesh.norm.vmax) == ends, stat
        rows = np.ma.masked_invalid(np.asarray(values)).T
        assert np.ma.getmaskarray(mesh.get_array()).tolist() == np.ma.getmaskarray(rows).tolist()
    assert mesh.cmap.get_bad().tolist() == [1, 0, 0, 1]


def test_all_that_a_record_keeps_can_be_shown():
    from optaxclip.monitor._record import STATISTICS

    assert list(leaves.HEATMAP_STYLES) == list(STATISTICS)
    tx = monitor.record(3, scope=scopes.leaf(), stats=tuple(STATISTICS))
    grads = {"w": np.ones(2, np.float32), "b": np.zeros(3, np.float32)}
    state = tx.init(grads)
    with pytest.raises(ValueError, match=r"got \(0, 2\) with 2 names; record some steps"):
        plots.heatmap(monitor.history(state), monitor.history_names(state))
    _, state = tx.update(grads, state, grads)
    names = monitor.history_names(state)
    for stat in STATISTICS:
        plots.heatmap(monitor.history(state, stat=stat), names, stat=stat, ax=axes())


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.heatmap([[0.5]], stat="shares"), "'shares'; did you mean 'share'"),
        (
            lambda: plots.heatmap([[0.5]], steps=[1, 2]),
            r"steps must have shape \(1,\) to match the rows of values, got \(2,\)",
        ),
    ],
)
def test_what_cannot_be_drawn(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.parametrize("values", [[[1.0], [1.0, 2.0]], [["a"]], {"w": 1.0}])
def test_heatmap_needs_real_numbers(values):
    with pytest.raises(
        TypeError, match=r"values must be an array .* with rows of equal length, got "
    ):
        plots.heatmap(values)

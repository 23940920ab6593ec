"""Pictures of statistics by leaf: which areas and colours stand for what."""

import numpy as np
import pytest

from optaxclip import monitor, plots, scopes
from optaxclip.plots import groups

matplotlib = pytest.importorskip("matplotlib")
Figure = pytest.importorskip("matplotlib.figure").Figure
NAN = np.nan


def axes():
    return Figure().subplots()


def areas(ax):
    """For each area its label and, at each step, from where to where it goes."""
    found = {}
    for area in ax.collections:
        corners = np.concatenate([path.vertices for path in area.get_paths()])
        spans = {}
        for x, y in corners.round(6):
            spans.setdefault(x, set()).add(y)
        found[area.get_label()] = {x: (min(y), max(y)) for x, y in spans.items()}
    return found


def test_shares_lie_on_top_of_each_other_the_largest_at_the_bottom():
    shares = [[0.2, 0.8, 0.0], [0.5, 0.25, 0.25]]
    ax = plots.shares_over_steps(shares, ["a", "b", "c"], steps=[10, 20], ax=axes())
    assert ax.get_legend_handles_labels()[1] == ["b", "a", "c"]
    found = areas(ax)
    at_first, at_last = ({name: spans[x] for name, spans in found.items()} for x in (5.0, 25.0))
    assert at_first == {"b": (0.0, 0.8), "a": (0.8, 1.0), "c": (1.0, 1.0)}
    assert at_last == {"b": (0.0, 0.25), "a": (0.25, 0.75), "c": (0.75, 1.0)}
    assert (ax.get_xlim(), ax.get_ylim()) == ((5.0, 25.0), (0.0, 1.0))
    colors = {tuple(area.get_facecolor()[0]) for area in ax.collections}
    assert len(colors) == 3


def test_areas_meet_half_way_between_steps():
    ax = plots.shares_over_steps(np.ones((3, 1)), steps=[0, 2, 6], ax=axes())
    assert sorted(areas(ax)["0"]) == [-1, 1, 4, 8]
    assert ax.get_xlim() == (-1, 8)


def test_shares_may_exceed_1_by_rounding_alone():
    plots.shares_over_steps([[1 + 9e-5]], ax=axes())
    with pytest.raises(ValueError, match="shares must be from 0 to 1"):
        plots.shares_over_steps([[1 + 1.1e-4]], ax=axes())


def test_many_small_ones_share_a_colour_and_a_single_one_does_not():
    shares = np.full((3, 12), 0.5 / 11)
    shares[:, 4] = 0.5
    names = [f"layer {i}" for i in range(12)]
    ax = plots.shares_over_steps(shares, names, ax=axes(), most=3)
    assert ax.get_legend_handles_labels()[1] == ["layer 4", "layer 0", "layer 1", "9 others"]
    assert areas(ax)["9 others"][1.5][1] == pytest.approx(1.0)
    assert ax.get_legend() is None
    ax = plots.shares_over_steps(shares[:, :4], names[:4], most=3)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*names[:4]]


def test_more_groups_than_colours_leave_one_to_the_others():
    ax = plots.shares_over_steps(np.full((1, 9), 1 / 9), ax=axes(), most=8)
    assert ax.get_legend_handles_labels()[1] == [*map(str, range(8)), "1 others"]
    ax = plots.shares_over_steps(np.full((1, 8), 1 / 8), ax=axes(), most=7)
    assert ax.get_legend_handles_labels()[1] == [*map(str, range(8))]


def test_a_heatmap_names_as_many_leaves_as_fit():
    for count, label in ((40, ""), (41, "leaf")):
        ax = plots.heatmap(np.ones((2, count)), [f"leaf {i}" for i in range(count)], ax=axes())
        assert ax.get_ylabel() == label
        assert (ax.get_yticklabels()[0].get_text() == "leaf 0") == (count == 40)


def test_steps_that_are_not_finite_stay_empty_and_missing_leaves_count_as_nothing():
    shares = [[0.4, 0.6], [NAN, NAN], [1.0, NAN], [NAN, NAN]]
    ax = plots.shares_over_steps(shares, ax=axes())
    assert ax.get_legend_handles_labels()[1] == ["0", "1", "not finite (2)"]
    assert ax.lines[0].get_xdata().tolist() == [1, 3]
    found = areas(ax)["0"]
    assert found == {-0.5: (0, 0.4), 0.5: (0, 0.4), 1.5: (0, 1), 2.5: (0, 1)}
    for rows in ([[0.3, 0.7]], [[NAN, NAN]]):
        assert plots.shares_over_steps(rows, ax=axes()).get_xlim() == (-0.5, 0.5)


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
        assert bar.get_ylabel() == groups.LOOKS[stat].label
        places = mesh.get_coordinates()[0, :, 0]
        assert ((places[1:] + places[:-1]) / 2).tolist() == [*range(10, 10 + len(values))]
        assert (mesh.norm.vmin, mesh.norm.vmax) == ends, stat
        rows = np.ma.masked_invalid(np.asarray(values)).T
        assert np.ma.getmaskarray(mesh.get_array()).tolist() == np.ma.getmaskarray(rows).tolist()
    assert mesh.cmap.get_bad().tolist() == [1, 0, 0, 1]


def test_all_that_a_record_keeps_can_be_shown():
    from optaxclip.monitor.statistics import STATISTICS

    assert list(groups.LOOKS) == list(STATISTICS)
    tx = monitor.record(3, scope=scopes.leaf(), stats=tuple(STATISTICS))
    grads = {"w": np.ones(2, np.float32), "b": np.zeros(3, np.float32)}
    state = tx.init(grads)
    with pytest.raises(ValueError, match=r"got the shape \(0, 2\) and 2 names; record some steps"):
        plots.heatmap(monitor.history(state), monitor.history_names(state))
    _, state = tx.update(grads, state, grads)
    names = monitor.history_names(state)
    for stat in STATISTICS:
        plots.heatmap(monitor.history(state, stat=stat), names, stat=stat, ax=axes())
    plots.shares_over_steps(monitor.history(state, stat="share"), names, ax=axes())


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.shares_over_steps([[5.0, 2.0]]), "shares must be from 0 to 1.*2 to 5"),
        (lambda: plots.shares_over_steps([[-0.5, 1.5]]), "shares must be from 0 to 1"),
        (lambda: plots.shares_over_steps([0.5]), r"shares must be \[steps, leaves\]"),
        (lambda: plots.shares_over_steps(np.ones((0, 2))), "record some steps first"),
        (lambda: plots.shares_over_steps([[0.5]], ["a", "b"]), "and 2 names"),
        (lambda: plots.shares_over_steps([[0.5]], steps=[1, 2]), "for each of 1 rows"),
        (lambda: plots.shares_over_steps([[0.5]], most=0), "most must be an int of at least 1"),
        (lambda: plots.shares_over_steps([[0.5]], most=9), "most must be at most 8, got 9"),
        (lambda: plots.heatmap([[0.5]], stat="shares"), "'shares'; did you mean 'share'"),
        (lambda: plots.heatmap([[0.5]], steps=[1, 2]), "for each of 1 rows"),
    ],
)
def test_what_cannot_be_drawn(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.parametrize("values", [[[1.0], [1.0, 2.0]], [["a"]], {"w": 1.0}])
def test_maps_are_of_real_numbers(values):
    for draw, name in (
        (plots.heatmap, "values"),
        (plots.shares_over_steps, "shares"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be real numbers .* in each row, got "):
            draw(values)

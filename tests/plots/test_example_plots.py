"""The picture of the norms of examples: every norm is counted, and the largest are named."""

import numpy as np
import pytest

from optaxclip import plots

Figure = pytest.importorskip("matplotlib.figure").Figure


def drawn(*args, **options):
    return plots.example_norms(*args, ax=Figure().subplots(), **options)


def counted(ax):
    return {bars.get_label(): sum(bar.get_height() for bar in bars) for bars in ax.containers}


NORMS = np.exp(0.3 * np.random.default_rng(0).normal(size=1000))


def test_every_norm_is_counted_once_and_the_largest_have_names():
    norms = NORMS.copy()
    norms[[17, 205]] = 20.0, 50.0
    ax = drawn(norms, 2.0, {"wrong": [17, 3], "broken": np.array([205, 17])}, most=3)
    assert counted(ax) == {"others (997)": 997, "wrong (2)": 2, "broken (1)": 1}
    largest = np.argsort(-norms)[:3]
    assert ax.texts[0].get_text() == "\n".join(
        ["example: norm", *(f"{i}: {norms[i]:.3g}" for i in largest)]
    )
    assert list(largest[:2]) == [205, 17]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylabel()) == (
        *("log", "log"),
        "number of examples",
    )
    line = ax.lines[0]
    assert line.get_xdata()[0] == 2.0
    assert line.get_label() == f"limit 2, clips {np.mean(norms > 2):.1%}"
    assert ax.get_legend() is None


def test_no_bar_has_norms_on_both_sides_of_the_limit():
    ax = drawn(NORMS, 1.3)
    left = [b for b in ax.containers[0] if b.get_x() + b.get_width() <= 1.3 * (1 + 1e-6)]
    assert sum(b.get_height() for b in left) == np.sum(NORMS <= 1.3)


def test_norms_without_a_place_on_the_axis_are_counted_in_its_label():
    ax = drawn([1.0, 20.0, 0.0, 1e-30, 1.9e-5, np.nan, np.inf], most=9)
    assert counted(ax) == {"examples (2)": 2}
    assert ax.get_xlabel() == "norm of an example's gradient (3 below 2e-05, 2 not finite)"
    assert ax.texts[0].get_text() == "example: norm\n1: 20\n0: 1"
    assert not ax.lines


def test_norms_that_are_all_alike_share_a_bar():
    ax = drawn([3.0, 3.0, 3.0], most=2)
    assert counted(ax) == {"examples (3)": 3}
    assert ax.texts[0].get_text() == "example: norm\n0: 3\n1: 3"
    assert not drawn([3.0, 3.0], 3.0, most=0).texts
    assert drawn([3.0, 3.0], 3.0).lines[0].get_label() == "limit 3, clips 0.0%"
    # A millionth of the largest norm is the least that is drawn.
    assert counted(drawn([1.0, 1e-6])) == {"examples (2)": 2}
    assert drawn([1.0, 1e-6]).get_xlabel() == "norm of an example's gradient"
    marked = {name: [i] for i, name in enumerate("abcdefg")}
    assert list(counted(drawn(np.full(7, 3.0), marked=marked))) == [f"{x} (1)" for x in marked]


@pytest.mark.parametrize("spread", [1.2, 3.0, 50.0, 1e5])
def test_ticks_can_be_read(spread):
    ax = drawn(np.geomspace(1.0, spread, 30))
    low, high = ax.get_xlim()
    ax.figure.canvas.draw()
    shown = [text.get_text() for text in ax.get_xticklabels(which="both")]
    places = ax.get_xticks()
    inside = [text for text, x in zip(shown, places, strict=False) if low <= x <= high and text]
    assert 1 <= len(inside) <= 9
    assert len(set(inside)) == len(inside)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([],), ValueError, "norms must have at least one entry"),
        (([[1.0]],), ValueError, "norms must have one axis"),
        ((["a"],), TypeError, "norms must be real numbers"),
        (([0.0, np.nan],), ValueError, "norms must have one that is finite and above 0"),
        (([1.0], 0.0), ValueError, "limit must be a finite number above 0, got 0.0"),
        (([1.0], np.inf), ValueError, "limit must be a finite number above 0, got inf"),
        (([1.0], None, {"a": [-1]}), ValueError, r"marked\['a'\] must be indices of 1 examples"),
        (([1.0], -1.0), ValueError, "limit must be a finite number above 0, got -1.0"),
        (([1.0], None, [0]), TypeError, "marked must be a dict from names"),
        (([1.0], None, {"a": [1]}), ValueError, r"marked\['a'\] must be indices of 1 examples"),
        (([1.0], None, {"a": [0.0]}), TypeError, r"marked\['a'\] must be indices, got"),
        (([1.0], None, {name: [] for name in "abcdefgh"}), ValueError, "at most 7 names, got 8"),
    ],
)
def test_bad_input(args, error, message):
    with pytest.raises(error, match=message):
        plots.example_norms(*args)
    with pytest.raises(ValueError, match="most must be an int of at least 0, got -1"):
        plots.example_norms([1.0], most=-1)

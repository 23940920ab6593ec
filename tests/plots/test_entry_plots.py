"""The picture of entries by size: every size has its bar, and what a format loses is marked."""

import jax.numpy as jnp
import numpy as np
import pytest

from optaxclip import monitor, plots

Figure = pytest.importorskip("matplotlib.figure").Figure
TREE = {
    "large": jnp.array([65519.0, 65520.0, 2.0**17, jnp.inf]),
    "none": jnp.zeros(3),
    "small": jnp.array([2.0**-30, 2.0**-25, 1.5 * 2.0**-25, 1.0, 0.0]),
}
HELD, LOST = "entries", "lost in float16"


TX = monitor.histogram()
FOUND = monitor.histograms(TX.update(TREE, TX.init(TREE))[1])


def by_hand(counts, exponents):
    """A histogram with these counts above these powers of two."""
    edges = np.array([2.0**k for k in range(exponents[0], exponents[-1] + 2)])
    found = np.zeros(len(edges) - 1, np.int64)
    found[np.array(exponents) - exponents[0]] = counts
    return monitor.Histogram(found, edges, 0, 0, 0)


def drawn(histogram, **options):
    return plots.element_histogram(histogram, ax=Figure().subplots(), **options)


def bars(ax, label):
    """The exponents at which bars of this look begin, by the row that they stand on."""
    look = next(x[0].get_facecolor() for x in ax.containers if x.get_label() == label)
    found = {}
    for bar in (bar for container in ax.containers for bar in container):
        if bar.get_facecolor() == look:
            found.setdefault(int(bar.get_y()), []).append(int(bar.get_x()))
    return found


def names(ax):
    return [text.get_text() for text in ax.get_yticklabels()]


def test_each_size_has_its_bar_and_the_first_format_marks_what_it_loses():
    ax = drawn(FOUND, dtypes=("float16", jnp.bfloat16))
    assert bars(ax, HELD) == {0: [15], -2: [-25, -1]}
    assert bars(ax, LOST) == {0: [16], -2: [-31, -26]}
    # 65520 is too large for float16, and shares its bar with 65519.
    columns = [text.get_text() for text in ax.texts]
    assert columns[:4] == ["lost in float16", "67 %", "0 %", "50 %"]
    assert columns[4:] == ["bfloat16", "0 %", "0 %", "0 %"]
    colors = [text.get_color() for text in ax.texts]
    assert colors == [plots.COLORS[1]] * 4 + [plots.COLORS[2]] * 4
    assert ax.get_xlabel() == "element size (33% zero, 1 non-finite)"
    assert names(ax) == ["float16", "bfloat16", *TREE]
    assert ax.get_legend() is None
    assert sorted(ax.get_legend_handles_labels()[1]) == [HELD, LOST]


def test_heights_are_shares_of_a_row_on_a_logarithmic_axis():
    ax = drawn(by_hand([990_000, 9_990, 10], [-1, 1, 3]))
    heights = {int(bar.get_x()): bar.get_height() for bar in ax.containers[0]}
    ticks = dict(zip(names(ax), ax.get_yticks(), strict=True))
    at = [*map(ticks.get, ("1e-6", "1e-4", "0.01", "1"))]
    np.testing.assert_allclose(np.diff(at), at[-1] / 3)
    share = {x: np.interp(y, at, [-6.0, -4.0, -2.0, 0.0]) for x, y in heights.items()}
    np.testing.assert_allclose(share[1], np.log10(0.00999), atol=0.01)
    np.testing.assert_allclose(share[3], -5.0, atol=1e-6)
    assert ax.get_ylabel() == "fraction of elements"
    assert ax.get_xlabel() == "element size"
    assert not ax.texts
    of_few = drawn(by_hand([1, 1999], [-30, 0]), dtypes=("float16", "bfloat16")).texts
    assert [text.get_text() for text in of_few][1::2] == ["<0.1 %", "0 %"]


def test_bands_reach_from_half_the_smallest_to_the_largest_number():
    formats = ("float16", jnp.float8_e4m3fn, "float4_e2m1fn", "float32", jnp.float64)
    ax = drawn(FOUND["small"], dtypes=formats)
    spans = {}
    for container in ax.containers:
        (bar, *more) = container
        if not more and bar.get_y() > 0.5:
            row = round(bar.get_y(), 6)
            low, high = bar.get_x(), bar.get_x() + bar.get_width()
            spans.setdefault(row, []).append((low, high))
    found = {name: sorted(spans[row]) for name, row in zip(formats, sorted(spans), strict=True)}
    assert found["float16"] == [(-25, -14), (-14, 16)]
    assert found[jnp.float8_e4m3fn] == [(-10, -6), (-6, 9)]
    assert found["float4_e2m1fn"] == [(-2, 0), (0, 3)]
    assert found["float32"] == [(-150, -126), (-126, 128)]
    assert found[jnp.float64] == [(-1075, -1022), (-1022, 1024)]
    # The axis has the entries, and those ends of bands that are near.
    assert ax.get_xlim() == (-32, 17)
    assert drawn(FOUND["small"]).get_xlim() == (-32, 1)


def test_the_sizes_of_float64_and_many_rows():
    many = {str(i): FOUND["small"] for i in range(41)}
    ax = drawn(many, dtypes=("bfloat16",))
    assert names(ax) == ["bfloat16", *map(str, range(0, 41, 2))]
    assert len(ax.texts) == 1 + 21
    counts = np.zeros(2099, np.int64)
    counts[[0, -1]] = 1
    edges = np.array([0.0, *(2.0**k for k in range(-1074, 1024)), np.inf])
    ax = drawn(monitor.Histogram(counts, edges, 0, 0, 0))
    assert bars(ax, HELD) == {0: [-1075, 1023]}
    ax.figure.canvas.draw()


@pytest.mark.parametrize(
    ("histogram", "dtypes", "error", "message"),
    [
        (FOUND["none"], (), ValueError, "contains no finite nonzero elements; train"),
        ({}, (), ValueError, "histogram is an empty dict; pass at least one histogram"),
        (3, (), TypeError, "histogram must be a Histogram returned by monitor.histograms, got"),
        ({"a": 3}, (), TypeError, r"histogram\['a'\] must be a Histogram"),
        (FOUND, "float16", TypeError, "dtypes must be a tuple of dtypes, got 'float16'"),
        (FOUND, jnp.float16, TypeError, "dtypes must be a tuple of dtypes"),
        (FOUND, ("int8",), TypeError, "dtypes must be floating-point dtypes such as"),
        (FOUND, ("bool",), TypeError, "dtypes must be floating-point dtypes such as"),
        (FOUND, ("float16",) * 8, ValueError, "dtypes must contain at most 7, got 8"),
    ],
)
def test_bad_input(histogram, dtypes, error, message):
    with pytest.raises(error, match=message):
        plots.element_histogram(histogram, dtypes=dtypes)

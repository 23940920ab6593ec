"""A picture of how many entries have each size, beside the ranges of number formats."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optaxclip._base.validation import short_repr
from optaxclip.monitor import Histogram
from optaxclip.plots.groups import MAX_LABELS
from optaxclip.plots.style import COLORS, STYLES, check_instance, finish_axes, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = np.ndarray[Any, Any]
LOST = {"color": COLORS[0], "hatch": "////", "edgecolor": "white", "linewidth": 0}
IN_RANGE_STYLE = {"color": "0.6", "linewidth": 0}
DECADES, MAX_BAR_HEIGHT, MIN_BAR_HEIGHT = 6, 0.85, 0.03
"""How many powers of ten of shares a row shows, and how tall a row and its smallest bar are."""
BAND = 0.6
"""The distance of two bands above several rows, in rows; above one row a third of it."""
AROUND = 32
"""The axis is extended to an end of a band that is at most so many powers of two further."""


class DtypeBand(NamedTuple):
    """The exponents of two between which a format holds numbers.

    Attributes:
      name: of the format.
      bottom: of half the smallest number, which becomes 0.
      full: of the smallest number with all digits.
      top: of the power of two above the largest number.
    """

    name: str
    bottom: int
    full: int
    top: int


def element_histogram(
    histogram: Histogram | Mapping[str, Histogram],
    *,
    dtypes: Sequence[Any] = (),
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws how many entries have each size, and which of them another number format would lose.

    A row has a bar for each power of two; its height is the share of the row's non-zero entries, on
    a logarithmic scale that begins at a millionth. The label of the axis tells how many entries
    are 0 or not finite.

    Each format is a band over the sizes that it holds. Where the band is pale the format holds
    fewer digits. Entries outside of a format would become 0 or infinite, so they are lost. At the
    right of a row is the share that each format loses, below the format's name and in its color.
    Bars outside of the first format are orange and hatched.

    Args:
      histogram: one of those that `monitor.histograms` returns, or its dict of them: a row each.
      dtypes: number formats, such as `(jnp.float16, jnp.float8_e5m2)`, at most 7.
      ax: where to draw.

    Raises:
      ValueError: if no entry is finite and not 0, for no histograms, or too many formats.
      TypeError: for what is no histogram, or no format of floating-point numbers.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optaxclip import monitor, plots
      >>> tx = monitor.histogram(every=1)
      >>> grads = {"w": jnp.array([1e-9, 1e-3, 2.0, 0.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.element_histogram(monitor.histograms(state), dtypes=("float16",))
      >>> print([label.get_text() for label in ax.get_yticklabels()])
      ['float16', 'w']
      >>> print([text.get_text() for text in ax.texts])
      ['lost in float16', '33 %']
    """
    rows = dict(histogram) if isinstance(histogram, Mapping) else {"": histogram}
    if not rows:
        raise ValueError("histogram must be a dict with at least one histogram, got none")
    for name, row in rows.items():
        what = f"histogram[{name!r}]" if name else "histogram"
        check_instance(row, Histogram, what, "monitor.histograms")
    ends = [row.list_by_exponent()[1][[0, -1]] for row in rows.values() if row.counts.any()]
    if not ends:
        raise ValueError(
            "histogram must have an entry that is finite and not 0, got none; train until a step "
            "is counted"
        )
    bands = _bands(dtypes)
    axes = new_axes(ax)
    low, high = np.min(ends) - 1, np.max(ends) + 1
    near = [end for band in bands for end in (band.bottom, band.top)]
    near = [end for end in near if low - AROUND <= end <= high + AROUND]
    low, high = min([low, *(end - 1 for end in near)]), max([high, *(end + 1 for end in near)])
    for place, row in enumerate(rows.values()):
        _draw_row(axes, row, -place, bands[0] if bands else None)
    _write_lost(axes, list(rows.values()), bands)
    distance, lowest = BAND / (1 if len(rows) > 1 else 3), 1 - len(rows)
    places = [1.0 + distance * (0.5 + number) for number in range(len(bands))]
    for number, (place, band) in enumerate(zip(places, bands, strict=True)):
        _draw_band(axes, band, place, distance, lowest, number)
    axes.set(xlim=(low, high), ylim=(lowest - 0.05, 1.05 + distance * len(bands)))
    _tick(axes, rows, dict(zip(places, bands, strict=True)))
    return finish_axes(axes, _label(list(rows.values())), legend=ax is None)


def _bands(dtypes: Sequence[Any]) -> list[DtypeBand]:
    if isinstance(dtypes, (str, type)) or not isinstance(dtypes, Sequence):
        raise TypeError(f"dtypes must be a tuple of number formats, got {short_repr(dtypes)}")
    if len(dtypes) >= len(COLORS):
        raise ValueError(f"dtypes must be at most {len(COLORS) - 1}, got {len(dtypes)}")
    found = []
    for dtype in dtypes:
        try:
            info = jnp.finfo(dtype)
        except (TypeError, ValueError) as error:
            wanted = "formats of floating-point numbers, such as jnp.float16"
            raise TypeError(f"dtypes must be {wanted}, got {short_repr(dtype)}") from error
        # A size with the exponent `n` of `frexp` is below `2**n`, and at least half of that.
        sizes = (info.smallest_subnormal, info.tiny, info.max)
        least, full, top = (int(np.frexp(float(size))[1]) for size in sizes)
        found.append(DtypeBand(info.dtype.name, bottom=least - 2, full=full - 1, top=top))
    return found


def _draw_row(ax: "Axes", row: Histogram, base: int, band: DtypeBand | None) -> None:
    """The bars of a row; those outside of the band look different."""
    counts, edges = row.list_by_exponent()
    exponents = edges[:-1]
    shares = np.maximum(counts, 1) / max(counts.sum(), 1)
    heights = MAX_BAR_HEIGHT * np.maximum(1 + np.log10(shares) / DECADES, MIN_BAR_HEIGHT)
    parts = {"entries": (np.ones(len(counts), bool), IN_RANGE_STYLE)}
    if band:
        is_lost = (exponents < band.bottom) | (exponents >= band.top)
        parts["entries"] = (~is_lost, IN_RANGE_STYLE)
        parts[f"lost in {band.name}"] = (is_lost, LOST)
    ax.axhline(base, color="0.8", linewidth=0.8, zorder=1)
    known = ax.get_legend_handles_labels()[1]
    for label, (part, look) in parts.items():
        shown = part & (counts > 0)
        if shown.any():
            look = {"width": 1.0, "align": "edge", "zorder": 2, **look}
            label = "_" if label in known else label
            ax.bar(exponents[shown], heights[shown], bottom=base, label=label, **look)


def _write_lost(ax: "Axes", rows: list[Histogram], bands: list[DtypeBand]) -> None:
    """Writes the share that each format loses of each row, in a column with the format's name."""
    from matplotlib import rcParams

    every = -(-len(rows) // MAX_LABELS)
    look = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
    for number, band in enumerate(bands):
        x = rcParams["font.size"] * (0.4 + 2.7 * number)
        column = {**look, "color": COLORS[number + 1], "fontsize": "x-small"}
        name = f"lost in {band.name}" if number == 0 else band.name
        ax.annotate(name, (1.0, 1.05), (x, 0.0), rotation=90, va="bottom", **column)
        for place, row in list(enumerate(rows))[::every]:
            percent = 100 * (row.underflow_fraction(band.name) + row.overflow_fraction(band.name))
            text = "<0.1 %" if 0 < percent < 0.1 else f"{percent:.2g} %"
            ax.annotate(text, (1.0, MAX_BAR_HEIGHT / 2 - place), (x, 0.0), va="center", **column)


def _draw_band(
    ax: "Axes", band: DtypeBand, height: float, distance: float, lowest: int, number: int
) -> None:
    """The band of a format above the rows, and lines from its ends through them."""
    color, style = COLORS[number + 1], STYLES[1 + number % (len(STYLES) - 1)]
    look = {"height": 0.6 * distance, "color": color, "linewidth": 0, "zorder": 2}
    ax.barh(height, band.top - band.full, left=band.full, **look)
    ax.barh(height, band.full - band.bottom, left=band.bottom, alpha=0.35, **look)
    ends = {"colors": color, "linestyles": style, "linewidth": 1.2, "zorder": 3}
    ax.vlines([band.bottom, band.top], lowest, height, **ends)


def _tick(ax: "Axes", rows: Mapping[str, Histogram], bands: dict[float, DtypeBand]) -> None:
    """Names beside rows and bands, and powers of two below them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ticks = {height: band.name for height, band in bands.items()}
    if list(rows) == [""]:
        shares = {0: "1", 2: "0.01", 4: "1e-4", 6: "1e-6"}
        ticks |= {MAX_BAR_HEIGHT * (1 - power / DECADES): name for power, name in shares.items()}
        ax.set_ylabel("fraction of elements")
    else:
        every = -(-len(rows) // MAX_LABELS)
        ticks |= {0.4 - place: name for place, name in list(enumerate(rows))[::every]}
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))


def _label(rows: list[Histogram]) -> str:
    """What the axis shows, and how many entries have no place on it."""
    zeros, bad = sum(row.num_zero for row in rows), sum(row.num_nonfinite for row in rows)
    count = zeros + bad + sum(int(row.counts.sum()) for row in rows)
    words = [f"{100 * zeros / count:.2g}% zero"] if zeros else []
    words += [f"{bad} non-finite"] if bad else []
    return "element size" + (f" ({', '.join(words)})" if words else "")

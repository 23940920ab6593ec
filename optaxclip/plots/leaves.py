"""Plots with one row per leaf, layer, or group."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import optaxclip.plots.style as style
from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import did_you_mean, short_repr
from optaxclip.monitor import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELS = 40  # More names would overlap.
LOST_STYLE = {"color": style.COLORS[0], "hatch": "////", "edgecolor": "white", "linewidth": 0}
IN_RANGE_STYLE = {"color": "0.6", "linewidth": 0}
DECADES, MAX_BAR_HEIGHT, MIN_BAR_HEIGHT = 6, 0.85, 0.03
"""The powers of ten in the scale of a row, and the heights of the largest and smallest bars."""
BAND_DISTANCE = 0.6
"""The distance between bands relative to the height of a row, divided by 3 if there is one row."""
NEAR_EXPONENTS = 32  # Ends of bands that are farther from all elements are not shown.


class HeatmapStyle(NamedTuple):
    """The style of a statistic. If `limits` is None, the color scale is logarithmic."""

    label: str
    limits: tuple[float, float] | None = None
    colormap: str = "cividis"


HEATMAP_STYLES = {
    "norm": HeatmapStyle("gradient norm"),
    "max": HeatmapStyle("largest absolute value"),
    "mean_abs": HeatmapStyle("mean absolute value"),
    "zero_fraction": HeatmapStyle("fraction of zeros", (0.0, 1.0)),
    "share": HeatmapStyle("fraction of the squared norm", (0.0, 1.0)),
    "param_norm": HeatmapStyle("parameter norm"),
    "ratio": HeatmapStyle("norm / parameter norm"),
    "cosine_param": HeatmapStyle("cosine with the parameters", (-1.0, 1.0), "BrBG"),
}


def heatmap(
    values: HostArrayLike,
    names: Sequence[str] | None = None,
    steps: HostArrayLike | None = None,
    ax: "Axes | None" = None,
    *,
    stat: str = "norm",
) -> "Axes":
    """Draws a statistic of leaves, layers, or groups over the steps as colors.

    The color scale is fixed for fractions (0 to 1) and cosines (-1 to 1), and logarithmic for all
    other statistics. Red cells are non-finite. At most 40 names are shown.

    Args:
      values: float[n, groups], the result of `monitor.history(state, stat=...)`.
      names: The names of the groups, the result of `monitor.history_names`.
      steps: The ascending steps of the rows, int[n]. Defaults to 0, 1, ...
      ax: The axes to use. Defaults to new axes, with a legend for non-finite values.
      stat: The name of the statistic, as in `monitor.record`. Defaults to "norm".

    Raises:
      ValueError: If `values` is empty, if shapes do not match, or if the statistic is unknown.
      TypeError: If `values` are not real numbers in rows of equal length.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.heatmap([[0.1, 0.9], [0.0, 1.0]], names=["w", "b"], stat="share")
      >>> print([label.get_text() for label in ax.get_yticklabels()])
      ['w', 'b']
    """
    if stat not in HEATMAP_STYLES:
        hint = did_you_mean(str(stat), HEATMAP_STYLES)
        raise ValueError(f"stat must be one of {list(HEATMAP_STYLES)}, got {stat!r}{hint}")
    look = HEATMAP_STYLES[stat]
    with style.require_matplotlib():
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize

    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        wanted = "an array [steps, leaves] of real numbers with rows of equal length"
        raise TypeError(f"values must be {wanted}, got {short_repr(values)}") from error
    is_named = names is None or found.shape[1:] == (len(names),)
    if found.ndim != 2 or not found.size or not is_named:
        of = "" if names is None else f" with {len(names)} names"
        remedy = "; record some steps first" if found.ndim == 2 and not len(found) else ""
        raise ValueError(f"values must have shape [steps, leaves], got {found.shape}{of}{remedy}")
    x = style.check_steps(steps, len(found), "the rows of values")
    axes = style.new_axes(ax)
    shown = np.where(np.isfinite(found), found, np.nan)  # [steps, groups]
    if look.limits is None:
        positive = shown[shown > 0]
        low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
        scale = LogNorm(low, high if high > low else 2 * low, clip=True)
        # Norms of 0 have no logarithm, so they use the lowest color.
        shown = np.maximum(shown, low)
    else:
        scale = Normalize(*look.limits, clip=True)
    rows = np.arange(found.shape[1])
    colors = colormaps[look.colormap].with_extremes(bad="red")
    mesh = axes.pcolormesh(_cell_edges(x), _cell_edges(rows), shown.T, norm=scale, cmap=colors)
    mesh.set_rasterized(True)  # Otherwise, vector formats contain one shape per cell.
    if names is None:
        axes.set_ylabel("leaf")
    else:
        stride = -(-len(rows) // MAX_LABELS)
        axes.set_yticks(rows[::stride], list(names)[::stride])
    axes.invert_yaxis()  # The first leaf is at the top.
    if bad := np.isnan(shown).sum():
        look_of_bad = {"color": "red", "marker": "s", "linestyle": "", "markersize": 9}
        axes.plot([], [], label=f"non-finite ({bad})", **look_of_bad)
    bar = axes.figure.colorbar(mesh, ax=axes, label=look.label)
    if look.limits is None:
        style.use_plain_ticks(bar.ax.yaxis)
    style.finish_axes(axes, legend=ax is None and bool(bad)).grid(visible=False)
    return axes


def _cell_edges(x: style.Numbers) -> style.Numbers:
    """Returns the edges `[n + 1]` of cells around the ascending values `x`, `[n]`."""
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middles = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middles[0]], middles, [2 * x[-1] - middles[-1]]])


class DtypeBand(NamedTuple):
    """A floating-point dtype and its range as exponents of two."""

    name: str
    bottom: int  # The exponent of half the smallest number. Smaller values are rounded to 0.
    full: int  # The exponent of the smallest normal number.
    top: int  # The exponent of the power of two above the largest number.


def element_histogram(
    histogram: Histogram | Mapping[str, Histogram],
    *,
    dtypes: Sequence[Any] = (),
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the number of elements by size, and marks elements outside the ranges of dtypes.

    A row has one bar per power of two. The height of a bar is the fraction of the row's nonzero
    elements, on a logarithmic scale that starts at a millionth. The axis label shows the number of
    non-finite elements and the fraction of zeros.

    Bands above the rows show the ranges of the dtypes. The pale part of a band is the subnormal
    range, which has fewer significant digits. Elements outside a band would become 0 or overflow,
    and their percentages are shown to the right of the rows. Bars outside the range of the first
    dtype are orange and hatched.

    Args:
      histogram: A histogram from `monitor.histograms`, or the whole dict for one row per histogram.
      dtypes: At most 7 floating-point dtypes, for example `(jnp.float16, jnp.float8_e5m2)`.
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      ValueError: If there are no histograms, no finite nonzero elements, or too many dtypes.
      TypeError: If `histogram` or `dtypes` contains an unsupported type.

    Example:
      >>> import jax.numpy as jnp
      >>> from optaxclip import monitor, plots
      >>> tx = monitor.histogram(every=1)
      >>> grads = {"w": jnp.array([1e-9, 1e-3, 2.0, 0.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.element_histogram(monitor.histograms(state), dtypes=("float16",))
      >>> print([text.get_text() for text in ax.texts])
      ['lost in float16', '33 %']
    """
    rows = dict(histogram) if isinstance(histogram, Mapping) else {"": histogram}
    if not rows:
        raise ValueError("histogram is an empty dict; pass at least one histogram")
    for name, row in rows.items():
        argument = f"histogram[{name!r}]" if name else "histogram"
        style.check_instance(row, Histogram, argument, "monitor.histograms")
    ends = [row.list_by_exponent()[1][[0, -1]] for row in rows.values() if row.counts.any()]
    if not ends:
        raise ValueError(
            "histogram contains no finite nonzero elements; train until the histogram is updated"
        )
    bands = _compute_bands(dtypes)
    axes = style.new_axes(ax)
    low, high = np.min(ends) - 1, np.max(ends) + 1
    near = [end for band in bands for end in (band.bottom, band.top)]
    near = [end for end in near if low - NEAR_EXPONENTS <= end <= high + NEAR_EXPONENTS]
    low, high = min([low, *(end - 1 for end in near)]), max([high, *(end + 1 for end in near)])
    for number, row in enumerate(rows.values()):
        _draw_row(axes, row, -number, bands[0] if bands else None)
    _write_lost_fractions(axes, list(rows.values()), bands)
    distance = BAND_DISTANCE / (1 if len(rows) > 1 else 3)
    bottom, top = 1 - len(rows), 1.0 + distance * len(bands)
    heights = [1.0 + distance * (0.5 + number) for number in range(len(bands))]
    for number, (height, band) in enumerate(zip(heights, bands, strict=True)):
        color, dashes = style.COLORS[number + 1], style.STYLES[1 + number % (len(style.STYLES) - 1)]
        look = {"height": 0.6 * distance, "color": color, "linewidth": 0, "zorder": 2}
        axes.barh(height, band.top - band.full, left=band.full, **look)
        axes.barh(height, band.full - band.bottom, left=band.bottom, alpha=0.35, **look)
        lines = {"colors": color, "linestyles": dashes, "linewidth": 1.2, "zorder": 3}
        axes.vlines([band.bottom, band.top], bottom, height, **lines)
    axes.set(xlim=(low, high), ylim=(bottom - 0.05, top + 0.05))
    _draw_ticks(axes, rows, dict(zip(heights, bands, strict=True)))
    zeros = sum(row.num_zero for row in rows.values())
    nonfinite = sum(row.num_nonfinite for row in rows.values())
    count = zeros + nonfinite + sum(int(row.counts.sum()) for row in rows.values())
    notes = [f"{100 * zeros / count:.2g}% zero"] if zeros else []
    notes += [f"{nonfinite} non-finite"] if nonfinite else []
    label = "element size" + (f" ({', '.join(notes)})" if notes else "")
    return style.finish_axes(axes, label, legend=ax is None)


def _compute_bands(dtypes: Sequence[Any]) -> list[DtypeBand]:
    if isinstance(dtypes, (str, type)) or not isinstance(dtypes, Sequence):
        raise TypeError(f"dtypes must be a tuple of dtypes, got {short_repr(dtypes)}")
    if len(dtypes) >= len(style.COLORS):
        raise ValueError(f"dtypes must contain at most {len(style.COLORS) - 1}, got {len(dtypes)}")
    bands = []
    for dtype in dtypes:
        try:
            info = jnp.finfo(dtype)
        except (TypeError, ValueError) as error:
            wanted = "floating-point dtypes such as jnp.float16"
            raise TypeError(f"dtypes must be {wanted}, got {short_repr(dtype)}") from error
        # Values with the exponent `n` of `frexp` are at least `2**(n - 1)` and below `2**n`.
        sizes = (info.smallest_subnormal, info.tiny, info.max)
        least, full, top = (int(np.frexp(float(size))[1]) for size in sizes)
        bands.append(DtypeBand(info.dtype.name, bottom=least - 2, full=full - 1, top=top))
    return bands


def _draw_row(ax: "Axes", row: Histogram, base: int, band: DtypeBand | None) -> None:
    """Draws the bars of a row above `base`, in a different style outside the band."""
    counts, edges = row.list_by_exponent()  # [bins], [bins + 1]
    exponents = edges[:-1]
    # Counts of 0 have no logarithm. Their bars are not drawn below.
    fractions = np.maximum(counts, 1) / max(counts.sum(), 1)
    heights = MAX_BAR_HEIGHT * np.maximum(1 + np.log10(fractions) / DECADES, MIN_BAR_HEIGHT)
    parts = {"entries": (np.ones(len(counts), bool), IN_RANGE_STYLE)}
    if band:
        is_lost = (exponents < band.bottom) | (exponents >= band.top)
        parts["entries"] = (~is_lost, IN_RANGE_STYLE)
        parts[f"lost in {band.name}"] = (is_lost, LOST_STYLE)
    ax.axhline(base, color="0.8", linewidth=0.8, zorder=1)
    known = ax.get_legend_handles_labels()[1]
    for label, (part, look) in parts.items():
        shown = part & (counts > 0)
        if shown.any():
            look = {"width": 1.0, "align": "edge", "zorder": 2, **look}
            # Legends omit labels that start with an underscore, so rows share one label.
            label = "_" if label in known else label
            ax.bar(exponents[shown], heights[shown], bottom=base, label=label, **look)


def _write_lost_fractions(ax: "Axes", rows: list[Histogram], bands: list[DtypeBand]) -> None:
    """Writes the percentages of elements outside the bands, with one column per dtype."""
    from matplotlib import rcParams

    stride = -(-len(rows) // MAX_LABELS)
    # Columns are placed to the right of the axes in points, so they do not overlap in any figure.
    look = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
    for number, band in enumerate(bands):
        x = rcParams["font.size"] * (0.4 + 2.7 * number)
        column = {**look, "color": style.COLORS[number + 1], "fontsize": "x-small"}
        name = f"lost in {band.name}" if number == 0 else band.name
        ax.annotate(name, (1.0, 1.05), (x, 0.0), rotation=90, va="bottom", **column)
        for place, row in list(enumerate(rows))[::stride]:
            percent = 100 * (row.underflow_fraction(band.name) + row.overflow_fraction(band.name))
            text = "<0.1 %" if 0 < percent < 0.1 else f"{percent:.2g} %"
            ax.annotate(text, (1.0, MAX_BAR_HEIGHT / 2 - place), (x, 0.0), va="center", **column)


def _draw_ticks(ax: "Axes", rows: Mapping[str, Histogram], bands: dict[float, DtypeBand]) -> None:
    """Labels rows and bands with their names, and the horizontal axis with powers of two."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ticks = {height: band.name for height, band in bands.items()}
    if list(rows) == [""]:
        fractions = {0: "1", 2: "0.01", 4: "1e-4", 6: "1e-6"}
        ticks |= {MAX_BAR_HEIGHT * (1 - power / DECADES): name for power, name in fractions.items()}
        ax.set_ylabel("fraction of elements")
    else:
        stride = -(-len(rows) // MAX_LABELS)
        ticks |= {0.4 - number: name for number, name in list(enumerate(rows))[::stride]}
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))

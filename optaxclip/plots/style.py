"""The look that all pictures share, and checks of the numbers that they show."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import install_command, short_repr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

Numbers = np.ndarray[Any, Any]
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#4800F0")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; a violet in place of its
yellow, which is too pale on white."""
STYLES = ("-", "--", "-.", ":")
"""Line styles, for print in grey and for readers who cannot tell the colours apart."""
MAX_COLUMNS = 4
"""Of a legend: more labels in a row are hard to read."""


@contextlib.contextmanager
def require_matplotlib() -> Iterator[None]:
    """If Matplotlib is missing, turns the error into one that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"optaxclip.plots needs Matplotlib: {install_command('plot')}"
        raise ModuleNotFoundError(message) from error


def new_axes(ax: "Axes | None") -> "Axes":
    """`ax`, or new axes if it is None."""
    if ax is not None:
        return ax
    with require_matplotlib():
        from matplotlib import pyplot as plt
    return plt.subplots(layout="constrained")[1]


def line_style(number: int) -> tuple[str, str]:
    """The colour and the line style of curve `number`, from 0.

    After each round through the colours the next style is used, so a pair comes again only after
    `len(COLORS) * len(STYLES)` curves.
    """
    again, color = divmod(number, len(COLORS))
    return COLORS[color], STYLES[(color + again) % len(STYLES)]


def curve(
    values: HostArrayLike, steps: HostArrayLike | None, name: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, np.dtype[np.float64]]]:
    """The steps and values of one line, [n] each; messages call the values by `name`."""
    try:
        y = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        message = f"{name} must be real numbers in one axis, got {short_repr(values)}"
        raise TypeError(message) from error
    if y.ndim != 1:
        remedy = "of a record per leaf take one column, or np.linalg.norm(norms, axis=1)"
        raise ValueError(f"{name} must have one axis, got the shape {y.shape}; {remedy}")
    if not y.size:
        raise ValueError(f"{name} must have at least one entry, got none; record some steps first")
    x = np.arange(len(y)) if steps is None else np.asarray(steps)
    if x.shape != y.shape:
        raise ValueError(
            f"steps must have one entry for each of {len(y)} {name}, got the shape {x.shape}"
        )
    return x, y


def check_instance(value: Any, kind: type, argument: str, maker: str) -> None:
    """Checks that a value has the type that a picture needs."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{argument} must be a {kind.__name__}, which {maker} returns, got a value of type "
            f"{type(value).__name__}"
        )


def finish_axes(ax: "Axes", xlabel: str = "step", *, legend: bool) -> "Axes":
    """Adds to the axes what every picture has, and returns them."""
    ax.set_xlabel(xlabel)
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            plain_ticks(axis)
    if legend:
        legend_below(ax)
    return ax


def plain_ticks(axis: "Axis") -> None:
    """Puts numbers such as 0.5 beside a logarithmic axis, and some within a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if not 1e-4 < low < high < 1e6:
        return
    if high < 300 * low:
        subs = (1.0, 2.0, 5.0) if high > 4 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_line(ax: "Axes", x: Numbers, y: Numbers, style: str = "-", **look: Any) -> "Line2D":
    """Draws a line, and a marker at each point without a neighbor, which a line would not show."""
    finite = np.pad(np.isfinite(y), 1)
    isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    if isolated.any():
        look |= {"marker": "o", "markersize": 5, "markevery": np.flatnonzero(isolated).tolist()}
    return ax.plot(x, y, style, **look)[0]


def mark_off_scale(ax: "Axes", x: HostArrayLike, **look: Any) -> None:
    """Draws crosses on the upper edge that the axes have when the figure is drawn.

    The edge cuts no cross in half. A cross far beside the axes is not drawn, because the figure
    would have to shrink the axes for it.
    """
    from matplotlib.transforms import Bbox, TransformedBbox

    look = {"color": "black", "markeredgecolor": "white", "markersize": 9, "zorder": 4, **look}
    ones = np.ones(np.shape(x))
    (crosses,) = ax.plot(x, ones, "X", transform=ax.get_xaxis_transform(), **look)
    crosses.set_clip_box(TransformedBbox(Bbox([[-0.05, 0.0], [1.05, 1.1]]), ax.transAxes))


def legend_below(ax: "Axes") -> None:
    """A legend below the axes, with as many columns as the figure has room for, at most 4."""
    from matplotlib import rcParams
    from matplotlib.transforms import ScaledTranslation

    # The ticks, their labels and the label of the axis take three lines.
    inches = 3.0 * rcParams["font.size"] / 72
    below = ax.transAxes + ScaledTranslation(0.0, -inches, ax.figure.dpi_scale_trans)
    look = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": below}
    labels = ax.get_legend_handles_labels()[1]
    make = functools.partial(ax.legend, frameon=False, **look)
    fit_legend(ax.figure, len(labels), MAX_COLUMNS, lambda columns: make(ncols=columns))


def fit_legend(
    figure: "Figure | SubFigure", labels: int, columns: int, make: "Callable[[int], Legend]"
) -> None:
    """Makes the legend by `make(columns)`, with as many columns as fit into the figure."""
    for rows in range(max(1, math.ceil(labels / columns)), labels + 1):
        legend = make(math.ceil(labels / rows))
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
    make(1)

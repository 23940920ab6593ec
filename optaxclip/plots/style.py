"""The style of all plots, and checks of their data."""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import install_command, short_repr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D

Numbers = np.ndarray[Any, Any]
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#4800F0")
"""The palette of Okabe and Ito for color-blind readers, with a violet instead of the yellow, which
is too pale on white."""
STYLES = ("-", "--", "-.", ":")
"""Line styles, for grayscale prints and for readers who cannot distinguish the colors."""
MAX_LEGEND_COLUMNS = 4


@contextlib.contextmanager
def require_matplotlib() -> Iterator[None]:
    """Adds the installation command to the error if Matplotlib is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"optaxclip.plots requires Matplotlib; run {install_command('plot')}"
        raise ModuleNotFoundError(message) from error


def new_axes(ax: "Axes | None") -> "Axes":
    """Returns `ax`, or new axes if it is None."""
    if ax is not None:
        return ax
    # Matplotlib is an optional dependency, so it is only imported when a plot is drawn.
    with require_matplotlib():
        from matplotlib import pyplot as plt
    return plt.subplots(layout="constrained")[1]


def check_series(
    values: HostArrayLike, steps: HostArrayLike | None, name: str
) -> tuple[Numbers, Numbers]:
    """Returns the steps and the values of a line, `[n]`. Messages refer to the values by `name`."""
    try:
        y = np.asarray(values, np.float64)  # [n]
    except (TypeError, ValueError) as error:
        wanted = "a one-dimensional array of real numbers"
        raise TypeError(f"{name} must be {wanted}, got {short_repr(values)}") from error
    if y.ndim != 1:
        raise ValueError(
            f"{name} must be one-dimensional, got shape {y.shape}; use one column of a per-leaf "
            "record or np.linalg.norm(norms, axis=1)"
        )
    if not y.size:
        raise ValueError(f"{name} must not be empty, got shape {y.shape}; record some steps first")
    return check_steps(steps, len(y), name), y


def check_steps(steps: HostArrayLike | None, number: int, name: str) -> Numbers:
    """Returns the steps `[number]`, which default to 0, 1, ..."""
    x = np.arange(number) if steps is None else np.asarray(steps)
    if x.shape != (number,):
        raise ValueError(f"steps must have shape ({number},) to match {name}, got {x.shape}")
    return x


def check_instance(value: Any, kind: type, argument: str, maker: str) -> None:
    """Checks the type of a value."""
    if not isinstance(value, kind):
        wanted = f"a {kind.__name__} returned by {maker}"
        raise TypeError(f"{argument} must be {wanted}, got type {type(value).__name__}")


def finish_axes(ax: "Axes", xlabel: str = "step", *, legend: bool) -> "Axes":
    """Applies the common style to axes, and returns them."""
    ax.set_xlabel(xlabel)
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            use_plain_ticks(axis)
    if legend:
        legend_below(ax)
    return ax


def use_plain_ticks(axis: "Axis") -> None:
    """Labels a logarithmic axis with plain numbers such as 0.5, also between powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    # Matplotlib's default is 10^k at powers of ten only, which is clearer for extreme ranges.
    low, high = axis.get_view_interval()
    if not 1e-4 < low < high < 1e6:
        return
    if high < 300 * low:
        subs = (1.0, 2.0, 5.0) if high > 4 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_line(ax: "Axes", x: Numbers, y: Numbers, style: str = "-", **look: Any) -> "Line2D":
    """Draws a line, with markers at isolated points, which a line would not show."""
    finite = np.pad(np.isfinite(y), 1)  # [n + 2]
    isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # [n]
    if isolated.any():
        look |= {"marker": "o", "markersize": 5, "markevery": np.flatnonzero(isolated).tolist()}
    return ax.plot(x, y, style, **look)[0]


def mark_off_scale(ax: "Axes", x: HostArrayLike, **look: Any) -> None:
    """Draws crosses at the top of the axes, even if the limits of the axes change later."""
    from matplotlib.transforms import Bbox, TransformedBbox

    look = {"color": "black", "markeredgecolor": "white", "markersize": 9, "zorder": 4, **look}
    # The transform uses data coordinates for `x` and fractions of the axes for the height.
    ones = np.ones(np.shape(x))
    (crosses,) = ax.plot(x, ones, "X", transform=ax.get_xaxis_transform(), **look)
    # The clip box is larger than the axes because the edge would cut crosses in half. However,
    # crosses far outside are clipped because a constrained layout would shrink the axes for them.
    crosses.set_clip_box(TransformedBbox(Bbox([[-0.05, 0.0], [1.05, 1.1]]), ax.transAxes))


def legend_below(ax: "Axes") -> None:
    """Draws a legend below the axes, with as many columns as fit into the figure, at most 4."""
    from matplotlib import rcParams
    from matplotlib.transforms import ScaledTranslation

    # The ticks, their labels and the label of the axis use three lines.
    inches = 3.0 * rcParams["font.size"] / 72
    below = ax.transAxes + ScaledTranslation(0.0, -inches, ax.figure.dpi_scale_trans)
    look = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": below}
    labels = max(1, len(ax.get_legend_handles_labels()[1]))
    for rows in range(math.ceil(labels / MAX_LEGEND_COLUMNS), labels + 1):
        columns = math.ceil(labels / rows)
        legend = ax.legend(frameon=False, ncols=columns, **look)
        # The width of a legend is only known after it was made.
        if columns == 1 or legend.get_window_extent().width <= ax.figure.bbox.width:
            return
        legend.remove()

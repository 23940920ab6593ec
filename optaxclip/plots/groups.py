"""Pictures of statistics by leaf, layer or group, over the steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import did_you_mean, short_repr
from optaxclip.plots.style import finish_axes, new_axes, plain_ticks, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = np.ndarray[Any, Any]
MAX_LABELS = 40
"""More names beside a picture would overlap."""


class HeatmapStyle(NamedTuple):
    """How a statistic is shown by colours: its label, and the ends of the scale if they are fixed.

    Without fixed ends the scale is logarithmic, from the smallest to the largest number.
    """

    label: str
    ends: tuple[float, float] | None = None
    colors: str = "cividis"


HEATMAP_STYLES = {
    "norm": HeatmapStyle("gradient norm"),
    "max": HeatmapStyle("largest modulus"),
    "mean_abs": HeatmapStyle("mean modulus"),
    "zero_fraction": HeatmapStyle("share of zeros", (0.0, 1.0)),
    "share": HeatmapStyle("share of the squared norm", (0.0, 1.0)),
    "param_norm": HeatmapStyle("norm of the parameters"),
    "ratio": HeatmapStyle("norm over that of the parameters"),
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
    """Draws a statistic of every leaf, layer or group at every step as a color.

    Shares are shown from 0 to 1, cosines from -1 to 1, all others logarithmically. Red is not
    finite. If there are more than 40 names, only some of them are written.

    Args:
      values: float[n, groups], as `monitor.history(state, stat=...)` gives them.
      names: the names of the groups, as `monitor.history_names` gives them.
      steps: the step of each row, int[n], ascending; 0, 1, ... if None.
      ax: where to draw.
      stat: the name of the statistic, one of those that `monitor.record` keeps.

    Raises:
      ValueError: for values that do not have two axes, or for an axis of length 0; for a wrong
        number of names or steps; for an unknown statistic.
      TypeError: for values that are not real numbers, or rows of different lengths.

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
    with require_matplotlib():
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize

    found, x = _check_series(values, names, steps, "values")
    axes = new_axes(ax)
    shown = np.where(np.isfinite(found), found, np.nan)
    if look.ends is None:
        positive = shown[shown > 0]
        low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
        scale = LogNorm(low, high if high > low else 2 * low, clip=True)
        # A norm of zero has no logarithm, so it gets the lowest colour.
        shown = np.maximum(shown, low)
    else:
        scale = Normalize(*look.ends, clip=True)
    rows = np.arange(found.shape[1])
    colors = colormaps[look.colors].with_extremes(bad="red")
    mesh = axes.pcolormesh(_edges(x), _edges(rows), shown.T, norm=scale, cmap=colors)
    mesh.set_rasterized(True)
    if names is None:
        axes.set_ylabel("leaf")
    else:
        every = -(-len(rows) // MAX_LABELS)
        axes.set_yticks(rows[::every], list(names)[::every])
    axes.invert_yaxis()
    if bad := np.isnan(shown).sum():
        look_of_bad = {"color": "red", "marker": "s", "linestyle": "", "markersize": 9}
        axes.plot([], [], label=f"not finite ({bad})", **look_of_bad)
    bar = axes.figure.colorbar(mesh, ax=axes, label=look.label)
    if look.ends is None:
        plain_ticks(bar.ax.yaxis)
    finish_axes(axes, legend=ax is None and bool(bad)).grid(visible=False)
    return axes


def _check_series(
    values: HostArrayLike, names: Sequence[str] | None, steps: HostArrayLike | None, what: str
) -> tuple[Numbers, Numbers]:
    """Numbers `[steps, groups]`, and the steps."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        wanted = "real numbers [steps, leaves], as many in each row"
        raise TypeError(f"{what} must be {wanted}, got {short_repr(values)}") from error
    named = names is None or found.shape[1:] == (len(names),)
    if found.ndim != 2 or not found.size or not named:
        of = "" if names is None else f" and {len(names)} names"
        none = "; record some steps first" if found.ndim == 2 and not len(found) else ""
        raise ValueError(f"{what} must be [steps, leaves], got the shape {found.shape}{of}{none}")
    x = np.arange(len(found)) if steps is None else np.asarray(steps)
    if x.shape != (len(found),):
        raise ValueError(
            f"steps must have one entry for each of {len(found)} rows, got the shape {x.shape}"
        )
    return found, x


def _edges(x: Numbers) -> Numbers:
    """The edges of cells around `x`, which is ascending: float[n + 1]."""
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middles = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middles[0]], middles, [2 * x[-1] - middles[-1]]])

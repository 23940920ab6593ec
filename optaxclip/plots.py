"""Pictures of training runs and of what clipping did in them.

Every function draws on the axes `ax` and returns them. Without `ax` it makes new axes, with a
legend; on axes of yours the legend is yours to place. Needs Matplotlib: `optaxclip[plot]`.
"""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# For print in grey. As 4 and 7 have no common factor, a pair comes again only after 28 lines.
STYLES = ("-", "--", "-.", ":")


def loss_curves(
    losses: Mapping[str, ArrayLike],
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Losses over the steps, a line for each run.

    The axis ends a little above the largest first loss: what lies higher is cut off, because one
    exploded run would flatten all others. A cross at the top marks where a loss is not finite.

    Args:
      losses: for each run's name its losses, float[n].
      steps: the step of each loss, int[n]; 1, 2, ... if None.
      ax: where to draw.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.loss_curves({"plain": [3.0, float("nan")], "clipped": [3.0, 2.0]})
      >>> print(ax.get_ylabel())
      loss
    """
    axes = _axes(ax)
    arrays = [np.asarray(values) for values in losses.values()]
    finite = [y[np.isfinite(y)] for y in arrays if np.isfinite(y).any()]
    if finite:
        top, bottom = max(y[0] for y in finite), min(y.min() for y in finite)
        margin = 0.05 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)
    _lines(axes, losses, steps)
    axes.set_ylabel("loss")
    return _finish(axes, legend=ax is None)


def norm_curves(
    norms: Mapping[str, ArrayLike],
    steps: ArrayLike | None = None,
    limit: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Gradient norms over the steps on a logarithmic axis, a line for each run.

    A cross at the top marks where a norm is not finite.

    Args:
      norms: for each run's name its norms, float[n].
      steps: the step of each norm, int[n]; 1, 2, ... if None.
      limit: a norm to mark by a horizontal line.
      ax: where to draw.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.norm_curves({"plain": [1.0, 1e9, float("inf")], "clipped": [1.0, 4.0]})
      >>> print(ax.get_yscale())
      log
    """
    axes = _axes(ax)
    axes.set_yscale("log")
    _lines(axes, norms, steps)
    if limit is not None:
        axes.axhline(limit, color="0.4", linewidth=1.0, label=f"limit {limit:g}")
    axes.set_ylabel("gradient norm")
    return _finish(axes, legend=ax is None)


def side_by_side(columns: int = 2) -> "Figure":
    """An empty figure of `columns` axes for a page's width, outside of `pyplot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * columns, 4.2), layout="constrained")
    figure.subplots(1, columns)
    return figure


def shared_legend(figure: "Figure") -> None:
    """One legend below all axes of the figure, each label once."""
    entries = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=len(entries),
        frameon=False,
    )


def _axes(ax: "Axes | None") -> "Axes":
    if ax is not None:
        return ax
    from matplotlib import pyplot as plt

    return plt.subplots(layout="constrained")[1]


def _lines(ax: "Axes", series: Mapping[str, ArrayLike], steps: ArrayLike | None) -> None:
    drawn = []
    looks = zip(itertools.cycle(COLORS), itertools.cycle(STYLES), strict=True)
    for name, values in series.items():
        color, style = next(looks)
        y = np.asarray(values)
        x = np.arange(1, len(y) + 1) if steps is None else np.asarray(steps)
        line = ax.plot(x, np.where(np.isfinite(y), y, np.nan), style, linewidth=1.4, label=name)[0]
        line.set(color=color, zorder=3 - len(drawn) / len(series))  # the first is on top
        drawn.append((x, y, line))
    top = ax.get_ylim()[1]
    ax.set_ylim(top=top)
    for x, y, line in drawn:
        _cross(ax, x, y, top, line)
    if not all(np.isfinite(y).all() for _, y, _ in drawn):
        ax.plot([], [], "X", color="black", markersize=8, label="not finite")


def _cross(
    ax: "Axes", x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], top: float, like: "Line2D"
) -> None:
    """Leads a line up to a cross at the top wherever it stops being finite."""
    bad = ~np.isfinite(y)
    for first in np.flatnonzero(bad & ~np.append(False, bad[:-1])):
        way = slice(max(first - 1, 0), first + 1)
        rise = ax.plot(x[way], np.where(bad[way], top, np.minimum(y[way], top)))[0]
        rise.update_from(like)
        rise.set(label="_", marker="X", markevery=[-1], markersize=11, clip_on=False)
        rise.set(markeredgecolor="white", linestyle="-")


def _finish(ax: "Axes", *, legend: bool) -> "Axes":
    ax.set_xlabel("step")
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax

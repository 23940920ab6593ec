"""Pictures of training runs: losses, norms, before and after."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from optaxclip.plots.style import COLORS, STYLES, finished, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


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
    axes = new_axes(ax)
    arrays = [np.asarray(values) for values in losses.values()]
    finite = [y[np.isfinite(y)] for y in arrays if np.isfinite(y).any()]
    if finite:
        top, bottom = max(y[0] for y in finite), min(y.min() for y in finite)
        margin = 0.05 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)
    _lines(axes, losses, steps)
    axes.set_ylabel("loss")
    return finished(axes, legend=ax is None)


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
    axes = new_axes(ax)
    axes.set_yscale("log")
    _lines(axes, norms, steps)
    if limit is not None:
        axes.axhline(limit, color="0.4", linewidth=1.0, label=f"limit {limit:g}")
    axes.set_ylabel("gradient norm")
    return finished(axes, legend=ax is None)


def before_after(
    before: ArrayLike,
    after: ArrayLike,
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """The losses of a run without clipping and of the same run with it, as `loss_curves`.

    Args:
      before: without clipping, float[n].
      after: with clipping, float[n].
      steps: the step of each loss, int[n]; 1, 2, ... if None.
      ax: where to draw.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.before_after([3.0, 9.0, float("nan")], [3.0, 2.5, 2.0])
      >>> print([text.get_text() for text in ax.get_legend().get_texts()])
      ['without clipping', 'with clipping', 'not finite']
    """
    return loss_curves({"without clipping": before, "with clipping": after}, steps, ax)


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
        ncols=min(len(entries), 6),  # more do not fit in the width
        frameon=False,
    )


def legends_below(figure: "Figure") -> None:
    """A legend of its own below each axes of the figure."""
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
        ax.legend(handles, labels, ncols=2, frameon=False, **place)


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

"""Pictures of training runs: losses and norms."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.numerics import is_real
from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import short_repr
from optaxclip.plots.style import (
    curve,
    finish_axes,
    line_style,
    mark_off_scale,
    new_axes,
    plot_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Curves = Mapping[str, HostArrayLike]
Numbers = np.ndarray[Any, Any]
LEAST_WIDTH, WIDER = 1.4, 0.25
"""The width of the line on top, and by how much each line below it is wider, in points."""


def loss_curves(
    losses: Curves, steps: HostArrayLike | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws losses over the steps, a line for each run.

    The axis ends a little above the largest first loss. Higher losses are cut off, because one
    exploded run would flatten all others. A cross at the top marks where a loss is not finite.

    Args:
      losses: a dict from each run's name to its losses, float[n].
      steps: the step of each loss, int[n]; 0, 1, ... if None.
      ax: where to draw.

    Raises:
      ValueError: for no runs, a run without losses, and losses or steps of other shapes.
      TypeError: if `losses` is not a dict, or holds anything but real numbers.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.loss_curves({"plain": [3.0, float("nan")], "clipped": [3.0, 2.0]})
      >>> print(ax.get_ylabel())
      loss
    """
    curves = _check_runs(losses, steps, "losses")
    axes = new_axes(ax)
    finite = [y[np.isfinite(y)] for _, y in curves.values() if np.isfinite(y).any()]
    if finite:
        top, bottom = max(y[0] for y in finite), min(y.min() for y in finite)
        margin = 0.05 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)
    _lines(axes, curves)
    axes.set_ylabel("loss")
    return finish_axes(axes, legend=ax is None)


def norm_curves(
    norms: Curves,
    steps: HostArrayLike | None = None,
    threshold: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws gradient norms over the steps on a logarithmic axis, a line for each run.

    A cross at the top marks where a norm is not finite.

    Args:
      norms: a dict from each run's name to its norms, float[n].
      steps: the step of each norm, int[n]; 0, 1, ... if None.
      threshold: a norm to mark by a horizontal line. A threshold that changes from step to step is
        drawn by `norms_over_steps`.
      ax: where to draw.

    Raises:
      ValueError: for no runs, a run without norms, and norms or steps of other shapes.
      TypeError: if `norms` is not a dict, or holds anything but real numbers; for a threshold that
        is not a real number, such as an array of one for each step.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.norm_curves({"plain": [1.0, 1e9, float("inf")], "clipped": [1.0, 4.0]})
      >>> print(ax.get_yscale())
      log
    """
    curves = _check_runs(norms, steps, "norms")
    if threshold is not None and (not is_real(threshold) or np.ndim(threshold)):
        raise TypeError(
            f"threshold must be a number, got {short_repr(threshold)} of type "
            f"{type(threshold).__name__}; "
            "plots.norms_over_steps draws one run with a threshold for each step"
        )
    axes = new_axes(ax)
    axes.set_yscale("log")
    _lines(axes, curves)
    if threshold is not None:
        axes.axhline(float(threshold), color="0.4", linewidth=1.0, label=f"threshold {threshold:g}")
    axes.set_ylabel("gradient norm")
    return finish_axes(axes, legend=ax is None)


def _check_runs(
    series: Curves, steps: HostArrayLike | None, what: str
) -> dict[str, tuple[Numbers, Numbers]]:
    """Steps and values of each run."""
    if not isinstance(series, Mapping):
        raise TypeError(
            f"{what} must be a dict with each run's {what} under its name, such as "
            f"{{'run': {what}}}, got {short_repr(series)} of type {type(series).__name__}"
        )
    if not series:
        raise ValueError(f"{what} must be a dict with at least one run by its name, got none")
    return {name: curve(values, steps, f"{what} of {name!r}") for name, values in series.items()}


def _lines(ax: "Axes", curves: Mapping[str, tuple[Numbers, Numbers]]) -> "dict[str, Line2D]":
    drawn = {}
    for depth, (name, (x, y)) in enumerate(curves.items()):
        color, style = line_style(depth)
        line = plot_line(ax, x, np.where(np.isfinite(y), y, np.nan), style, color=color, label=name)
        # The first line is on top; lines below it are wider, so that equal ones stay visible.
        line.set(zorder=3 - depth / len(curves), linewidth=LEAST_WIDTH + WIDER * depth)
        drawn[name] = line
    for name, (x, y) in curves.items():
        _mark_end(ax, x, y, drawn[name])
    if not all(np.isfinite(y).all() for _, y in curves.values()):
        ax.plot([], [], "X", color="black", markersize=8, label="not finite")
    return drawn


def _mark_end(ax: "Axes", x: Numbers, y: Numbers, like: "Line2D") -> None:
    """Leads a line up to a cross on the upper edge at each point where it stops being finite.

    The edge is found when the axes are drawn, so their range may change until then.
    """
    from matplotlib.patches import ConnectionPatch

    bad = ~np.isfinite(y)
    firsts = np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    look = {"color": like.get_color(), "zorder": like.get_zorder()}
    if len(firsts):
        mark_off_scale(ax, x[firsts], label="_", markersize=11, **look)
    for first in firsts[firsts > 0]:
        last, top = (float(x[first - 1]), float(y[first - 1])), (float(x[first]), 1.0)
        rise = {"linewidth": like.get_linewidth(), "clip_on": True}
        ax.add_patch(ConnectionPatch(last, top, "data", ax.get_xaxis_transform(), **rise, **look))

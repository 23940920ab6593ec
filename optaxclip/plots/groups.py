"""Pictures of statistics by leaf, layer or group, over the steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optaxclip._base.arguments import checked_int, near_miss, short
from optaxclip._base.host import ArrayLike
from optaxclip.plots.style import (
    COLORS,
    crosses_at_the_top,
    finished,
    new_axes,
    plain_ticks,
    with_matplotlib,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = np.ndarray[Any, Any]
MAX_LABELS = 40
"""Beside a heat map, more names than this would overlap."""


class Look(NamedTuple):
    """How a statistic is shown by colours: its label, and the ends of the scale if they are fixed.

    Without fixed ends the scale is logarithmic, from the smallest to the largest number.
    """

    label: str
    ends: tuple[float, float] | None = None
    colors: str = "cividis"


LOOKS = {
    "norm": Look("gradient norm"),
    "max": Look("largest modulus"),
    "mean_abs": Look("mean modulus"),
    "zero_fraction": Look("share of zeros", (0.0, 1.0)),
    "share": Look("share of the squared norm", (0.0, 1.0)),
    "param_norm": Look("norm of the parameters"),
    "ratio": Look("norm over that of the parameters"),
    "cosine_param": Look("cosine with the parameters", (-1.0, 1.0), "BrBG"),
}


def shares_over_steps(
    shares: ArrayLike,
    names: Sequence[str] | None = None,
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
    *,
    most: int = 6,
) -> "Axes":
    """Draws each group's share of the squared norm, as areas on top of each other.

    A group is a leaf, a layer or a set of leaves. The groups with the highest peaks have colours of
    their own, the highest at the bottom; all others share one colour. Steps whose gradient is not
    finite have no shares: they stay empty, with a cross at the top.

    Args:
      shares: float[n, groups], as `monitor.history(state, stat="share")` gives them. A group that
        is missing at a step, NaN among numbers, counts as 0.
      names: the names of the groups, as `monitor.history_names` gives them.
      steps: the step of each row, int[n], ascending; 0, 1, ... if None.
      ax: where to draw.
      most: how many groups have a colour of their own, at most 8.

    Raises:
      ValueError: for shares that do not have two axes, for an axis of length 0, and for shares that
        are not from 0 to 1; for a wrong number of names or steps; for `most` out of range.
      TypeError: for shares that are not real numbers, or rows of different lengths; if `most` is
        not an int.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.shares_over_steps([[0.2, 0.8], [0.05, 0.95]], names=["body", "head"])
      >>> print(ax.get_legend_handles_labels()[1])
      ['head', 'body']
    """
    values, x = _checked(shares, names, steps, "shares")
    if checked_int(most, 1, "most") > len(COLORS):
        raise ValueError(f"most must be at most {len(COLORS)}, got {most}")
    if np.any((values < 0) | (values > 1 + 1e-4)):
        raise ValueError(
            "shares must be from 0 to 1, as monitor.record(stats='share') keeps them; got numbers "
            f"from {np.nanmin(values):g} to {np.nanmax(values):g}"
        )
    known = np.isfinite(values).any(axis=1)
    values = np.where(np.isfinite(values), values, 0.0)
    order = np.argsort(-values.max(axis=0), kind="stable")
    # If only one group is left, it keeps its own colour, because "others" would need one too.
    count = len(order) if len(order) <= most + 1 and len(order) <= len(COLORS) else most
    labels = [str(i) for i in range(len(order))] if names is None else list(names)
    bands = [(labels[i], values[:, i], COLORS[n]) for n, i in enumerate(order[:count])]
    if count < len(order):
        rest = values[:, order[count:]].sum(axis=1)
        bands.append((f"{len(order) - count} others", rest, "0.8"))
    axes = new_axes(ax)
    # The area of a step begins half-way to the step before and ends half-way to the step after.
    edges = _edges(x)
    ends, where = np.repeat(edges, 2)[1:-1], np.repeat(known, 2)
    below = np.zeros(len(ends))
    for label, band, color in bands:
        above = below + np.repeat(band, 2)
        look = {"color": color, "linewidth": 0, "label": label}
        axes.fill_between(ends, below, above, where=where, **look)
        below = above
    if not known.all():
        crosses_at_the_top(axes, x[~known], label=f"not finite ({np.sum(~known)})")
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0.0, 1.0), ylabel="share of the squared norm")
    return finished(axes, legend=ax is None)


def heatmap(
    values: ArrayLike,
    names: Sequence[str] | None = None,
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
    *,
    stat: str = "norm",
) -> "Axes":
    """Draws a statistic of every leaf, layer or group at every step as a colour; red: not finite.

    Shares are shown from 0 to 1, cosines from -1 to 1, all others logarithmically.

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
    if stat not in LOOKS:
        hint = near_miss(str(stat), LOOKS)
        raise ValueError(f"stat must be one of {list(LOOKS)}, got {stat!r}{hint}")
    look = LOOKS[stat]
    with with_matplotlib():
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize

    found, x = _checked(values, names, steps, "values")
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
    mesh = axes.pcolormesh(x, rows, shown.T, norm=scale, cmap=colors, shading="nearest")
    mesh.set_rasterized(True)
    if names is not None and len(names) <= MAX_LABELS:
        axes.set_yticks(rows, names)
    else:
        axes.set_ylabel("leaf")
    axes.invert_yaxis()
    bar = axes.figure.colorbar(mesh, ax=axes, label=look.label)
    if look.ends is None:
        plain_ticks(bar.ax.yaxis)
    finished(axes, legend=False).grid(visible=False)
    return axes


def _checked(
    values: ArrayLike, names: Sequence[str] | None, steps: ArrayLike | None, what: str
) -> tuple[Numbers, Numbers]:
    """Numbers `[steps, groups]`, and the steps."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        wanted = "real numbers [steps, leaves], as many in each row"
        raise TypeError(f"{what} must be {wanted}, got {short(values)}") from error
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
    """Where each step begins and ends."""
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middles = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middles[0]], middles, [2 * x[-1] - middles[-1]]])

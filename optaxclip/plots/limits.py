"""Pictures that help to find a limit."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.host import ArrayLike
from optaxclip.plots.style import (
    COLORS,
    crosses_at_the_top,
    curve,
    finished,
    instance,
    new_axes,
    plot_line,
)
from optaxclip.tuning.suggesting import Suggestion
from optaxclip.tuning.sweeping import SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, BLUE = COLORS[:2]
PALE_ORANGE = COLORS[5]
Numbers = np.ndarray[Any, Any]
BINS = 50


def norms_over_steps(
    norms: ArrayLike | Suggestion,
    limit: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the norms of one run on a logarithmic axis, and marks the steps above a limit.

    Triangles mark the norms above the limit, and crosses at the top those that are not finite. For
    a suggestion, triangles mark only steps after the warm-up, because only these are counted.

    Args:
      norms: the raw norms, float[n]; or what `optaxclip.tuning.suggest` returned, with its limit.
      limit: one limit, or the limit of each step, float[n]; it need not be the run's own limit. An
        infinite limit is not drawn.
      steps: the step of each norm, int[n]; if None, those of the suggestion, or 0, 1, ...
      ax: where to draw.

    Raises:
      ValueError: for no norms, for more than one axis, for a wrong number of limits or steps, or
        for a suggestion and a limit.
      TypeError: for norms that are not real numbers.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.norms_over_steps([1.0, 1.2, 30.0, float("nan")], limit=2.0)
      >>> print(ax.get_legend_handles_labels()[1])
      ['norm', 'above the limit (1)', 'limit 2', 'not finite (1)']
    """
    suggestion = None
    if isinstance(norms, Suggestion):
        if limit is not None:
            remedy = "to draw another limit, pass suggestion.norms"
            raise ValueError(f"limit must be None for a suggestion, which has its own; {remedy}")
        suggestion, norms, limit = norms, norms.norms, norms.limit
        steps = suggestion.steps if steps is None else steps
    x, y = curve(norms, steps, "norms")
    bound = None if limit is None else np.asarray(limit, np.float64)
    if bound is not None and bound.shape not in ((), y.shape):
        what = f"one, or one for each of {len(y)} norms"
        raise ValueError(f"limit must be {what}, got the shape {bound.shape}")
    axes = new_axes(ax)
    finite = np.isfinite(y)
    axes.set_yscale("log")
    shown = np.where(finite & (y > 0), y, np.nan)
    plot_line(axes, x, shown, color="0.55", linewidth=1.0, label="norm")
    if suggestion is not None and (warmup := suggestion.warmup_steps):
        label = f"warm-up ({warmup}), not counted"
        axes.axvspan(x[0], x[warmup], color="0.93", linewidth=0, zorder=0, label=label)
    if bound is not None:
        above = finite & (y > bound)
        label = f"limit {bound:.3g}" if bound.ndim == 0 else "limit"
        if suggestion is not None:
            above, label = above & suggestion.counted, _label(suggestion)
        _mark_above(axes, x, y, above)
        line = np.broadcast_to(np.where(np.isfinite(bound), bound, np.nan), y.shape)
        plot_line(axes, x, line, "--", color=BLUE, linewidth=1.6, label=label)
    if not finite.all():
        crosses_at_the_top(axes, x[~finite], label=f"not finite ({np.sum(~finite)})")
    axes.set_ylabel("gradient norm")
    return finished(axes, legend=ax is None)


def norm_histogram(suggestion: Suggestion, ax: "Axes | None" = None) -> "Axes":
    """Draws how often norms of each size came after the warm-up, with the suggested limit.

    Spikes, whose norms stick out among the steps around them, have a colour of their own. So do
    norms above the limit that are not spikes; there are such norms if the level of the norms moves.

    Args:
      suggestion: what `optaxclip.tuning.suggest` returned.
      ax: where to draw.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import numpy as np
      >>> from optaxclip import plots, tuning
      >>> norms = np.exp(0.2 * np.random.default_rng(0).normal(size=500))
      >>> norms[[100, 200]] = 10.0, 50.0
      >>> ax = plots.norm_histogram(tuning.suggest(norms))
      >>> print(ax.get_legend_handles_labels()[1][1:])
      ['ordinary (498)', 'spikes (2)']
    """
    instance(suggestion, Suggestion, "suggestion", "optaxclip.tuning.suggest")
    axes = new_axes(ax)
    norms = suggestion.norms
    spikes, counted = suggestion.is_spike, suggestion.counted
    above = norms > suggestion.limit
    parts = (
        ("ordinary", counted & ~spikes & ~above, {"color": "0.7"}),
        ("above the limit, no spikes", counted & ~spikes & above, {"color": PALE_ORANGE}),
        ("spikes", spikes, {"color": ORANGE, "hatch": "////", "edgecolor": "white"}),
    )
    bars_of_norms(axes, norms, edges_of_bars(norms[counted], suggestion.limit), parts)
    line_of_limit(axes, suggestion.limit, _label(suggestion))
    after = " after the warm-up" if suggestion.warmup_steps else ""
    axes.set_ylabel(f"number of steps{after}")
    return finished(axes, "gradient norm", legend=ax is None)


def sweep_curve(result: SweepResult, ax: "Axes | None" = None) -> "Axes":
    """Draws the final loss for each limit, at the best learning rate, with a dot for each seed.

    Crosses at the top are diverged runs: at the end their loss was not finite, or above its first
    value. A bar is the noise within which a loss counts as equal to the best loss, the dotted line:
    the suggested limit is the largest whose bar reaches down to it.

    Args:
      result: what `optaxclip.tuning.sweep` returned.
      ax: where to draw.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import ops, plots, tuning
      >>> def step(x, batch, limit):
      ...     loss, grad = jax.value_and_grad(lambda x: (x - batch) ** 2)(x)
      ...     grad, norm = ops.clip_by_global_norm(grad, limit)
      ...     return x - 1.1 * grad, loss, norm
      >>> key, data = jax.random.key(0), jnp.full(20, 9.0)
      >>> result = tuning.sweep(jax.random.normal, step, [0.01, 100.0], 20, key=key, data=data)
      >>> ax = plots.sweep_curve(result)
      >>> print(ax.get_legend_handles_labels()[1][1:3])
      ['the best loss', 'suggested limit 0.01']
    """
    instance(result, SweepResult, "result", "optaxclip.tuning.sweep")
    axes = new_axes(ax)
    final, diverged = result.by_limit(result.final_loss), result.by_limit(result.diverged)
    losses = np.where(diverged, np.nan, final)
    axes.set_xscale("log")
    every = np.broadcast_to(result.limits[:, None], losses.shape)
    counts = np.maximum(np.sum(~diverged, axis=1), 1)
    means = np.where(diverged.all(axis=1), np.nan, np.nansum(losses, axis=1) / counts)
    label = "final loss" if losses.shape[1] == 1 else "final loss, mean of the seeds"
    axes.plot(result.limits, means, "o-", color="0.35", linewidth=1.4, label=label)
    if losses.shape[1] > 1:
        axes.plot(every.ravel(), losses.ravel(), ".", color="0.35", markersize=4, label="_")
    is_finite = np.isfinite(final.mean(axis=1))
    if is_finite.any():
        noises = np.stack([result.noises[is_finite], np.zeros(is_finite.sum())])
        look = {"fmt": "none", "ecolor": BLUE, "elinewidth": 1.2, "capsize": 4}
        label = "noise: as good as the best if it reaches that line"
        axes.errorbar(result.limits[is_finite], means[is_finite], noises, label=label, **look)
        best = means[is_finite].min()
        axes.axhline(best, color=BLUE, linewidth=0.8, linestyle=":", label="the best loss")
    if np.isfinite(result.limit):
        label = f"suggested limit {result.limit:.3g}"
        axes.axvline(result.limit, color=BLUE, linestyle="--", linewidth=1.6, label=label)
    if diverged.any():
        label = "diverged: not finite, or above the first loss"
        crosses_at_the_top(axes, every[diverged], label=label)
    if result.diverged.all():
        axes.set_yticks([])
    axes.set_ylabel("final loss")
    return finished(axes, "limit", legend=ax is None)


def _label(suggestion: Suggestion) -> str:
    """The label of a suggestion's limit, by its verdict."""
    return (
        f"{suggestion.words.line}limit {suggestion.limit:g}, clips {suggestion.share_clipped:.1%}"
    )


def edges_of_bars(norms: Numbers, limit: float) -> Numbers:
    """The edges of equally wide bins. The limit is an edge, so no bin lies on both sides of it."""
    low, high = np.log(norms.min() / limit), np.log(norms.max() / limit)
    width = (high - low) / BINS or 0.1
    # A norm equal to its limit is not above it.
    bins = np.arange(np.floor(low / width - 1e-6), np.ceil(high / width) + 1)
    return limit * np.exp(bins * width) * (1 + 1e-9)


def bars_of_norms(
    ax: "Axes", norms: Numbers, edges: Numbers, parts: Iterable[tuple[str, Numbers, dict[str, Any]]]
) -> None:
    """How many norms of each part are in each bin, as bars on top of each other.

    A part has a name, a flag for each norm, and a look; a part without norms is left out.
    """
    ax.set_xscale("log")
    ax.set_yscale("log")  # on a linear axis, a few norms among thousands would be invisible
    below = np.zeros(len(edges) - 1)
    for name, part, look in parts:
        if part.any():
            counts = np.histogram(norms[part], edges)[0]
            look = {"linewidth": 0, "align": "edge", **look}
            label = f"{name} ({part.sum()})"
            ax.bar(edges[:-1], counts, np.diff(edges), below, label=label, **look)
            below += counts
    ax.set_ylim(0.6, 1.5 * max(below.max(), 1))  # so that even a single norm is visible


def line_of_limit(ax: "Axes", limit: float, label: str) -> None:
    """Draws a limit as a line across the horizontal axis of norms."""
    ax.axvline(limit, color=BLUE, linestyle="--", linewidth=1.6, label=label)


def _mark_above(
    ax: "Axes",
    x: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    above: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    label = f"above the limit ({np.sum(above)})"
    ax.plot(x[above], y[above], "^", color=ORANGE, markersize=4, zorder=3, label=label)

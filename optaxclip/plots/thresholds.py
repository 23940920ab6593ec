"""Pictures that help to find a threshold."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.types import HostArrayLike
from optaxclip.plots.style import (
    COLORS,
    check_instance,
    curve,
    finish_axes,
    mark_off_scale,
    new_axes,
    plot_line,
)
from optaxclip.tuning import Suggestion, SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, BLUE = COLORS[:2]
PALE_ORANGE = COLORS[5]
Numbers = np.ndarray[Any, Any]
BINS = 50


def norms_over_steps(
    norms: HostArrayLike | Suggestion,
    threshold: HostArrayLike | None = None,
    steps: HostArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the norms of one run on a logarithmic axis, and marks the steps above a threshold.

    Triangles mark the norms above the threshold, and crosses at the top those that are not finite.
    For a suggestion, triangles mark only steps after the warm-up, because only these are counted.

    Args:
      norms: the raw norms, float[n]; or what `optaxclip.tuning.suggest` returned, with its
        threshold.
      threshold: one threshold, or the threshold of each step, float[n]; it need not be the run's
        own threshold. An infinite threshold is not drawn.
      steps: the step of each norm, int[n]; if None, those of the suggestion, or 0, 1, ...
      ax: where to draw.

    Raises:
      ValueError: for no norms, for more than one axis, for a wrong number of thresholds or steps,
        or for a suggestion and a threshold.
      TypeError: for norms that are not real numbers.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.norms_over_steps([1.0, 1.2, 30.0, float("nan")], threshold=2.0)
      >>> print(ax.get_legend_handles_labels()[1])
      ['norm', 'above the threshold (1)', 'threshold 2', 'not finite (1)']
    """
    suggestion = None
    if isinstance(norms, Suggestion):
        if threshold is not None:
            remedy = "to draw another threshold, pass suggestion.norms"
            raise ValueError(
                f"threshold must be None for a suggestion, which has its own; {remedy}"
            )
        suggestion, norms, threshold = norms, norms.norms, norms.threshold
        steps = suggestion.steps if steps is None else steps
    x, y = curve(norms, steps, "norms")
    bound = None if threshold is None else np.asarray(threshold, np.float64)
    if suggestion is not None and suggestion.recommendation == "none":
        bound = None
    if bound is not None and bound.shape not in ((), y.shape):
        what = f"one, or one for each of {len(y)} norms"
        raise ValueError(f"threshold must be {what}, got the shape {bound.shape}")
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
        label = f"threshold {bound:.3g}" if bound.ndim == 0 else "threshold"
        if suggestion is not None:
            above, label = above & suggestion.is_used, _label(suggestion)
        _mark_above(axes, x, y, above)
        line = np.broadcast_to(np.where(np.isfinite(bound), bound, np.nan), y.shape)
        plot_line(axes, x, line, "--", color=BLUE, linewidth=1.6, label=label)
    if not finite.all():
        mark_off_scale(axes, x[~finite], label=f"not finite ({np.sum(~finite)})")
    axes.set_ylabel("gradient norm")
    return finish_axes(axes, legend=ax is None)


def norm_histogram(suggestion: Suggestion, ax: "Axes | None" = None) -> "Axes":
    """Draws how often norms of each size came after the warm-up, with the suggested threshold.

    Spikes, whose norms stick out among the steps around them, have a colour of their own. So do
    norms above the threshold that are not spikes; there are such norms if the level of the norms
    moves.

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
    check_instance(suggestion, Suggestion, "suggestion", "optaxclip.tuning.suggest")
    axes = new_axes(ax)
    norms, threshold = suggestion.norms, suggestion.threshold
    spikes, used = suggestion.is_spike, suggestion.is_used
    above = norms > threshold
    parts = (
        ("ordinary", used & ~spikes & ~above, {"color": "0.7"}),
        ("above the threshold, no spikes", used & ~spikes & above, {"color": PALE_ORANGE}),
        ("spikes", spikes, {"color": ORANGE, "hatch": "////", "edgecolor": "white"}),
    )
    has_threshold = suggestion.recommendation != "none"
    center = threshold if has_threshold else suggestion.typical_norm
    draw_bars(axes, norms, bin_edges(norms[used], center), parts)
    if has_threshold:
        draw_threshold(axes, threshold, _label(suggestion))
    after = " after the warm-up" if suggestion.warmup_steps else ""
    axes.set_ylabel(f"number of steps{after}")
    return finish_axes(axes, "gradient norm", legend=ax is None)


def sweep_curve(result: SweepResult, ax: "Axes | None" = None) -> "Axes":
    """Draws the final loss for each threshold.

    Crosses at the top are diverged runs: at the end their loss was not finite, or above its first
    value. A bar is the noise within which a loss counts as equal to the best loss, the dotted line:
    the suggested threshold is the largest whose bar reaches down to it.

    Args:
      result: what `optaxclip.tuning.sweep` returned.
      ax: where to draw.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import ops, plots, tuning
      >>> def step(x, batch, threshold):
      ...     loss, grad = jax.value_and_grad(lambda x: (x - batch) ** 2)(x)
      ...     grad, norm = ops.clip_by_global_norm(grad, threshold)
      ...     return x - 1.1 * grad, loss, norm
      >>> key, data = jax.random.key(0), jnp.full(20, 9.0)
      >>> result = tuning.sweep(jax.random.normal, step, [0.01, 100.0], 20, key=key, data=data)
      >>> ax = plots.sweep_curve(result)
      >>> print(ax.get_legend_handles_labels()[1][1:3])
      ['the best loss', 'suggested threshold 0.01']
    """
    check_instance(result, SweepResult, "result", "optaxclip.tuning.sweep")
    axes = new_axes(ax)
    axes.set_xscale("log")
    losses = np.where(result.diverged, np.nan, result.final_loss)
    style = {"color": "0.35", "linewidth": 1.4}
    axes.plot(result.thresholds, losses, "o-", label="final loss", **style)
    if not result.diverged.all():
        good = ~result.diverged
        noises = np.stack([result.loss_noise[good], np.zeros(good.sum())])
        look = {"fmt": "none", "ecolor": BLUE, "elinewidth": 1.2, "capsize": 4}
        label = "noise: as good as the best if it reaches that line"
        axes.errorbar(result.thresholds[good], losses[good], noises, label=label, **look)
        best = losses[good].min()
        axes.axhline(best, color=BLUE, linewidth=0.8, linestyle=":", label="the best loss")
        label = f"suggested threshold {result.threshold:.3g}"
        axes.axvline(result.threshold, color=BLUE, linestyle="--", linewidth=1.6, label=label)
    if result.diverged.any():
        label = "diverged: not finite, or above the first loss"
        mark_off_scale(axes, result.thresholds[result.diverged], label=label)
    if result.diverged.all():
        axes.set_yticks([])
    axes.set_ylabel("final loss")
    return finish_axes(axes, "threshold", legend=ax is None)


def _label(suggestion: Suggestion) -> str:
    """The label of a suggestion's threshold."""
    kind = "best constant " if suggestion.recommendation == "adaptive" else ""
    return f"{kind}threshold {suggestion.threshold:g}, clips {suggestion.clipped_fraction:.1%}"


def bin_edges(norms: Numbers, threshold: float) -> Numbers:
    """Returns the edges of bins of equal width, of which the threshold is one."""
    low, high = np.log(norms.min() / threshold), np.log(norms.max() / threshold)
    width = (high - low) / BINS or 0.1
    # A norm equal to its threshold is not above it.
    bins = np.arange(np.floor(low / width - 1e-6), np.ceil(high / width) + 1)
    return threshold * np.exp(bins * width) * (1 + 1e-9)


def draw_bars(
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


def draw_threshold(ax: "Axes", threshold: float, label: str) -> None:
    """Draws a threshold as a line across the horizontal axis of norms."""
    ax.axvline(threshold, color=BLUE, linestyle="--", linewidth=1.6, label=label)


def _mark_above(
    ax: "Axes",
    x: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    above: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    label = f"above the threshold ({np.sum(above)})"
    ax.plot(x[above], y[above], "^", color=ORANGE, markersize=4, zorder=3, label=label)

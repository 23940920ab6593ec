"""Plots of losses, norms, and thresholds of training runs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import optaxclip.plots.style as style
from optaxclip._base.numerics import is_real
from optaxclip._base.types import HostArrayLike
from optaxclip._base.validation import short_repr
from optaxclip.tuning import Suggestion, SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Curves = Mapping[str, HostArrayLike]
ORANGE, BLUE, PALE_ORANGE = style.COLORS[0], style.COLORS[1], style.COLORS[5]
NUM_BINS = 50


def loss_curves(
    losses: Curves, steps: HostArrayLike | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws the losses of runs over the steps.

    The axis ends slightly above the largest initial loss, because a diverged run would otherwise
    flatten the remaining curves. Crosses at the top mark steps on which a loss becomes non-finite.

    Args:
      losses: A dict that maps run names to losses, float[n].
      steps: The steps of the losses, int[n]. Defaults to 0, 1, ...
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      ValueError: If there are no runs or no losses, or if shapes do not match.
      TypeError: If `losses` is not a dict of real numbers.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.loss_curves({"plain": [3.0, float("nan")], "clipped": [3.0, 2.0]})
      >>> print(ax.get_ylabel())
      loss
    """
    curves = _check_runs(losses, steps, "losses")
    axes = style.new_axes(ax)
    finite = [y[np.isfinite(y)] for _, y in curves.values() if np.isfinite(y).any()]
    if finite:
        top, bottom = max(y[0] for y in finite), min(y.min() for y in finite)
        margin = 0.05 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)
    _draw_lines(axes, curves)
    axes.set_ylabel("loss")
    return style.finish_axes(axes, legend=ax is None)


def norm_curves(
    norms: Curves,
    steps: HostArrayLike | None = None,
    threshold: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the gradient norms of runs over the steps on a logarithmic axis.

    Crosses at the top mark steps on which a norm becomes non-finite.

    Args:
      norms: A dict that maps run names to norms, float[n].
      steps: The steps of the norms, int[n]. Defaults to 0, 1, ...
      threshold: A constant threshold, drawn as a horizontal line.
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      ValueError: If there are no runs or no norms, or if shapes do not match.
      TypeError: If `norms` is not a dict of real numbers, or if `threshold` is not a real number.

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
            f"{type(threshold).__name__}; use plots.norms_over_steps for a threshold per step"
        )
    axes = style.new_axes(ax)
    axes.set_yscale("log")
    _draw_lines(axes, curves)
    if threshold is not None:
        axes.axhline(float(threshold), color="0.4", linewidth=1.0, label=f"threshold {threshold:g}")
    axes.set_ylabel("gradient norm")
    return style.finish_axes(axes, legend=ax is None)


def norms_over_steps(
    norms: HostArrayLike | Suggestion,
    threshold: HostArrayLike | None = None,
    steps: HostArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the norms of one run on a logarithmic axis, and marks norms above a threshold.

    Triangles mark norms above the threshold, and crosses at the top mark non-finite norms. For a
    suggestion, triangles do not mark norms of the warm-up.

    Args:
      norms: The norms before clipping, float[n], or the result of `optaxclip.tuning.suggest`, which
        also contains a threshold.
      threshold: A threshold, or float[n] with one threshold per step. It does not need to be the
        threshold used in the run. Infinite thresholds are not drawn.
      steps: The steps of the norms, int[n]. Defaults to the steps of the suggestion or 0, 1, ...
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      ValueError: If there are no norms, if shapes do not match, or if `threshold` is used with a
        suggestion.
      TypeError: If a norm is not a real number.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.norms_over_steps([1.0, 1.2, 30.0, float("nan")], threshold=2.0)
      >>> print(ax.get_legend_handles_labels()[1])
      ['norm', 'above the threshold (1)', 'threshold 2', 'non-finite (1)']
    """
    suggestion = None
    if isinstance(norms, Suggestion):
        if threshold is not None:
            raise ValueError(
                f"threshold={short_repr(threshold)} cannot be combined with a suggestion; pass "
                "suggestion.norms to plot a different threshold"
            )
        suggestion, norms, threshold = norms, norms.norms, norms.threshold
        steps = suggestion.steps if steps is None else steps
    x, y = style.check_series(norms, steps, "norms")
    bound = None if threshold is None else np.asarray(threshold, np.float64)
    if suggestion is not None and suggestion.recommendation == "none":
        bound = None  # the suggestion is not to clip
    if bound is not None and bound.shape not in ((), y.shape):
        raise ValueError(
            f"threshold must be a scalar or match the shape of norms, {y.shape}, got {bound.shape}"
        )
    axes = style.new_axes(ax)
    finite = np.isfinite(y)
    axes.set_yscale("log")
    # Zeros have no position on a logarithmic axis, so they are gaps like non-finite norms.
    shown = np.where(finite & (y > 0), y, np.nan)
    style.plot_line(axes, x, shown, color="0.55", linewidth=1.0, label="norm")
    if suggestion is not None and (warmup := suggestion.warmup_steps):
        label = f"warm-up ({warmup}), not counted"
        axes.axvspan(x[0], x[warmup], color="0.93", linewidth=0, zorder=0, label=label)
    if bound is not None:
        above = finite & (y > bound)
        label = f"threshold {bound:.3g}" if bound.ndim == 0 else "threshold"
        if suggestion is not None:
            above, label = above & suggestion.is_used, _threshold_label(suggestion)
        look = {"color": ORANGE, "markersize": 4, "zorder": 3}
        axes.plot(x[above], y[above], "^", label=f"above the threshold ({above.sum()})", **look)
        line = np.broadcast_to(np.where(np.isfinite(bound), bound, np.nan), y.shape)
        style.plot_line(axes, x, line, "--", color=BLUE, linewidth=1.6, label=label)
    if not finite.all():
        style.mark_off_scale(axes, x[~finite], label=f"non-finite ({np.sum(~finite)})")
    axes.set_ylabel("gradient norm")
    return style.finish_axes(axes, legend=ax is None)


def norm_histogram(suggestion: Suggestion, ax: "Axes | None" = None) -> "Axes":
    """Draws a histogram of the norms after the warm-up, and the suggested threshold.

    Spikes have a separate color. Norms above the threshold that are not spikes, which occur if the
    typical norm changes during training, also have a separate color.

    Args:
      suggestion: The result of `optaxclip.tuning.suggest`.
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      TypeError: If `suggestion` is not a `Suggestion`.

    Example:
      >>> from optaxclip import plots, tuning
      >>> norms = [1.0, 1.1, 0.9] * 100 + [10.0]
      >>> ax = plots.norm_histogram(tuning.suggest(norms))
      >>> print(ax.get_legend_handles_labels()[1][1:])
      ['typical (300)', 'spikes (1)']
    """
    style.check_instance(suggestion, Suggestion, "suggestion", "optaxclip.tuning.suggest")
    axes = style.new_axes(ax)
    norms, threshold = suggestion.norms, suggestion.threshold  # [n], []
    spikes, used = suggestion.is_spike, suggestion.is_used
    above = norms > threshold
    parts: tuple[tuple[str, style.Numbers, dict[str, Any]], ...] = (
        ("typical", used & ~spikes & ~above, {"color": "0.7"}),
        ("above the threshold, no spikes", used & ~spikes & above, {"color": PALE_ORANGE}),
        ("spikes", spikes, {"color": ORANGE, "hatch": "////", "edgecolor": "white"}),
    )
    has_threshold = suggestion.recommendation != "none"
    # Bins have equal widths in the logarithm, and the threshold is one of the edges. The edges are
    # slightly larger because a norm equal to the threshold is not above it.
    center = threshold if has_threshold else suggestion.typical_norm
    low, high = np.log(norms[used].min() / center), np.log(norms[used].max() / center)
    width = (high - low) / NUM_BINS or 0.1
    bins = np.arange(np.floor(low / width - 1e-6), np.ceil(high / width) + 1)
    edges = center * np.exp(bins * width) * (1 + 1e-9)  # [bins + 1]
    axes.set_xscale("log")
    axes.set_yscale("log")  # on a linear axis, a few norms among thousands would be invisible
    heights = np.zeros(len(edges) - 1)
    for name, part, look in parts:
        if part.any():
            counts = np.histogram(norms[part], edges)[0]
            look = {"linewidth": 0, "align": "edge", "label": f"{name} ({part.sum()})", **look}
            axes.bar(edges[:-1], counts, np.diff(edges), heights, **look)
            heights += counts
    axes.set_ylim(0.6, 1.5 * max(heights.max(), 1))  # so bars with a single norm are visible
    if has_threshold:
        label = _threshold_label(suggestion)
        axes.axvline(threshold, color=BLUE, linestyle="--", linewidth=1.6, label=label)
    after = " after the warm-up" if suggestion.warmup_steps else ""
    axes.set_ylabel(f"number of steps{after}")
    return style.finish_axes(axes, "gradient norm", legend=ax is None)


def sweep_curve(result: SweepResult, ax: "Axes | None" = None) -> "Axes":
    """Draws the final losses of a sweep over thresholds.

    The dotted line shows the best loss, and bars show the noise of the losses. If a bar reaches the
    dotted line, the loss is considered equal to the best loss. Crosses at the top mark diverged
    runs, in which the final loss is non-finite or above the first loss.

    Args:
      result: The result of `optaxclip.tuning.sweep`.
      ax: The axes to use. Defaults to new axes with a legend.

    Raises:
      TypeError: If `result` is not a `SweepResult`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optaxclip import plots, tuning
      >>> def step(x, batch, threshold):
      ...     grad = 2 * (x - batch)
      ...     return x - 1.1 * jnp.clip(grad, -threshold, threshold), grad**2, jnp.abs(grad)
      >>> data = jnp.full(20, 9.0)
      >>> result = tuning.sweep(jax.random.normal, step, [0.01, 100.0], 20, key=0, data=data)
      >>> print(plots.sweep_curve(result).get_legend_handles_labels()[1][1:3])
      ['best loss', 'suggested threshold 0.01']
    """
    style.check_instance(result, SweepResult, "result", "optaxclip.tuning.sweep")
    axes = style.new_axes(ax)
    axes.set_xscale("log")
    losses = np.where(result.diverged, np.nan, result.final_loss)  # [thresholds]
    axes.plot(result.thresholds, losses, "o-", label="final loss", color="0.35", linewidth=1.4)
    if not result.diverged.all():
        good = ~result.diverged
        # Bars only extend downward because only the distance to the best loss matters.
        noises = np.stack([result.loss_noise[good], np.zeros(good.sum())])  # [2, good]
        look = {"fmt": "none", "ecolor": BLUE, "elinewidth": 1.2, "capsize": 4}
        label = "noise: equivalent to the best if it reaches the line"
        axes.errorbar(result.thresholds[good], losses[good], noises, label=label, **look)
        best = losses[good].min()
        axes.axhline(best, color=BLUE, linewidth=0.8, linestyle=":", label="best loss")
        label = f"suggested threshold {result.threshold:.3g}"
        axes.axvline(result.threshold, color=BLUE, linestyle="--", linewidth=1.6, label=label)
    if result.diverged.any():
        label = "diverged: non-finite or above the first loss"
        style.mark_off_scale(axes, result.thresholds[result.diverged], label=label)
    if result.diverged.all():
        axes.set_yticks([])  # the default ticks would suggest losses between 0 and 1
    axes.set_ylabel("final loss")
    return style.finish_axes(axes, "threshold", legend=ax is None)


def _check_runs(
    series: Curves, steps: HostArrayLike | None, name: str
) -> dict[str, tuple[style.Numbers, style.Numbers]]:
    if not isinstance(series, Mapping):
        wanted = f"a dict of runs, such as {{'run': {name}}}"
        raise TypeError(f"{name} must be {wanted}, got {short_repr(series)}")
    if not series:
        raise ValueError(f"{name} must be a dict with at least one run, got an empty dict")
    return {
        run: style.check_series(values, steps, f"{name} of {run!r}")
        for run, values in series.items()
    }


def _draw_lines(ax: "Axes", curves: Mapping[str, tuple[style.Numbers, style.Numbers]]) -> None:
    lines = list["Line2D"]()
    for depth, (name, (x, y)) in enumerate(curves.items()):
        # The line styles shift after all colors were used, so pairs of colors and line styles
        # repeat only after `len(COLORS) * len(STYLES)` curves.
        shift, number = divmod(depth, len(style.COLORS))
        color, dashes = style.COLORS[number], style.STYLES[(number + shift) % len(style.STYLES)]
        finite = np.where(np.isfinite(y), y, np.nan)
        line = style.plot_line(ax, x, finite, dashes, color=color, label=name)
        # The first line is on top. Lines below it are wider, so that equal lines remain visible.
        line.set(zorder=3 - depth / len(curves), linewidth=1.4 + 0.25 * depth)
        lines.append(line)
    for line, (x, y) in zip(lines, curves.values(), strict=True):
        _mark_nonfinite(ax, x, y, line)
    if not all(np.isfinite(y).all() for _, y in curves.values()):
        ax.plot([], [], "X", color="black", markersize=8, label="non-finite")


def _mark_nonfinite(ax: "Axes", x: style.Numbers, y: style.Numbers, line: "Line2D") -> None:
    """Extends a line to a cross at the top of the axes where its values become non-finite."""
    from matplotlib.patches import ConnectionPatch

    bad = ~np.isfinite(y)
    # Only the first of several consecutive non-finite values is marked.
    firsts = np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    look = {"color": line.get_color(), "zorder": line.get_zorder()}
    if len(firsts):
        style.mark_off_scale(ax, x[firsts], label="_", markersize=11, **look)
    for first in firsts[firsts > 0]:
        last, top = (float(x[first - 1]), float(y[first - 1])), (float(x[first]), 1.0)
        rise = {"linewidth": line.get_linewidth(), "clip_on": True}
        ax.add_patch(ConnectionPatch(last, top, "data", ax.get_xaxis_transform(), **rise, **look))


def _threshold_label(suggestion: Suggestion) -> str:
    kind = "best constant " if suggestion.recommendation == "adaptive" else ""
    return f"{kind}threshold {suggestion.threshold:g}, clips {suggestion.clipped_fraction:.1%}"

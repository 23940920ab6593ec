"""A picture of the gradient noise scale beside the batch size."""

from typing import TYPE_CHECKING

import numpy as np

from optaxclip._base.host import ArrayLike
from optaxclip.plots.style import COLORS, curve, finished, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, BLUE = COLORS[:2]


def noise_scale_over_steps(
    scales: ArrayLike,
    batch_size: ArrayLike,
    steps: ArrayLike | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the gradient noise scale over the steps, with the batch size beside it.

    The part of the curve above the batch size is shaded: there, steps are mostly noise. Scales that
    are not positive or not finite are left out; they come while the signal is not positive.

    Args:
      scales: float[n], the `scale` of the states of `optaxclip.monitor.noise_scale`.
      batch_size: one size for all steps, or one for each, float[n], in the units of the scales.
      steps: the step of each scale, int[n]; 0, 1, ... if None.
      ax: where to draw.

    Raises:
      ValueError: for no scales, for more than one axis, for a wrong number of batch sizes or steps,
        and for a batch size that is not above 0.

    Example:
      >>> from optaxclip import plots
      >>> ax = plots.noise_scale_over_steps([float("nan"), 20.0, 45.0, 70.0], batch_size=32)
      >>> print(ax.get_legend_handles_labels()[1])
      ['noise scale', 'batch size 32', 'batch too small']
    """
    x, y = curve(scales, steps, "scales")
    size = np.asarray(batch_size, np.float64)
    if size.shape not in ((), y.shape):
        what = f"one, or one for each of {len(y)} scales"
        raise ValueError(f"batch_size must be {what}, got the shape {size.shape}")
    if not (size > 0).all():
        raise ValueError(f"batch_size must be above 0, got {batch_size!r:.80}")
    axes = new_axes(ax)
    axes.set_yscale("log")
    positive = np.where(np.isfinite(y) & (y > 0), y, np.nan)
    line = np.broadcast_to(size, y.shape)
    axes.plot(x, positive, color=BLUE, linewidth=1.4, label="noise scale")
    label = f"batch size {size:g}" if size.ndim == 0 else "batch size"
    axes.plot(x, line, "--", color="0.35", linewidth=1.4, label=label)
    if (above := positive > line).any():
        look = {"color": ORANGE, "alpha": 0.25, "linewidth": 0}
        axes.fill_between(x, line, positive, where=above, label="batch too small", **look)
    axes.set_ylabel("batch size")
    return finished(axes, legend=ax is None)

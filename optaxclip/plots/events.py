"""A picture of a run's events: which steps were clipped, and which were skipped."""

from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip.plots.style import COLORS, crosses_at_the_top, finished, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, BLUE, GREEN, PINK = COLORS[:4]


def events_over_steps(events: np.ndarray[Any, Any], ax: "Axes | None" = None) -> "Axes":
    """Draws the norms and limits of a run's last steps, and marks clipped and skipped steps.

    The axis of norms is logarithmic. Triangles mark clipped steps, squares skipped steps, and
    crosses at the top steps whose norm is not finite. The norms and the dashed limit are those of
    the outermost clip or skip; the limits of other clips and skips are drawn if they judge the same
    norms. An infinite limit is not drawn.

    Args:
      events: what `monitor.history` returns for `monitor.events`.
      ax: where to draw.

    Raises:
      ValueError: for no events.
      TypeError: for anything else.

    Example:
      >>> import jax.numpy as jnp, optaxclip
      >>> from optaxclip import monitor, plots
      >>> tx = monitor.events(optaxclip.clip_by_global_norm(2.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for size in (1.0, 3.0, 1.5, jnp.nan):
      ...     _, state = tx.update(jnp.array([size]), state)
      >>> ax = plots.events_over_steps(monitor.history(state))
      >>> print(ax.get_legend_handles_labels()[1])
      ['norm', 'limit', 'clipped (1)', 'not finite (1)']
    """
    if "verdict" not in (getattr(getattr(events, "dtype", None), "names", None) or ()):
        raise TypeError(
            "events must be what monitor.history returns of monitor.events, with all its fields, "
            f"got a value of type {type(events).__name__}"
        )
    if not len(events):
        raise ValueError("events must have at least one step, got none; train some steps first")
    x, norm, verdict = events["step"], events["norm"], events["verdict"]
    axes = new_axes(ax)
    axes.set_yscale("log")
    finite, skipped = np.isfinite(norm), verdict == "skipped"
    axes.plot(x, np.where(finite & (norm > 0), norm, np.nan), color="0.55", lw=1.0, label="norm")
    looks = iter(((BLUE, "--"), (GREEN, "-."), ("0.2", ":"), (COLORS[4], "-")))
    for name, limit in _limits(events).items():
        if (known := np.isfinite(limit) & (limit > 0)).any():
            color, style = next(looks, ("0.2", ":"))
            axes.plot(x[known], limit[known], style, color=color, linewidth=1.6, label=name)
    for name, marked, look in (
        ("clipped", verdict == "clipped", {"marker": "^", "color": ORANGE}),
        ("skipped", skipped & finite, {"marker": "s", "color": PINK}),
    ):
        if marked.any():
            look = {"linestyle": "", "markersize": 4, "zorder": 3, **look}
            axes.plot(x[marked], norm[marked], label=f"{name} ({marked.sum()})", **look)
    for name, marked, color in (
        ("not finite", ~finite & ~skipped, "black"),
        ("not finite, skipped", ~finite & skipped, PINK),
    ):
        if marked.any():
            crosses_at_the_top(axes, x[marked], label=f"{name} ({marked.sum()})", color=color)
    axes.set_ylabel("gradient norm")
    return finished(axes, legend=ax is None)


def _limits(events: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The limits of the norms that are drawn, by their labels."""
    found = {"limit": events["limit"]}
    names = [field.removesuffix("/norm") for field in events.dtype.names if field.endswith("/norm")]
    for name in names:
        norm = events[f"{name}/norm"]
        known = np.isfinite(norm)
        if known.any() and np.allclose(norm[known], events["norm"][known], rtol=1e-5):
            found[f"limit of {name}"] = events[f"{name}/limit"]
    return found

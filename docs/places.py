"""Draws the positions of clipping in a chain: before, after and around the optimizer."""

import itertools
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from optaxclip.plots import COLORS

AROUND, BEFORE, AFTER, PLAIN = *COLORS[:3], "0.35"
STAGES = (  # in the order of the chain: text in the box, color, position, examples
    ("record", BEFORE, "first: records raw norms", "monitor.record"),
    ("clipping", BEFORE, "before: clips gradients", "clip_by_global_norm, zclip, …"),
    ("scale_by_adam", PLAIN, "", ""),
    ("clipping", AFTER, "after: clips updates", "clip_by_block_rms"),
    ("learning rate", PLAIN, "", ""),
    ("clipping", AFTER, "last: clips weight changes", "clip_attention_logits"),
)
# Positions and sizes are in inches, from the top left.
SIZE = (5.4, 5.0)
ROW, BOX = 0.56, (1.5, 0.34)
BYPASS, CHAIN, MIDDLE, TEXT = 0.25, 0.6, 1.65, 2.65


def draw(path: Path, dpi: int) -> None:
    """Draws how a step flows from gradients to weights, from top to bottom."""
    figure = Figure(figsize=SIZE)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, SIZE[0]), ylim=(SIZE[1], 0))
    ax.axis("off")
    begin, *rows, end = [
        0.3 + ROW * i for i in (0, *(1.65 + n for n in range(len(STAGES))), 7.9)
    ]
    stops = [begin, *rows, end]
    for above, below in itertools.pairwise(stops):
        _arrow(ax, (MIDDLE, above + BOX[1] / 2), (MIDDLE, below - BOX[1] / 2))
    for y, (name, color, sees, what) in zip(rows, STAGES, strict=True):
        _box(ax, (MIDDLE - BOX[0] / 2, y - BOX[1] / 2), BOX, color)
        ax.text(MIDDLE, y, name, ha="center", va="center")
        _note(ax, y, sees, what, color)
    # A skipped step bypasses all stages.
    bypass = {"color": AROUND, "linestyle": "--"}
    height = rows[-1] - rows[0] + 1.3 * ROW
    _box(
        ax,
        (CHAIN, rows[0] - 0.65 * ROW),
        (SIZE[0] - CHAIN - 0.1, height),
        AROUND,
        "--",
    )
    ax.plot([MIDDLE - 0.5, BYPASS, BYPASS], [begin, begin, end], **bypass)
    _arrow(ax, (BYPASS, end), (MIDDLE - 0.45, end), **bypass)
    _note(ax, begin, "around: skips bad steps", "skip_nonfinite, skip_above", AROUND)
    for y, name in ((begin, "gradients"), (end, "weights")):
        ax.text(MIDDLE, y, name, ha="center", va="center", weight="bold")
    figure.savefig(path, dpi=dpi)


def _note(ax: Axes, y: float, sees: str, what: str, color: str) -> None:
    ax.text(TEXT, y - 0.02, sees, va="bottom", color=color, weight="bold")
    ax.text(TEXT, y + 0.02, what, va="top", family="monospace", size="small")


def _box(
    ax: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    color: str,
    style: str = "-",
) -> None:
    look = {
        "edgecolor": color,
        "linestyle": style,
        "facecolor": "none",
        "linewidth": 1.4,
    }
    ax.add_patch(
        FancyBboxPatch(corner, *size, "round,pad=0,rounding_size=0.08", **look)
    )


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], **look: str
) -> None:
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": PLAIN, **look}
    ax.annotate("", end, start, arrowprops=arrow)

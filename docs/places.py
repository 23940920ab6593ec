"""The picture of where a clip goes: before the optimizer, behind it, around it."""

import itertools
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from optaxclip.plots import COLORS

AROUND, BEFORE, BEHIND, PLAIN = *COLORS[:3], "0.35"
STAGES = (  # in a chain's order: what is in the box, its color, what it sees, what goes there
    ("record", BEFORE, "first: keeps the raw norms", "monitor.record"),
    ("clip", BEFORE, "before: sees gradients", "clip_by_global_norm, zclip, …"),
    ("scale_by_adam", PLAIN, "", ""),
    ("clip", BEHIND, "behind: sees updates", "clip_by_block_rms"),
    ("learning rate", PLAIN, "", ""),
    ("clip", BEHIND, "at the end: sees changes", "clip_attention_logits"),
)
# Places and sizes are in inches, from the top left.
SIZE = (5.4, 5.0)
ROW, BOX = 0.56, (1.5, 0.34)
BYPASS, CHAIN, MIDDLE, TEXT = 0.25, 0.6, 1.65, 2.65


def draw(path: Path, dpi: int) -> None:
    """The way of a step from gradients to weights, downwards."""
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
    # A step that is left out goes past all of them.
    past = {"color": AROUND, "linestyle": "--"}
    height = rows[-1] - rows[0] + 1.3 * ROW
    _box(
        ax,
        (CHAIN, rows[0] - 0.65 * ROW),
        (SIZE[0] - CHAIN - 0.1, height),
        AROUND,
        "--",
    )
    ax.plot([MIDDLE - 0.5, BYPASS, BYPASS], [begin, begin, end], **past)
    _arrow(ax, (BYPASS, end), (MIDDLE - 0.45, end), **past)
    _note(
        ax, begin, "around: is the step taken?", "skip_nonfinite, skip_above", AROUND
    )
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

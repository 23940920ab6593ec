"""The picture of a bad stretch of data: the loss of one seed with each guard."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import optaxclip.commands.figures as figures
from benchmarks.research import bad_stretch
from optaxclip import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EFFORT = bad_stretch.Effort(seeds=1)
SHOWN = ("nothing", "clip", "reset", "skip", "skip and roll back")
TITLES = {
    "noise": "characters drawn by chance",
    "repeats": "one batch again and again",
}
FROM = 15
"""The first evaluation that is drawn: before it the loss falls from afar."""


def draw(path: Path, figure: "Figure", dpi: int) -> None:
    """Two kinds of bad data, one above the other."""
    found = bad_stretch.compare(
        EFFORT, {name: bad_stretch.GUARDS[name] for name in SHOWN}
    )
    for ax, (kind, title) in zip(
        figure.subplots(2, 1, sharex=True), TITLES.items(), strict=True
    ):
        number = bad_stretch.KINDS.index(kind)
        curves = {name: losses[number, 0] for name, (losses, _) in found.items()}
        first = min(FROM, EFFORT.bad[0] // EFFORT.every - 1)
        steps = EFFORT.every * np.arange(1, len(curves["nothing"]) + 1)
        shown = {name: curve[first:] for name, curve in curves.items()}
        plots.loss_curves(shown, steps[first:], ax=ax)
        ax.set_ylim(
            min(map(np.min, shown.values())) - 0.1,
            max(map(np.max, shown.values())) + 0.2,
        )
        ax.set_title(title)
        ax.set_ylabel("held-out loss (nats)")
        ax.axvspan(*EFFORT.bad, color="0.9", zorder=0)
    figure.axes[0].set_xlabel("")
    figures.shared_legend(figure)
    figure.savefig(path, dpi=dpi)

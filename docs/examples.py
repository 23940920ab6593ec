"""The picture of "Which example is it?": the norms of examples, some of which are spoiled."""

from collections import Counter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks import spoiled
from optaxclip import plots
from optaxclip.plots.style import legend_below

STEPS = spoiled.Effort().steps // 10
"""Early in a run: most examples still have something to say."""
RULE = 24
"""Lines of which one character makes up at least half are rules of tables, of headings."""


def draw(path: Path, dpi: int) -> None:
    """The digits above, and the lines of text below."""
    figure = Figure(figsize=(5.6, 9.4), layout="constrained")
    sets = {"digits": spoiled.digits(0, spoiled.FEW), "lines": spoiled.lines(0)}
    for ax, (task, found) in zip(figure.subplots(2, 1), sets.items(), strict=True):
        norms = np.asarray(spoiled.norms_and_losses(task, found.examples, STEPS)[0])
        marked = dict(found.which)
        most_common = [Counter(text).most_common(1)[0][1] for text in found.texts]
        if found.texts:
            marked["rules of tables"] = np.flatnonzero(np.array(most_common) >= RULE)
        plots.example_norms(norms, marked=marked, ax=ax, most=4)
        ax.set_title(
            {"digits": "handwritten digits", "lines": "lines of text"}[task]
        )
        legend_below(ax)
    figure.savefig(path, dpi=dpi)

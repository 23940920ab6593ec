"""Makes every picture of `docs/` anew, most of them from runs.

  python docs/pictures.py

Some minutes on two cores. It prints what the pages say of the pictures: the table of batch sizes,
the demo's table, the suggestion, the sweep. The numbers repeat on one machine; another rounds
otherwise, and where gradients explode no rounding stays small.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where `benchmarks` is

import batches
import examples
import formats
import layers
import matplotlib as mpl
import numpy as np
import places
import stretch
from matplotlib.figure import Figure

import optaxclip.commands.figures as figures
from optaxclip import plots, tuning
from optaxclip.commands import demo, sweep

DOCS = Path(__file__).parent
STEPS, SEED = 600, 0
SWEEP_STEPS = 200
# In points and inches: on a phone, where a picture has 350 pixels, letters have 11. Two axes beside
# each other would have no room for that.
LETTERS, WIDTH = {"font.size": 13}, 5.6
TWO, ONE = (WIDTH, 6.8), (WIDTH, 4.2)
DPI = 200


def draw_demo(text: str) -> np.ndarray:
    """The demo's picture; returns the norms that its clip by global norm saw."""
    histories = demo.train(
        text, [demo.UNCLIPPED, *demo.DEFAULT_METHODS], STEPS, SEED
    )
    demo.print_table(histories)
    figure = Figure(figsize=TWO, layout="constrained")
    with mpl.rc_context(LETTERS):
        figure.subplots(2, 1, sharex=True)
        demo.draw(histories, figure)
        figure.axes[0].set_xlabel("")
        figure.savefig(DOCS / "demo.png", dpi=DPI)
    return histories["global_norm"].norm


def draw_limits(norms: np.ndarray, result: tuning.SweepResult) -> None:
    """The recorded norms over the steps, how often each size came, and the sweep's curve."""
    suggestion = tuning.suggest(norms)
    print(suggestion)
    print(result)
    for name, draw in {
        "norms": lambda ax: plots.norms_over_steps(suggestion, ax=ax),
        "suggest": lambda ax: plots.norm_histogram(suggestion, ax=ax),
        "sweep": lambda ax: plots.sweep_curve(result, ax=ax),
    }.items():
        with mpl.rc_context(LETTERS):
            figure = figures.side_by_side(columns=1)
            figure.set_size_inches(ONE)
            draw(figure.axes[0])
            figures.legends_below(figure)
            figure.savefig(DOCS / f"{name}.png", dpi=DPI)


def main() -> None:
    """Makes all of them."""
    places.draw(DOCS / "places.png", DPI)
    with mpl.rc_context(LETTERS):
        stretch.draw(
            DOCS / "recovery.png", Figure(figsize=TWO, layout="constrained"), DPI
        )
    text = demo.read_text(None)
    layers.draw(DOCS, LETTERS, DPI, text, SEED)
    with mpl.rc_context(LETTERS):
        batches.draw(DOCS / "batch.png", DPI, text, SEED, ONE)
        examples.draw(DOCS / "example.png", DPI)
        formats.draw(DOCS / "numbers.png", DPI)
    norms = draw_demo(text)
    draw_limits(norms, sweep.train(text, sweep.LIMITS, SWEEP_STEPS, SEED))


if __name__ == "__main__":
    main()

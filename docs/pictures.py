"""Makes every picture of `docs/` anew, from runs of the demo's network on Python's help topics.

  python docs/pictures.py

Some minutes on two cores. It prints what the README says of the pictures: the demo's table, the
suggestion, the sweep. The numbers repeat on one machine; another rounds otherwise, and where
gradients explode no rounding stays small.
"""

from pathlib import Path

import numpy as np

from optaxclip import plots, tuning
from optaxclip.commands import demo, sweep

DOCS = Path(__file__).parent
STEPS, SEED = 600, 0
SWEEP_STEPS = 200


def draw_demo(text: str) -> np.ndarray:
    """The demo's picture; returns the norms that its clip by global norm saw."""
    histories = demo.train(text, [demo.UNCLIPPED, *demo.DEFAULT_METHODS], STEPS, SEED)
    demo.print_table(histories)
    demo.draw(histories, DOCS / "demo.png")
    return histories["global_norm"].norm


def draw_limits(norms: np.ndarray) -> None:
    """The recorded norms over the steps, and how often each size came."""
    suggestion = tuning.suggest(norms)
    print(suggestion)
    for name, draw in {
        "norms": lambda ax: plots.norms_over_steps(norms, suggestion.limit, ax=ax),
        "suggest": lambda ax: plots.norm_histogram(suggestion, ax=ax),
    }.items():
        figure = plots.side_by_side(columns=1)
        draw(figure.axes[0])
        plots.legends_below(figure)
        figure.savefig(DOCS / f"{name}.png", dpi=150)


def draw_sweep(text: str) -> None:
    """The sweep's curve."""
    result = sweep.train(text, sweep.LIMITS, SWEEP_STEPS, SEED)
    print(result)
    sweep.draw(result, DOCS / "sweep.png")


def main() -> None:
    """Makes all of them."""
    text = demo.read_text(None)
    draw_limits(draw_demo(text))
    draw_sweep(text)


if __name__ == "__main__":
    main()

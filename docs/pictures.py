"""Draws the pictures of `docs/`.

  python docs/pictures.py

It takes some minutes on two cores, and prints the figures of the pages: the table of the demo, the
suggestion and the sweep. The numbers are reproducible on one machine. Other machines round
differently, and exploding gradients amplify the differences. The programs of `batch.png`,
`example.png` and `recovery.png` are in commit 90f72813.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(
    str(Path(__file__).parents[1])
)  # where `benchmarks` and `examples` are

import formats
import jax
import layers
import matplotlib as mpl
import numpy as np
import optax
import places
from jax import Array
from matplotlib.figure import Figure

import optaxclip
from examples import demo
from optaxclip import plots, tuning
from optaxclip.plots.style import legend_below

DOCS = Path(__file__).parent
STEPS, SEED = 600, 0
SWEEP_STEPS = 200
THRESHOLDS = np.geomspace(0.03, 1000.0, 10).round(3).tolist()
# In points and inches. On a phone with a width of 350 pixels, letters have 11 pixels, so axes are
# below each other.
LETTERS, WIDTH = {"font.size": 13}, 5.6
TWO, ONE = (WIDTH, 6.8), (WIDTH, 4.2)
DPI = 200


def draw_demo(corpus: demo.Corpus) -> np.ndarray:
    """Draws the demo, and returns the norms of its run with `clip_by_global_norm`."""
    print(demo.HEADER)
    histories = {}
    for name, method in demo.METHODS.items():
        histories[name] = demo.train(corpus, method(demo.sgd(STEPS)), STEPS, SEED)
        print(demo.row(name, histories[name]))
    figure = Figure(figsize=TWO, layout="constrained")
    with mpl.rc_context(LETTERS):
        upper, lower = figure.subplots(2, 1, sharex=True)
        demo.draw(histories, (upper, lower))
        upper.set_xlabel("")
        figure.savefig(DOCS / "demo.png", dpi=DPI)
    return histories["clip_by_global_norm"].norm


def sweep(corpus: demo.Corpus) -> tuning.SweepResult:
    """Trains the demo's network with each threshold."""
    text, sgd = jax.numpy.asarray(corpus.train), demo.sgd(SWEEP_STEPS)

    def init_fn(key: Array) -> Any:
        params = demo.initial_params(key)
        return params, sgd.init(params)

    def step_fn(
        state: Any, starts: Array, threshold: Array
    ) -> tuple[Any, Array, Array]:
        params, opt_state = state
        batch = demo.windows(text, starts)
        loss, grads = jax.value_and_grad(demo.loss_fn)(params, batch)
        grads, norm = optaxclip.ops.clip_by_global_norm(grads, threshold)
        updates, opt_state = sgd.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss, norm

    starts = demo.batch_starts(corpus, SWEEP_STEPS, SEED)
    key = jax.random.key(SEED)
    return tuning.sweep(
        init_fn, step_fn, THRESHOLDS, SWEEP_STEPS, key=key, data=starts
    )


def draw_thresholds(norms: np.ndarray, result: tuning.SweepResult) -> None:
    """Draws the recorded norms, their histogram and the sweep."""
    suggestion = tuning.suggest(norms)
    print(suggestion)
    print(result)
    pictures: dict[str, Callable[[Any], Any]] = {
        "norms": lambda ax: plots.norms_over_steps(suggestion, ax=ax),
        "suggest": lambda ax: plots.norm_histogram(suggestion, ax=ax),
        "sweep": lambda ax: plots.sweep_curve(result, ax=ax),
    }
    for name, draw in pictures.items():
        with mpl.rc_context(LETTERS):
            figure = Figure(figsize=ONE, layout="constrained")
            legend_below(draw(figure.subplots()))
            figure.savefig(DOCS / f"{name}.png", dpi=DPI)


def main() -> None:
    """Draws all pictures."""
    places.draw(DOCS / "places.png", DPI)
    text = demo.help_topics()
    layers.draw(DOCS, LETTERS, DPI, text, SEED)
    with mpl.rc_context(LETTERS):
        formats.draw(DOCS / "numbers.png", DPI)
    corpus = demo.encode(text)
    norms = draw_demo(corpus)
    draw_thresholds(norms, sweep(corpus))


if __name__ == "__main__":
    main()

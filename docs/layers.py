"""Draws the pictures of the page on layers: a text model with noise in one layer."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import optaxclip
from examples.demo import SYMBOLS, encode
from optaxclip import monitor, plots, scopes

CONTEXT, WIDTH, HIDDEN, BLOCKS = 12, 32, 128, 6
SIZE, STEPS, LEARNING_RATE, THRESHOLD = 128, 600, 0.03, 1.0
WRONG, BEGIN, NOISE = 3, 200, 20.0
"""From step `BEGIN`, block `WRONG` has gradient noise of `NOISE` times their size."""
STACKED = ("up", "down")
LATEST, MEAN = 50, 10
Params = dict[str, Array]


def windows(text: Array, starts: Array) -> Array:
    """int32[starts, CONTEXT + 1]."""
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)[None]]


def initial(key: Array) -> Params:
    """A network of residual blocks, stacked for a `scan` over them."""
    shapes = {
        "embed": (SYMBOLS, WIDTH),
        "enter": (CONTEXT * WIDTH, HIDDEN),
        "up": (BLOCKS, HIDDEN, HIDDEN),
        "down": (BLOCKS, HIDDEN, HIDDEN),
        "head": (HIDDEN, SYMBOLS),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape)
        / np.sqrt(shape[-2] if name != "embed" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(params: Params, windows: Array) -> Array:
    """Returns the loss for the last characters of windows."""
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1) @ params["enter"]

    def block(x: Array, weights: tuple[Array, Array]) -> tuple[Array, None]:
        up, down = weights
        return x + jax.nn.relu(_normalized(x) @ up) @ down / np.sqrt(BLOCKS), None

    x, _ = jax.lax.scan(block, x, (params["up"], params["down"]))
    logits = _normalized(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, -1]
    ).mean()


def _normalized(x: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def with_noise(grads: Params, step: Array) -> Params:
    """Adds noise to the gradients of one block from step `BEGIN`."""
    is_bad = (jnp.arange(BLOCKS) == WRONG)[:, None, None] & (step >= BEGIN)

    def noisy(name: str) -> Array:
        grad, key = grads[name], jax.random.fold_in(jax.random.key(len(name)), step)
        size = NOISE * jnp.sqrt(jnp.mean(grad**2, axis=(1, 2), keepdims=True))
        return grad + jnp.where(is_bad, size, 0.0) * jax.random.normal(
            key, grad.shape
        )

    return grads | {name: noisy(name) for name in STACKED}


def train(text: Array, seed: int, *, wrong: bool) -> tuple[np.ndarray, Any]:
    """Returns the losses and the final optimizer state."""
    tx = optax.chain(
        monitor.record(
            STEPS,
            scope=scopes.leaf(stacked=lambda path, _: int(path in STACKED)),
            stats=("norm", "share", "ratio"),
        ),
        optaxclip.clip_by_global_norm(THRESHOLD),
        optax.sgd(LEARNING_RATE, 0.9),
    )
    starts = np.random.default_rng(seed).integers(
        len(text) - CONTEXT, size=(STEPS, SIZE)
    )

    def step(carry: Any, now: Any) -> tuple[Any, Array]:
        (params, state), (number, starts) = carry, now
        loss, grads = jax.value_and_grad(loss_fn)(params, windows(text, starts))
        grads = with_noise(grads, number) if wrong else grads
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params, steps = initial(jax.random.key(seed)), (jnp.arange(STEPS), starts)
    start = (params, tx.init(params))
    (_, state), losses = jax.jit(lambda *args: jax.lax.scan(step, *args))(
        start, steps
    )
    return np.asarray(losses), state


def draw(folder: Path, look: Any, dpi: int, text: str, seed: int) -> None:
    """Draws losses and norms of both runs, and the recorded norms of the faulty run."""
    learned = jnp.asarray(encode(text).train)
    runs = {
        "no noise": train(learned, seed, wrong=False),
        "noise in one block": train(learned, seed, wrong=True),
    }
    for name, (losses, state) in runs.items():
        norms = np.linalg.norm(monitor.history(state, stat="norm"), axis=1)
        shares = monitor.history(state, stat="share")[-1]
        names = monitor.history_names(state)
        largest = ", ".join(
            f"{names[i]} {shares[i]:.2f}" for i in np.argsort(-shares)[:3]
        )
        print(
            f"{name}: final loss {losses[-LATEST:].mean():.3f}, norm {norms[-1]:.2f}"
        )
        print(f"  largest shares: {largest}")
    with mpl.rc_context(look):
        _draw_log(folder / "layers_log.png", runs, dpi)
        _draw_record(folder / "layers.png", runs["noise in one block"][1], dpi)


def _draw_log(path: Path, runs: dict[str, tuple[np.ndarray, Any]], dpi: int) -> None:
    figure = Figure(figsize=(5.6, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    means = {
        name: np.convolve(loss, np.full(MEAN, 1 / MEAN), "valid")
        for name, (loss, _) in runs.items()
    }
    plots.loss_curves(means, np.arange(MEAN - 1, STEPS), ax=upper)
    upper.set_ylabel(f"loss, mean of {MEAN} steps")
    norms = {
        name: np.linalg.norm(monitor.history(state, stat="norm"), axis=1)
        for name, (_, state) in runs.items()
    }
    plots.norm_curves(norms, threshold=THRESHOLD, ax=lower)
    upper.set_xlabel("")
    handles = lower.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=dpi)


def _draw_record(path: Path, state: Any, dpi: int) -> None:
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    norms, names = monitor.history(state, stat="norm"), monitor.history_names(state)
    plots.heatmap(norms, names, ax=figure.subplots(), stat="norm")
    figure.savefig(path, dpi=dpi)

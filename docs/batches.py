"""The picture of the noise scale: a network that learns to spell, with batches of several sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip.commands.figures as figures
from optaxclip import accumulate, monitor, plots
from optaxclip.commands.demo_task import MAX_SYMBOLS, encode

CONTEXT, WIDTH, HIDDEN = 12, 32, 256
MICROBATCHES = 8
LEARNING_RATE = 3e-3
STEPS = {64: 1000, 256: 1000, 1024: 300, 4096: 300}
"""How many steps with batches of each size."""
SHOWN = 256
GOAL, LATEST = 1.8, 20
Params = dict[str, Array]


def initial(key: Array) -> Params:
    """A network with one hidden layer."""
    keys = jax.random.split(key, 3)
    shapes = {"embed": (MAX_SYMBOLS, WIDTH), "hide": (CONTEXT * WIDTH, HIDDEN)}
    shapes["out"] = (HIDDEN, MAX_SYMBOLS)
    return {
        name: jax.random.normal(key, shape)
        / np.sqrt(shape[0] if name != "embed" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(params: Params, windows: Array) -> Array:
    """How well each window's last character is told from those before it."""
    context = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    logits = jax.nn.relu(context @ params["hide"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, -1]
    ).mean()


def train(
    text: Array, size: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loss and the noise scale at each step with batches of this size."""
    grad_fn = accumulate.value_and_grad(
        loss_fn, microbatch_size=size // MICROBATCHES
    )
    tx = optax.chain(monitor.noise_scale(0.99), optax.adam(LEARNING_RATE))
    starts = np.random.default_rng(seed).integers(
        len(text) - CONTEXT, size=(steps, size)
    )

    def step(carry: Any, starts: Array) -> tuple[Any, tuple[Array, Array]]:
        params, state = carry
        loss, grads, found = grad_fn(params, windows(text, starts))
        updates, state = tx.update(grads, state, params, noise=found.noise)
        return (optax.apply_updates(params, updates), state), (loss, state[0].scale)

    params = initial(jax.random.key(seed))
    run: Callable[..., Any] = jax.jit(lambda *args: jax.lax.scan(step, *args))
    losses, scales = run((params, tx.init(params)), starts)[1]
    return np.asarray(losses), np.asarray(scales)


def windows(text: Array, starts: Array) -> Array:
    """int32[starts, CONTEXT + 1]."""
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)[None]]


def steps_to(loss: float, losses: np.ndarray) -> int | None:
    """The first step at which the mean of the latest losses is as low, if there is one."""
    means = np.convolve(losses, np.full(LATEST, 1 / LATEST), mode="valid")
    reached = np.flatnonzero(means <= loss)
    return int(reached[0]) + LATEST if len(reached) else None


def draw(
    path: Path, dpi: int, text: str, seed: int, inches: tuple[float, float]
) -> None:
    """Draws the noise scale of one size, and prints how soon each size learned as much."""
    learned = jnp.asarray(encode(text).train)
    for size, steps in STEPS.items():
        losses, scales = train(learned, size, steps, seed)
        reached = steps_to(GOAL, losses)
        examples = reached and reached * size
        print(
            f"batches of {size}: loss {GOAL} after {reached} steps, {examples} examples"
        )
        print(
            f"  noise scale then {scales[(reached or steps) - 1]:.0f}, at the end {scales[-1]:.0f}"
        )
        if size == SHOWN:
            figure = figures.side_by_side(columns=1)
            figure.set_size_inches(inches)
            plots.noise_scale_over_steps(scales, size, ax=figure.axes[0])
            figures.legends_below(figure)
            figure.savefig(path, dpi=dpi)

"""Defines tasks on the characters of Python's standard library, with an LSTM and a transformer.

The text is the concatenation of the top-level files of the standard library, whose last tenth is
held out. Bad batches have random targets.
"""

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.research import text_model
from benchmarks.research.study.examples import Examples, scramble
from benchmarks.research.study.task import Params, Task
from examples.demo import SYMBOLS, encode

SIZE = text_model.Size(width=24, heads=2, layers=2, context=24, batch=8, held_out=64)
"""The size of the transformer, and of the windows of both networks."""
HIDDEN = 32
"""The hidden units of the LSTM."""
UNIT = "nats per character"


class Text(NamedTuple):
    """Encoded characters as uint8, which are small constants in programs."""

    train: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


@functools.cache
def read_library() -> Text:
    """Reads the top-level source files of Python's standard library in the order of their names.

    Raises:
      FileNotFoundError: If this Python has no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"{folder} must contain the source files of the standard library; use a Python that "
            "includes them"
        )
    corpus = encode("".join(file.read_text(encoding="utf-8") for file in files))
    return Text(corpus.train.astype(np.uint8), corpus.held_out.astype(np.uint8))


@functools.cache
def build_transformer() -> Task:
    """Returns the task with the network of `benchmarks.research.text_model`."""
    losses = functools.partial(compute_transformer_losses, size=SIZE)
    initial = functools.partial(text_model.initial, size=SIZE)
    return build_task(read_library(), SYMBOLS, initial, losses, ("adamw", "muon"))


def compute_transformer_losses(params: Params, batch: Examples, size: text_model.Size) -> Array:
    """Computes the losses of windows."""
    return text_model.losses(params, batch.inputs, batch.labels, size)


@functools.cache
def build_lstm() -> Task:
    """Returns the task with one LSTM layer and orthogonal initial recurrent matrices."""
    return build_task(
        read_library(), SYMBOLS, _draw_lstm_params, _compute_lstm_losses, ("adamw", "sgd")
    )


def _draw_lstm_params(key: Array) -> Params:
    input_key, recurrent_key, head_key = jax.random.split(key, 3)
    # Forget gates are initially open (R. Jozefowicz et al., 2015).
    bias = jnp.zeros((4, HIDDEN)).at[1].set(1.0)
    return {
        "embedding": jax.random.normal(input_key, (SYMBOLS, 4 * HIDDEN)),
        "recurrent": jax.nn.initializers.orthogonal()(recurrent_key, (HIDDEN, 4 * HIDDEN)),
        "bias": bias.reshape(-1),
        "head": HIDDEN**-0.5 * jax.random.normal(head_key, (HIDDEN, SYMBOLS)),
        "head_bias": jnp.zeros(SYMBOLS),
    }


def _compute_lstm_losses(params: Params, batch: Examples) -> Array:
    def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        hidden, cell = carry
        gates = x + hidden @ params["recurrent"]
        enter, keep, out, new = jnp.split(gates, 4, -1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return (hidden, cell), hidden

    # [characters, windows, 4 * HIDDEN]
    x = params["embedding"][batch.inputs.T] + params["bias"]
    start = jnp.zeros((batch.inputs.shape[0], HIDDEN))
    _, hidden = jax.lax.scan(step, (start, start), x)
    logits = hidden @ params["head"] + params["head_bias"]
    costs = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels.T)
    return costs.mean(0)


def build_task(
    text: Text,
    symbols: int,
    initial: Callable[[Array], Params],
    losses: Callable[[Params, Examples], Array],
    optimizers: tuple[str, ...],
    unit: str = UNIT,
    size: text_model.Size = SIZE,
) -> Task:
    """Builds a task from a text with numbers below `symbols`."""
    train = jnp.asarray(text.train)
    last = text.held_out.size - size.context - 1
    starts = jnp.linspace(0, last, size.held_out).astype(jnp.int32)
    held_out = pair_with_next(text_model.windows(jnp.asarray(text.held_out), starts, size))

    def batch(params: Params, key: Array, is_bad: Array) -> Examples:
        window_key, label_key = jax.random.split(key)
        examples = pair_with_next(text_model.batch(train, window_key, size))
        return scramble(examples, label_key, is_bad, symbols)

    def held_out_loss(params: Params) -> Array:
        return losses(params, held_out).mean()

    return Task(initial, batch, losses, held_out_loss, size.batch, unit, optimizers)


def pair_with_next(windows: Array) -> Examples:
    """Pairs the characters of uint8[windows, characters + 1] with the next characters."""
    windows = windows.astype(jnp.int32)
    return Examples(windows[:, :-1], windows[:, 1:])

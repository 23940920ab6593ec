"""Defines a decoder as a task of the study.

It uses RoPE and RMS normalization, and its residual branches and logits are initially 0. Weights
and losses are float32, and other arrays have a lower precision.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.research import text_model
from benchmarks.research.scale.text import SYMBOLS, Text, extract_windows
from benchmarks.research.study import faults, text
from benchmarks.research.study.cell import Begin
from benchmarks.research.study.examples import Examples, scramble
from benchmarks.research.study.task import Params, Task


class Size(NamedTuple):
    """The sizes of the network, runs, evaluation intervals, and the text in bytes."""

    network: text_model.Size
    steps: int
    every: int
    text: int

    @property
    def parameters(self) -> int:
        """Returns the number of parameters."""
        shapes = jax.eval_shape(lambda: _draw_params(jax.random.key(0), self.network))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


SIZES = {
    "gpu": Size(
        text_model.Size(width=512, heads=8, layers=6, context=256, batch=32, held_out=256),
        *(1000, 50, 48_000_000),
    ),
    "cpu": Size(
        text_model.Size(width=64, heads=2, layers=2, context=64, batch=8, held_out=64),
        *(200, 10, 16_000_000),
    ),
}


def build_task(corpus: Text, size: text_model.Size, dtype: str) -> Task:
    """Builds the decoder task, whose batches are drawn from pairs of a key and bytes."""
    last = corpus.held_out.size - size.context - 1
    starts = np.linspace(0, last, size.held_out).astype(np.int64)
    held_out = text.pair_with_next(
        jnp.asarray(extract_windows(corpus.held_out, starts, size.context + 1))
    )

    def batch(params: Params, key: tuple[Array, Array], is_bad: Array) -> Examples:
        return scramble(text.pair_with_next(key[1]), key[0], is_bad, SYMBOLS)

    def losses(params: Params, batch: Examples) -> Array:
        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        return text_model.losses(narrow, batch.inputs, batch.labels, size)

    return Task(
        initial=lambda key: _draw_params(key, size),
        batch=batch,
        losses=losses,
        held_out=lambda params: losses(params, held_out).mean(),
        examples=size.batch,
        unit="nats per byte",
        optimizers=("adamw", "muon"),
    )


def build_begin(task: Task, corpus: Text, size: Size) -> Callable[[str, int], Begin]:
    """Returns a function of a fault and a seed that draws the start of a run.

    The start contains all batches of the run, so that no program contains the whole text.
    """

    @jax.jit
    def draw(fault: Array, seed: Array) -> tuple[Any, ...]:
        first, data, wrong, noise = jax.random.split(jax.random.key(seed), 4)
        params, keys = task.initial(first), jax.random.split(data, size.steps)
        return params, task.held_out(params), keys, noise, faults.draw(fault, wrong, size.steps)

    def begin(fault: str, seed: int) -> Begin:
        params, held_out, keys, noise, wrong = draw(faults.NUMBERS[fault], seed)
        length, shape = size.network.context + 1, (size.steps, size.network.batch)
        starts = np.random.default_rng(seed).integers(corpus.train.size - length, size=shape)
        batches = keys, jnp.asarray(extract_windows(corpus.train, starts, length))
        return Begin(params, held_out, batches, noise, wrong)

    return begin


def _draw_params(key: Array, size: text_model.Size) -> Params:
    params = text_model.zero_outputs(text_model.initial(key, size, SYMBOLS))
    return {name: leaf for name, leaf in params.items() if name != "positions"}

"""A decoder as people train them, as a task of the study: how large it is, and what it reads.

Positions turn queries and keys (RoPE), layers are normalized by root mean squares, and what they
add to the residual stream begins at 0, as the logits do. Weights are float32; all that is computed
with them is in a narrower format, but the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.research import text_model
from benchmarks.research.scale.text import SYMBOLS, Text, windows
from benchmarks.research.study import faults, text
from benchmarks.research.study.cell import Begin
from benchmarks.research.study.examples import Examples, scrambled
from benchmarks.research.study.task import Params, Task


class Size(NamedTuple):
    """Of the network, of a run, and of the text.

    Attributes:
      network: the network's, and of its batches.
      steps: of each run.
      every: steps from one evaluation to the next.
      text: bytes.
    """

    network: text_model.Size
    steps: int
    every: int
    text: int

    @property
    def parameters(self) -> int:
        """How many the network has."""
        shapes = jax.eval_shape(lambda: _initial(jax.random.key(0), self.network))
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


def task(corpus: Text, size: text_model.Size, dtype: str) -> Task:
    """The decoder; as key of a batch it takes a pair: a key, and the bytes that it has."""
    last = corpus.held_out.size - size.context - 1
    starts = np.linspace(0, last, size.held_out).astype(np.int64)
    held_out = text.shifted(jnp.asarray(windows(corpus.held_out, starts, size.context + 1)))

    def batch(params: Params, key: tuple[Array, Array], is_bad: Array) -> Examples:
        return scrambled(text.shifted(key[1]), key[0], is_bad, SYMBOLS)

    def losses(params: Params, batch: Examples) -> Array:
        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        return text_model.losses(narrow, batch.inputs, batch.labels, size)

    return Task(
        initial=lambda key: _initial(key, size),
        batch=batch,
        losses=losses,
        held_out=lambda params: losses(params, held_out).mean(),
        examples=size.batch,
        unit="nats per byte",
        optimizers=("adamw", "muon"),
    )


def beginning(of: Task, corpus: Text, size: Size) -> Callable[[str, int], Begin]:
    """Gives what all methods begin with, from a fault and a seed.

    All batches of a run are in it, so that no program has the whole text.
    """

    @jax.jit
    def drawn(fault: Array, seed: Array) -> tuple[Any, ...]:
        first, data, wrong, noise = jax.random.split(jax.random.key(seed), 4)
        params, keys = of.initial(first), jax.random.split(data, size.steps)
        return params, of.held_out(params), keys, noise, faults.drawn(fault, wrong, size.steps)

    def begin(fault: str, seed: int) -> Begin:
        params, held_out, keys, noise, wrong = drawn(faults.NUMBERS[fault], seed)
        length, shape = size.network.context + 1, (size.steps, size.network.batch)
        starts = np.random.default_rng(seed).integers(corpus.train.size - length, size=shape)
        batches = keys, jnp.asarray(windows(corpus.train, starts, length))
        return Begin(params, held_out, batches, noise, wrong)

    return begin


def _initial(key: Array, size: text_model.Size) -> Params:
    params = text_model.with_zeros(text_model.initial(key, size, SYMBOLS))
    return {name: leaf for name, leaf in params.items() if name != "positions"}

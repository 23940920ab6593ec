"""The demo's task: a character-level recurrent network that diverges without clipping.

It is a ReLU network with Flax's default initial values, on long sequences. The learning rate warms
up to a value at which the network learns quickly, and a single exploded gradient destroys it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx  # noqa: TID253  (only the demo, when it runs, imports this module)
from jax import Array, lax

from optaxclip import ops
from optaxclip._base.types import ArrayLike, ClipState, PyTree
from optaxclip.methods.fixed import clip_by_global_norm

HIDDEN = 128
LENGTH = 150
BATCH = 16
LEARNING_RATE = 0.2
MOMENTUM = 0.9
WARMUP = 0.25
CHUNK = 10
HELD_OUT_SHARE = 0.1
HELD_OUT_WINDOWS = 64
MAX_SYMBOLS = 128
MIN_CHARACTERS = 2000


class Corpus(NamedTuple):
    """A text as int32 numbers; rare characters share the number 0."""

    train: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


class History(NamedTuple):
    """The record of a run.

    Attributes:
      loss: float32[steps], the loss on the step's batch, before the update.
      norm: float32[steps], the global norm of the raw gradient.
      clipped: bool[steps], whether the gradient was finite and the method changed any entry.
      limit: float32[steps], the method's limit of the global norm; NaN if it has none or several.
      evals: int32[evals], the step, counted from 1, before which each evaluation took place.
      held_out: float32[evals], the loss on held-out text.
    """

    loss: np.ndarray[Any, Any]
    norm: np.ndarray[Any, Any]
    clipped: np.ndarray[Any, Any]
    limit: np.ndarray[Any, Any]
    evals: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]

    @property
    def nonfinite(self) -> np.ndarray[Any, Any]:
        """The steps at which the loss or the gradient was not finite."""
        return np.flatnonzero(~(np.isfinite(self.loss) & np.isfinite(self.norm)))


class CharRNN(nnx.Module):
    """A ReLU recurrent network from characters to the logits of the next character."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(MAX_SYMBOLS, HIDDEN, rngs=rngs)
        self.recur = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, MAX_SYMBOLS, rngs=rngs)

    def __call__(self, symbols: Array) -> Array:
        """Int32[batch, time] -> float32[batch, time, symbols]."""

        def step(hidden: Array, x: Array) -> tuple[Array, Array]:
            hidden = nnx.relu(x + self.recur(hidden))
            return hidden, hidden

        start = jnp.zeros((symbols.shape[0], HIDDEN))
        _, hidden = lax.scan(step, start, self.embed(symbols.T))
        return self.out(hidden).swapaxes(0, 1)


def encode(text: str) -> Corpus:
    """The text as numbers; its last part is held out."""
    common = Counter(text).most_common(MAX_SYMBOLS - 1)
    index = {character: i for i, (character, _) in enumerate(common, start=1)}
    symbols = np.fromiter((index.get(c, 0) for c in text), np.int32, len(text))
    cut = round(len(symbols) * (1 - HELD_OUT_SHARE))
    return Corpus(symbols[:cut], symbols[cut:])


class Task:
    """A network and its text; all runs have the same initial values, batches and learning rate.

    Results are reproducible on one machine. With another number of cores rounding differs, and
    exploding gradients make any difference large.
    """

    def __init__(self, corpus: Corpus, seed: int):
        self.graph, self.params = nnx.split(CharRNN(nnx.Rngs(seed)))
        self.train_text = jnp.asarray(corpus.train)
        self.seed = seed
        last = len(corpus.held_out) - LENGTH - 1
        starts = np.linspace(0, last, HELD_OUT_WINDOWS).astype(np.int32)
        held_out = _windows(jnp.asarray(corpus.held_out), starts)
        self.evaluate = jax.jit(lambda params: self._loss(params, held_out))

    def train(
        self,
        method: optax.GradientTransformationExtraArgs,
        steps: int,
        on_steps: Callable[[int], object],
    ) -> History:
        """Trains from the initial values; calls `on_steps` with the size of every chunk."""
        sgd = _sgd(steps)
        run_chunk = jax.jit(lambda carry, xs: lax.scan(self.step_with(method, sgd), carry, xs))
        carry = (self.params, method.init(self.params), sgd.init(self.params))
        batches = self.batches(steps)
        evals, held_out, records = [1], [self.evaluate(self.params)], []
        for done in range(0, steps, CHUNK):
            starts = batches[done : done + CHUNK]
            carry, record = run_chunk(carry, starts)
            records.append(jax.device_get(record))
            evals.append(done + len(starts) + 1)
            held_out.append(self.evaluate(carry[0]))
            on_steps(len(starts))
        loss, norm, clipped, limit = map(np.concatenate, zip(*records, strict=True))
        return History(loss, norm, clipped, limit, np.asarray(evals), np.asarray(held_out))

    def batches(self, steps: int) -> np.ndarray[Any, Any]:
        """The places where the windows of each step start: int32[steps, windows]."""
        rng = np.random.default_rng(self.seed)
        last = len(self.train_text) - LENGTH
        return rng.integers(last, size=(steps, BATCH), dtype=np.int32)

    def step_with(
        self, method: optax.GradientTransformationExtraArgs, sgd: optax.GradientTransformation
    ) -> Callable[[PyTree, Array], tuple[PyTree, tuple[Array, ...]]]:
        """A training step from `(params, method's state, sgd's state)` and starts of windows."""

        def step(carry: PyTree, starts: Array) -> tuple[PyTree, tuple[Array, ...]]:
            params, method_state, sgd_state = carry
            batch = _windows(self.train_text, starts)
            loss, grads = jax.value_and_grad(self._loss)(params, batch)
            clipped, method_state = method.update(grads, method_state, params)
            updates, sgd_state = sgd.update(clipped, sgd_state)
            params = optax.apply_updates(params, updates)
            norm = ops.global_norm(grads)
            was_clipped = jnp.isfinite(norm) & _differ(grads, clipped)
            record = (loss, norm, was_clipped, _limit_of(method_state))
            return (params, method_state, sgd_state), record

        return step

    def _loss(self, params: PyTree, windows: Array) -> Array:
        logits = nnx.merge(self.graph, params)(windows[:, :-1])
        targets = windows[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def sweep_functions(
    task: Task, steps: int
) -> tuple[
    Callable[[Array], PyTree], Callable[..., tuple[PyTree, Array, Array]], np.ndarray[Any, Any]
]:
    """The arguments `init_fn, step_fn, data` of `optaxclip.tuning.sweep` for this task."""
    sgd = _sgd(steps)

    def init_fn(key: Array) -> PyTree:
        params = nnx.split(CharRNN(nnx.Rngs(key)))[1]
        return params, clip_by_global_norm(1.0).init(params), sgd.init(params)

    def step_fn(state: PyTree, starts: Array, limit: Array) -> tuple[PyTree, Array, Array]:
        step = task.step_with(clip_by_global_norm(limit), sgd)
        state, (loss, norm, *_) = step(state, starts)
        return state, loss, norm

    return init_fn, step_fn, task.batches(steps)


def _sgd(steps: int) -> optax.GradientTransformation:
    warmup = max(1, round(steps * WARMUP))
    return optax.sgd(optax.linear_schedule(0.0, LEARNING_RATE, warmup), MOMENTUM)


def _windows(text: Array, starts: ArrayLike) -> Array:
    return jax.vmap(lambda start: lax.dynamic_slice(text, (start,), (LENGTH + 1,)))(starts)


def _limit_of(state: PyTree) -> Array:
    """The limit in a clip's state, if it has one for all leaves."""
    limit = state.info.limit if isinstance(state, ClipState) else jnp.empty(0)
    return limit if limit.shape == () else jnp.full((), jnp.nan)


def _differ(tree: PyTree, other: PyTree) -> Array:
    """Whether any entry differs; NaN is equal to NaN."""
    same = jax.tree.map(lambda a, b: jnp.array_equal(a, b, equal_nan=True), tree, other)
    return ~jnp.stack(jax.tree.leaves(same)).all()

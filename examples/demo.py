"""Trains a recurrent network on text without clipping and with several methods.

  pip install ".[demo]" && python examples/demo.py

Prints a table and plots held-out losses and gradient norms in `optaxclip_demo.png`. The network
uses ReLUs, Flax's default initialization and long sequences. The learning rate warms up to a value
at which the network learns quickly. However, a single exploding gradient destroys it.

Results depend on the number of cores, because exploding gradients amplify rounding errors.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import optaxclip

HIDDEN, SYMBOLS = 128, 128
LENGTH, BATCH = 150, 16
LEARNING_RATE, MOMENTUM, WARMUP = 0.2, 0.9, 0.25
EVAL_EVERY, HELD_OUT_FRACTION, HELD_OUT_WINDOWS = 10, 0.1, 64
PICTURE = "optaxclip_demo.png"

Params = dict[str, Array]
Optimizer = optax.GradientTransformation


def recommended(optimizer: Optimizer) -> Optimizer:
    """Adds the default clipping method of the README to an optimizer."""
    return optaxclip.skip_nonfinite(
        optax.chain(optaxclip.clip_by_global_norm(1.0), optimizer), max_consecutive=20
    )


def clipped_by(clip: Optimizer) -> Callable[[Optimizer], Optimizer]:
    """Returns a function that adds a clipping stage before an optimizer."""
    return lambda optimizer: optax.chain(clip, optimizer)


UNCLIPPED, THRESHOLD = "no clipping", 1.0
METHODS: dict[str, Callable[[Optimizer], Optimizer]] = {
    UNCLIPPED: lambda optimizer: optimizer,
    "clip_by_global_norm": recommended,
    "clip_by_norm": clipped_by(optaxclip.clip_by_norm(0.15)),
    "clip": clipped_by(optaxclip.clip(0.005)),
    "adaptive_grad_clip": clipped_by(optaxclip.adaptive_grad_clip(0.01)),
    "adagc": clipped_by(optaxclip.adagc()),
}


class Corpus(NamedTuple):
    """A text as int32 numbers below `SYMBOLS`. All rare characters have the number 0."""

    train: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


class History(NamedTuple):
    """The record of a run.

    Attributes:
      loss: float32[steps], the losses of the batches before the update.
      norm: float32[steps], the global norms of the raw gradients.
      clipped: bool[steps], True if the gradient was finite and the method reduced its norm.
      held_out: float32[evals], the losses on held-out text at the start and after every
        `EVAL_EVERY` steps.
    """

    loss: np.ndarray[Any, Any]
    norm: np.ndarray[Any, Any]
    clipped: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


def help_topics() -> str:
    """Returns the text of Python's help topics."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise SystemExit("this Python lacks its help topics; pass a text with --text") from error
    return "\n".join(topics.values())


def encode(text: str) -> Corpus:
    """Converts a text to numbers and reserves the last part for evaluation."""
    common = Counter(text).most_common(SYMBOLS - 1)
    index = {character: i for i, (character, _) in enumerate(common, start=1)}
    symbols = np.fromiter((index.get(c, 0) for c in text), np.int32, len(text))
    cut = round(len(symbols) * (1 - HELD_OUT_FRACTION))
    return Corpus(symbols[:cut], symbols[cut:])


def windows(text: Array, starts: Array) -> Array:
    """Returns the windows of the text that start at `starts`, int32[starts, LENGTH + 1]."""
    return jax.vmap(lambda start: lax.dynamic_slice(text, (start,), (LENGTH + 1,)))(starts)


def initial_params(key: Array) -> Params:
    """Returns initial parameters with the distributions of Flax's `Embed` and `Linear`."""
    keys = [jax.random.fold_in(key, number) for number in (0, 1, 3)]
    lecun = jax.nn.initializers.lecun_normal()
    return {
        "embed": jax.random.normal(keys[0], (SYMBOLS, HIDDEN)) / SYMBOLS**0.5,
        "recur": lecun(keys[1], (HIDDEN, HIDDEN)),
        "recur_bias": jnp.zeros(HIDDEN),
        "out": lecun(keys[2], (HIDDEN, SYMBOLS)),
        "out_bias": jnp.zeros(SYMBOLS),
    }


def loss_fn(params: Params, batch: Array) -> Array:
    """Computes the mean cross-entropy of the next characters, for int32[batch, LENGTH + 1]."""

    def step(hidden: Array, x: Array) -> tuple[Array, Array]:
        hidden = jax.nn.relu(x + hidden @ params["recur"] + params["recur_bias"][None])
        return hidden, hidden

    inputs, targets = batch[:, :-1].T, batch[:, 1:].T  # int32[time, batch]
    start = jnp.zeros((len(batch), HIDDEN))
    _, hidden = lax.scan(step, start, params["embed"][inputs])
    logits = hidden @ params["out"] + params["out_bias"][None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class Clipped(NamedTuple):
    """The state of a stage that records the norm after clipping."""

    clipped_norm: Array


def sgd(steps: int) -> Optimizer:
    """Returns SGD with momentum and learning rate warm-up, which also records the incoming norm."""
    warmup = max(1, round(steps * WARMUP))
    observe = optax.GradientTransformation(
        lambda params: Clipped(jnp.zeros(())),
        lambda updates, *_: (updates, Clipped(optaxclip.ops.global_norm(updates))),
    )
    learning_rate = optax.linear_schedule(0.0, LEARNING_RATE, warmup)
    return optax.chain(observe, optax.sgd(learning_rate, MOMENTUM))


def batch_starts(corpus: Corpus, steps: int, seed: int) -> np.ndarray[Any, Any]:
    """Samples the positions in the text where windows start, int32[steps, BATCH]."""
    rng = np.random.default_rng(seed)
    return rng.integers(len(corpus.train) - LENGTH, size=(steps, BATCH), dtype=np.int32)


def train(corpus: Corpus, optimizer: Optimizer, steps: int, seed: int) -> History:
    """Trains with initial parameters and batches that only depend on the seed."""
    text = jnp.asarray(corpus.train)
    last = len(corpus.held_out) - LENGTH - 1
    held_out_starts = jnp.linspace(0, last, HELD_OUT_WINDOWS).astype(jnp.int32)
    held_out = windows(jnp.asarray(corpus.held_out), held_out_starts)

    def step(carry: Any, starts: Array) -> tuple[Any, tuple[Array, Array, Array]]:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, windows(text, starts))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = optaxclip.ops.global_norm(grads)
        clipped = jnp.isfinite(norm) & (optax.tree.get(opt_state, "clipped_norm") < 0.999 * norm)
        return (optax.apply_updates(params, updates), opt_state), (loss, norm, clipped)

    @jax.jit
    def train_and_evaluate(carry: Any, starts: Array) -> tuple[Any, Any, Array]:
        carry, record = lax.scan(step, carry, starts)
        return carry, record, loss_fn(carry[0], held_out)

    params = initial_params(jax.random.key(seed))
    carry = (params, optimizer.init(params))
    records, losses = [], [loss_fn(params, held_out)]
    starts = batch_starts(corpus, steps, seed)
    for begin in range(0, steps, EVAL_EVERY):
        carry, record, loss = train_and_evaluate(carry, starts[begin : begin + EVAL_EVERY])
        records.append(jax.device_get(record))
        losses.append(loss)
    return History(*map(np.concatenate, zip(*records, strict=True)), np.array(losses))


HEADER = f"{'method':<22}{'final loss':>12}{'best loss':>12}{'largest norm':>14}{'clipped':>9}"


def row(name: str, history: History) -> str:
    """Formats a row of the table."""
    final, finite = history.held_out[-1], history.norm[np.isfinite(history.norm)]
    bad = np.flatnonzero(~(np.isfinite(history.loss) & np.isfinite(history.norm)))
    cells = (
        f"{final:.4g}" if np.isfinite(final) else "diverged",
        f"{np.nanmin(history.held_out):.4g}",
        f"{finite.max():.3g}" if len(finite) else "non-finite",
        f"{history.clipped.mean():.0%}",
    )
    text = f"{name:<22}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}{cells[3]:>9}"
    return f"{text}  non-finite from step {bad[0] + 1} on" if len(bad) else text


def draw(histories: Mapping[str, History], axes: Sequence[Any]) -> None:
    """Plots held-out losses and gradient norms on two axes with a common legend."""
    from optaxclip import plots

    steps = EVAL_EVERY * np.arange(len(next(iter(histories.values())).held_out))
    losses = {name: history.held_out for name, history in histories.items()}
    plots.loss_curves(losses, steps, ax=axes[0]).set_ylabel("held-out loss (nats)")
    # Plot only the largest norm between two evaluations, because noisy lines would overlap.
    norms = {
        name: np.maximum.reduceat(history.norm, steps[:-1]) for name, history in histories.items()
    }
    plots.norm_curves(norms, steps[1:], THRESHOLD, ax=axes[1])
    axes[1].set_ylabel(f"largest raw norm of {EVAL_EVERY} steps")
    handles, names = axes[1].get_legend_handles_labels()
    look = {"loc": "outside lower center", "ncols": 2, "frameon": False, "columnspacing": 1.0}
    axes[0].figure.legend(handles, names, **look)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with all selected methods, prints a table and saves a plot."""
    parser = argparse.ArgumentParser(description="Compare clipping methods on a small network.")
    parser.add_argument("--text", type=Path, help="UTF-8 text (default: Python's help topics)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    args = parser.parse_args(argv)
    from matplotlib.figure import Figure  # A missing package should raise an error early.

    corpus = encode(args.text.read_text("utf-8") if args.text else help_topics())
    if args.steps < 1 or len(corpus.held_out) <= LENGTH:
        parser.error(f"--steps must be at least 1, and the text {20 * LENGTH} characters or more")
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.steps} steps with each method:\n{HEADER}", flush=True)
    histories = {}
    for name in dict.fromkeys([UNCLIPPED, *args.methods]):
        optimizer = METHODS[name](sgd(args.steps))
        histories[name] = train(corpus, optimizer, args.steps, args.seed)
        print(row(name, histories[name]), flush=True)
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    draw(histories, figure.subplots(1, 2))
    figure.savefig(args.out / PICTURE, dpi=150)
    print(f"picture: {args.out / PICTURE}")


if __name__ == "__main__":
    main()

"""Which example is it? Norms of spoiled examples, and a limit for each in ordinary training.

  python -m benchmarks.spoiled           # some minutes on two cores
  python -m benchmarks.spoiled --quick   # a minute, and no more than a sign that it runs

Two data sets get a few spoiled examples. Handwritten digits get wrong labels, inverted images, and
images whose pixels were not divided by 16. Of the lines of Python's help topics some are replaced
by characters drawn by chance, and one comes many times. A network learns from them, and then the
norm of every example's gradient is taken. The digits are also learned with a limit for each
example, with a clip of the whole batch's gradient, and without both, each with the limit that suits
it best.
"""

import argparse
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.research.study.digits import DEEPEST, DIGITS, images
from benchmarks.research.study.examples import Examples
from optaxclip import ops, per_example
from optaxclip.commands.demo import read_text
from optaxclip.commands.demo_task import MAX_SYMBOLS, encode

HIDDEN, WIDTH, LENGTH = 64, 32, 48
BATCH = 64
RATE = 3e-3
LINES, COPIES = 2000, 40
Params = dict[str, Array]


class Spoiled(NamedTuple):
    """Examples, some of them spoiled.

    Attributes:
      examples: all of them.
      which: for each way of spoiling the indices of its examples.
      texts: what the examples are, where they are text.
    """

    examples: Examples
    which: dict[str, np.ndarray]
    texts: list[str]


class Effort(NamedTuple):
    """How much is run.

    Attributes:
      steps: of each run.
      seeds: how many runs there are of each kind.
      limits: how many limits are tried.
    """

    steps: int = 400
    seeds: int = 10
    limits: int = 7


QUICK = Effort(60, 2, 2)


def digits(seed: int, shares: Mapping[str, float]) -> Spoiled:
    """Digits to learn from, of which some shares are spoiled.

    Args:
      seed: decides which.
      shares: of "wrong label", "inverted" (black on white), and "not scaled", with pixels that are
        16 times as large.
    """
    clean, rng = images()[0], np.random.default_rng(seed)
    count = len(clean.labels)
    order, which = rng.permutation(count), {}
    for name, share in shares.items():
        size = round(share * count)
        which[name], order = order[:size], order[size:]
    inputs, labels = map(np.array, clean)
    if "wrong label" in which:
        wrong = which["wrong label"]
        labels[wrong] = (labels[wrong] + rng.integers(1, DIGITS, len(wrong))) % DIGITS
    if "inverted" in which:
        inputs[which["inverted"]] = 1 - inputs[which["inverted"]]
    if "not scaled" in which:
        inputs[which["not scaled"]] *= DEEPEST
    return Spoiled(Examples(jnp.asarray(inputs), jnp.asarray(labels)), which, [])


def lines(seed: int) -> Spoiled:
    """Pieces of a text, of which some are drawn by chance, and one comes again and again."""
    characters, rng = read_text(None), np.random.default_rng(seed)
    symbols = encode(characters).train
    starts = rng.permutation(len(symbols) // (LENGTH + 1))[:LINES] * (LENGTH + 1)
    rows = symbols[starts[:, None] + np.arange(LENGTH + 1)]
    texts = [characters[start : start + LENGTH + 1] for start in starts]
    order = rng.permutation(LINES)
    garbled, copies = order[:8], order[8 : 8 + COPIES]
    rows[garbled] = rng.integers(1, symbols.max() + 1, (len(garbled), LENGTH + 1))
    rows[copies] = rows[copies[0]]
    which = {"drawn by chance": garbled, f"one line, {COPIES} times": copies}
    return Spoiled(Examples(jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])), which, texts)


def _drawn(key: Array, **shapes: tuple[int, ...]) -> Params:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0] if len(shape) > 1 else np.inf)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def initial_of_digits(key: Array) -> Params:
    """A network with one hidden layer."""
    pixels = int(np.prod(images()[0].inputs.shape[1:]))
    shapes = {"w": (pixels, HIDDEN), "b": (HIDDEN,), "v": (HIDDEN, DIGITS), "c": (DIGITS,)}
    return _drawn(key, **shapes)


def loss_of_digit(params: Params, image: Array, label: Array) -> Array:
    """The loss of one image."""
    hidden = jax.nn.relu(image.reshape(-1) @ params["w"] + params["b"])
    logits = hidden @ params["v"] + params["c"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, label)


def initial_of_lines(key: Array) -> Params:
    """A recurrent network."""
    shapes = {"embed": (MAX_SYMBOLS, WIDTH), "x": (WIDTH, 2 * HIDDEN), "h": (HIDDEN, 2 * HIDDEN)}
    return _drawn(key, **shapes, b=(2 * HIDDEN,), out=(HIDDEN, MAX_SYMBOLS))


def loss_of_line(params: Params, symbols: Array, following: Array) -> Array:
    """The mean loss of the characters of one line."""

    def step(hidden: Array, x: Array) -> tuple[Array, Array]:
        forget, new = jnp.split(x @ params["x"] + hidden @ params["h"] + params["b"], 2)
        forget = jax.nn.sigmoid(forget)
        hidden = forget * hidden + (1 - forget) * jnp.tanh(new)
        return hidden, hidden

    _, hidden = jax.lax.scan(step, jnp.zeros(HIDDEN), params["embed"][symbols])
    logits = hidden @ params["out"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, following).mean()


LOSSES = {"digits": (initial_of_digits, loss_of_digit), "lines": (initial_of_lines, loss_of_line)}


def gradient(kind: str, loss_fn: Any, limit: Any, params: Params, batch: Examples) -> Params:
    """The mean gradient of a batch, with a limit for each example, for all together, or none."""
    if kind == "each example":
        clipped = per_example.clipped_grad(loss_fn, limit, method="ghost")
        return jax.tree.map(lambda x: x / len(batch.labels), clipped(params, *batch).grads)
    mean = lambda params: jax.vmap(loss_fn, (None, 0, 0))(params, *batch).mean()  # noqa: E731
    grads = jax.grad(mean)(params)
    return ops.clip_by_global_norm(grads, limit)[0] if kind == "whole batch" else grads


def train(task: str, examples: Examples, kind: str, limit: Any, seed: Any, steps: int) -> Params:
    """The parameters at the end of a run by Adam."""
    initial, loss_fn = LOSSES[task]
    for_start, for_batches = jax.random.split(jax.random.key(seed))
    params, tx = initial(for_start), optax.adam(RATE)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        rows = jax.random.randint(key, (BATCH,), 0, len(examples.labels))
        batch = Examples(*(x[rows] for x in examples))
        grads = gradient(kind, loss_fn, limit, params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(for_batches, steps)
    return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def norms_and_losses(task: str, examples: Examples, steps: int) -> tuple[Array, Array]:
    """Of every example, after a run without limits."""
    params = train(task, examples, "nothing", None, 0, steps)
    return per_example.grad_norms(LOSSES[task][1])(params, *examples)


def found_among_largest(spoiled: np.ndarray, values: np.ndarray) -> int:
    """How many of these examples are among as many that have the largest values."""
    return len(np.intersect1d(spoiled, np.argsort(-values)[: len(spoiled)]))


FEW = {"wrong label": 0.02, "inverted": 0.005, "not scaled": 0.005}
"""What is spoiled of the digits whose norms are shown."""
SHARES = {
    "nothing spoiled": {},
    "wrong labels, 10 %": {"wrong label": 0.1},
    "inverted images, 10 %": {"inverted": 0.1},
    "images not scaled, 2 %": {"not scaled": 0.02},
    "all of these": {"wrong label": 0.1, "inverted": 0.1, "not scaled": 0.02},
}
KINDS = ("nothing", "whole batch", "each example")


def compare(effort: Effort) -> dict[str, dict[str, tuple[float, np.ndarray, np.ndarray]]]:
    """For each data set and kind of limit: the best limit, and held-out errors and losses by seed.

    The best is the limit with the lowest mean loss over the seeds. All limits and seeds are one
    program.
    """
    limits = np.geomspace(0.03, 30, effort.limits).astype(np.float32)
    held_out = images()[1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(kind: str, examples: Examples, limit: Array, seed: Array) -> tuple[Array, Array]:
        params = train("digits", examples, kind, limit, seed, effort.steps)
        losses = jax.vmap(loss_of_digit, (None, 0, 0))(params, *held_out)
        every = jnp.arange(DIGITS)
        of_each = jax.vmap(jax.vmap(loss_of_digit, (None, None, 0)), (None, 0, None))
        guesses = jnp.argmin(of_each(params, held_out.inputs, every), axis=1)
        return 100 * jnp.mean(guesses != held_out.labels), jnp.mean(losses)

    found: dict[str, dict[str, Any]] = {}
    seeds = np.arange(effort.seeds)
    for name, shares in SHARES.items():
        drawn = [digits(seed, shares).examples for seed in seeds]
        data = jax.tree.map(lambda *x: jnp.stack(x), *drawn)
        found[name] = {}
        for kind in KINDS:
            tried = limits if kind != "nothing" else np.ones(1, np.float32)
            of_seeds = jax.vmap(functools.partial(run, kind), (0, None, 0))
            errors, losses = jax.vmap(of_seeds, (None, 0, None))(data, tried, seeds)
            best = int(np.argmin(np.mean(losses, axis=1)))
            found[name][kind] = (
                float(tried[best]),
                *(np.asarray(x[best]) for x in (errors, losses)),
            )
    return found


def _shown(values: np.ndarray) -> str:
    return f"{values.mean():.3g} ± {values.std(ddof=1):.2g}"


def report(effort: Effort) -> None:
    """Prints what the norms find, and the table of runs."""
    sets = {"digits": digits(0, FEW), "lines": lines(0)}
    for task, steps in itertools.product(sets, (effort.steps // 10, effort.steps)):
        spoiled = sets[task]
        norms, losses = map(np.asarray, norms_and_losses(task, spoiled.examples, steps))
        print(
            f"\n{task}, after {steps} steps: {len(norms)} examples, median {np.median(norms):.3g}"
        )
        print("  largest:", ", ".join(f"{i} ({norms[i]:.3g})" for i in np.argsort(-norms)[:10]))
        for i in np.argsort(-norms)[:6] if spoiled.texts else ():
            rank = 1 + np.sum(losses > losses[i])
            print(f"    {i}, {rank}th by loss ({losses[i]:.2f}): {spoiled.texts[i]!r}")
        _, counts = np.unique(np.stack([norms, losses]), axis=1, return_counts=True)
        print("  with the norm and the loss of others:", *(f"{n} alike" for n in counts if n > 1))
        every = np.concatenate(list(spoiled.which.values()))
        for name, rows in spoiled.which.items():
            middle, ends = np.median(norms[rows]), (norms[rows].min(), norms[rows].max())
            print(f"  {name}: {len(rows)}, norms {middle:.3g} ({ends[0]:.3g} to {ends[1]:.3g})")
            below = np.mean(np.delete(norms, every) < middle)
            print(f"    the median is above {below:.1%} of the others")
            for what, values in (("norm", norms), ("loss", losses)):
                count = found_among_largest(rows, np.where(_others(every, rows, norms), -1, values))
                print(f"    by {what}: {count} of {len(rows)} among as many largest")
    print("\n| digits | limit for | best limit | held-out error, % | held-out loss | better in |")
    print("|---" * 6 + "|")
    for name, kinds in compare(effort).items():
        without = kinds["nothing"][2]
        for kind, (limit, errors, of_loss) in kinds.items():
            cells = [name, kind, "" if kind == "nothing" else f"{limit:.2g}", _shown(errors)]
            better = "" if kind == "nothing" else f"{np.sum(of_loss < without)} of {effort.seeds}"
            print(f"| {' | '.join([*cells, _shown(of_loss), better])} |")


def _others(every: np.ndarray, rows: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Examples that are spoiled in another way, which are left out of a comparison."""
    return np.isin(np.arange(len(norms)), np.setdiff1d(every, rows))


def main(arguments: list[str] | None = None) -> None:
    """Prints all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, seeds and limits")
    report(QUICK if parser.parse_args(arguments).quick else Effort())


if __name__ == "__main__":
    main()

"""`ops.clip_cotangent` in recurrent networks, beside a clip of the whole gradient.

  python -m benchmarks.research.cotangents          # some minutes
  python -m benchmarks.research.cotangents --quick  # a minute, a sign that it runs

Two tasks on which recurrent networks of ReLUs explode: the next character of Python's help topics,
each window of which is seen once, and the sum of two marked numbers in a sequence (Hochreiter and
Schmidhuber, 1997), by a network that begins with the identity (Le et al., 2015, arXiv 1504.00941).
All are trained by SGD with momentum. Rate and limit of each way are chosen from the same number of
each, by the mean of the last tenth of the losses over some seeds; other seeds are told.

Limits of cotangents are in parts of one term of the loss, which is a mean: a limit of 1 is `1 / n`
for `n` terms.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from optaxclip import ops
from optaxclip.commands.demo import read_text
from optaxclip.commands.demo_task import MAX_SYMBOLS, encode

Clip = Callable[[Array], Array]
Params = dict[str, Array]
MOMENTUM = 0.9
WARMUP = 0.1


class Effort(NamedTuple):
    """How much is run.

    Attributes:
      steps: of each run.
      length: of a sequence.
      hidden: units of the network.
      batch: sequences of a step.
      tuning: the seeds that choose rate and limit.
      told: the seeds of the table.
    """

    steps: int = 300
    length: int = 80
    hidden: int = 48
    batch: int = 8
    tuning: tuple[int, ...] = (100, 101)
    told: tuple[int, ...] = (0, 1, 2, 3, 4, 5)


EFFORTS = {"text": Effort(), "adding": Effort(steps=1000, length=40, batch=16)}
QUICK = Effort(20, 10, 8, 4, (100,), (0, 1))


class Task(NamedTuple):
    """What is learned.

    Attributes:
      initial: from a key to parameters.
      batches: from a key to the data of all steps.
      loss: `loss(params, batch, before, behind)`; of each step's state, `before` is applied to what
        enters the ReLU and `behind` to what leaves it.
      terms: how many terms the loss is the mean of.
      rates: the grid.
    """

    initial: Callable[[Array], Params]
    batches: Callable[[Array], Any]
    loss: Callable[[Params, Any, Clip, Clip], Array]
    terms: int
    rates: tuple[float, ...]


def states(params: Params, inputs: Array, before: Clip, behind: Clip) -> Array:
    """[time, batch, hidden], from what enters at each step."""

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = behind(jax.nn.relu(before(x + h @ params["recur"])))
        return h, h

    return lax.scan(step, jnp.zeros(inputs.shape[1:]), inputs)[1]


def text(effort: Effort) -> Task:
    """The next character."""
    symbols = encode(read_text(None)).train
    windows = len(symbols) // (effort.length + 1)
    rows = jnp.asarray(symbols[: windows * (effort.length + 1)].reshape(windows, -1))
    assert windows >= effort.steps * effort.batch

    def initial(key: Array) -> Params:
        embed, recur, out = jax.random.split(key, 3)
        lecun, hidden = jax.nn.initializers.lecun_normal(), effort.hidden
        return {
            "embed": jax.random.normal(embed, (MAX_SYMBOLS, hidden)) / hidden**0.5,
            "recur": lecun(recur, (hidden, hidden)),
            "out": lecun(out, (hidden, MAX_SYMBOLS)),
        }

    def batches(key: Array) -> Array:
        chosen = jax.random.permutation(key, windows)[: effort.steps * effort.batch]
        return rows[chosen].reshape(effort.steps, effort.batch, -1)

    def loss(params: Params, batch: Array, before: Clip, behind: Clip) -> Array:
        h = states(params, params["embed"][batch[:, :-1].T], before, behind)
        logits = h @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].T).mean()

    return Task(initial, batches, loss, effort.length * effort.batch, (0.03, 0.1, 0.3, 1.0))


def adding(effort: Effort) -> Task:
    """The sum of two marked numbers."""

    def initial(key: Array) -> Params:
        into, out = jax.random.split(key)
        return {
            "into": 0.1 * jax.random.normal(into, (2, effort.hidden)),
            "recur": jnp.eye(effort.hidden),
            "out": 0.1 * jax.random.normal(out, (effort.hidden,)),
            "bias": jnp.ones(()),
        }

    def batches(key: Array) -> tuple[Array, Array]:
        numbers, first, second = jax.random.split(key, 3)
        shape, half = (effort.steps, effort.batch), effort.length // 2
        x = jax.random.uniform(numbers, (*shape, effort.length))
        places = [
            jax.random.randint(first, shape, 0, half),
            jax.random.randint(second, shape, half, effort.length),
        ]
        marks = sum(jax.nn.one_hot(place, effort.length) for place in places)
        return jnp.stack([x, marks], -1), jnp.sum(x * marks, -1)

    def loss(params: Params, batch: Any, before: Clip, behind: Clip) -> Array:
        x, target = batch
        h = states(params, jnp.swapaxes(x, 0, 1) @ params["into"], before, behind)[-1]
        return jnp.mean((h @ params["out"] + params["bias"] - target) ** 2)

    return Task(initial, batches, loss, effort.batch, (0.003, 0.01, 0.03, 0.1))


TASKS = {"text": text, "adding": adding}


class Way(NamedTuple):
    """How gradients are clipped: the whole of them, or what comes back through states.

    Attributes:
      limits: the grid.
      total: the clip of the whole gradient, from gradients and limit.
      before: the clip of what comes back before the ReLU, from state and limit.
      behind: the same behind it.
    """

    limits: tuple[float, ...]
    total: Callable[[Any, Array], Any] = lambda grads, _: grads
    before: Callable[..., Array] = lambda x, **_: x
    behind: Callable[..., Array] = lambda x, **_: x


def by_norm(x: Array, limit: Array) -> Array:
    """One norm for the state of each sequence."""
    return ops.clip_cotangent(x, clip_norm=limit, axes=-1)


def by_value(x: Array, limit: Array) -> Array:
    """Entry by entry."""
    return ops.clip_cotangent(x, clip_value=limit)


def by_total(grads: Any, limit: Array) -> Any:
    """One norm for all parameters."""
    return ops.clip_by_global_norm(grads, limit)[0]


NORMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
OF_STATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
OF_ENTRIES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
WAYS = {
    "no clip": Way((np.inf,)),
    "global norm": Way(NORMS, total=by_total),
    "states by norm": Way(OF_STATES, behind=by_norm),
    "inputs by value": Way(OF_ENTRIES, before=by_value),
}


def trainer(task: Task, way: Way, effort: Effort) -> Callable[..., Array]:
    """`run(limit, rate, seed) -> losses [steps]`."""

    def run(limit: Array, rate: Array, seed: Array) -> Array:
        keys = jax.random.split(jax.random.key(seed))
        of_term = limit / task.terms
        before = functools.partial(way.before, limit=of_term)
        behind = functools.partial(way.behind, limit=of_term)
        params = task.initial(keys[0])
        warmup = max(1, round(effort.steps * WARMUP))

        def step(carry: Any, at: Any) -> tuple[Any, Array]:
            (params, trace), (number, batch) = carry, at
            loss, grads = jax.value_and_grad(task.loss)(params, batch, before, behind)
            grads = way.total(grads, limit)
            trace = jax.tree.map(lambda m, g: MOMENTUM * m + g, trace, grads)
            now = rate * jnp.minimum(1, (number + 1) / warmup)
            return (jax.tree.map(lambda p, m: p - now * m, params, trace), trace), loss

        start = (params, optax.tree.zeros_like(params))
        numbers = jnp.arange(effort.steps)
        return lax.scan(step, start, (numbers, task.batches(keys[1])))[1]

    return run


def finals(losses: Array) -> np.ndarray:
    """The mean of the last tenth of each run; infinite where it is lost."""
    tail = np.asarray(losses)[..., -max(1, losses.shape[-1] // 10) :].mean(-1)
    return np.where(np.isfinite(tail), tail, np.inf)


def compare(task: Task, way: Way, effort: Effort) -> tuple[np.ndarray, tuple[float, float], Any]:
    """Tuning losses [limits, rates], the best limit and rate, and losses of the told seeds."""
    run = jax.jit(jax.vmap(trainer(task, way, effort)))
    limits, rates, seeds = map(np.asarray, (way.limits, task.rates, effort.tuning))
    grid = [x.ravel() for x in np.meshgrid(limits, rates, seeds, indexing="ij")]
    with np.errstate(invalid="ignore", over="ignore"):
        tuned = finals(run(*map(jnp.asarray, np.float32(grid[:2])), jnp.asarray(grid[2])))
    tuned = tuned.reshape(len(limits), len(rates), -1).mean(-1)
    limit, rate = np.unravel_index(np.argmin(tuned), tuned.shape)
    chosen = float(limits[limit]), float(rates[rate])
    told = jnp.asarray(effort.told)
    many = [jnp.full(told.shape, x, jnp.float32) for x in chosen]
    return tuned, chosen, finals(run(*many, told))


def main(arguments: list[str] | None = None) -> None:
    """Prints a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny network, a few steps")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    args = parser.parse_args(arguments)
    for name in args.tasks:
        effort = QUICK if args.quick else EFFORTS[name]
        task = TASKS[name](effort)
        print(f"\n{name}: the last losses of {len(effort.told)} seeds\n")
        print("| way | limit | rate | mean | from | to | lost |\n|---|---|---|---|---|---|---|")
        grids = []
        for label, way in WAYS.items():
            tuned, (limit, rate), told = compare(task, way, effort)
            kept = told[np.isfinite(told)]
            row = [f"{f(kept):.3f}" for f in (np.mean, np.min, np.max)] if len(kept) else [""] * 3
            shown = "" if np.isinf(limit) else f"{limit:g}"
            print(
                f"| {label} | {shown} | {rate:g} | {' | '.join(row)} | {len(told) - len(kept)} |",
                flush=True,
            )
            grids.append((label, way, tuned))
        for label, way, tuned in grids:
            print(f"\n{label}, while tuning: by limit and rate {task.rates}")
            for limit, row in zip(way.limits, tuned, strict=True):
                print(f"{limit:>8g}", *(f"{x:>8.3f}" for x in row))


if __name__ == "__main__":
    main()

"""`hyperball` beside AdamW and Muon on a small transformer of text.

Each way trains the matrices of the layers with one rate, tuned over the same grid, and all else
with AdamW's best one; every rate warms up over the first tenth of the steps and falls to 0 by a
cosine. All seeds of a rate are one compiled program. The seeds that choose the rates are others
than those that are told.

  python -m benchmarks.research.hyperball           # about half an hour on two cores
  python -m benchmarks.research.hyperball --quick   # a minute, and no more than a sign that it runs
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import optaxclip
from benchmarks.research import text_model
from benchmarks.research.text_model import Size
from benchmarks.times.timing import race, ratio, spread

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DECAY = 0.1
"""Of the weights, times the rate, in AdamW and Muon."""


class Effort(NamedTuple):
    """How much is run.

    Attributes:
      steps: of each run.
      every: steps from one evaluation to the next.
      rates: the grid.
      tuning: the seeds that choose the rates.
      told: the seeds of the table.
      rounds: how often the steps take turns to be timed.
      size: the network's.
    """

    steps: int = 500
    every: int = 20
    rates: tuple[float, ...] = RATES
    tuning: tuple[int, ...] = (100, 101)
    told: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    rounds: int = 50
    size: Size = Size(batch=8)


QUICK = Effort(40, 10, (3e-3, 3e-2), (100, 101), (0, 1), 2, Size(16, 2, 1, 16, 4, 8))
Make = Callable[[Any, Any], optax.GradientTransformation]


MATRIX = optax.contrib.MuonDimensionNumbers(-2, -1)
"""What stands in front are layers."""


def _matrices_of_layers(params: Any) -> Any:
    labels = text_model.labels(params)
    return jax.tree.map(lambda label: MATRIX if label == "matrices" else None, labels)


def _all_matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: MATRIX, params)


def _adamw(rate: Any, others: Any) -> optax.GradientTransformation:
    of_each = {"matrices": rate, "others": others}
    optimizers = {name: optax.adamw(x, weight_decay=DECAY) for name, x in of_each.items()}
    return optax.partition(optimizers, text_model.labels)


def _muon(rate: Any, others: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate,
        weight_decay=DECAY,
        adam_weight_decay=DECAY,
        adam_learning_rate=others,
        muon_weight_dimension_numbers=_matrices_of_layers,
    )


def _on_spheres(direction: optax.GradientTransformation) -> Make:
    def make(rate: Any, others: Any) -> optax.GradientTransformation:
        matrices = optax.chain(direction, optaxclip.hyperball(rate, stacked=1))
        optimizers = {"matrices": matrices, "others": optax.adamw(others, weight_decay=DECAY)}
        return optax.partition(optimizers, text_model.labels)

    return make


WAYS: dict[str, Make] = {
    "AdamW": _adamw,
    "Muon": _muon,
    "AdamH": _on_spheres(optax.scale_by_adam()),
    "MuonH": _on_spheres(optax.contrib.scale_by_muon(weight_dimension_numbers=_all_matrices)),
}
"""AdamH and MuonH are `hyperball` behind Adam's and Muon's direction."""


def trainer(make: Make, effort: Effort, text: text_model.Text) -> Callable[..., Array]:
    """A compiled function of the seeds and two rates: held-out losses [seeds, evaluations].

    The first is before any step. Seeds take turns inside of it: on a CPU products of matrices that
    differ by seed are three times faster one by one than with `vmap`.
    """
    size, steps = effort.size, effort.steps

    def run(rate: Array, others: Array, seed: Array) -> Array:
        tx = make(*(_schedule(x, steps) for x in (rate, others)))
        first, then = jax.random.split(jax.random.key(seed))
        params = text_model.initial(first, size)
        held_out = functools.partial(text_model.loss_fn, tokens=text.held_out, size=size)

        def step(carry: Any, key: Array) -> tuple[Any, None]:
            params, state = carry
            tokens = text_model.batch(text.train, key, size)
            grads = jax.grad(text_model.loss_fn)(params, tokens, size)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def steps_between(carry: Any, keys: Array) -> tuple[Any, Array]:
            carry, _ = jax.lax.scan(step, carry, keys)
            return carry, held_out(carry[0])

        keys = jax.random.split(then, (steps // effort.every, effort.every))
        _, losses = jax.lax.scan(steps_between, (params, tx.init(params)), keys)
        return jnp.concatenate([held_out(params)[None], losses])

    return jax.jit(lambda seeds, *rates: jax.lax.map(functools.partial(run, *rates), seeds))


def _schedule(rate: Array, steps: int) -> Callable[[Any], Array]:
    share = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    return lambda count: rate * share(count)


def tuned(run: Callable[..., Array], effort: Effort, others: float | None) -> dict[float, float]:
    """For each rate the mean of the last held-out losses; what is not finite counts as infinite.

    Args:
      run: as `trainer` makes it.
      effort: with the grid and the seeds that choose.
      others: the rate of what is not in the layers, or None for the same.
    """
    found = {}
    for rate in effort.rates:
        losses = run(jnp.asarray(effort.tuning), rate, others or rate)
        last = float(jnp.mean(losses[:, -1]))
        found[rate] = last if np.isfinite(last) else np.inf
        print(f"  rate {rate:g}: {found[rate]:.3f}", flush=True)
    return found


def steps_to(goals: np.ndarray, losses: np.ndarray, every: int) -> list[float]:
    """For each seed the first evaluated step whose loss is as low as its goal; inf if none is."""
    reached = losses <= goals[:, None]
    first = np.argmax(reached, axis=1) * every
    return [float(x) if any_of else np.inf for x, any_of in zip(first, reached.any(1), strict=True)]


def seconds(effort: Effort, text: text_model.Text) -> dict[str, np.ndarray]:
    """The processor's times of one step of one seed, round by round, in turns."""
    calls = {name: functools.partial(*_one_step(make, effort, text)) for name, make in WAYS.items()}
    return race(calls, effort.rounds, time.process_time)


def _one_step(make: Make, effort: Effort, text: text_model.Text) -> tuple[Any, ...]:
    tx, size = make(1e-2, 1e-2), effort.size
    params = text_model.initial(jax.random.key(0), size)
    tokens = text_model.batch(text.train, jax.random.key(0), size)

    def step(params: Any, state: Any, tokens: Array) -> Any:
        grads = jax.grad(text_model.loss_fn)(params, tokens, size)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step).lower(params, tx.init(params), tokens).compile()
    return lambda *args: jax.block_until_ready(compiled(*args)), params, tx.init(params), tokens


def compare(effort: Effort) -> dict[str, tuple[float, np.ndarray]]:
    """Of each way the best rate, and the held-out losses of the seeds that are told."""
    text, others, found = text_model.read(effort.size), None, {}
    for name, make in WAYS.items():
        begin, run = time.perf_counter(), trainer(make, effort, text)
        print(name, flush=True)
        grid = tuned(run, effort, others)
        best = min(grid, key=lambda rate: grid[rate])
        others = others or best  # that of AdamW, which is the first
        found[name] = best, np.asarray(run(jnp.asarray(effort.told), best, others))
        print(f"  best {best:g}, {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny network, a few steps")
    effort = QUICK if parser.parse_args(arguments).quick else Effort()
    found = compare(effort)
    times = seconds(effort, text_model.read(effort.size))
    goals = found["AdamW"][1][:, -1]
    print("\n| | rate | held-out loss | steps to AdamW's | step, ms | of AdamW's |")
    print("|---|---|---|---|---|---|")
    for name, (rate, losses) in found.items():
        last, reached = losses[:, -1], steps_to(goals, losses, effort.every)
        of_adamw = ratio(times[name], times["AdamW"])
        print(
            f"| {name} | {rate:g} | {last.mean():.3f} ± {last.std(ddof=1):.3f} "
            f"| {np.median(reached):g} ({min(reached):g} to {max(reached):g}) "
            f"| {spread(times[name]).median * 1e3:.1f} | {of_adamw.median if of_adamw else 0:.2f} |"
        )


if __name__ == "__main__":
    main()

"""How often `suggest` is wrong: about norms whose truth is known, and about those of real runs.

Norms without a trend must be stationary, whatever their distribution and however much they resemble
those before them. A level that moves must be seen to move. Spikes of 10 times the level must be
found, and few ordinary norms taken for spikes. The constants of `optaxclip.tuning.spread` were
chosen on the norms of `MADE_ON`. `JUDGED_ON` has other distributions too, and other seeds.

  python -m benchmarks.suggesting          # the norms of JUDGED_ON, some minutes
  python -m benchmarks.suggesting --made   # those of MADE_ON
  python -m benchmarks.suggesting --real   # norms of five trainings, and every second one of them
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from scipy.signal import lfilter

import optaxclip.tuning.doubts as doubts
import optaxclip.tuning.spread as spread
from optaxclip import monitor, tuning

Rng, Floats = np.random.Generator, np.ndarray
Logs = Callable[[Rng, int], Floats]
"""Logarithms of norms without a trend, float64[n]."""
SPIKE = 10.0
"""A spike is this many times the level."""


def normal(std: float) -> Logs:
    """Of lognormal norms."""
    return lambda rng, n: std * rng.normal(size=n)


def student(scale: float, degrees: float) -> Logs:
    """Of norms with heavy tails on both sides."""
    return lambda rng, n: scale * rng.standard_t(degrees, n)


def log(draw: Logs) -> Logs:
    """Of norms that are drawn themselves."""
    return lambda rng, n: np.log(draw(rng, n))


NORMAL = normal(1.0)


def alike(resemblance: float, std: float, draw: Logs = NORMAL) -> Logs:
    """Of norms that resemble those before them, an autoregression."""

    def logs(rng: Rng, n: int) -> Floats:
        new = std * math.sqrt(1 - resemblance**2) * draw(rng, n + 200)
        return lfilter([1], [1, -resemblance], new)[200:]

    return logs


ASKED = {f"lognormal, sd {std:g}": normal(std) for std in (0.1, 0.3, 0.5, 0.7)} | {
    "chi, 5 degrees": log(lambda rng, n: np.sqrt(rng.chisquare(5, n))),
    "gamma 3": log(lambda rng, n: rng.gamma(3, size=n)),
    "uniform, .5 to 1.5": log(lambda rng, n: rng.uniform(0.5, 1.5, n)),
    "log Student 3, scale .2": student(0.2, 3),
    "AR .5, sd .3": alike(0.5, 0.3),
    "AR .8, sd .2": alike(0.8, 0.2),
    "AR .9, sd .15": alike(0.9, 0.15),
    "AR .9, sd .3": alike(0.9, 0.3),
}
MADE_ON: Mapping[str, Logs] = ASKED | {
    "chi, 20 degrees": log(lambda rng, n: np.sqrt(rng.chisquare(20, n))),
    "uniform, .02 to 1": log(lambda rng, n: rng.uniform(0.02, 1, n)),
    "log Student 3, scale .1": student(0.1, 3),
    "log Student 5, scale .3": student(0.3, 5),
    "log Laplace, scale .2": lambda rng, n: rng.laplace(scale=0.2, size=n),
    "Pareto": lambda rng, n: 0.3 * rng.exponential(size=n),
    "AR .7, sd .3": alike(0.7, 0.3),
}
JUDGED_ON: Mapping[str, Logs] = ASKED | {
    "lognormal, sd .2": normal(0.2),
    "lognormal, sd .6": normal(0.6),
    "chi, 3 degrees": log(lambda rng, n: np.sqrt(rng.chisquare(3, n))),
    "chi, 100 degrees": log(lambda rng, n: np.sqrt(rng.chisquare(100, n))),
    "gamma 8": log(lambda rng, n: rng.gamma(8, size=n)),
    "Weibull 1.5": log(lambda rng, n: rng.weibull(1.5, n)),
    "uniform, .2 to 1": log(lambda rng, n: rng.uniform(0.2, 1, n)),
    "log logistic, scale .15": lambda rng, n: rng.logistic(scale=0.15, size=n),
    "log Gumbel, scale .2": lambda rng, n: rng.gumbel(scale=0.2, size=n),
    "log Student 4, scale .15": student(0.15, 4),
    "log Student 2.5, scale .1": student(0.1, 2.5),
    "two sorts of batches": lambda rng, n: 0.15 * rng.normal(size=n) + 0.8 * (rng.random(n) < 0.3),
    "AR .6, sd .4": alike(0.6, 0.4),
    "AR .85, sd .2": alike(0.85, 0.2),
    "AR .7, Student 4": alike(0.7, 0.2, student(0.7, 4)),
    "mean of ten neighbours": lambda rng, n: (
        0.6 * np.convolve(rng.normal(size=n + 9), np.full(10, 0.1), "valid")
    ),
}


def steps(*at: tuple[float, float]) -> Callable[[Floats], Floats]:
    """A level that is multiplied by a factor behind each place."""
    return lambda t: sum(np.where(t > place, math.log(factor), 0.0) for place, factor in at)


MOVES: Mapping[str, Callable[[Floats], Floats]] = {
    "x 2": steps((0.5, 2)),
    "x 2, late": steps((0.85, 2)),
    "x 3": steps((0.6, 3)),
    "x .4": steps((0.4, 0.4)),
    "x 10, late": steps((0.8, 10)),
    "x 2, x 2": steps((0.3, 2), (0.7, 2)),
    "x 3 and back": steps((0.4, 3), (0.6, 1 / 3)),
    "x 2, back, x 2": steps((0.3, 2), (0.5, 0.5), (0.75, 2)),
    "falls to 1/6": lambda t: -math.log(6) * t,
    "rises x 4": lambda t: math.log(4) * t,
    "falls as 1/t": lambda t: -np.log(t + 0.25),
    "rises x 4, falls": lambda t: math.log(4) * (1 - (2 * t - 1) ** 2),
    "rises x 6, falls at once": lambda t: math.log(6) * np.minimum(t / 0.7, (1 - t) / 0.3),
    "waves twice, x 4": lambda t: 0.5 * math.log(4) * np.sin(4 * np.pi * t),
}
NOISES: Mapping[str, Logs] = {
    "lognormal, sd .15": normal(0.15),
    "log Student 4, scale .15": student(0.15, 4),
    "chi, 5 degrees": ASKED["chi, 5 degrees"],
    "AR .5, sd .15": alike(0.5, 0.15),
}


class Wrong(NamedTuple):
    """Shares of runs, or of norms, at which `suggest` was wrong.

    Attributes:
      stepped: of runs that were found to be stepped.
      drifting: of runs that were found to be drifting.
      no_constant: of runs with another verdict than a constant threshold.
      for_spikes: of ordinary norms that were taken for spikes.
      missed: of spikes that were planted, in a hundredth of the norms, and not found.
    """

    stepped: float
    drifting: float
    no_constant: float
    for_spikes: float
    missed: float


def verdict(norms: Floats) -> str:
    """What `suggest` says, without the rules that it tries."""
    shape = spread.shape_of(np.log(norms))
    return doubts.judged_threshold(norms, shape, math.exp(shape.threshold)).verdict


def without_trend(draw: Logs, n: int, seeds: Sequence[int]) -> Wrong:
    """How often norms without a trend are misjudged."""
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        logs = draw(rng, n)
        shape = spread.shape_of(logs)
        planted = rng.choice(n, max(n // 100, 1), replace=False)
        spoiled = logs.copy()
        spoiled[planted] = np.median(np.delete(logs, planted)) + math.log(SPIKE)
        again = spread.shape_of(spoiled)
        known = planted[planted >= again.warmup]
        found.append(
            (
                shape.regime == "stepped",
                shape.regime == "drifting",
                verdict(np.exp(logs)) != "constant",
                np.mean(shape.spikes[shape.warmup :]),
                1 - np.mean(again.spikes[known]) if known.size else 0.0,
            )
        )
    return Wrong(*np.mean(found, axis=0).tolist())


def seen(
    move: Callable[[Floats], Floats], noise: Logs, n: int, seeds: Sequence[int], share: float = 0.0
) -> float:
    """The share of runs whose level is seen to move, beside a share of spikes."""
    found = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        logs = move((np.arange(n) + 0.5) / n) + noise(rng, n)
        logs[rng.random(n) < share] += math.log(SPIKE)
        found += spread.shape_of(logs).regime != "stationary"
    return found / len(seeds)


LENGTHS = (50, 100, 300, 1000, 3000, 10_000, 100_000)


def print_tables(families: Mapping[str, Logs], first: int, runs: int) -> None:
    """Both tables, of some runs of each kind, fewer of those with many norms."""

    def seeds(n: int) -> range:
        return range(first, first + max(10, min(runs, runs * 3000 // n)))

    print("no trend: % stepped + % drifting, % without a constant threshold;")
    print("ordinary norms of 300 that are taken for spikes, % of spikes missed")
    print(f"{'':26}" + "".join(f"{n:>25,}" for n in LENGTHS))
    for name, draw in families.items():
        cells = [without_trend(draw, n, seeds(n)) for n in LENGTHS]
        rows = [
            f"{100 * x.stepped:4.1f}+{100 * x.drifting:.1f} {100 * x.no_constant:4.1f};"
            f"{300 * x.for_spikes:5.2f} {100 * x.missed:5.1f}"
            for x in cells
        ]
        print(f"{name:26}" + "".join(f"{row:>25}" for row in rows), flush=True)
    lengths = (100, 200, 1000, 10_000)
    for share in (0.0, 0.01, 0.1):
        print(f"\nlevels that move, {share:.0%} spikes: % seen, of {lengths} norms")
        print(f"{'':26}" + "".join(f"{name:>26}" for name in NOISES))
        for name, move in MOVES.items():
            rows = [
                [seen(move, noise, n, seeds(n)[: runs // 2], share) for n in lengths]
                for noise in NOISES.values()
            ]
            cells = [" ".join(f"{100 * x:.0f}" for x in row) for row in rows]
            print(f"{name:26}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def trainings() -> Iterator[tuple[str, Floats]]:
    """The norms of five trainings."""
    from benchmarks.research.study import plan, running, tables, tasks
    from examples import demo

    optimizer = demo.METHODS["clip_by_global_norm"](demo.sgd(600))
    corpus = demo.encode(demo.help_topics())
    yield "demo, clip_by_global_norm", demo.train(corpus, optimizer, 600, seed=0).norm
    effort = plan.Effort(steps=600, seeds=1, tuning=1, chunk=1)
    for name, rate in ("conv", 1e-3), ("lstm", 1e-2):
        method = tables.methods_for(False, "adamw")["none"]
        runner = running.Runner(tasks.TASKS[name](), "adamw", method, effort)
        yield f"study, {name}, AdamW {rate:g}", runner([rate], ["none"], [0], 0.0)[0].norms[0]
    for rate in (1e-3, 1e-2):
        yield f"transformer, AdamW {rate:g}", of_transformer(rate)


def of_transformer(rate: float, steps: int = 1000) -> Floats:
    """The norms of a small transformer that learns text with AdamW and a warm-up of its rate."""
    from benchmarks.research import text_model

    size = text_model.Size()
    text = text_model.read(size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    tx = optax.chain(monitor.record(steps), optax.adamw(schedule))

    @jax.jit
    def run(params: Any) -> optax.OptState:
        def step(carry: tuple, key: jax.Array) -> tuple:
            params, state = carry
            tokens = text_model.batch(text.train, key, size)
            grads = jax.grad(text_model.loss_fn)(params, tokens, size)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), steps)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[0][1]

    return monitor.history(run(text_model.initial(jax.random.key(0), size)))


def print_real() -> None:
    """What is suggested for real norms and for every second one of them, which must be the same.

    Last comes how far a threshold is from that of all norms.
    """
    for name, norms in trainings():
        threshold = None
        for kept, what in ((norms, "all"), (norms[::2], "even"), (norms[1::2], "odd")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = tuning.suggest(kept)
            threshold = found.threshold if threshold is None else threshold
            print(
                f"{name:26} {what:5} {found.verdict:9} threshold {found.threshold:<9.4g} {found.regime:11}"
                f" warm-up {found.warmup_steps:4} of {len(kept)}, {len(found.spikes)} spikes,"
                f" clips {found.share_clipped:.1%}, {found.threshold / threshold - 1:+.1%}"
            )


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--made", action="store_true", help="the norms that constants are from")
    parser.add_argument("--real", action="store_true", help="norms of trainings")
    parser.add_argument("--runs", type=int, default=100, help="of each kind")
    args = parser.parse_args()
    if args.real:
        print_real()
    else:
        families, first = (MADE_ON, 0) if args.made else (JUDGED_ON, 10_000)
        print_tables(families, first, args.runs)


if __name__ == "__main__":
    main()

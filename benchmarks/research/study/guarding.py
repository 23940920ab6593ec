"""Runs the guards that `judging` judges, as `benchmarks/research/guard.md` says in its second part.

  nice python -m benchmarks.research.study.guarding --out guard.jsonl

One process on one core, less than half an hour on an idle one. Each problem and optimizer is one
compiled program, whose runs are then written; what is in the file is not run again.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.research.study import guards, plan, running
from benchmarks.research.study.faults import FAULTS, HARMLESS, SCALES
from benchmarks.research.study.plan import Effort
from benchmarks.research.study.results import read
from benchmarks.research.study.runs import BEST, NONE
from benchmarks.research.study.tasks import ALL
from benchmarks.research.study.unseen import ADAPTIVE, OPTIMIZERS

ROUNDS, SEEDS, FIRST, FINDING, CHUNK = 2, 6, 9000, 2, 32
"""The second round has other seeds, and the adaptive optimizers only."""
EVALUATIONS = 20
EVERYONES = "constant 1"
"""`clip_by_global_norm(1.0)`."""
LIMITS = 2.0 ** np.arange(-5, 1)
"""Constants of the sweep, in multiples of the median norm of a run without a clip."""


class Problem(NamedTuple):
    """What is trained, for how many steps, and in which cases."""

    task: str
    steps: int
    cases: tuple[str, ...] = ("none",)


PROBLEMS = {
    "gru": Problem("gru", 300, (*FAULTS, *HARMLESS)),
    "vit": Problem("vit", 300, tuple(FAULTS)),
    "zero start": Problem("decoder", 600),
    "small weights": Problem("autoencoder", 1500),
    "3000 steps": Problem("gru", 3000),
}


def methods(best: float) -> dict[str, float]:
    """What the program takes as the limit of each method."""
    rules = {name: guards.number(name) for name in guards.RULES}
    return {NONE: guards.NO_CLIP, EVERYONES: 1.0, BEST: best, **rules}


def rows(name: str, optimizer: str, number: int = 0) -> Iterator[dict[str, Any]]:
    """The runs of a problem and an optimizer in this round, at the calm rate."""
    task, steps, cases = PROBLEMS[name]
    effort = Effort(steps, steps // EVALUATIONS, SEEDS, FINDING, CHUNK, FIRST)
    seeds = [number * SEEDS + seed for seed in effort.reported]
    runner = running.Runner(ALL[task](), optimizer, guards.GUARDED, effort, at_once=True)
    rate, norm = _rate(runner, optimizer, effort)
    best = _limit(runner, rate, norm, [x for x in running.SWEPT if x in cases], effort)
    limits = methods(best)
    each = [(x, case, seed) for x in limits for case in cases for seed in seeds]
    # The best constant of another scale of the loss is known.
    scales = [SCALES.get(case, 1.0) if x == BEST else 1.0 for x, case, _ in each]
    values = np.array([limits[x] for x, _, _ in each]) * scales
    outcome, seconds = runner(rate, [x for _, x, _ in each], [x for *_, x in each], values)
    ends = plan.final(outcome.held_out)
    for i, (method, case, seed) in enumerate(each):
        yield {
            "round": number,
            "problem": name,
            "optimizer": optimizer,
            "method": method,
            "case": case,
            "seed": seed,
            "rate": rate,
            "limit": float(values[i]) if method in (EVERYONES, BEST) else None,
            "start": round(float(outcome.held_out[i, 0]), 5),
            "end": round(float(ends[i]), 5),
            "lost": bool(plan.is_lost(outcome.held_out[i])),
            "clipped": round(int(outcome.changed[i]) / steps, 4),
            "seconds": round(seconds, 5),
        }


def _rate(runner: running.Runner, optimizer: str, effort: Effort) -> tuple[float, float]:
    """A quarter of the edge, as in the study, and the median norm there without a clip."""
    grid, seeds = plan.GRID[optimizer], effort.finding
    outcome, _ = runner(
        np.repeat(grid, len(seeds)), ["none"] * len(grid) * len(seeds), seeds * len(grid), np.inf
    )
    losses = plan.final(outcome.held_out).reshape(len(grid), -1).mean(-1)
    edge = plan.edge(grid, losses, outcome.held_out[:, 0].mean())
    calm = edge * plan.RATES["calm"]
    nearest = int(np.abs(np.log(grid / calm)).argmin())
    return calm, float(np.median(outcome.norms[nearest * len(seeds)]))


def _limit(
    runner: running.Runner, rate: float, norm: float, cases: list[str], effort: Effort
) -> float:
    """The constant that is best over these cases."""
    each = [(x * norm, case, seed) for x in LIMITS for case in cases for seed in effort.finding]
    limits, faults, seeds = zip(*each, strict=True)
    outcome, _ = runner(rate, faults, seeds, limits)
    losses = plan.final(outcome.held_out).reshape(len(LIMITS), -1).mean(-1)
    return float(limits[int(losses.argmin()) * len(limits) // len(LIMITS)])


def main(arguments: list[str] | None = None) -> None:
    """Runs what the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("guard.jsonl"), help="the results")
    options = parser.parse_args(arguments)
    os.environ.update(running.ENVIRONMENT)  # XLA's flags, which it reads at its first program
    for name in ("jax_platforms", "jax_default_prng_impl"):
        jax.config.update(name, running.ENVIRONMENT[name.upper()])
    lines = read(options.out) if options.out.exists() else ()
    done = {(line["round"], line["problem"], line["optimizer"]) for line in lines}
    for number in range(ROUNDS):
        for optimizer in OPTIMIZERS if number == 0 else ADAPTIVE:
            for name in PROBLEMS:
                if (number, name, optimizer) not in done:
                    found = list(rows(name, optimizer, number))
                    with options.out.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in found)
                    print(number, name, optimizer, flush=True)


if __name__ == "__main__":
    main()

"""What skips, loss scales and records add to AdamW's step on a CPU, compared with a branch by hand.

  python -m benchmarks.skipping                          # the table: about 3 minutes on 2 cores
  python -m benchmarks.skipping --trees mixed --rounds 60
  python -m benchmarks.skipping --rows skip --clock processor

Steps of float32 entries change their donated parameters and state in place, and take turns. Each
number is the median over the rounds of a step's time divided by the plain step's time. A target is
a multiple of the row in brackets; the last column has the worst ratio to that row of all trees. The
clock of the processor adds up the time of all threads, which other work on the machine changes
less.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optaxclip
from benchmarks.times.report import load_average
from benchmarks.times.steps import step_program
from benchmarks.times.timing import Times, race, ratio, spread
from benchmarks.times.trees import filled
from optaxclip import monitor, thresholds
from optaxclip._base.types import PyTree

Step = optax.GradientTransformation

TREES: dict[str, list[tuple[int, ...]]] = {
    "equal": [(512, 512)] * 16,
    "mixed": [shape for i in range(24) for shape in ((128 + 16 * i, 448 + 8 * i), (448 + 8 * i,))],
    "one": [(2048, 2048)],
}
"""About 4 million entries each: equal matrices, matrices and vectors of all shapes, one leaf."""

ALL_STATISTICS = ("norm", "max", "mean_abs", "zero_fraction")


class Row(NamedTuple):
    """A step, and the row whose time it may take at most some times."""

    name: str
    tx: Step
    base: str = ""
    target: float = float("inf")


def rows() -> list[Row]:
    """The steps of the table, in its order."""
    adamw = optax.adamw(1e-3)
    clip, norm = optax.clip_by_global_norm, optaxclip.clip_by_global_norm
    clipped = optax.chain(norm(1.0), adamw)
    default = optax.chain(optaxclip.adagc(), adamw)

    def recorded(**stats: Any) -> Step:
        return optax.chain(monitor.record(64, **stats), adamw)

    return [
        Row(PLAIN, adamw),
        Row(BRANCH, branch(adamw)),
        Row("lax.cond, Optax's clip", branch(optax.chain(clip(1.0), adamw))),
        Row("apply_if_finite", optax.apply_if_finite(adamw, 5)),
        Row(CLIP, optax.chain(clip(1.0), adamw)),
        Row("clip_by_global_norm", clipped),
        Row("adagc", default),
        Row("skip_nonfinite", optaxclip.skip_nonfinite(adamw), BRANCH, 1.2),
        Row("skip_nonfinite, clip", optaxclip.skip_nonfinite(clipped), BRANCH, 1.4),
        Row("skip_nonfinite, adagc", optaxclip.skip_nonfinite(default), BRANCH, 1.5),
        Row("skip_above, zscore", optaxclip.skip_above(adamw, thresholds.zscore()), BRANCH, 1.25),
        Row("skip_above, of updates", optaxclip.skip_above(adamw, 1e3, check="updates")),
        Row("scale_loss", optaxclip.scale_loss(adamw), BRANCH, 1.45),
        Row("record", recorded(), CLIP, 1.15),
        *(Row(f"record, {stat}", recorded(stats=stat)) for stat in ALL_STATISTICS[1:]),
        Row("record, all four", recorded(stats=ALL_STATISTICS), PLAIN, 2.2),
        Row("histogram, every step", optax.chain(monitor.histogram(every=1), adamw)),
        Row("histogram, every 100 steps", optax.chain(monitor.histogram(every=100), adamw)),
        Row("events of a clip", monitor.events(clipped)),
        Row("events of a skip", monitor.events(optaxclip.skip_nonfinite(clipped))),
    ]


PLAIN, BRANCH, CLIP = "plain step", "lax.cond", "Optax's clip"


def branch(inner: Step) -> Step:
    """A skip of steps that are not finite, as one writes it by hand."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]
        return lax.cond(
            jnp.all(jnp.stack(is_finite)),
            lambda: inner.update(updates, state, params),
            lambda: (optax.tree.zeros_like(updates), state),
        )

    return optax.GradientTransformation(inner.init, update)


def measure(
    tree: str, chosen: list[Row], rounds: int, clock: Callable[[], float], tell: Callable[..., Any]
) -> Times:
    """The seconds of each step on a tree, round by round."""
    grads, programs = filled(TREES[tree], jnp.float32), {}
    for row in chosen:
        tell(f"{tree}: {row.name}")
        programs[row.name] = step_program(row.tx, grads)
    return race(programs, rounds, clock)


def table(chosen: list[Row], found: Mapping[str, Times]) -> str:
    """The table as Markdown."""
    lines = [["", *found, "target", "worst"], ["---"] * (len(found) + 3)]
    plain = [f"{1e3 * spread(times[PLAIN]).median:.2f}" for times in found.values()]
    lines.append([f"{PLAIN}, ms", *plain, "", ""])
    for row in chosen[1:]:
        ratios = [_median_ratio(times, row.name, PLAIN) for times in found.values()]
        target, worst = "", ""
        if row.base:
            of_base = max(_median_ratio(times, row.name, row.base) for times in found.values())
            missed = " (missed)" if of_base > row.target else ""
            target, worst = f"{row.target} [{row.base}]", f"{of_base:.2f}{missed}"
        lines.append([row.name, *(f"{x:.2f}" for x in ratios), target, worst])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median_ratio(times: Times, row: str, base: str) -> float:
    found = ratio(times[row], times[base])
    return np.nan if found is None else found.median


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    options = _options(argv)
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    chosen = [
        row
        for row in rows()
        if row.name in (PLAIN, BRANCH, CLIP)
        or any(text in row.name for text in options.rows or [""])
    ]
    device = jax.devices()[0].device_kind
    print(f"JAX {jax.__version__}, {device}, {os.cpu_count()} cores, load {load_average()}\n")
    found = {
        tree: measure(
            tree, chosen, options.rounds, clock, lambda text: print(text, file=sys.stderr)
        )
        for tree in options.trees or TREES
    }
    print(table(chosen, found))


def _options(argv: list[str] | None) -> argparse.Namespace:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.skipping",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trees", nargs="+", choices=TREES, metavar="TREE", help=", ".join(TREES))
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows with such a text")
    parser.add_argument("--rounds", type=int, default=40, help="how often each step runs")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

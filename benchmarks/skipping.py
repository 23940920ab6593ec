"""Measures the overhead of skips, loss scaling and recording in an AdamW step on a CPU.

  python -m benchmarks.skipping                          # about 3 minutes on 2 cores
  python -m benchmarks.skipping --trees mixed --rounds 60
  python -m benchmarks.skipping --rows skip --clock processor

The steps run one after another in every round, with float32 arrays and donated parameters and
states. The numbers are medians over rounds of the ratio to the plain step. A target is a multiple
of the row in brackets. The last column is the largest ratio to that row over all trees.
`--clock processor` adds up the CPU time of all threads, which other work affects less.
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
from benchmarks.times.report import get_load_average
from benchmarks.times.steps import compile_steps
from benchmarks.times.timing import Times, compute_ratio, summarize, time_calls
from benchmarks.times.trees import fill_tree
from optaxclip import monitor, thresholds
from optaxclip._base.types import PyTree

Step = optax.GradientTransformation

TREES: dict[str, list[tuple[int, ...]]] = {
    "equal": [(512, 512)] * 16,
    "mixed": [shape for i in range(24) for shape in ((128 + 16 * i, 448 + 8 * i), (448 + 8 * i,))],
    "one": [(2048, 2048)],
}
"""Trees of about 4 million elements with equal matrices, different shapes, and a single leaf."""

ALL_STATISTICS = ("norm", "max", "mean_abs", "zero_fraction")


class Row(NamedTuple):
    """A step, and its target as a multiple of the time of another row."""

    name: str
    tx: Step
    base: str = ""
    target: float = float("inf")


def build_rows() -> list[Row]:
    """Returns the steps in the order of the table."""
    adamw = optax.adamw(1e-3)
    clip, norm = optax.clip_by_global_norm, optaxclip.clip_by_global_norm
    clipped = optax.chain(norm(1.0), adamw)
    default = optax.chain(optaxclip.adagc(), adamw)

    def chain_record(**stats: Any) -> Step:
        return optax.chain(monitor.record(64, **stats), adamw)

    return [
        Row(PLAIN, adamw),
        Row(BRANCH, skip_with_cond(adamw)),
        Row("lax.cond, Optax's clip", skip_with_cond(optax.chain(clip(1.0), adamw))),
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
        Row("record", chain_record(), CLIP, 1.15),
        *(Row(f"record, {stat}", chain_record(stats=stat)) for stat in ALL_STATISTICS[1:]),
        Row("record, all four", chain_record(stats=ALL_STATISTICS), PLAIN, 2.2),
        Row("histogram, every step", optax.chain(monitor.histogram(every=1), adamw)),
        Row("histogram, every 100 steps", optax.chain(monitor.histogram(every=100), adamw)),
        Row("events of a clip", monitor.events(clipped)),
        Row("events of a skip", monitor.events(optaxclip.skip_nonfinite(clipped))),
    ]


PLAIN, BRANCH, CLIP = "plain step", "lax.cond", "Optax's clip"


def skip_with_cond(inner: Step) -> Step:
    """Skips non-finite steps with a hand-written `lax.cond`."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]
        return lax.cond(
            jnp.all(jnp.stack(is_finite)),
            lambda: inner.update(updates, state, params),
            lambda: (optax.tree.zeros_like(updates), state),
        )

    return optax.GradientTransformation(inner.init, update)


def measure(
    tree: str, rows: list[Row], rounds: int, clock: Callable[[], float], report: Callable[..., Any]
) -> Times:
    """Measures the seconds of the steps on a tree in every round."""
    grads, programs = fill_tree(TREES[tree], jnp.float32), {}
    for row in rows:
        report(f"{tree}: {row.name}")
        programs[row.name] = compile_steps(row.tx, grads)
    return time_calls(programs, rounds, clock)


def format_table(rows: list[Row], times_by_tree: Mapping[str, Times]) -> str:
    """Formats the table in Markdown."""
    lines = [["", *times_by_tree, "target", "worst"], ["---"] * (len(times_by_tree) + 3)]
    plain = [f"{1e3 * summarize(times[PLAIN]).median:.2f}" for times in times_by_tree.values()]
    lines.append([f"{PLAIN}, ms", *plain, "", ""])
    for row in rows[1:]:
        ratios = [_compare(times, row.name, PLAIN) for times in times_by_tree.values()]
        target, worst = "", ""
        if row.base:
            worst_ratio = max(
                _compare(times, row.name, row.base) for times in times_by_tree.values()
            )
            missed = " (missed)" if worst_ratio > row.target else ""
            target, worst = f"{row.target} [{row.base}]", f"{worst_ratio:.2f}{missed}"
        lines.append([row.name, *(f"{x:.2f}" for x in ratios), target, worst])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _compare(times: Times, row: str, base: str) -> float:
    spread = compute_ratio(times[row], times[base])
    return np.nan if spread is None else spread.median


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    options = _parse_arguments(argv)
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    rows = [
        row
        for row in build_rows()
        if row.name in (PLAIN, BRANCH, CLIP)
        or any(text in row.name for text in options.rows or [""])
    ]
    device = jax.devices()[0].device_kind
    print(f"JAX {jax.__version__}, {device}, {os.cpu_count()} cores, load {get_load_average()}\n")
    times_by_tree = {
        tree: measure(tree, rows, options.rounds, clock, lambda text: print(text, file=sys.stderr))
        for tree in options.trees or TREES
    }
    print(format_table(rows, times_by_tree))


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.skipping",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trees", nargs="+", choices=TREES, metavar="TREE", help=", ".join(TREES))
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows that contain a text")
    parser.add_argument("--rounds", type=int, default=40, help="number of runs per step")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

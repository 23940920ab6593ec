"""Does the study hold at a hundred times the size? A decoder learns the text that packages ship.

  python -m benchmarks.research.scale --minutes 12 --out scale.csv   # on a GPU
  python -m benchmarks.research.scale --size cpu                     # a hundredth of it

On a GPU the decoder has 19 million parameters and reads 8 million bytes in a run of 1000 steps; a
CPU has one of 131,000. Weights are float32 and the rest is bfloat16. At first runs without a clip,
by a seed of their own, find the rate that is best; then six ways meet five cases, each with three
seeds. A row is written as a run ends, and a run of the program does what the file lacks, until the
minutes are over; then it prints the table of all rows, and says what is missing. As compiled for an
H100 a step moves 27 GB, and so takes at least 8 ms; with compiling, 12 minutes are about 60 runs
of 204, which are two whole cases of AdamW and a part of the third.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.research.scale.decoder import SIZES, Size
from benchmarks.research.scale.runs import CASES, COLUMNS, KEYS, METHODS, NONE, SEEDS, Study
from benchmarks.research.scale.text import read
from benchmarks.table_file import TableFile, start_timer

OPTIMIZERS = ("adamw", "muon")


def run(study: Study, minutes: float) -> None:
    """Runs what the file lacks, as long as there is time."""
    has_time = start_timer(minutes)
    for optimizer in OPTIMIZERS:
        for each in study.runs(optimizer):
            if study.is_done(each):
                continue
            if not has_time():
                return
            study.add(each)
            row = study.ended(each)
            words = " ".join(map(str, (*each[:5], row["end"])))
            print(f"{words}, {row['seconds']} s", flush=True)


def tables(rows: list[Any]) -> str:
    """Of each optimizer the losses at the end without a clip, and what each method changes."""
    told = [row for row in rows if row["seed"] in map(str, SEEDS)]
    ends = {(*_which(row), row["seed"]): float(row["end"]) for row in told}
    lines = []
    for optimizer in OPTIMIZERS:
        lines += [
            f"\n{optimizer}: the loss at the end; below, what methods add in the same seeds",
            f"| | {' | '.join(CASES)} |",
            "|---" * (1 + len(CASES)) + "|",
        ]
        for method in METHODS:
            cells = []
            for case in CASES:
                of_cell = [row for row in told if _which(row) == (optimizer, case, method)]
                base = [ends.get((optimizer, case, NONE, row["seed"]), math.nan) for row in of_cell]
                cells.append(_cell(of_cell, base if method != NONE else None))
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def missing(rows: list[Any]) -> str:
    """How many runs each case lacks, in words; nothing if none does."""
    words, of_each = [], len(METHODS) * len(SEEDS)
    for optimizer in OPTIMIZERS:
        for case in CASES:
            found = sum(
                _which(row)[:2] == (optimizer, case) and row["seed"] in map(str, SEEDS)
                for row in rows
            )
            if found < of_each:
                words.append(f"{optimizer}, {case}: {of_each - found} of {of_each} runs")
    return "; ".join(words)


def _which(row: Any) -> tuple[str, str, str]:
    return row["optimizer"], row["case"], row["method"]


def _cell(rows: list[Any], base: list[float] | None) -> str:
    if not rows:
        return "not run"
    ends = np.array([float(row["end"]) for row in rows])
    if base is not None:
        ends = ends - base
    summarize_times = f" ± {ends.std(ddof=1):.3f}" if len(rows) > 1 else ""
    parts = [
        f"{ends.mean():.3f}{summarize_times}"
        if base is None
        else f"{ends.mean():+.3f}{summarize_times}"
    ]
    if rows[0]["clipped"]:
        share = np.mean([float(row["clipped"]) for row in rows])
        parts.append(f"clips {100 * share:.0f} %")
    if lost := sum(row["lost"] == "1" for row in rows):
        parts.append(f"{lost} lost")
    if len(rows) < len(SEEDS):
        parts.append(f"{len(rows)} of {len(SEEDS)} seeds")
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Goes on with the runs, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("scale.csv"), help="the rows")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins later")
    usual = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument("--size", choices=SIZES, default=usual, help="of decoder and runs")
    options = parser.parse_args(arguments)
    size: Size = SIZES[options.size]
    table = TableFile(options.out, KEYS, COLUMNS)
    study = Study(size, read(size.text), table)
    run(study, options.minutes)
    rows = [row for row in table.rows.values() if row["size"] == study.name]
    print(f"\n{study.name}{tables(rows)}")
    if lacking := missing(rows):
        print(f"\nMissing, and had by the same command again: {lacking}")


if __name__ == "__main__":
    main()

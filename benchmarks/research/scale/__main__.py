"""Repeats the study with a larger decoder on the text of installed packages.

  python -m benchmarks.research.scale --minutes 12 --out scale.csv   # on a GPU
  python -m benchmarks.research.scale --size cpu                     # a hundredth of the size

The decoder has 19 million parameters on GPUs and reads 8 million bytes in 1000 steps. It has
131,000 parameters on CPUs. Weights are float32, and other arrays bfloat16. Runs without clipping
and with a separate seed determine the best learning rate. Then six methods run in five cases with
three seeds. The program adds missing rows to the file until the time is over, and prints a table
and the missing runs. Steps on an H100 move 27 GB, so they take at least 8 ms. With compilation, 12
minutes are enough for about 60 of 204 runs, two cases of AdamW and a part of the third.
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
    """Adds missing runs to the file while there is time."""
    has_time = start_timer(minutes)
    for optimizer in OPTIMIZERS:
        for each in study.plan_runs(optimizer):
            if study.is_done(each):
                continue
            if not has_time():
                return
            study.add(each)
            row = study.get_row(each)
            words = " ".join(map(str, (*each[:5], row["end"])))
            print(f"{words}, {row['seconds']} s", flush=True)


def format_tables(rows: list[Any]) -> str:
    """Formats the final losses without clipping and the differences of methods by optimizer."""
    rows = [row for row in rows if row["seed"] in map(str, SEEDS)]
    ends = {(*_get_group(row), row["seed"]): float(row["end"]) for row in rows}
    lines = []
    for optimizer in OPTIMIZERS:
        lines += [
            f"\n{optimizer}: final loss, and differences of methods with the same seeds",
            f"| | {' | '.join(CASES)} |",
            "|---" * (1 + len(CASES)) + "|",
        ]
        for method in METHODS:
            cells = []
            for case in CASES:
                cell_rows = [row for row in rows if _get_group(row) == (optimizer, case, method)]
                base = [
                    ends.get((optimizer, case, NONE, row["seed"]), math.nan) for row in cell_rows
                ]
                cells.append(_format_cell(cell_rows, base if method != NONE else None))
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_missing(rows: list[Any]) -> str:
    """Describes the numbers of missing runs by case."""
    words, num_expected = [], len(METHODS) * len(SEEDS)
    for optimizer in OPTIMIZERS:
        for case in CASES:
            num_found = sum(
                _get_group(row)[:2] == (optimizer, case) and row["seed"] in map(str, SEEDS)
                for row in rows
            )
            if num_found < num_expected:
                words.append(
                    f"{optimizer}, {case}: {num_expected - num_found} of {num_expected} runs"
                )
    return "; ".join(words)


def _get_group(row: Any) -> tuple[str, str, str]:
    return row["optimizer"], row["case"], row["method"]


def _format_cell(rows: list[Any], base: list[float] | None) -> str:
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
        fraction = np.mean([float(row["clipped"]) for row in rows])
        parts.append(f"clips {100 * fraction:.0f} %")
    if num_lost := sum(row["lost"] == "1" for row in rows):
        parts.append(f"{num_lost} lost")
    if len(rows) < len(SEEDS):
        parts.append(f"{len(rows)} of {len(SEEDS)} seeds")
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Continues the runs and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("scale.csv"), help="file for the rows")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run starts later")
    default = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument(
        "--size", choices=SIZES, default=default, help="size of the decoder and the runs"
    )
    options = parser.parse_args(arguments)
    size: Size = SIZES[options.size]
    table = TableFile(options.out, KEYS, COLUMNS)
    study = Study(size, read(size.text), table)
    run(study, options.minutes)
    rows = [row for row in table.rows.values() if row["size"] == study.name]
    print(f"\n{study.name}{format_tables(rows)}")
    if missing := describe_missing(rows):
        print(f"\nMissing (run the command again): {missing}")


if __name__ == "__main__":
    main()

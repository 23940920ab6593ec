"""Runs the study of `benchmarks/research/recommended.md`, and prints its tables and decision.

  nice -n 10 python -m benchmarks.research.recommended --minutes 35
  python -m benchmarks.research.recommended --minutes 0    # only prints

A task with an optimizer is one compiled program. Results in the file are not computed again.
"""

import argparse
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Use one core, and halve the compile time. XLA reads its flags before the first program.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1"

from benchmarks.research.recommended import judging, runs
from benchmarks.research.recommended.tasks import TASKS
from benchmarks.table_file import TableFile, start_timer

OUT = Path(__file__).parents[2] / "measured" / "recommended.csv"
KEYS, COLUMNS = ("optimizer", "task", "fault", "method"), ("rate", "norm", "percent")


def main(arguments: list[str] | None = None) -> None:
    """Adds missing results to the file, and prints the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=35, help="no program starts later")
    parser.add_argument("--out", type=Path, default=OUT, help="file of results")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", default=list(runs.OPTIMIZERS))
    parser.add_argument("--first", type=int, default=0, help="the first seed (0 for the protocol)")
    options = parser.parse_args(arguments)
    table, has_time = TableFile(options.out, KEYS, COLUMNS), start_timer(options.minutes)
    pairs = [(x, y) for y in options.tasks for x in options.optimizers]
    pairs.sort(key=lambda pair: pair[0] == "sgd")
    for optimizer, name in pairs:
        is_done = (optimizer, name, runs.KINDS[0], runs.NONE) in table.rows
        if not is_done and has_time():
            for row in runs.run_study(name, TASKS[name](), optimizer, options.first):
                table.add(**row)
    print(judging.format_report(table.rows.values()))


if __name__ == "__main__":
    main()

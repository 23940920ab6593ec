"""Compares all methods on small tasks with faults.

The tasks use data of Python and its packages, with six kinds of faults, all adaptive rules, and the
constant that is best in hindsight. A cell is a compiled program for a task, an optimizer and a
method. First, the edge of the learning rate is determined without clipping for all tasks and
optimizers. Results are JSON lines, one per run, and runs in the file are not repeated. Use
`python -m benchmarks.research.study.page` to generate the page.

  python -m benchmarks.study           # 75 minutes on two cores
  python -m benchmarks.study --quick   # a minute, only to check that it runs
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.research.study import plan, running
from benchmarks.research.study.methods import METHODS, PRIVATE
from benchmarks.research.study.plan import BatchCell, Cell, Effort
from benchmarks.research.study.results import Results
from benchmarks.research.study.tables import select_methods
from benchmarks.research.study.tasks import TASKS

Pair = tuple[str, str]
ALL = list(METHODS | PRIVATE)


def list_pairs(quick: bool, tasks: list[str] | None) -> list[Pair]:
    """Returns the selected tasks with their optimizers."""
    if quick:
        return list(plan.QUICK_PAIRS)
    names = tasks or list(TASKS)
    return [(name, optimizer) for name in names for optimizer in TASKS[name]().optimizers]


def list_cells(pairs: list[Pair], quick: bool, methods: list[str] | None) -> Iterator[Cell]:
    """Yields the cells of the pairs by method."""
    wanted = methods or (plan.QUICK_METHODS if quick else [*METHODS, *PRIVATE])
    tables = {pair: select_methods(TASKS[pair[0]]().noise is not None, pair[1]) for pair in pairs}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    for name in names:
        for pair in pairs:
            if name in tables[pair] and name in wanted:
                yield Cell(*pair, name)


def list_batch_cells(quick: bool, tasks: list[str] | None) -> Iterator[BatchCell]:
    """Yields the cells for the claim of AGC, which belongs to the task "conv"."""
    if not quick and (tasks is None or "conv" in tasks):
        for batch in plan.BATCHES:
            for clip in plan.ON_BATCHES:
                yield BatchCell(batch, clip)


def run_study(
    pairs: list[Pair],
    todo: list[Cell | BatchCell],
    results: Results,
    effort: Effort,
    executor: Executor,
) -> None:
    """Adds missing results to the file."""
    with Progress() as progress:

        def iterate_results(title: str, jobs: dict[Future[Any], Any]) -> Iterator[tuple[Any, Any]]:
            bar = progress.add_task(title, total=len(jobs))
            for job in as_completed(jobs):
                name = " ".join(map(str, jobs[job]))
                progress.update(bar, advance=1, description=f"{title}: {name}")
                yield jobs[job], job.result()

        new = [pair for pair in pairs if pair not in results.found]
        explored = {executor.submit(running.explore, *pair, effort): pair for pair in new}
        for pair, found in iterate_results("rates", explored):
            results.add([{"pair": pair, "found": found._asdict()}])

        def submit(cell: Cell | BatchCell) -> Future[Any]:
            if isinstance(cell, BatchCell):
                return executor.submit(running.run_batches, cell, effort)
            return executor.submit(running.run_cell, cell, results.found[cell[:2]], effort)

        for _, rows in iterate_results("cells", {submit(cell): cell for cell in todo}):
            results.add(rows)


def main(arguments: list[str] | None = None) -> None:
    """Runs or continues the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two tasks, a few methods and steps")
    parser.add_argument("--out", type=Path, default=Path("study.jsonl"), help="file of results")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="only these tasks")
    parser.add_argument("--methods", nargs="+", choices=ALL, metavar="NAME", help="only these")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of processes")
    options = parser.parse_args(arguments)
    os.environ.update(running.ENVIRONMENT)  # Affects the processes when they import JAX.
    effort = plan.QUICK if options.quick else Effort()
    pairs = list_pairs(options.quick, options.tasks)
    results = Results(options.out, effort)
    todo: list[Cell | BatchCell] = [*list_cells(pairs, options.quick, options.methods)]
    if options.methods is None:
        todo += list_batch_cells(options.quick, options.tasks)
    todo = [cell for cell in todo if cell not in results.done]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as executor:
        try:
            run_study(pairs, todo, results, effort, executor)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)  # Otherwise pending cells run.
            raise
    print(f"{options.out} contains {len(results.done)} cells")


if __name__ == "__main__":
    main()

"""Which method helps? Measured: `python -m benchmarks.study`.

Small tasks on data that Python and its packages bring, six kinds of faults, every adaptive rule,
and the constant that is best in hindsight. Each task, optimizer and method is a cell: one compiled
program of its runs. Before the cells the edge of the learning rate is found for each task and
optimizer without a clip. Results are JSON lines, one a run; what is in the file is not run again.
`python -m benchmarks.study.page` makes the page of them.

  python -m benchmarks.study           # an hour on two cores
  python -m benchmarks.study --quick   # a minute, and no more than a sign that it runs
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.progress import Progress

from benchmarks.study import plan, running
from benchmarks.study.methods import methods_for
from benchmarks.study.plan import Cell, Effort
from benchmarks.study.results import Results
from benchmarks.study.tasks import TASKS

Pair = tuple[str, str]


def pairs(quick: bool, tasks: list[str] | None) -> list[Pair]:
    """Tasks with their optimizers."""
    if quick:
        return list(plan.QUICK_PAIRS)
    names = tasks or list(TASKS)
    return [(name, optimizer) for name in names for optimizer in TASKS[name]().optimizers]


def cells(of: list[Pair], quick: bool, methods: list[str] | None) -> Iterator[Cell]:
    """Those of the pairs, each method of all pairs before the next one."""
    wanted = methods or (plan.QUICK_METHODS if quick else None)
    tables = {pair: methods_for(TASKS[pair[0]]().noise is not None, pair[1]) for pair in of}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    for name in names:
        for pair in of:
            if name in tables[pair] and (wanted is None or name in wanted):
                yield Cell(*pair, name)


def study(
    of: list[Pair], todo: list[Cell], results: Results, effort: Effort, executor: Executor
) -> None:
    """Runs what the file of results does not have."""
    todo = [each for each in todo if each not in results.done]
    new = [pair for pair in of if pair not in results.found]
    with Progress() as progress:
        bar = progress.add_task("rates", total=len(new))
        jobs = {executor.submit(running.explore, *pair, effort): pair for pair in new}
        for job in as_completed(jobs):
            results.add([{"pair": jobs[job], "found": job.result()._asdict()}])
            progress.advance(bar)
        bar = progress.add_task("cells", total=len(todo))
        again = {
            executor.submit(running.run_cell, each, results.found[each[:2]], effort): each
            for each in todo
        }
        for job in as_completed(again):
            results.add(job.result())
            progress.update(bar, advance=1, description=" ".join(again[job]))


def main(arguments: list[str] | None = None) -> None:
    """Runs the study, or goes on with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two tasks, a few methods and steps")
    parser.add_argument("--out", type=Path, default=Path("study.jsonl"), help="the results")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="some of the tasks")
    parser.add_argument("--methods", nargs="+", help="some of the methods, by name")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    os.environ.update(running.ENVIRONMENT)  # which the processes see when they import JAX
    effort = plan.QUICK if options.quick else Effort()
    of = pairs(options.quick, options.tasks)
    todo = list(cells(of, options.quick, options.methods))
    results = Results(options.out, plan.settings(effort), plan.runs(effort))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as executor:
        study(of, todo, results, effort, executor)
    print(f"{len(results.done)} cells are in {options.out}")


if __name__ == "__main__":
    main()

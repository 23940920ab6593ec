"""The table, a row at a time."""

import collections
import functools
import itertools
import statistics
from collections.abc import Iterable

from benchmarks.accelerators.cases import Added, Case, added
from benchmarks.accelerators.devices import is_gpu
from benchmarks.accelerators.methods import NONE, OURS, THEIRS
from benchmarks.accelerators.steps import ONE, Compiled

COLUMNS = [
    *("device", "model", "dtype", "mesh", "method", "read", "written", "kernels"),
    *("branches and loops", "collectives", "temporary, %"),
]
SECONDS = ["trace, s", "compile, s", "of Optax's"]


def header(with_seconds: bool) -> str:
    """The names of the columns."""
    columns = COLUMNS + SECONDS * with_seconds
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def rows(cases: Iterable[Case], ways: Iterable[str], rounds: int, with_seconds: bool) -> Iterable:
    """A line for each case, and the programs that it is about."""
    # One program serves several rows, in each turn anew.
    compiled = functools.cache(lambda case, way, turn: case.compile(way))
    for case in cases:
        base = None if case.is_of_examples else compiled(case.of(NONE), NONE, 0)
        runs = collections.defaultdict(list)
        for turn, way in itertools.product(range(rounds), ways):
            runs[way].append(compiled(case.of(way), way, turn))
        yield _row(case, base, runs, with_seconds), runs


def _row(
    case: Case, plain: Compiled | None, runs: dict[str, list[Compiled]], with_seconds: bool
) -> str:
    found = [added(results[0], plain) for results in runs.values()]
    has_reads = next(iter(runs.values()))[0].gradients > 1
    mesh = "" if case.mesh == ONE else case.mesh
    cells = [case.device, case.model, case.dtype, mesh, case.method]
    cells += [_beside(_bytes(x, x.read) for x in found) if has_reads else ""]
    cells += [_beside(_bytes(x, x.written) for x in found) if has_reads else ""]
    cells += [_beside(f"{x.counts.kernels:+}" for x in found) if is_gpu(case.device) else ""]
    cells += [_beside(str(x.counts.branches + x.counts.loops) for x in found)]
    cells += [_beside(_named(x.counts.collectives) for x in found)]
    cells += [_beside(f"{100 * x.temporary:.2f}" for x in found) if has_reads else ""]
    if with_seconds:
        compiling = _medians(runs, "compile")
        cells += [_beside(f"{x:.2f}" for x in _medians(runs, "trace").values())]
        cells += [_beside(f"{x:.2f}" for x in compiling.values())]
        both = OURS in compiling and THEIRS in compiling
        cells += [f"{compiling[OURS] / compiling[THEIRS]:.2f}" if both else ""]
    return f"| {' | '.join(cells)} |"


def _bytes(x: Added, value: float) -> str:
    """What is in a branch is not counted: where that is the optimizer itself, nothing is said."""
    return "in a branch" if x.written < -0.5 else f"{value:.2f}"


def _named(collectives: collections.Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in collectives.items() if number) or "0"


def _beside(cells: Iterable[str]) -> str:
    """Ours, and Optax's after it."""
    return " / ".join(cells)


def _medians(runs: dict[str, list[Compiled]], phase: str) -> dict[str, float]:
    return {
        way: statistics.median(getattr(x, phase) for x in results) for way, results in runs.items()
    }

"""The table, a row at a time."""

import collections
import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.accelerators.cases import Added, Case, added
from benchmarks.accelerators.devices import is_gpu
from benchmarks.accelerators.methods import NONE, OURS, THEIRS
from benchmarks.accelerators.steps import ONE, Compiled

NAMES = ["device", "model", "dtype", "mesh", "method"]
COUNTS = ["read", "written", "kernels", "branches and loops", "collectives", "temporary, %"]
SECONDS = ["trace, s", "compile, s", "of Optax's"]
Runs = dict[str, list[Compiled]]


def line(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def header(columns: Sequence[str]) -> str:
    """The names of the columns, of what names a row and of what is told."""
    return f"{line([*NAMES, *columns])}\n|{'---|' * len([*NAMES, *columns])}"


# One program serves several rows, in each turn anew.
@functools.cache
def _compiled(case: Case, way: str, turn: int) -> Compiled:
    return case.compile(way)


def rows(
    cases: Iterable[Case], ways: Iterable[str], rounds: int, columns: Sequence[str]
) -> Iterator[tuple[str, Runs]]:
    """A line for each case, and the programs that it is about."""
    for case in cases:
        runs = collections.defaultdict(list)
        for turn, way in itertools.product(range(rounds), ways):
            runs[way].append(_compiled(case.of(way), way, turn))
        cells = _seconds(runs)
        if not set(columns) <= cells.keys():
            cells |= _counts(case, {way: _added(case.of(way), runs[way][0]) for way in ways}, runs)
        mesh = "" if case.mesh == ONE else case.mesh
        names = [case.device, case.model, case.dtype, mesh, case.method]
        yield line([*names, *(cells[column] for column in columns)]), runs


def _added(case: Case, run: Compiled) -> Added:
    return added(run, None if case.is_of_examples else _compiled(case.of(NONE), NONE, 0))


def _counts(case: Case, found: dict[str, Added], runs: Runs) -> dict[str, str]:
    has_reads = next(iter(runs.values()))[0].gradients > 1
    all_of = found.values()
    cells = {
        "branches and loops": _beside(str(x.counts.branches + x.counts.loops) for x in all_of),
        "collectives": _beside(_named(x.counts.collectives) for x in all_of),
    }
    cells["kernels"] = _beside(f"{x.counts.kernels:+}" for x in all_of if is_gpu(case.device))
    for name in ("read", "written"):
        cells[name] = _beside(_bytes(x, getattr(x, name)) for x in all_of if has_reads)
    cells["temporary, %"] = _beside(f"{100 * x.temporary:.2f}" for x in all_of if has_reads)
    return cells


def _seconds(runs: Runs) -> dict[str, str]:
    cells = {
        f"{phase}, s": _beside(
            f"{statistics.median(getattr(x, phase) for x in results):.2f}"
            for results in runs.values()
        )
        for phase in ("trace", "compile")
    }
    pairs = zip(runs.get(OURS, []), runs.get(THEIRS, []), strict=False)
    ratios = [ours.compile / theirs.compile for ours, theirs in pairs]
    return cells | {"of Optax's": f"{statistics.median(ratios):.2f}" if ratios else ""}


def _bytes(x: Added, value: float) -> str:
    """What is in a branch is not counted: where that is the optimizer itself, nothing is said."""
    return "in a branch" if x.written < -0.5 else f"{value:.2f}"


def _named(collectives: collections.Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in collectives.items() if number) or "0"


def _beside(cells: Iterable[str]) -> str:
    """Ours, and Optax's after it."""
    return " / ".join(cells)

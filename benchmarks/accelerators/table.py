"""Formats the table row by row."""

import collections
import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.accelerators.cases import Case, Overhead, compute_overhead
from benchmarks.accelerators.devices import is_gpu
from benchmarks.accelerators.methods import NONE, OURS, THEIRS
from benchmarks.accelerators.steps import ONE, Compiled

NAMES = ["device", "model", "dtype", "mesh", "method"]
COUNTS = ["read", "written", "kernels", "branches and loops", "collectives", "temporary, %"]
SECONDS = ["trace, s", "compile, s", "of Optax's"]
Runs = dict[str, list[Compiled]]


def format_row(cells: Iterable[str]) -> str:
    """Formats a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def format_header(columns: Sequence[str]) -> str:
    """Formats the header of a table with the key columns and `columns`."""
    return f"{format_row([*NAMES, *columns])}\n|{'---|' * len([*NAMES, *columns])}"


# Rows share programs within a round, but programs are compiled again in the next round.
@functools.cache
def _compile(case: Case, variant: str, round_index: int) -> Compiled:
    return case.compile(variant)


def measure_rows(
    cases: Iterable[Case], variants: Iterable[str], rounds: int, columns: Sequence[str]
) -> Iterator[tuple[str, Runs]]:
    """Yields formatted rows with their programs."""
    for case in cases:
        runs = collections.defaultdict(list)
        for turn, variant in itertools.product(range(rounds), variants):
            runs[variant].append(_compile(case.canonicalize(variant), variant, turn))
        cells = _format_seconds(runs)
        if not set(columns) <= cells.keys():
            overheads = [_compute_overhead(case.canonicalize(v), runs[v][0]) for v in variants]
            cells |= _format_counts(case, overheads, runs)
        mesh = "" if case.mesh == ONE else case.mesh
        names = [case.device, case.model, case.dtype, mesh, case.method]
        yield format_row([*names, *(cells[column] for column in columns)]), runs


def _compute_overhead(case: Case, run: Compiled) -> Overhead:
    is_total = case.is_per_example
    return compute_overhead(run, None if is_total else _compile(case.canonicalize(NONE), NONE, 0))


def _format_counts(case: Case, overheads: list[Overhead], runs: Runs) -> dict[str, str]:
    has_reads = next(iter(runs.values()))[0].gradients > 1
    cells = {
        "branches and loops": _join(str(x.counts.branches + x.counts.loops) for x in overheads),
        "collectives": _join(_format_collectives(x.counts.collectives) for x in overheads),
    }
    cells["kernels"] = _join(f"{x.counts.kernels:+}" for x in overheads if is_gpu(case.device))
    for name in ("read", "written"):
        cells[name] = _join(_format_bytes(x, getattr(x, name)) for x in overheads if has_reads)
    cells["temporary, %"] = _join(f"{100 * x.temporary:.2f}" for x in overheads if has_reads)
    return cells


def _format_seconds(runs: Runs) -> dict[str, str]:
    cells = {
        f"{phase}, s": _join(
            f"{statistics.median(getattr(x, phase) for x in results):.2f}"
            for results in runs.values()
        )
        for phase in ("trace", "compile")
    }
    pairs = zip(runs.get(OURS, []), runs.get(THEIRS, []), strict=False)
    ratios = [ours.compile / theirs.compile for ours, theirs in pairs]
    return cells | {"of Optax's": f"{statistics.median(ratios):.2f}" if ratios else ""}


def _format_bytes(x: Overhead, value: float) -> str:
    """Formats a number of bytes, unless the optimizer is in a branch and was not counted."""
    return "in a branch" if x.written < -0.5 else f"{value:.2f}"


def _format_collectives(collectives: collections.Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in collectives.items() if number) or "0"


def _join(cells: Iterable[str]) -> str:
    """Joins the values of optaxclip and Optax."""
    return " / ".join(cells)

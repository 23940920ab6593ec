"""Summarizes and prints the verdicts of the study.

python -m benchmarks.research.study.summary study.jsonl
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.research.study import comparing, results
from benchmarks.research.study.comparing import (
    CASES,
    HARMS,
    HELPS,
    UNCLEAR,
    Case,
    Comparison,
    Study,
)
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.runs import BEST, NONE, Cell, Pair, group_cells

PRIVATE = "private"
"""The task with per-example clipping and its own methods, which are compared with the best
constant, because training without clipping would not be private."""
APART = (PRIVATE, "muon")
"""A task and an optimizer that are not pooled, because they lack many methods."""
BACK = 0.02
"""The margin above the loss before bad data for a recovery, as a fraction of the gain."""


class Recovery(NamedTuple):
    """The median steps of a recovery, which may be infinite, and the fraction without one."""

    steps: float
    never: float


class Summary(NamedTuple):
    """The comparisons for the page and the pictures.

    Attributes:
      study: The results.
      pooled: Comparisons with no method over pooled pairs, by case and method.
      beside_best: Comparisons with the best constant over pooled pairs, by case and method.
      single: Comparisons by case and pair, with no method or, on the private task, with the best
        constant.
    """

    study: Study
    pooled: Mapping[str, Mapping[str, Comparison]]
    beside_best: Mapping[str, Mapping[str, Comparison]]
    single: Mapping[str, Mapping[Pair, Mapping[str, Comparison]]]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Returns the cases that were run."""
        return tuple(case for case in CASES if any(self.single[case.name].values()))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Returns the pooled pairs."""
        return select_pooled(self.study.pairs)

    def list_methods(self, verdict: str, case: Case) -> list[str]:
        """Returns the methods with a pooled verdict, the best first."""
        by_method = self.pooled[case.name]
        names = [name for name, found in by_method.items() if found.verdict == verdict]
        return sorted(names, key=lambda name: -by_method[name].share.mean)

    def list_unhelpful(self) -> list[str]:
        """Returns the methods that help in no case."""
        helping = {name for case in self.cases for name in self.list_methods(HELPS, case)}
        compared = {name for by_method in self.pooled.values() for name in by_method}
        return [name for name in self.study.methods if name in compared - helping]

    def list_pairs(self, verdict: str, method: str, case: Case) -> list[Pair]:
        """Returns the pooled pairs with a verdict for a method."""
        by_method = self.single[case.name]
        found = [pair for pair in self.pairs if method in by_method.get(pair, {})]
        return [pair for pair in found if by_method[pair][method].verdict == verdict]

    def list_cells(self, method: str, case: Case) -> Iterator[tuple[Pair, Cell]]:
        """Yields the pairs and cells of a method in a case."""
        for pair in self.pairs:
            cell = self.study.get_cell(pair, method, case)
            if cell is not None:
                yield pair, cell

    def compute_lost(self, method: str, case: Case) -> float | None:
        """Returns the fraction of lost runs."""
        return _compute_mean([cell.is_lost for _, cell in self.list_cells(method, case)])

    def compute_clipped(self, method: str, case: Case) -> float | None:
        """Returns the fraction of steps that the method changed."""
        return _compute_mean([cell.clipped for _, cell in self.list_cells(method, case)])

    def compute_recovery(self, method: str, case: Case) -> Recovery | None:
        """Returns the recovery over all runs, or None for faults without an onset."""
        each = [
            cell.count_recovery_steps(BACK * self.study.gains[pair])
            for pair, cell in self.list_cells(method, case)
        ]
        known = [steps for steps in each if steps is not None]
        if not known:
            return None
        steps = np.concatenate(known)
        # Use the upper median, because the mean of a number and infinity is infinite.
        middle = np.sort(steps)[len(steps) // 2]
        return Recovery(float(middle), float(np.mean(np.isinf(steps))))

    def compute_times(self, method: str) -> Interval | None:
        """Returns the relative time of a run: the mean, smallest and largest over pairs."""
        ratios = []
        for pair in self.pairs:
            times = [
                (np.median(ours.seconds), np.median(theirs.seconds))
                for case in CASES
                if (ours := self.study.get_cell(pair, method, case)) is not None
                and (theirs := self.study.get_cell(pair, NONE, case)) is not None
            ]
            if times:
                ours, theirs = np.sum(times, 0)
                ratios.append(float(ours / theirs))
        mean = np.exp(np.mean(np.log(ratios))) if ratios else 0.0
        return Interval(float(mean), min(ratios), max(ratios)) if ratios else None


def _compute_mean(values: Sequence[np.ndarray]) -> float | None:
    known = [mean for mean in map(np.mean, values) if not np.isnan(mean)]
    return float(np.mean(known)) if known else None


def select_pooled(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Returns the pairs that are pooled."""
    return tuple(pair for pair in pairs if not set(pair) & set(APART))


def summarize(study: Study) -> Summary:
    """Computes all comparisons."""
    pairs = select_pooled(study.pairs)
    pooled, beside_best = (
        {case.name: comparing.compare(study, pairs, base, case) for case in CASES}
        for base in (NONE, BEST)
    )
    single = {
        case.name: {
            pair: comparing.compare(study, [pair], BEST if pair.task == PRIVATE else NONE, case)
            for pair in study.pairs
        }
        for case in CASES
    }
    return Summary(study, pooled, beside_best, single)


def load(path: Path) -> tuple[Summary, Mapping[str, str]]:
    """Loads the summary and the versions of a file of results."""
    lines = list(results.read(path))
    versions = lines[0].get("versions", {}) if lines else {}
    return summarize(Study.from_cells(group_cells(lines))), versions


def main(arguments: list[str] | None = None) -> None:
    """Prints the verdicts by case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="file of JSON lines, one per run")
    summary, _ = load(parser.parse_args(arguments).results)
    for case in summary.cases:
        print(f"\n{case.title}")
        for verdict in (HELPS, HARMS, UNCLEAR):
            by_method = summary.pooled[case.name]
            names = [
                f"{name} ({100 * by_method[name].share.mean:+.1f})"
                for name in summary.list_methods(verdict, case)
            ]
            print(f"  {verdict}: {', '.join(names) or '-'}")
    print(f"\nhelps nowhere: {', '.join(summary.list_unhelpful()) or '-'}")


if __name__ == "__main__":
    main()

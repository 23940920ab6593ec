"""What the study found: its verdicts.

  python -m benchmarks.research.study.summary study.jsonl

The page has all the rest: `benchmarks.research.study.page`.
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
from benchmarks.research.study.runs import BEST, NONE, Cell, Pair, cells

PRIVATE = "private"
"""The task in which each example is clipped, so that methods are others. Nothing would not be
private, so they stand beside the best constant."""
APART = (PRIVATE, "muon")
"""A task and an optimizer that are not put together with the others, as they have some methods."""
BACK = 0.02
"""A share of the gain: so much above the loss before bad data is as good as back."""


class Recovery(NamedTuple):
    """How soon losses are back after bad data.

    Attributes:
      steps: the median of the runs; infinite if most never come back.
      never: the share of runs that do not.
    """

    steps: float
    never: float


class Summary(NamedTuple):
    """What the page and the pictures tell.

    Attributes:
      study: the results.
      pooled: comparisons with nothing over all pairs but those apart, by case and method.
      beside_best: the same, beside the best constant.
      single: comparisons on one pair, by case and pair: with nothing, or on a task apart with the
        best constant.
    """

    study: Study
    pooled: Mapping[str, Mapping[str, Comparison]]
    beside_best: Mapping[str, Mapping[str, Comparison]]
    single: Mapping[str, Mapping[Pair, Mapping[str, Comparison]]]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Those that were run."""
        return tuple(case for case in CASES if any(self.single[case.name].values()))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Those that are put together."""
        return together(self.study.pairs)

    def found(self, verdict: str, case: Case) -> list[str]:
        """The methods of which the pooled comparison says so, the best first."""
        of_case = self.pooled[case.name]
        names = [name for name, found in of_case.items() if found.verdict == verdict]
        return sorted(names, key=lambda name: -of_case[name].share.mean)

    def helps_nowhere(self) -> list[str]:
        """The methods that help in no case."""
        helping = {name for case in self.cases for name in self.found(HELPS, case)}
        compared = {name for of_case in self.pooled.values() for name in of_case}
        return [name for name in self.study.methods if name in compared - helping]

    def pairs_with(self, verdict: str, method: str, case: Case) -> list[Pair]:
        """The pairs on which the method alone was found so, of those that are put together."""
        of_case = self.single[case.name]
        found = [pair for pair in self.pairs if method in of_case.get(pair, {})]
        return [pair for pair in found if of_case[pair][method].verdict == verdict]

    def cells(self, method: str, case: Case) -> Iterator[tuple[Pair, Cell]]:
        """Those of a method in a case."""
        for pair in self.pairs:
            cell = self.study.cell(pair, method, case)
            if cell is not None:
                yield pair, cell

    def lost(self, method: str, case: Case) -> float | None:
        """The share of runs that were lost."""
        return _mean([cell.is_lost for _, cell in self.cells(method, case)])

    def clipped(self, method: str, case: Case) -> float | None:
        """The share of steps that the method changed."""
        return _mean([cell.clipped for _, cell in self.cells(method, case)])

    def recovery(self, method: str, case: Case) -> Recovery | None:
        """Over all runs, if the fault begins somewhere."""
        each = [
            cell.steps_to_recover(BACK * self.study.gains[pair])
            for pair, cell in self.cells(method, case)
        ]
        known = [steps for steps in each if steps is not None]
        if not known:
            return None
        steps = np.concatenate(known)
        # Of an even number the upper one: half of the sum of a number and infinity says little.
        middle = np.sort(steps)[len(steps) // 2]
        return Recovery(float(middle), float(np.mean(np.isinf(steps))))

    def seconds(self, method: str) -> Interval | None:
        """Time of a run over that with nothing: the mean of the pairs, the least and the most."""
        ratios = []
        for pair in self.pairs:
            times = [
                (np.median(ours.seconds), np.median(theirs.seconds))
                for case in CASES
                if (ours := self.study.cell(pair, method, case)) is not None
                and (theirs := self.study.cell(pair, NONE, case)) is not None
            ]
            if times:
                ours, theirs = np.sum(times, 0)
                ratios.append(float(ours / theirs))
        mean = np.exp(np.mean(np.log(ratios))) if ratios else 0.0
        return Interval(float(mean), min(ratios), max(ratios)) if ratios else None


def _mean(values: Sequence[np.ndarray]) -> float | None:
    known = [mean for mean in map(np.mean, values) if not np.isnan(mean)]
    return float(np.mean(known)) if known else None


def together(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Those pairs that all methods have, or nearly."""
    return tuple(pair for pair in pairs if not set(pair) & set(APART))


def summarize(study: Study) -> Summary:
    """All comparisons."""
    pairs = together(study.pairs)
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
    """The summary of a file of results, and the versions that it names."""
    lines = list(results.read(path))
    versions = lines[0].get("versions", {}) if lines else {}
    return summarize(Study.of(cells(lines))), versions


def main(arguments: list[str] | None = None) -> None:
    """Prints what helps where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    summary, _ = load(parser.parse_args(arguments).results)
    for case in summary.cases:
        print(f"\n{case.title}")
        for verdict in (HELPS, HARMS, UNCLEAR):
            of_case = summary.pooled[case.name]
            names = [
                f"{name} ({100 * of_case[name].share.mean:+.1f})"
                for name in summary.found(verdict, case)
            ]
            print(f"  {verdict}: {', '.join(names) or '-'}")
    print(f"\nhelps nowhere: {', '.join(summary.helps_nowhere()) or '-'}")


if __name__ == "__main__":
    main()

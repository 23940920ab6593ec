"""Judges guards by the measure that `guard.md` wrote down before they were run.

python -m benchmarks.research.study.judging guard.jsonl
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.research.study import inference, results
from benchmarks.research.study.comparing import CASES, Case, Study
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.runs import BEST, NONE, RATES, Key, Pair, cells

PRICE, BEHIND = 0.01, 0.02
"""What a guard may cost where nothing goes wrong, and how far it may be behind the best constant,
both as shares of what training without a guard learns."""
CALM = "nothing goes wrong"
FAULTS = tuple(case for case in CASES if case.fault != "none")


class Judged(NamedTuple):
    """A guard on the tasks of one optimizer, or on all.

    Attributes:
      price: how much less it learns where nothing goes wrong, at the rate that is best without it.
      beside: for each fault how much more it learns than the best constant, each at the rate that
        is best for it where nothing goes wrong.
      lost: for each fault the share of runs that are lost.
      past: how much more it learns than the best constant at a rate that is too high; not judged.
    """

    price: Interval
    beside: dict[str, Interval]
    lost: dict[str, float]
    past: Interval

    @property
    def holds(self) -> bool:
        """Whether it is as good as the measure asks."""
        is_near = all(x.mean >= -BEHIND for name, x in self.beside.items() if name != "nan")
        return self.price.mean <= PRICE and is_near and self.lost["nan"] == 0


def groups(study: Study) -> dict[str, list[Pair]]:
    """The pairs of each optimizer, and all."""
    optimizers = sorted({pair.optimizer for pair in study.pairs})
    found = {name: [pair for pair in study.pairs if pair.optimizer == name] for name in optimizers}
    return {**found, "all": list(study.pairs)}


def holds(study: Study, method: str) -> bool:
    """Whether the guard holds for each optimizer and for all."""
    return all(judged(study, pairs, method).holds for pairs in groups(study).values())


def judged(study: Study, pairs: Sequence[Pair], method: str) -> Judged:
    """The guard, every pair counting alike."""
    past = next(case for case in CASES if case.name == "past")
    return Judged(
        price=_over([_price(study, pair, method) for pair in pairs]),
        beside={case.name: _beside(study, pairs, method, case) for case in FAULTS},
        lost={case.name: _lost(study, pairs, method, case) for case in FAULTS},
        past=_beside(study, pairs, method, past),
    )


def _price(study: Study, pair: Pair, method: str) -> dict[int, float]:
    """By seed: at the rate that is best without a guard, the loss that the guard adds."""

    def ends(name: str, rate: str) -> dict[int, float]:
        cell = study.cells[Key(pair, name, "none", rate)]
        return dict(zip(cell.seeds.tolist(), cell.end.tolist(), strict=True))

    rate = min(RATES, key=lambda rate: np.mean(list(ends(NONE, rate).values())))
    without, guarded = ends(NONE, rate), ends(method, rate)
    return {seed: (guarded[seed] - without[seed]) / study.gains[pair] for seed in guarded}


def _beside(study: Study, pairs: Sequence[Pair], method: str, case: Case) -> Interval:
    return _over([dict(study.differences(pair, method, BEST, case)) for pair in pairs])


def _over(each: Sequence[dict[int, float]]) -> Interval:
    """Over seeds, of the mean over pairs."""
    seeds = sorted(set.intersection(*map(set, each)))
    return inference.interval(np.mean([[of[seed] for seed in seeds] for of in each], 0))


def _lost(study: Study, pairs: Sequence[Pair], method: str, case: Case) -> float:
    found = [study.cell(pair, method, case) for pair in pairs]
    return float(np.mean([cell.is_lost.mean() for cell in found if cell is not None]))


def table(study: Study, methods: Sequence[str]) -> Iterator[str]:
    """A row for each guard and optimizer, in percent."""
    names = [case.short for case in FAULTS if case.name != "nan"]
    head = ["guard", "optimizer", CALM, *names, "lost to NaN", "rate too high", "holds"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for method in methods:
        for optimizer, pairs in groups(study).items():
            found = judged(study, pairs, method)
            beside = [found.beside[case.name] for case in FAULTS if case.name != "nan"]
            numbers = [-found.price.mean, *(x.mean for x in beside)]
            cells = [f"{100 * x:+.1f}" for x in numbers]
            cells += [f"{100 * found.lost['nan']:.0f}", f"{100 * found.past.mean:+.1f}"]
            yield f"| {' | '.join([method, optimizer, *cells, 'yes' if found.holds else 'no'])} |"


def load(path: Path) -> Study:
    """The study of a file of results."""
    return Study.of(cells(results.read(path)))


def main(arguments: list[str] | None = None) -> None:
    """Prints what was found of each guard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    study = load(parser.parse_args(arguments).results)
    guards = [name for name in study.methods if name not in (NONE, BEST)]
    print("\n".join(table(study, guards)))


if __name__ == "__main__":
    main()

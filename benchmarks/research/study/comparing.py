"""Compares methods with a base method for a fault, and tests the differences for significance."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.research.study import inference
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.methods import METHODS, PRIVATE
from benchmarks.research.study.runs import NONE, RATES, Cell, Cells, Key, Pair

HELPS, UNCLEAR, HARMS = "helps", "no difference shown", "harms"
CHANCE = 0.05
SMALLEST_SHARE = 0.005
"""Smaller fractions of the gain do not count as differences, even if they are significant."""


class Case(NamedTuple):
    """The conditions of a comparison. If `rate` is None, methods use their best learning rate."""

    name: str
    title: str
    short: str
    fault: str
    rate: str | None


CASES = (
    Case("best", "no fault, best rate", "best LR", "none", None),
    Case("calm", "no fault, calm rate", "0.25 × edge LR", "none", "calm"),
    Case("edge", "no fault, rate at the edge", "edge LR", "none", "edge"),
    Case("past", "no fault, rate past the edge", "4 × edge LR", "none", "past"),
    Case("spike", "spikes", "spikes", "spike", None),
    Case("tails", "heavy tails", "heavy tails", "tails", None),
    Case("nan", "NaN in a microbatch", "NaN", "nan", None),
    Case("jump", "a jump of scale", "jump in scale", "jump", None),
    Case("stretch", "a stretch of bad data", "bad stretch", "stretch", None),
)


class Comparison(NamedTuple):
    """A comparison of a method with a base method.

    Attributes:
      share: The mean improvement over the base as a fraction of the gain of the pair.
      chance: The p-value, corrected for the number of compared methods.
      pairs, seeds: The numbers of pairs and seeds.
    """

    share: Interval
    chance: float
    pairs: int
    seeds: int

    @property
    def verdict(self) -> str:
        """Returns whether the method helps, harms, or neither."""
        if self.chance >= CHANCE or abs(self.share.mean) < SMALLEST_SHARE:
            return UNCLEAR
        return HELPS if self.share.mean > 0 else HARMS


class Study(NamedTuple):
    """All results.

    Attributes:
      cells: The cells by key.
      pairs: The sorted pairs.
      methods: The methods in the order of `benchmarks.research.study.methods`, then others.
      gains: The decrease of the loss without fault and method at the best learning rate, by pair.
        If the loss does not decrease, the largest decrease of all methods. Differences are divided
        by it, so that pairs are comparable. The spread over seeds is not a suitable unit, because
        it emphasizes tasks whose seeds agree.
    """

    cells: Cells
    pairs: tuple[Pair, ...]
    methods: tuple[str, ...]
    gains: Mapping[Pair, float]

    @classmethod
    def from_cells(cls, cells: Cells) -> "Study":
        """Builds the study from cells."""
        pairs = tuple(sorted({key.pair for key in cells}))
        found = dict.fromkeys(key.method for key in cells)
        known = [method for method in (METHODS | PRIVATE) if method in found]
        methods = tuple(dict.fromkeys([*known, *found]))
        max_gains: dict[tuple[Pair, bool], float] = {}
        for key, cell in cells.items():
            if key.fault == "none":
                group = key.pair, key.method == NONE
                max_gains[group] = max(
                    max_gains.get(group, 0.0), float(np.mean(cell.start - cell.end))
                )
        gains = {
            pair: max_gains.get((pair, True)) or max_gains.get((pair, False), 0.0) for pair in pairs
        }
        return cls(cells, pairs, methods, gains)

    def get_cell(self, pair: Pair, method: str, case: Case) -> Cell | None:
        """Returns the cell, or None if it was not run.

        If the case has no learning rate, selects the cell with the lowest mean final loss. Faults
        run at one learning rate. Without a fault, all three learning rates are required, so that
        all methods have the same choice.
        """
        rates = RATES if case.rate is None else (case.rate,)
        found = [self.cells.get(Key(pair, method, case.fault, rate)) for rate in rates]
        known = [cell for cell in found if cell is not None]
        if not known or (case.fault == "none" and len(known) < len(rates)):
            return None
        return min(known, key=lambda x: x.end.mean())

    def compute_differences(
        self, pair: Pair, method: str, base: str, case: Case
    ) -> Mapping[int, float]:
        """Returns the decrease of the final loss by seed, as a fraction of the gain."""
        ours, theirs = self.get_cell(pair, method, case), self.get_cell(pair, base, case)
        if ours is None or theirs is None or not self.gains[pair]:
            return {}
        ends = dict(zip(ours.seeds.tolist(), ours.end.tolist(), strict=True))
        pairs = zip(theirs.seeds.tolist(), theirs.end.tolist(), strict=True)
        return {seed: (end - ends[seed]) / self.gains[pair] for seed, end in pairs if seed in ends}


def compare(study: Study, pairs: Sequence[Pair], base: str, case: Case) -> Mapping[str, Comparison]:
    """Compares all methods that were run on some of the pairs with the base.

    The difference of a seed is the mean over the pairs, so that pairs have equal weights. P-values
    are those of a sign-flip test over seeds, corrected for the number of methods.
    """
    found = {}
    for method in study.methods:
        differences = [study.compute_differences(pair, method, base, case) for pair in pairs]
        differences = [by_seed for by_seed in differences if len(by_seed) > 1]
        seeds = set.intersection(*map(set, differences)) if differences else set()
        if method != base and len(seeds) > 1:
            means = [np.mean([by_seed[seed] for by_seed in differences]) for seed in sorted(seeds)]
            found[method] = np.array(means), len(differences)
    chances = inference.correct_chances(
        [inference.run_sign_test(means) for means, _ in found.values()]
    )
    return {
        method: Comparison(inference.compute_interval(means), chance, count, len(means))
        for (method, (means, count)), chance in zip(found.items(), chances, strict=True)
    }

"""Each method beside a base, by one fault: how much it is worth, and whether that is chance."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.research.study import inference
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.methods import METHODS, PRIVATE
from benchmarks.research.study.runs import NONE, RATES, Cell, Cells, Key, Pair

HELPS, UNCLEAR, HARMS = "helps", "no difference shown", "harms"
CHANCE = 0.05
LEAST = 0.005
"""A smaller share of the gain is no difference that matters, however sure it is."""


class Case(NamedTuple):
    """What every method is tried on.

    Attributes:
      name: for anchors, and in the code.
      title: for readers.
      short: the same where there is little room.
      fault: as in the results.
      rate: the same; None for that which each method and pair has of its own, the best.
    """

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
    """A method beside a base.

    Attributes:
      share: the loss that it gains on the base, as a share of the pair's gain, over seeds.
      chance: that so large a mean comes by chance, corrected for the methods compared.
      pairs: how many it was compared on.
      seeds: how many.
    """

    share: Interval
    chance: float
    pairs: int
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether it helps."""
        if self.chance >= CHANCE or abs(self.share.mean) < LEAST:
            return UNCLEAR
        return HELPS if self.share.mean > 0 else HARMS


class Study(NamedTuple):
    """All results.

    Attributes:
      cells: by what was run.
      pairs: sorted.
      methods: in the order of `benchmarks.research.study.methods`, and others behind.
      gains: of each pair, the loss that is learned away without a fault and without a method, at
        the best rate; where that is nothing, the most that any method learns away. It is the unit
        in which pairs are put together, as losses of different tasks have different ones. The
        spread over seeds would be another, but one that makes much of a task because its seeds
        agree.
    """

    cells: Cells
    pairs: tuple[Pair, ...]
    methods: tuple[str, ...]
    gains: Mapping[Pair, float]

    @classmethod
    def of(cls, cells: Cells) -> "Study":
        """The study with these cells."""
        pairs = tuple(sorted({key.pair for key in cells}))
        found = dict.fromkeys(key.method for key in cells)
        known = [method for method in (METHODS | PRIVATE) if method in found]
        methods = tuple(dict.fromkeys([*known, *found]))
        most: dict[tuple[Pair, bool], float] = {}
        for key, cell in cells.items():
            if key.fault == "none":
                group = key.pair, key.method == NONE
                most[group] = max(most.get(group, 0.0), float(np.mean(cell.start - cell.end)))
        gains = {pair: most.get((pair, True)) or most.get((pair, False), 0.0) for pair in pairs}
        return cls(cells, pairs, methods, gains)

    def cell(self, pair: Pair, method: str, case: Case) -> Cell | None:
        """The cell, if it was run; without a rate that whose mean end is the lowest.

        Faults are run at one rate, which is then taken. Without a fault all three rates have to be
        there: with two a method would have less choice.
        """
        rates = RATES if case.rate is None else (case.rate,)
        found = [self.cells.get(Key(pair, method, case.fault, rate)) for rate in rates]
        known = [cell for cell in found if cell is not None]
        if not known or (case.fault == "none" and len(known) < len(rates)):
            return None
        return min(known, key=lambda x: x.end.mean())

    def differences(self, pair: Pair, method: str, base: str, case: Case) -> Mapping[int, float]:
        """By seed: how much less loss a run of the method ends with, as a share of the gain."""
        ours, theirs = self.cell(pair, method, case), self.cell(pair, base, case)
        if ours is None or theirs is None or not self.gains[pair]:
            return {}
        ends = dict(zip(ours.seeds.tolist(), ours.end.tolist(), strict=True))
        pairs = zip(theirs.seeds.tolist(), theirs.end.tolist(), strict=True)
        return {seed: (end - ends[seed]) / self.gains[pair] for seed, end in pairs if seed in ends}


def compare(study: Study, pairs: Sequence[Pair], base: str, case: Case) -> Mapping[str, Comparison]:
    """All methods that were run on some of the pairs, each beside the base.

    A seed's difference is the mean over those pairs that have both, so that each pair counts as
    much as any other. Chances are those of all signs of the seeds' differences, and corrected for
    the number of methods here.
    """
    found = {}
    for method in study.methods:
        each = [study.differences(pair, method, base, case) for pair in pairs]
        each = [of_pair for of_pair in each if len(of_pair) > 1]
        seeds = set.intersection(*map(set, each)) if each else set()
        if method != base and len(seeds) > 1:
            means = [np.mean([of_pair[seed] for of_pair in each]) for seed in sorted(seeds)]
            found[method] = np.array(means), len(each)
    chances = inference.holm([inference.sign_flip(means) for means, _ in found.values()])
    return {
        method: Comparison(inference.interval(means), chance, count, len(means))
        for (method, (means, count)), chance in zip(found.items(), chances, strict=True)
    }

"""The runs of a results file, put together by what was run."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.research import curves
from benchmarks.research.study import plan

NONE, BEST = "none", "constant (best)"
RATES = tuple(plan.RATES)
TOO_FEW = 2


class Pair(NamedTuple):
    """What is trained, and with what."""

    task: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}"


class Key(NamedTuple):
    """What a cell's runs have in common."""

    pair: Pair
    method: str
    fault: str
    rate: str


class Cell(NamedTuple):
    """Runs that differ in nothing but the seed.

    Attributes:
      seeds: int[n], rising.
      held_out: losses [n, 1 + evaluations], the first before any step.
      clipped: the share of steps that the method changed, [n]; NaN where nobody counted.
      onset: the first bad step, [n], or None for a fault without one.
      every: steps from one evaluation to the next.
      seconds: the processor's, [n].
      learning_rate: of the optimizer.
      threshold: of a constant.
    """

    seeds: np.ndarray
    held_out: np.ndarray
    clipped: np.ndarray
    onset: np.ndarray | None
    every: int
    seconds: np.ndarray
    learning_rate: float
    threshold: float | None

    @property
    def start(self) -> np.ndarray:
        """The loss before any step, [n]."""
        return self.held_out[:, 0]

    @property
    def is_lost(self) -> np.ndarray:
        """Whether a run's end is not finite or not below its start, bool[n]."""
        return plan.is_lost(self.held_out)

    @property
    def end(self) -> np.ndarray:
        """The loss at the end, [n]; of a lost run, as if nothing had been learned, at its start."""
        return plan.final(self.held_out)

    def steps_to_recover(self, margin: float) -> np.ndarray | None:
        """Of each run [n], if the fault has a first bad step, and enough losses come before it."""
        if self.onset is None or np.min(self.onset) < (curves.LATEST - 1) * self.every:
            return None
        # The first loss is that before any step, so all are `every` steps earlier.
        onset = self.onset + self.every
        return curves.steps_to_recover(self.held_out, onset, self.every, margin)


Cells = Mapping[Key, Cell]


def cells(lines: Iterable[Mapping[str, Any]]) -> Cells:
    """The cells of the lines that are runs, in their order.

    Those with one seed, of which no spread is known, are left out.

    Raises:
      ValueError: for a run that is there twice.
    """
    found: dict[Key, dict[int, Any]] = collections.defaultdict(dict)
    for run in lines:
        if "method" not in run:
            continue
        pair = Pair(run["task"], run["optimizer"])
        key = Key(pair, run["method"], run["fault"], run["rate"])
        if run["seed"] in found[key]:
            raise ValueError(f"each run must be there once, got two of {key}, seed {run['seed']}")
        found[key][run["seed"]] = run
    return {key: _cell(seeds) for key, seeds in found.items() if len(seeds) >= TOO_FEW}


def _cell(runs: Mapping[int, Mapping[str, Any]]) -> Cell:
    rows = [runs[seed] for seed in sorted(runs)]
    first = rows[0]

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], np.float64)  # null becomes NaN

    return Cell(
        seeds=np.array(sorted(runs)),
        held_out=column("held_out"),
        clipped=column("clipped"),
        onset=None if any(row["onset"] is None for row in rows) else column("onset").astype(int),
        every=first["every"],
        seconds=column("seconds"),
        learning_rate=first["learning_rate"],
        threshold=first["threshold"],
    )

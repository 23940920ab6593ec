"""Groups the runs of a results file into cells."""

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
    """A task and an optimizer."""

    task: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}"


class Key(NamedTuple):
    """The common properties of the runs of a cell."""

    pair: Pair
    method: str
    fault: str
    rate: str


class Cell(NamedTuple):
    """Runs that differ only in their seeds.

    Attributes:
      seeds: The sorted seeds, int[n].
      held_out: The held-out losses, [n, 1 + evaluations], including the initial loss.
      clipped: The fraction of steps that the method changed, [n], or NaN if unknown.
      onset: The first bad step, [n], or None.
      every: The number of steps between evaluations.
      seconds: The CPU seconds, [n].
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
        """Returns the initial losses, [n]."""
        return self.held_out[:, 0]

    @property
    def is_lost(self) -> np.ndarray:
        """Returns which runs have a final loss that is non-finite or not below the start."""
        return plan.is_lost(self.held_out)

    @property
    def end(self) -> np.ndarray:
        """Returns the final losses, [n], or the initial losses for lost runs."""
        return plan.get_final_losses(self.held_out)

    def count_recovery_steps(self, margin: float) -> np.ndarray | None:
        """Returns the recovery times, [n], or None without a bad step or earlier losses."""
        if self.onset is None or np.min(self.onset) < (curves.LATEST - 1) * self.every:
            return None
        # `held_out` includes the initial loss, so evaluations are shifted by `every` steps.
        onset = self.onset + self.every
        return curves.count_recovery_steps(self.held_out, onset, self.every, margin)


Cells = Mapping[Key, Cell]


def group_cells(lines: Iterable[Mapping[str, Any]]) -> Cells:
    """Groups runs into cells, without cells that have only one seed.

    Raises:
      ValueError: If there are duplicate runs.
    """
    found: dict[Key, dict[int, Any]] = collections.defaultdict(dict)
    for run in lines:
        if "method" not in run:
            continue
        pair = Pair(run["task"], run["optimizer"])
        key = Key(pair, run["method"], run["fault"], run["rate"])
        if run["seed"] in found[key]:
            raise ValueError(f"runs must be unique, got two of {key}, seed {run['seed']}")
        found[key][run["seed"]] = run
    return {key: _build_cell(seeds) for key, seeds in found.items() if len(seeds) >= TOO_FEW}


def _build_cell(runs: Mapping[int, Mapping[str, Any]]) -> Cell:
    rows = [runs[seed] for seed in sorted(runs)]
    first = rows[0]

    def get_column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], np.float64)  # None becomes NaN.

    return Cell(
        seeds=np.array(sorted(runs)),
        held_out=get_column("held_out"),
        clipped=get_column("clipped"),
        onset=None
        if any(row["onset"] is None for row in rows)
        else get_column("onset").astype(int),
        every=first["every"],
        seconds=get_column("seconds"),
        learning_rate=first["learning_rate"],
        threshold=first["threshold"],
    )

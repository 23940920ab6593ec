"""What the study runs: how much of it, at which rates, with which thresholds."""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.research import curves
from benchmarks.research.study.faults import FAULTS

RATES = {"calm": 0.25, "edge": 1.0, "past": 4.0}
"""Each rate in multiples of the edge: the largest at which no clip is needed."""
NEAR = 0.05
"""Of what the best rate gains: at the edge a run without a clip gains nearly as much."""
GRID = {
    "adamw": 2.0 ** np.arange(-11, 1),
    "sgd": 2.0 ** np.arange(-8, 4),
    "muon": 2.0 ** np.arange(-11, 1),
    "lion": 2.0 ** np.arange(-15, -3),
    "adafactor": 2.0 ** np.arange(-9, 3),
}
"""Where the edge is looked for."""
THRESHOLDS = 2.0 ** np.arange(-6, 4)
"""Constants of the sweep, in multiples of the median norm of a run without a clip."""
FIRST_TUNING = 1000
"""How far the seeds that find rates and thresholds are from those that are reported."""


class Effort(NamedTuple):
    """How much is run.

    Attributes:
      steps: of each run.
      every: steps from one evaluation to the next.
      seeds: how many are reported.
      tuning: how many find the rates and the best constants.
      chunk: runs of one call of a program; best if it divides those of a rate and fault.
      first: the first seed that is reported; those that find rates and constants move along.
    """

    steps: int = 300
    every: int = 10
    seeds: int = 12
    tuning: int = 3
    chunk: int = 12
    first: int = 0

    @property
    def reported(self) -> list[int]:
        """The seeds of the figures."""
        return [self.first + i for i in range(self.seeds)]

    @property
    def finding(self) -> list[int]:
        """The seeds that find rates and thresholds, which are not reported."""
        return [self.first + FIRST_TUNING + i for i in range(self.tuning)]


QUICK = Effort(steps=40, every=10, seeds=2, tuning=1, chunk=2)
QUICK_PAIRS = (("conv", "adamw"), ("private", "adamw"))
QUICK_METHODS = ("none", "constant (best)", "ZClip", "skip above", "quantile")


BATCHES, ON_BATCHES = (16, 128), ("none", "AGC", "AGC (paper)")
"""Of AGC's claim: sizes of batches, and methods."""
RATES_OF_BATCHES = 2.0 ** np.arange(-7, 1)


class OfBatches(NamedTuple):
    """One program of AGC's claim, that large batches and rates need it.

    Attributes:
      batch: its size, on the task "conv" with SGD.
      clip: the method's name.
    """

    batch: int
    clip: str


class Cell(NamedTuple):
    """One program.

    Attributes:
      task: its name.
      optimizer: its name.
      method: its name.
    """

    task: str
    optimizer: str
    method: str


class Found(NamedTuple):
    """What is found about a task and an optimizer without a clip, before the cells run.

    Attributes:
      edge: the learning rate.
      losses: for each rate of the grid the mean final loss of the tuning seeds, a lost one's being
        that at the start.
      norm: the median norm at the edge.
      suggested: the threshold that `tuning.suggest` gives from the norms at the edge.
    """

    edge: float
    losses: dict[float, float]
    norm: float
    suggested: float


def final(held_out: np.ndarray) -> np.ndarray:
    """The loss at the end of runs [..., evaluations]; of lost ones that at the start.

    A run is lost if it does not end finite and below its start.
    """
    return np.where(is_lost(held_out), held_out[..., 0], curves.last(held_out))


def is_lost(held_out: np.ndarray) -> np.ndarray:
    """Whether runs [..., evaluations] do not end finite and below their start."""
    return ~(curves.last(held_out) < held_out[..., 0])


def edge(rates: np.ndarray, losses: np.ndarray, start: float) -> float:
    """The largest rate at which the loss, float[rates], is nearly as low as at the best one."""
    best = losses.min()
    is_near = losses <= best + NEAR * (start - best)
    return float(rates[is_near].max())


def conditions(effort: Effort, best_rate: str | None = None) -> list[tuple[str, str, int]]:
    """Rate, fault and seed of the runs of a cell.

    Without a rate those without a fault, at all rates; with one those with faults, at this rate.
    """
    if best_rate is None:
        pairs = [(rate, "none") for rate in RATES]
    else:
        pairs = [(best_rate, fault) for fault in FAULTS if fault != "none"]
    return [(*pair, seed) for pair in pairs for seed in effort.reported]


def runs(of: Cell | OfBatches, effort: Effort) -> int:
    """How many a cell has."""
    if isinstance(of, OfBatches):
        return len(RATES_OF_BATCHES) * effort.seeds
    return len(conditions(effort)) + len(conditions(effort, "edge"))


def settings(effort: Effort) -> dict[str, Any]:
    """What two files of results must share to be one study."""
    return {**effort._asdict(), "rates": RATES, "faults": list(FAULTS)}

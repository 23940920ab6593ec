"""Defines the runs of the study with their learning rates and thresholds."""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.research import curves
from benchmarks.research.study.faults import FAULTS

RATES = {"calm": 0.25, "edge": 1.0, "past": 4.0}
"""Learning rates in multiples of the edge, the largest rate that does not require clipping."""
NEAR = 0.05
"""The fraction of the gain of the best rate that a run may lose at the edge."""
GRID = {
    "adamw": 2.0 ** np.arange(-11, 1),
    "sgd": 2.0 ** np.arange(-8, 4),
    "muon": 2.0 ** np.arange(-11, 1),
    "lion": 2.0 ** np.arange(-15, -3),
    "adafactor": 2.0 ** np.arange(-9, 3),
}
"""The learning rates from which the edge is selected."""
THRESHOLDS = 2.0 ** np.arange(-6, 4)
"""Constants of the sweep, in multiples of the median norm of a run without clipping."""
FIRST_TUNING = 1000
"""The offset of the seeds that determine rates and thresholds from the reported seeds."""


class Effort(NamedTuple):
    """The numbers of steps and runs.

    Attributes:
      steps: The number of steps of a run.
      every: The number of steps between evaluations.
      seeds: The number of reported seeds.
      tuning: The number of seeds that determine rates and constants.
      chunk: The number of runs per call, which should divide the runs of a rate and fault.
      first: The first reported seed, which also shifts the other seeds.
    """

    steps: int = 300
    every: int = 10
    seeds: int = 12
    tuning: int = 3
    chunk: int = 12
    first: int = 0

    @property
    def reported(self) -> list[int]:
        """Returns the seeds of the figures."""
        return [self.first + i for i in range(self.seeds)]

    @property
    def finding(self) -> list[int]:
        """Returns the seeds that determine rates and thresholds, which are not reported."""
        return [self.first + FIRST_TUNING + i for i in range(self.tuning)]


QUICK = Effort(steps=40, every=10, seeds=2, tuning=1, chunk=2)
QUICK_PAIRS = (("conv", "adamw"), ("private", "adamw"))
QUICK_METHODS = ("none", "constant (best)", "ZClip", "skip above", "quantile")


BATCHES, ON_BATCHES = (16, 128), ("none", "AGC", "AGC (paper)")
"""The batch sizes and methods for the claim of AGC."""
RATES_OF_BATCHES = 2.0 ** np.arange(-7, 1)


class BatchCell(NamedTuple):
    """The batch size and the method of a program for the claim of AGC."""

    batch: int
    clip: str


class Cell(NamedTuple):
    """The names of the task, the optimizer and the method of a program."""

    task: str
    optimizer: str
    method: str


class Found(NamedTuple):
    """The results for a task and an optimizer without clipping.

    Attributes:
      edge: The largest learning rate that is nearly as good as the best.
      losses: The mean final losses by learning rate, with the initial loss for lost runs.
      norm: The median norm at the edge.
      suggested: The threshold that `tuning.suggest` returns for the norms at the edge.
    """

    edge: float
    losses: dict[float, float]
    norm: float
    suggested: float


def get_final_losses(held_out: np.ndarray) -> np.ndarray:
    """Returns the final losses of runs [..., evaluations], or the initial losses of lost runs."""
    return np.where(is_lost(held_out), held_out[..., 0], curves.average_last(held_out))


def is_lost(held_out: np.ndarray) -> np.ndarray:
    """Returns `True` for runs whose final loss is non-finite or not below the initial loss."""
    return ~(curves.average_last(held_out) < held_out[..., 0])


def find_edge(rates: np.ndarray, losses: np.ndarray, start: float) -> float:
    """Returns the largest rate whose loss is nearly as low as the lowest loss."""
    best = losses.min()
    is_near = losses <= best + NEAR * (start - best)
    return float(rates[is_near].max())


def list_conditions(effort: Effort, best_rate: str | None = None) -> list[tuple[str, str, int]]:
    """Returns the rates, faults and seeds of the runs of a cell.

    Without `best_rate`, returns runs without a fault at all rates. Otherwise, returns runs with
    faults at this rate.
    """
    if best_rate is None:
        pairs = [(rate, "none") for rate in RATES]
    else:
        pairs = [(best_rate, fault) for fault in FAULTS if fault != "none"]
    return [(*pair, seed) for pair in pairs for seed in effort.reported]


def count_runs(cell: Cell | BatchCell, effort: Effort) -> int:
    """Returns the number of runs of a cell."""
    if isinstance(cell, BatchCell):
        return len(RATES_OF_BATCHES) * effort.seeds
    return len(list_conditions(effort)) + len(list_conditions(effort, "edge"))


def get_settings(effort: Effort) -> dict[str, Any]:
    """Returns the settings that files of the same study share."""
    return {**effort._asdict(), "rates": RATES, "faults": list(FAULTS)}

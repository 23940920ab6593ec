"""Runs cells in processes with one core."""

import functools
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.research.study import cell, digits, plan
from benchmarks.research.study.faults import NUMBERS
from benchmarks.research.study.methods import Method
from benchmarks.research.study.plan import BatchCell, Cell, Effort, Found
from benchmarks.research.study.tables import select_methods
from benchmarks.research.study.task import Task
from benchmarks.research.study.tasks import TASKS
from optaxclip import tuning

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1",
}
"""The environment of the processes, which use one core. Fewer LLVM optimizations and random numbers
as a single operation halve the compile time of programs without slowing them down."""

SWEPT = ("none", "spike", "tails", "jump", "stretch")
"""The faults that determine the best constant, which is therefore chosen in hindsight."""

Row = dict[str, Any]


class Runner:
    """Runs the program of a cell."""

    def __init__(
        self, task: Task, optimizer: str, method: Method, effort: Effort, use_vmap: bool = False
    ):
        self.chunk = effort.chunk
        self.begin, begin = _compile_begin(task, effort)
        real = jax.ShapeDtypeStruct((self.chunk,), jnp.float32)
        runs = cell.Runs(begin, real, real)
        program = cell.build_program(task, optimizer, method, effort.steps, effort.every, use_vmap)
        self.program = program.lower(runs).compile()

    def __call__(
        self, rates: Any, faults: Sequence[str], seeds: Sequence[int], thresholds: Any
    ) -> tuple[cell.Outcome, float]:
        """Returns the results of runs, and the CPU seconds per run without compilation."""
        numbers = [NUMBERS[fault] for fault in faults]
        inputs = [np.asarray(x, np.int32) for x in (seeds, numbers)]
        inputs += [np.broadcast_to(np.float32(x), len(seeds)) for x in (rates, thresholds)]
        found, seconds = [], []
        for first in range(0, len(seeds), self.chunk):
            # Pad the last chunk, so that the program is compiled only once.
            index = np.minimum(first + np.arange(self.chunk), len(seeds) - 1)
            seed, fault, rate, threshold = (jnp.asarray(x[index]) for x in inputs)
            runs = cell.Runs(jax.block_until_ready(self.begin(seed, fault)), rate, threshold)
            begin = time.process_time()
            outcome = jax.block_until_ready(self.program(runs))
            seconds.append((time.process_time() - begin) / self.chunk)
            found.append(jax.tree.map(np.asarray, outcome))
        whole = jax.tree.map(lambda *x: np.concatenate(x)[: len(seeds)], *found)
        return whole, float(np.median(seconds))


@functools.cache
def _compile_begin(task: Task, effort: Effort) -> tuple[Any, Any]:
    """Compiles the function that draws starts, and returns it with its result shapes."""
    number = jax.ShapeDtypeStruct((effort.chunk,), jnp.int32)
    begin = cell.build_begin(task, effort.steps)
    compiled = begin.lower(number, number).compile()
    return compiled, jax.eval_shape(begin, number, number)


def explore(task_name: str, optimizer: str, effort: Effort) -> Found:
    """Determines the edge of the learning rate and the norms there without clipping."""
    task, grid = TASKS[task_name](), plan.GRID[optimizer]
    method = select_methods(task.noise is not None, optimizer)["none"]
    runner = Runner(task, optimizer, method, effort)
    seeds = effort.finding
    rates = np.repeat(grid, len(seeds))
    outcome, _ = runner(rates, ["none"] * len(rates), seeds * len(grid), 0.0)
    losses = plan.get_final_losses(outcome.held_out).reshape(len(grid), -1).mean(-1)
    edge = plan.find_edge(grid, losses, outcome.held_out[:, 0].mean())
    norms = outcome.norms[np.flatnonzero(rates == edge)[0]]
    norms = norms / np.sqrt(1 if task.noise is None else task.examples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `suggest` warns about short runs.
        found = tuning.suggest(norms)
        suggested = np.inf if found.recommendation == "none" else found.threshold
    by_rate = {float(rate): float(loss) for rate, loss in zip(grid, losses, strict=True)}
    return Found(edge, by_rate, float(np.median(norms)), float(suggested))


def run_cell(cell_key: Cell, found: Found, effort: Effort) -> list[Row]:
    """Returns the rows of runs without a fault at all rates, and with faults at the best rate."""
    task = TASKS[cell_key.task]()
    method = select_methods(task.noise is not None, cell_key.optimizer)[cell_key.method]
    runner = Runner(task, cell_key.optimizer, method, effort)
    threshold = found.suggested if method.threshold == "suggest" else None
    if method.threshold == "best":
        threshold = _find_best_threshold(runner, found, effort)
    clean_conditions = plan.list_conditions(effort)
    rows = _run_conditions(cell_key, runner, clean_conditions, found, threshold, effort)
    losses = {rate: [] for rate in plan.RATES}
    for row, (rate, _, _) in zip(rows, clean_conditions, strict=True):
        losses[rate].append(plan.get_final_losses(np.array(row["held_out"], float)))
    best = min(losses, key=lambda rate: np.mean(losses[rate]))
    rows += _run_conditions(
        cell_key, runner, plan.list_conditions(effort, best), found, threshold, effort
    )
    jax.clear_caches()
    return rows


def run_batches(cell_key: BatchCell, effort: Effort) -> list[Row]:
    """Returns the rows of all learning rates and seeds for a batch size and method."""
    grid, method = plan.RATES_OF_BATCHES, select_methods(False, "sgd")[cell_key.clip]
    runner = Runner(digits.build_conv(cell_key.batch), "sgd", method, effort)
    conditions = [(float(rate), seed) for rate in grid for seed in effort.reported]
    rates, seeds = zip(*conditions, strict=True)
    outcome, _ = runner(rates, ["none"] * len(seeds), seeds, 0.0)
    jax.clear_caches()
    thresholds_of_runs = zip(conditions, outcome.held_out, strict=True)
    return [
        {
            **cell_key._asdict(),
            "learning_rate": rate,
            "seed": seed,
            "held_out": [_convert_number(x) for x in held_out],
        }
        for (rate, seed), held_out in thresholds_of_runs
    ]


def _find_best_threshold(runner: Runner, found: Found, effort: Effort) -> float:
    """Returns the constant with the lowest mean loss at the edge over faults."""
    thresholds = found.norm * plan.THRESHOLDS
    seeds = effort.finding
    conditions = [
        (threshold, fault, seed) for threshold in thresholds for fault in SWEPT for seed in seeds
    ]
    thresholds_of_runs, faults, seeds = zip(*conditions, strict=True)
    outcome, _ = runner(found.edge, faults, seeds, thresholds_of_runs)
    losses = plan.get_final_losses(outcome.held_out).reshape(len(thresholds), -1).mean(-1)
    return float(thresholds[np.argmin(losses)])


def _run_conditions(
    cell_key: Cell,
    runner: Runner,
    conditions: Sequence[tuple[str, str, int]],
    found: Found,
    threshold: float | None,
    effort: Effort,
) -> list[Row]:
    rates, faults, seeds = zip(*conditions, strict=True)
    values = [found.edge * plan.RATES[rate] for rate in rates]
    outcome, seconds = runner(values, faults, seeds, threshold or 0.0)
    rows = []
    for i, (rate, fault, seed) in enumerate(conditions):
        changed, onset = int(outcome.changed[i]), int(outcome.onset[i])
        rows.append(
            {
                **cell_key._asdict(),
                "rate": rate,
                "learning_rate": values[i],
                "fault": fault,
                "seed": seed,
                "threshold": threshold,
                "held_out": [_convert_number(x) for x in outcome.held_out[i]],
                "clipped": None if changed < 0 else changed / effort.steps,
                "onset": None if onset < 0 else onset,
                "every": effort.every,
                "seconds": round(seconds, 4),
            }
        )
    return rows


def _convert_number(x: Any) -> float | None:
    return round(float(x), 4) if np.isfinite(x) else None

"""Plans and runs the cases of all optimizers, and stores their rows."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optaxclip
from benchmarks.research.scale import decoder
from benchmarks.research.scale.decoder import Size
from benchmarks.research.scale.text import Text
from benchmarks.research.study import cell, plan
from benchmarks.research.study.cell import Begin
from benchmarks.research.study.methods import Make, Method, Setting, chain, count_changes
from benchmarks.research.study.task import Task
from benchmarks.table_file import Row, TableFile, describe_versions, get_device_name

KEYS = ("size", "optimizer", "case", "method", "tried", "seed")
COLUMNS = (
    *("rate", "threshold", "start", "end", "lost", "clipped", "norm", "seconds"),
    *("device", "versions", "losses"),
)
SEEDS, FINDING = (0, 1, 2), 1000
"""The seeds of the table, and of the runs that determine learning rates and thresholds."""
RATES = 2.0 ** np.arange(-11, -5)
"""The learning rates, from which the best is selected."""
THRESHOLDS = (1 / 16, 1 / 4, 1.0)
"""Constants of the sweep, in multiples of the median norm at the best learning rate."""
TOO_HIGH = 4.0
"""Multiple of the largest learning rate that is nearly as good as the best."""


class Case(NamedTuple):
    """The fault, learning rate and dtype of a run. The loss is scaled for float16."""

    fault: str = "none"
    is_high: bool = False
    dtype: str = "bfloat16"


CASES = {
    "no fault": Case(),
    "spikes": Case("spike"),
    "rate too high": Case(is_high=True),
    "bad stretch": Case("stretch"),
    "float16": Case(dtype="float16"),
}
SWEPT = ("spikes", "bad stretch")
"""The cases that determine the best constant."""
NONE, ONE, BEST = "no clip", "constant 1", "best of three constants"
UNCHOSEN = "nothing to choose: adagc()"


def _build_default(setting: Setting) -> Any:
    """Builds the optimizer that README.md recommends by default."""
    return optaxclip.skip_nonfinite(
        chain(setting, count_changes(optaxclip.adagc())), max_consecutive=20
    )


def _clip_before(stage: Callable[[Any], Any]) -> Make:
    return lambda setting: chain(setting, count_changes(stage(setting.threshold)))


METHODS: dict[str, Make] = {
    **dict.fromkeys((NONE, ONE, BEST), _clip_before(optaxclip.clip_by_global_norm)),
    UNCHOSEN: _build_default,
    "zclip": _clip_before(lambda threshold: optaxclip.zclip()),
    "autoclip": _clip_before(lambda threshold: optaxclip.autoclip()),
}
"""Runs without clipping have an infinite threshold, so that all constants share one program."""


class Run(NamedTuple):
    """A run, whose first five fields are the key of its row.

    `tried` is the learning rate or the multiple of the norm of a sweep, otherwise "". `threshold`
    is infinite without a constant.
    """

    optimizer: str
    case: str
    method: str
    tried: str
    seed: int
    conditions: Case
    rate: float
    threshold: float


class Study:
    """The runs of a size and a text, with a table that may contain rows of other studies."""

    def __init__(self, size: Size, text: Text, table: TableFile):
        self._size, self._text, self._table = size, text, table
        self.name = f"{size.parameters:,} parameters, {size.steps} steps, text {text.digest}"
        self._build_for_dtype = functools.cache(self._build_task)
        self._programs: dict[Any, Any] = {}

    def is_done(self, run: Run) -> bool:
        """Returns `True` if the file contains the row of the run."""
        return self._table.key(**self._build_key(run)) in self._table.rows

    def get_row(self, run: Run) -> Row:
        """Returns the row of a completed run."""
        return self._table.rows[self._table.key(**self._build_key(run))]

    def plan_runs(self, optimizer: str) -> Iterator[Run]:
        """Yields all runs of an optimizer, where later runs depend on the rows of earlier runs."""
        run_sweep = functools.partial(Run, optimizer, seed=FINDING, method=NONE)
        usual = CASES["no fault"]
        rates = [
            run_sweep("rates", tried=f"{rate:.3g}", conditions=usual, rate=rate, threshold=math.inf)
            for rate in RATES.tolist()
        ]
        yield from rates
        found = [self.get_row(run) for run in rates]
        losses = np.array([float(row["end"]) for row in found])
        best, start = int(losses.argmin()), float(found[0]["start"])
        rate, edge = float(RATES[best]), plan.find_edge(RATES, losses, start)
        thresholds = {part: part * float(found[best]["norm"]) for part in THRESHOLDS}
        ends = dict.fromkeys(THRESHOLDS, 0.0)
        for case in SWEPT:
            for part, threshold in thresholds.items():
                run = run_sweep(
                    case, tried=f"{part:g}", conditions=CASES[case], rate=rate, threshold=threshold
                )
                yield run
                ends[part] += float(self.get_row(run)["end"])
        chosen = {ONE: 1.0, BEST: thresholds[min(ends, key=lambda part: ends[part])]}
        for name, conditions in CASES.items():
            used = TOO_HIGH * edge if conditions.is_high else rate
            for method in METHODS:
                threshold = chosen.get(method, math.inf)
                for seed in SEEDS:
                    yield Run(optimizer, name, method, "", seed, conditions, used, threshold)

    def add(self, run: Run) -> None:
        """Performs a run and stores its row."""
        task, begin = self._build_for_dtype(run.conditions.dtype)
        each = (
            begin(run.conditions.fault, run.seed),
            np.float32(run.rate),
            np.float32(run.threshold),
        )
        inputs = cell.Runs(*jax.tree.map(lambda x: jnp.asarray(x)[None], each))
        program = self._compile(run, task, inputs)
        ticks = time.perf_counter()
        outcome = jax.tree.map(lambda x: np.asarray(x)[0], jax.block_until_ready(program(inputs)))
        seconds = time.perf_counter() - ticks
        self._table.add(
            **self._build_key(run),
            rate=f"{run.rate:.4g}",
            threshold=f"{run.threshold:.4g}" if math.isfinite(run.threshold) else "",
            start=f"{outcome.held_out[0]:.4f}",
            end=f"{plan.get_final_losses(outcome.held_out):.4f}",
            lost=int(plan.is_lost(outcome.held_out)),
            clipped="" if run.method == NONE else f"{outcome.changed / self._size.steps:.3f}",
            norm=f"{np.nanmedian(outcome.norms):.4g}",
            seconds=f"{seconds:.2f}",
            device=get_device_name(),
            versions=describe_versions(),
            losses=" ".join(f"{x:.4f}" for x in outcome.held_out),
        )

    def _build_key(self, run: Run) -> dict[str, Any]:
        return dict(zip(KEYS, (self.name, *run[:5]), strict=True))

    def _build_task(self, dtype: str) -> tuple[Task, Callable[[str, int], Begin]]:
        task = decoder.build_task(self._text, self._size.network, dtype)
        return task, decoder.build_begin(task, self._text, self._size)

    def _compile(self, run: Run, task: Task, inputs: cell.Runs) -> Any:
        make, is_scaled = METHODS[run.method], run.conditions.dtype == "float16"
        key = (run.optimizer, make, run.conditions.dtype)
        if key not in self._programs:
            method = Method(_scale_loss(make) if is_scaled else make, is_scaled=is_scaled)
            steps, every = self._size.steps, self._size.every
            program = cell.build_program(task, run.optimizer, method, steps, every)
            self._programs[key] = program.lower(inputs).compile()
        return self._programs[key]


def _scale_loss(make: Make) -> Make:
    return lambda setting: optaxclip.scale_loss(make(setting))

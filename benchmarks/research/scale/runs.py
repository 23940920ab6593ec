"""The runs of each optimizer, and the rows that they give."""

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
from benchmarks.research.study.methods import Make, Method, Setting, chain, watched
from benchmarks.research.study.task import Task
from benchmarks.table_file import Row, TableFile, describe_versions, get_device_name

KEYS = ("size", "optimizer", "case", "method", "tried", "seed")
COLUMNS = (
    *("rate", "threshold", "start", "end", "lost", "clipped", "norm", "seconds"),
    *("device", "versions", "losses"),
)
SEEDS, FINDING = (0, 1, 2), 1000
"""Of the table, and of the runs that find rates and thresholds."""
RATES = 2.0 ** np.arange(-11, -5)
"""Where the best is looked for."""
THRESHOLDS = (1 / 16, 1 / 4, 1.0)
"""The constants of the sweep, in multiples of the median norm at the best rate."""
TOO_HIGH = 4.0
"""Times the largest rate that is nearly as good as the best."""


class Case(NamedTuple):
    """What a run meets.

    Attributes:
      fault: its name in the study.
      is_high: whether the rate is too high.
      dtype: of what is computed; with float16 the loss is scaled.
    """

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
"""The cases over which the best constant is chosen."""
NONE, ONE, BEST = "no clip", "constant 1", "best of three constants"
UNCHOSEN = "nothing to choose: adagc()"


def _guarded(of: Setting) -> Any:
    """README's line for those who do not want to choose."""
    return optaxclip.skip_nonfinite(chain(of, watched(optaxclip.adagc())), max_consecutive=20)


def _front(stage: Callable[[Any], Any]) -> Make:
    return lambda of: chain(of, watched(stage(of.threshold)))


METHODS: dict[str, Make] = {
    **dict.fromkeys((NONE, ONE, BEST), _front(optaxclip.clip_by_global_norm)),
    UNCHOSEN: _guarded,
    "zclip": _front(lambda threshold: optaxclip.zclip()),
    "autoclip": _front(lambda threshold: optaxclip.autoclip()),
}
"""No clip is the threshold infinity, so that constants are one program."""


class Run(NamedTuple):
    """What is run; the first five are the keys of its row.

    Attributes:
      optimizer: its name.
      case: its name in the table.
      method: its name.
      tried: the rate or the multiple of the norm that a run tries to find the best; else "".
      seed: of all that is drawn.
      of: what `case` means.
      rate: the largest of its schedule.
      threshold: of a constant, infinity for none.
    """

    optimizer: str
    case: str
    method: str
    tried: str
    seed: int
    of: Case
    rate: float
    threshold: float


class Study:
    """The runs of one size, with the rows that they gave.

    Args:
      size: of all.
      text: what is read.
      table: the file; rows of other sizes or texts stay in it untouched.
    """

    def __init__(self, size: Size, text: Text, table: TableFile):
        self._size, self._text, self._table = size, text, table
        self.name = f"{size.parameters:,} parameters, {size.steps} steps, text {text.digest}"
        self._of_dtype = functools.cache(self._task)
        self._programs: dict[Any, Any] = {}

    def is_done(self, run: Run) -> bool:
        """Whether the file has its row."""
        return self._table.key(**self._keys(run)) in self._table.rows

    def ended(self, run: Run) -> Row:
        """The row of a run that is done."""
        return self._table.rows[self._table.key(**self._keys(run))]

    def runs(self, optimizer: str) -> Iterator[Run]:
        """All of an optimizer, one after another: what comes later needs the rows before it."""
        tried = functools.partial(Run, optimizer, seed=FINDING, method=NONE)
        usual = CASES["no fault"]
        rates = [
            tried("rates", tried=f"{rate:.3g}", of=usual, rate=rate, threshold=math.inf)
            for rate in RATES.tolist()
        ]
        yield from rates
        found = [self.ended(run) for run in rates]
        losses = np.array([float(row["end"]) for row in found])
        best, start = int(losses.argmin()), float(found[0]["start"])
        rate, edge = float(RATES[best]), plan.edge(RATES, losses, start)
        thresholds = {part: part * float(found[best]["norm"]) for part in THRESHOLDS}
        ends = dict.fromkeys(THRESHOLDS, 0.0)
        for case in SWEPT:
            for part, threshold in thresholds.items():
                run = tried(case, tried=f"{part:g}", of=CASES[case], rate=rate, threshold=threshold)
                yield run
                ends[part] += float(self.ended(run)["end"])
        chosen = {ONE: 1.0, BEST: thresholds[min(ends, key=lambda part: ends[part])]}
        for name, of in CASES.items():
            used = TOO_HIGH * edge if of.is_high else rate
            for method in METHODS:
                threshold = chosen.get(method, math.inf)
                for seed in SEEDS:
                    yield Run(optimizer, name, method, "", seed, of, used, threshold)

    def add(self, run: Run) -> None:
        """Runs one, and writes its row."""
        task, begin = self._of_dtype(run.of.dtype)
        each = (begin(run.of.fault, run.seed), np.float32(run.rate), np.float32(run.threshold))
        inputs = cell.Runs(*jax.tree.map(lambda x: jnp.asarray(x)[None], each))
        program = self._program(run, task, inputs)
        ticks = time.perf_counter()
        outcome = jax.tree.map(lambda x: np.asarray(x)[0], jax.block_until_ready(program(inputs)))
        seconds = time.perf_counter() - ticks
        self._table.add(
            **self._keys(run),
            rate=f"{run.rate:.4g}",
            threshold=f"{run.threshold:.4g}" if math.isfinite(run.threshold) else "",
            start=f"{outcome.held_out[0]:.4f}",
            end=f"{plan.final(outcome.held_out):.4f}",
            lost=int(plan.is_lost(outcome.held_out)),
            clipped="" if run.method == NONE else f"{outcome.changed / self._size.steps:.3f}",
            norm=f"{np.nanmedian(outcome.norms):.4g}",
            seconds=f"{seconds:.2f}",
            device=get_device_name(),
            versions=describe_versions(),
            losses=" ".join(f"{x:.4f}" for x in outcome.held_out),
        )

    def _keys(self, run: Run) -> dict[str, Any]:
        return dict(zip(KEYS, (self.name, *run[:5]), strict=True))

    def _task(self, dtype: str) -> tuple[Task, Callable[[str, int], Begin]]:
        task = decoder.task(self._text, self._size.network, dtype)
        return task, decoder.beginning(task, self._text, self._size)

    def _program(self, run: Run, task: Task, inputs: cell.Runs) -> Any:
        make, is_scaled = METHODS[run.method], run.of.dtype == "float16"
        key = (run.optimizer, make, run.of.dtype)
        if key not in self._programs:
            method = Method(_scaled(make) if is_scaled else make, is_scaled=is_scaled)
            steps, every = self._size.steps, self._size.every
            program = cell.program(task, run.optimizer, method, steps, every)
            self._programs[key] = program.lower(inputs).compile()
        return self._programs[key]


def _scaled(make: Make) -> Make:
    return lambda of: optaxclip.scale_loss(make(of))

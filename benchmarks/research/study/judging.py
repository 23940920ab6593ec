"""Judges guards by the measure that `benchmarks/research/guard.md` wrote down before they were run.

  python -m benchmarks.research.study.judging guard.jsonl --parts parts.jsonl

It prints a table and which guards hold, and writes all figures, `docs/guard.csv` and
`docs/guard.png`.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.research.study import inference, pictures, results
from benchmarks.research.study.comparing import CASES, HARMS, HELPS, Case, Study
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.page import DOCS
from benchmarks.research.study.runs import BEST, NONE, RATES, Key, Pair, cells

PRICE, BEHIND = 0.01, 0.02
"""What a guard may cost where nothing goes wrong, and how far it may be behind the best constant,
both as shares of what training without a guard learns."""
FAULTS = tuple(case for case in CASES if case.fault != "none")
JUDGED = tuple(case for case in FAULTS if case.name != "nan")
"""The faults at which guards are compared with the best constant, which a NaN destroys."""
NAN, PAST = (next(case for case in CASES if case.name == name) for name in ("nan", "past"))
LEAST = (-PRICE, *[-BEHIND] * len(JUDGED))
"""What the measure asks of the first of `COLUMNS`; the last is told, and not judged."""
COLUMNS = ("nothing wrong", *(case.short for case in JUDGED), "rate too high")
NAMES = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD", "all": "all"}


class Judged(NamedTuple):
    """A guard on the tasks of one optimizer, or on all.

    Attributes:
      gain: how much more it learns where nothing goes wrong, at the rate that is best without it.
      beside: for each fault how much more it learns than the best constant, each at the rate that
        is best for it where nothing goes wrong.
      lost: the share of runs that a NaN destroys.
      past: how much more it learns than the best constant at a rate that is too high; not judged.
    """

    gain: Interval
    beside: Mapping[str, Interval]
    lost: float
    past: Interval

    @property
    def holds(self) -> bool:
        """Whether it is as good as the measure asks."""
        is_near = [x.mean >= least for x, least in zip(self.columns, LEAST, strict=False)]
        return all(is_near) and self.lost == 0

    @property
    def columns(self) -> tuple[Interval, ...]:
        """What `COLUMNS` names."""
        return self.gain, *self.beside.values(), self.past


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
    found = [study.cell(pair, method, NAN) for pair in pairs]
    return Judged(
        gain=_over([_gain(study, pair, method) for pair in pairs]),
        beside={case.name: _beside(study, pairs, method, case) for case in JUDGED},
        lost=float(np.mean([cell.is_lost.mean() for cell in found if cell is not None])),
        past=_beside(study, pairs, method, PAST),
    )


def _gain(study: Study, pair: Pair, method: str) -> dict[int, float]:
    """By seed: the loss that the guard saves at the rate that is best without one."""

    def ends(name: str, rate: str) -> dict[int, float]:
        cell = study.cells[Key(pair, name, "none", rate)]
        return dict(zip(cell.seeds.tolist(), cell.end.tolist(), strict=True))

    rate = min(RATES, key=lambda rate: np.mean(list(ends(NONE, rate).values())))
    without, guarded = ends(NONE, rate), ends(method, rate)
    return {seed: (without[seed] - guarded[seed]) / study.gains[pair] for seed in guarded}


def _beside(study: Study, pairs: Sequence[Pair], method: str, case: Case) -> Interval:
    return _over([dict(study.differences(pair, method, BEST, case)) for pair in pairs])


def _over(each: Sequence[dict[int, float]]) -> Interval:
    """Over seeds, of the mean over pairs."""
    seeds = sorted(set.intersection(*map(set, each)))
    return inference.interval(np.array([np.mean([of[seed] for of in each]) for seed in seeds]))


def rows(study: Study, tasks: str) -> Iterator[dict[str, Any]]:
    """The figures of each method and optimizer, in percent."""
    for method in study.methods:
        for optimizer, pairs in groups(study).items():
            found = judged(study, pairs, method)
            row: dict[str, Any] = {"tasks": tasks, "method": method, "optimizer": optimizer}
            for name, x in zip(COLUMNS, found.columns, strict=True):
                row |= {name: x.mean, f"{name}, low": x.low, f"{name}, high": x.high}
            shares = {name: f"{100 * x:.1f}" for name, x in row.items() if isinstance(x, float)}
            yield {**row, **shares, "lost to NaN": f"{100 * found.lost:.0f}", "holds": found.holds}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A table of such rows."""
    head = ("method", "optimizer", *COLUMNS, "lost to NaN", "holds")
    lines = [head, ["---"] * len(head), *([str(row[name]) for name in head] for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(study: Study, guards: Sequence[str]) -> Figure:
    """Tiles of all guards, a block for each optimizer: blue where the measure is met."""
    blocks = groups(study)
    with mpl.rc_context(pictures.LETTERS):
        height = pictures.ROW * len(guards) * len(blocks) + 0.15 * len(blocks) + 1.2
        figure = Figure(figsize=(pictures.WIDTH, height), layout="constrained")
        axes = figure.subplots(len(blocks), 1, squeeze=False)[:, 0]
        for ax, (optimizer, pairs) in zip(axes, blocks.items(), strict=True):
            for y, method in enumerate(guards):
                found = judged(study, pairs, method)
                for x, (share, least) in enumerate(zip(found.columns, LEAST, strict=False)):
                    pictures.tile(ax, x, y, share.mean, HELPS if share.mean >= least else HARMS)
            ax.set_xlim(-0.5, len(COLUMNS) - 1.5)
            ax.set_ylim(len(guards) - 0.5, -0.5)
            ax.set_yticks(range(len(guards)), guards)
            ax.set_xticks([])
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            ax.yaxis.set_label_position("right")
            ax.set_ylabel(NAMES[optimizer], rotation=270, labelpad=16)
        look = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        top = axes[0].secondary_xaxis("top")
        top.set_xticks(range(len(COLUMNS) - 1), COLUMNS[:-1], **look)
        top.tick_params(length=0)
        top.spines[:].set_visible(False)
    return figure


def load(path: Path) -> Study:
    """The study of a file of results."""
    return Study.of(cells(results.read(path)))


def main(arguments: list[str] | None = None) -> None:
    """Prints what was found of each guard, and writes the data and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    parser.add_argument("--parts", type=Path, help="that of the parts, for the data")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where data and picture go")
    options = parser.parse_args(arguments)
    study = load(options.results)
    found = [*rows(study, " and ".join(sorted({pair.task for pair in study.pairs})))]
    print(table(found))
    if options.parts:
        parts = load(options.parts)
        found += rows(parts, " and ".join(sorted({pair.task for pair in parts.pairs})))
    with (options.docs / "guard.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    guards = [name for name in study.methods if name != BEST]
    print(f"holds: {', '.join(name for name in guards if holds(study, name)) or 'none'}")
    picture(study, guards).savefig(options.docs / "guard.png", dpi=pictures.DPI)


if __name__ == "__main__":
    main()

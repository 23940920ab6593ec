"""Judges guards by the measure that `benchmarks/research/guard.md` wrote down before they were run.

  python -m benchmarks.research.study.judging guard.jsonl

It prints a table and which guards hold, and writes all figures, `docs/guard.csv` and
`docs/guard.png`.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.research.study import inference, pictures
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.page import DOCS
from benchmarks.research.study.results import read
from benchmarks.research.study.runs import BEST, NONE
from benchmarks.research.study.unseen import ADAPTIVE

PRICE, BEHIND = 0.01, 0.02
"""What a guard may cost where nothing goes wrong, and how far it may be behind the best constant,
both as shares of what training without a guard learns."""
NAMES = dict(zip(ADAPTIVE, ("AdamW", "Muon", "Lion", "Adafactor"), strict=True)) | {"sgd": "SGD"}
Cells = Mapping[tuple[str, str, str, str], Mapping[int, Mapping[str, Any]]]
"""Runs by seed, by problem, optimizer, method and case."""


class Column(NamedTuple):
    """What is judged: cases of problems, beside training without a guard, or the best constant."""

    title: str
    case: str
    problems: tuple[str, ...]
    base: str = NONE

    @property
    def least(self) -> float:
        """The measure."""
        return -PRICE if self.base == NONE else -BEHIND


OF_FAULTS = ("gru", "vit")
COLUMNS = (
    Column("nothing wrong", "none", OF_FAULTS),
    Column("zero start", "none", ("zero start",)),
    Column("small weights", "none", ("small weights",)),
    Column("loss times 100", "times 100", ("gru",)),
    Column("loss over 100", "over 100", ("gru",)),
    Column("late rate", "late rate", ("gru",)),
    Column("3000 steps", "none", ("3000 steps",)),
    Column("spikes", "spike", OF_FAULTS, BEST),
    Column("heavy tails", "tails", OF_FAULTS, BEST),
    Column("jump of scale", "jump", OF_FAULTS, BEST),
    Column("bad stretch", "stretch", OF_FAULTS, BEST),
)


class Judged(NamedTuple):
    """A guard with one optimizer.

    Attributes:
      shares: for each of `COLUMNS` how much more it learns than the base, over seeds.
      lost: the share of runs that a NaN destroys.
      clipped: the share of steps that it changes where nothing goes wrong.
    """

    shares: tuple[Interval, ...]
    lost: float
    clipped: float

    @property
    def holds(self) -> bool:
        """Whether it is as good as the measure asks."""
        is_near = [x.mean >= of.least for x, of in zip(self.shares, COLUMNS, strict=True)]
        return all(is_near) and self.lost == 0


def cells(lines: Iterable[Mapping[str, Any]]) -> Cells:
    """The runs, put together."""
    found: dict[Any, dict[int, Any]] = defaultdict(dict)
    for line in lines:
        key = tuple(line[name] for name in ("problem", "optimizer", "method", "case"))
        found[key][line["seed"]] = line
    return found


def methods(runs: Cells) -> list[str]:
    """Their names, in the order of the runs."""
    return list(dict.fromkeys(method for _, _, method, _ in runs))


def optimizers(runs: Cells) -> list[str]:
    """Those that were run on all problems, in the order of `NAMES`."""
    problems = {problem for of in COLUMNS for problem in of.problems}
    has = {optimizer: {x for x, y, *_ in runs if y == optimizer} for optimizer in NAMES}
    return [optimizer for optimizer in NAMES if problems <= has[optimizer]]


def judged(runs: Cells, optimizer: str, method: str) -> Judged:
    """The guard, every problem of a column counting alike."""

    def share(of: Column, problem: str) -> dict[int, float]:
        base = NONE if of.base == NONE else BEST
        without = runs[problem, optimizer, NONE, of.case if of.base == NONE else "none"].values()
        gain = np.mean([run["start"] - run["end"] for run in without])
        ours, theirs = (runs[problem, optimizer, x, of.case] for x in (method, base))
        return {seed: (theirs[seed]["end"] - run["end"]) / gain for seed, run in ours.items()}

    def over(of: Column) -> Interval:
        each = [share(of, problem) for problem in of.problems]
        return inference.interval(np.array([np.mean([x[s] for x in each]) for s in each[0]]))

    def mean(case: str, what: str) -> float:
        each = (runs[problem, optimizer, method, case].values() for problem in OF_FAULTS)
        return float(np.mean([run[what] for of in each for run in of]))

    return Judged(tuple(map(over, COLUMNS)), mean("nan", "lost"), mean("none", "clipped"))


def holds(runs: Cells, method: str) -> bool:
    """Whether the guard holds with each adaptive optimizer."""
    return all(judged(runs, optimizer, method).holds for optimizer in ADAPTIVE)


def rows(runs: Cells) -> Iterator[dict[str, Any]]:
    """The figures of each optimizer and method, in percent."""
    for optimizer in optimizers(runs):
        for method in methods(runs):
            found = judged(runs, optimizer, method)
            row = {"optimizer": optimizer, "method": method}
            for of, x in zip(COLUMNS, found.shares, strict=True):
                ends = {of.title: x.mean, f"{of.title}, low": x.low, f"{of.title}, high": x.high}
                row |= {name: f"{100 * share:.1f}" for name, share in ends.items()}
            percent = {"lost to NaN": found.lost, "steps clipped": found.clipped}
            row |= {name: f"{100 * share:.0f}" for name, share in percent.items()}
            yield row | {"holds": str(found.holds)}


def table(found: Sequence[Mapping[str, str]]) -> str:
    """A table of such rows, without intervals."""
    titles = [of.title for of in COLUMNS]
    head = ("optimizer", "method", *titles, "lost to NaN", "steps clipped", "holds")
    lines = [head, ["---"] * len(head), *([row[name] for name in head] for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(runs: Cells) -> Figure:
    """Tiles of all methods, a block for each optimizer: coloured where the measure is missed."""
    shown, names = optimizers(runs), methods(runs)
    with mpl.rc_context(pictures.LETTERS):
        height = pictures.ROW * len(names) * len(shown) + 0.15 * len(shown) + 1.6
        figure = Figure(figsize=(pictures.WIDTH * 1.25, height), layout="constrained")
        axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, optimizer in zip(axes, shown, strict=True):
            for y, method in enumerate(names):
                found = judged(runs, optimizer, method)
                for x, (share, of) in enumerate(zip(found.shares, COLUMNS, strict=True)):
                    verdict = pictures.MET if share.mean >= of.least else pictures.MISSED
                    pictures.tile(ax, x, y, share.mean, verdict)
            ax.set_xlim(-0.5, len(COLUMNS) - 0.5)
            ax.set_ylim(len(names) - 0.5, -0.5)
            ax.set_yticks(range(len(names)), names)
            ax.set_xticks([])
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            ax.yaxis.set_label_position("right")
            ax.set_ylabel(NAMES[optimizer], rotation=270, labelpad=16)
        look = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        top = axes[0].secondary_xaxis("top")
        top.set_xticks(range(len(COLUMNS)), [of.title for of in COLUMNS], **look)
        top.tick_params(length=0)
        top.spines[:].set_visible(False)
        pictures.legend(figure, pictures.MET, pictures.MISSED)
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Prints what was found of each guard, and writes the data and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where data and picture go")
    options = parser.parse_args(arguments)
    runs = cells(read(options.results))
    found = list(rows(runs))
    print(table(found))
    with (options.docs / "guard.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    if set(ADAPTIVE) <= set(optimizers(runs)):
        kept = [name for name in methods(runs) if holds(runs, name)]
        print(f"holds with each adaptive optimizer: {', '.join(kept) or 'none'}")
    picture(runs).savefig(options.docs / "guard.png", dpi=pictures.DPI)


if __name__ == "__main__":
    main()

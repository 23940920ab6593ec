"""The columns of a log: the numbers that each holds, and which of them is the gradient's norm."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optaxclip.tuning.spread import Floats

Steps: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Series(NamedTuple):
    """The numbers of a column.

    Attributes:
      values: float64[n], without blank cells.
      rows: int64[n], the row of each.
      steps: int64[n], the step of each, if the file has steps without a column of them.
    """

    values: Floats
    rows: Steps
    steps: Steps | None = None


Columns: TypeAlias = dict[str, Series | str]
"""The numbers of each column, or the reason why it cannot be read."""
Cells: TypeAlias = dict[str, tuple[Sequence[Any], Sequence[int]] | str]
"""The cells of each column, stripped text or what JSON holds, and their rows from 1; or the reason
why it cannot be read."""

MAX_LISTED = 10
LONGEST_NAME = 200
"""If a name is longer, only its end is searched, so that the search does not take long."""
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
BLANK = ("", "None")
UNNAMED = re.compile(r"\d+|values?")
"""Names that say nothing of what a column holds."""
KEY, VALUE, RUN = "key|tag|metric|name|variable", "values?", "run(_?(id|name))?"
"""Columns of a long table, which has a row for each number."""
OF_A_CHART = re.compile(r"__(MIN|MAX)$")
"""Weights & Biases exports three columns for each curve: its means, minima and maxima."""
NORM = re.compile(r"(.*_)?(g|grad)?norms?(_.*)?")
GRADIENT_NORM = re.compile(r"(.*_)?(g|grads?|gradients?)(_?norms?|_.*norms?)(_.*)?")
OTHER = re.compile(
    r"(.*_)?(clipped|after|post|num|threshold|ratio|min|max|mean|std|var|ema|layer|batch|rms"
    r"|(param(eter)?|weight|update)s?)(_.*)?"
)
"""Columns with norms of other things than gradients, and with other facts about norms."""


def columns_of(cells: Cells) -> Columns:
    """The numbers of each column; of a long table, a column for each of its keys."""
    return {
        name: column if isinstance(column, str) else numbers(*column)
        for name, column in _wide(cells).items()
    }


def _wide(cells: Cells) -> Cells:
    """The columns of a long table by its keys, and by its runs if it has several."""
    labels, values = _first(cells, KEY), _first(cells, VALUE)
    if labels is None or values is None or any(map(is_number, labels.values())):
        return cells
    runs = _first(cells, RUN) or {}
    if len(set(runs.values())) > 1:
        labels = {row: f"{runs.get(row)} - {label}" for row, label in labels.items()}
    found: dict[str, tuple[list[Any], list[int]]] = {}
    for row, cell in values.items():
        column, rows = found.setdefault(str(labels.get(row, "")), ([], []))
        column.append(cell)
        rows.append(row)
    names = re.compile(f"{KEY}|{VALUE}|{RUN}")
    others = {name: cells[name] for name in cells if not names.fullmatch(last_part(name))}
    return others | found


def _first(cells: Cells, names: str) -> dict[int, Any] | None:
    """The cells of the first column with one of some names, by their rows."""
    for name, column in cells.items():
        if re.fullmatch(names, last_part(name)) and not isinstance(column, str):
            return dict(zip(column[1], column[0], strict=True))
    return None


def numbers(cells: Sequence[Any], rows: Sequence[int]) -> Series | str:
    """The numbers in a column's cells, without the blank ones; or why they cannot be read.

    JSON's null stands for a number that is not finite, for which JSON has no name.
    """
    kept = [at for at, cell in enumerate(cells) if cell not in BLANK]
    values = [math.nan if cells[at] is None else cells[at] for at in kept]
    if len(values) <= cells.count(None):
        return "is empty"
    try:
        if set(map(type, values)) <= {float, str}:  # no list, and no bool, which `float` takes
            found = np.fromiter(map(float, values), np.float64, len(values))
            return Series(found, np.fromiter((rows[at] for at in kept), np.int64, len(values)))
    except ValueError:
        pass
    pairs = zip(rows, cells, strict=True)
    row, cell = next((x, y) for x, y in pairs if not (y is None or y in BLANK or is_number(y)))
    if isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell):
        return f"has decimal commas ({cell} in row {row}); write numbers with a point"
    return f"has {json.dumps(cell):.40} in row {row}, which is not a number"


def is_number(cell: Any) -> bool:
    """Whether a cell is a number, or text that is one."""
    try:
        return isinstance(cell, float | str) and isinstance(float(cell), float)
    except ValueError:
        return False


def chosen(columns: Columns, source: str) -> str:
    """The column to read if the user named none: plainly the norm, or the only one without a name.

    If the only column of norms cannot be read, it is chosen all the same, so that the error says
    why; no loss or step is read in its place.
    """
    names = [name for name in columns if OF_A_CHART.sub("", name) not in columns.keys() - {name}]
    numeric = numeric_among(columns)
    for kind in KINDS:
        found = [name for name in names if kind(name)]
        readable = [name for name in found if name in numeric and kind is not _is_unnamed]
        for candidates in (found, readable):
            if len(candidates) == 1:
                return candidates[0]
        if found:
            how = f"choose one of {listed(found)}, as column={found[0]!r}"
            raise ValueError(f"{source} has several columns: {how}")
    if not columns:
        raise ValueError(f"{source} holds no numbers")
    if len(names) == 1 and not numeric:
        return names[0]
    how = f"pass column=NAME if it is one of {listed(numeric or names)}"
    raise ValueError(f"{source}: no column looks like a gradient norm; {how}")


def numeric_among(columns: Columns) -> list[str]:
    """The names of the columns that hold numbers."""
    return [name for name, values in columns.items() if not isinstance(values, str)]


def listed(names: list[str]) -> str:
    """The names for a message: ten of them, norms first, and how many more there are."""
    ordered = sorted(names, key=lambda name: "norm" not in name.lower())
    more = len(names) - MAX_LISTED
    return f"{ordered[:MAX_LISTED]}" + (f" and {more} more" if more > 0 else "")


def last_part(name: str) -> str:
    """`grad_norm` of `train/grad_norm` or `train.Grad Norm`, and of a chart's `run - grad_norm`."""
    last = re.split(r"/|\.(?!\d)", name.rsplit(" - ")[-1].strip().lower())[-1]
    return re.sub(r"[\s-]+", "_", last[-LONGEST_NAME:]).strip("_")


def _is_norm(name: str, of: re.Pattern[str] = NORM) -> bool:
    last = last_part(name)
    return bool(of.fullmatch(last) and not OTHER.fullmatch(last))


def _is_unnamed(name: str) -> bool:
    return bool(UNNAMED.fullmatch(last_part(name)))


KINDS: tuple[Callable[[str], bool], ...] = (
    lambda name: bool(re.search(r"(^|/)record/norm$", name)),  # of `monitor.record`
    lambda name: _is_norm(name, GRADIENT_NORM) and not re.search("[/.]", name),
    lambda name: _is_norm(name, GRADIENT_NORM),
    _is_norm,
    lambda name: "norm" in name.lower(),
    _is_unnamed,
)
"""Tests for the name of a gradient's norm: the first one that fits any column decides."""

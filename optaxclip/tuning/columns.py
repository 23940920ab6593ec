"""The columns of a log: the numbers that each holds, and which of them is the gradient's norm."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from optaxclip.tuning.spread import Floats

Columns: TypeAlias = dict[str, Floats | str]
"""The numbers of each column, float64[rows], or the reason why it cannot be read."""

MAX_LISTED = 10
LONGEST_NAME = 200
"""If a name is longer, only its end is searched, so that the search does not take long."""
COMMAS = "has decimal commas"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
STEP = re.compile(
    r"(global_)?steps?|epoch|iter(ation)?|(wall_|relative_)?time.*|runtime|index|(unnamed:_\d+)?"
)
"""Columns that are not norms. pandas writes its index without a name, read as "Unnamed: 0"."""
OF_A_CHART = re.compile(r"__(MIN|MAX)$")
"""Weights & Biases exports three columns for each curve: its means, minima and maxima."""
NORM = re.compile(r"(.*_)?(g|grad)?norms?(_.*)?")
GRADIENT_NORM = re.compile(r"(.*_)?(g|grads?|gradients?)(_?norms?|_.*norms?)(_.*)?")
OTHER = re.compile(
    r"(.*_)?(clipped|after|post|num|limit|ratio|min|max|mean|std|var|ema|layer|batch|rms"
    r"|(param(eter)?|weight|update)s?)(_.*)?"
)
"""Columns with norms of other things than gradients, and with other facts about norms."""


def numbers(cells: Sequence[Any], rows: Sequence[int]) -> Floats | str:
    """The numbers in a column's cells, without the blank ones; or why they cannot be read.

    Args:
      cells: stripped text, or what JSON holds. Its null stands for a number that is not finite,
        for which JSON has no name.
      rows: the number of each cell's row, for messages.
    """
    values = [math.nan if cell is None else cell for cell in cells if cell != ""]
    if len(values) <= cells.count(None):
        return "is empty"
    try:
        if set(map(type, values)) <= {float, str}:  # no list, and no bool, which `float` takes
            return np.fromiter(map(float, values), np.float64, len(values))
    except ValueError:
        pass
    row, cell = next(pair for pair in zip(rows, cells, strict=True) if not _is_fine(pair[1]))
    if isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell):
        return f"{COMMAS} ({cell} in row {row}); write numbers with a point"
    return f"has {json.dumps(cell):.40} in row {row}, which is not a number"


def _is_fine(cell: Any) -> bool:
    return cell is None or cell == "" or is_number(cell)


def is_number(cell: Any) -> bool:
    """Whether a cell is a number, or text that is one."""
    try:
        return isinstance(cell, float | str) and isinstance(float(cell), float)
    except ValueError:
        return False


def chosen(columns: Columns, source: str) -> str:
    """The column to read if the user named none: plainly the norm, or the only one with numbers.

    If the only column of norms cannot be read, it is chosen all the same, so that the error says
    why; no loss or step is read in its place.
    """
    names = [name for name in columns if OF_A_CHART.sub("", name) not in columns.keys() - {name}]
    numeric = numeric_among(columns)
    for kind in KINDS:
        found = [name for name in names if kind(name)]
        for candidates in (found, [name for name in found if name in numeric]):
            if len(candidates) == 1:
                return candidates[0]
        if found:
            break
    else:
        found = [
            name
            for name, values in columns.items()
            if name in names and not STEP.fullmatch(_last_part(name)) and not _is_of_words(values)
        ]
        if len(found or names) == 1:
            return (found or names)[0]
    if not numeric:
        raise ValueError(f"{source} holds no numbers")
    raise ValueError(f"{source} has several columns: choose one of {listed(found or names)}")


def numeric_among(columns: Columns) -> list[str]:
    """The names of the columns that hold numbers."""
    return [name for name, values in columns.items() if not isinstance(values, str)]


def listed(names: list[str]) -> str:
    """The names for a message: ten of them, norms first, and how many more there are."""
    ordered = sorted(names, key=lambda name: "norm" not in name.lower())
    more = len(names) - MAX_LISTED
    return f"{ordered[:MAX_LISTED]}" + (f" and {more} more" if more > 0 else "")


def _is_of_words(values: Floats | str) -> bool:
    return isinstance(values, str) and not values.startswith(COMMAS)


def _last_part(name: str) -> str:
    """`grad_norm` of `train/grad_norm` or `train.Grad Norm`, and of a chart's `run - grad_norm`."""
    last = re.split(r"/|\.(?!\d)", name.rsplit(" - ")[-1].strip().lower())[-1]
    return re.sub(r"[\s-]+", "_", last[-LONGEST_NAME:]).strip("_")


def _is_norm(name: str, of: re.Pattern[str] = NORM) -> bool:
    last = _last_part(name)
    return bool(of.fullmatch(last) and not OTHER.fullmatch(last))


KINDS: tuple[Callable[[str], bool], ...] = (
    lambda name: bool(re.search(r"(^|/)record/norm$", name)),  # of `monitor.record`
    lambda name: _is_norm(name, GRADIENT_NORM) and not re.search("[/.]", name),
    lambda name: _is_norm(name, GRADIENT_NORM),
    _is_norm,
    lambda name: "norm" in name.lower(),
)
"""Tests for the name of a gradient's norm: the first one that fits any column decides."""

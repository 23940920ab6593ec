"""Reads norms from logs: CSV, JSON lines, TensorBoard's event files, `.npy`."""

import collections
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import optaxclip.tuning.events as events
from optaxclip._base.arguments import near_miss

Columns = dict[str, Sequence[float] | str]
"""The numbers of each column, or the reason why it cannot be read."""
NPY_START = b"\x93NUMPY"
STEPS = frozenset({"step", "steps", "global_step", "epoch", "iteration", "time", "wall_time"})
"""Columns that are not norms."""
MAX_LISTED = 10
COMMAS = "has decimal commas"
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
LINE_BREAK = re.compile(r"\r\n|\n|\r")
"""`str.splitlines` also splits at characters that a line may hold, such as U+2028."""


def read_norms(
    path: str | os.PathLike[str], column: str | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of one column of a file, float64[rows], without empty rows.

    The last line or record of a file is left out if it is incomplete, because the run still writes
    or was stopped. If a number in CSV was cut and a shorter number is left, such as 11 of 112.5,
    nothing tells it from a whole one, and it is read.

    Args:
      path: a CSV file, JSON lines, an event file, an array that `np.save` wrote, or a directory
        whose event files are read in the order of their names.
      column: its name, as in `optaxclip.tuning.suggest`.

    Raises:
      ValueError: if the column is not found or holds anything but numbers.
      OSError: if the file cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return parse_norms(path.read_bytes(), column, str(path))
    files = {str(file): file.read_bytes() for file in sorted(path.glob("*tfevents*"))}
    if not files:
        raise ValueError(f"{path} holds no TensorBoard event file (*tfevents*)")
    return _one_column(events.scalars(files), column, str(path))


def parse_norms(
    data: bytes, column: str | None, source: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`read_norms` for the bytes of a file, which messages call `source`."""
    return _one_column(_columns(data, source), column, source)


def _one_column(
    columns: Columns, column: str | None, source: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    numeric = [name for name, values in columns.items() if not isinstance(values, str)]
    column = _chosen(columns, numeric, source) if column is None else column
    values = columns.get(column, "is not there")
    if isinstance(values, str):
        others = f"; the columns with numbers are {_listed(numeric)}" if numeric else ""
        others += "" if column in columns else near_miss(str(column), numeric)
        raise ValueError(f"{source}: the column {column!r} {values}{others}")
    return np.asarray(values, np.float64)


def _columns(data: bytes, source: str) -> Columns:
    if data.startswith(NPY_START):
        return _from_npy(data, source)
    if events.START in data[:64]:
        return events.scalars({source: data})
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kinds = "CSV, JSON lines, a TensorBoard event file or an array of np.save"
        raise ValueError(f"{source} must be {kinds}, and is none of these") from error
    pieces = LINE_BREAK.split(text)
    lines = {at: line for at, line in enumerate(pieces, start=1) if line.strip()}
    if next(iter(lines.values()), "").lstrip().startswith(("{", "[")):
        return _from_json(lines, text, source)
    return _from_csv([*lines.values()], is_ended=len(pieces) not in lines)


def _chosen(columns: Columns, numeric: list[str], source: str) -> str:
    """The column to read if the user named none: the only one of norms, or the only numeric one.

    If the only column of norms cannot be read, it is chosen all the same, so that the error says
    why; no loss or step is read in its place.
    """
    names = list(columns)
    norms = [name for name in names if "norm" in name.lower()]
    words = [
        name
        for name, values in columns.items()
        if isinstance(values, str) and not values.startswith(COMMAS)
    ]
    last_parts = {name: re.split("[./]", name.lower())[-1].replace(" ", "_") for name in names}
    steps = [name for name in names if last_parts[name] in STEPS]
    others = [name for name in names if name not in (*words, *steps)]
    for candidates in (norms, [name for name in norms if name in numeric], [] if norms else others):
        if len(candidates) == 1:
            return candidates[0]
    if len(names) == 1:
        return names[0]
    if not numeric:
        raise ValueError(f"{source} holds no numbers")
    raise ValueError(f"{source} has several columns: choose one of {_listed(others or names)}")


def _listed(names: list[str]) -> str:
    """The names for a message: ten of them, those of norms first, and how many more there are."""
    ordered = sorted(names, key=lambda name: "norm" not in name.lower())
    more = len(names) - MAX_LISTED
    return f"{ordered[:MAX_LISTED]}" + (f" and {more} more" if more > 0 else "")


def _from_csv(lines: list[str], *, is_ended: bool) -> Columns:
    """The columns of CSV; `is_ended` says whether a line break follows the last line."""
    if not lines:
        return {}
    # Where there is another delimiter, a comma may be a decimal comma.
    delimiter = next((sign for sign in "\t;" if sign in lines[0]), ",")
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    if not is_ended and len(rows) > 1 and _is_cut(rows[-1], len(rows[0])):
        rows.pop()
    if all(_number(cell.replace(",", ".")) is not None for cell in rows[0]):
        names = [str(i) for i in range(len(rows[0]))]
    else:
        names, rows = rows[0], rows[1:]
    return _gathered([list(zip(names, row, strict=False)) for row in rows], names)


def _is_cut(row: list[str], cells: int) -> bool:
    """Whether a row lacks some of its cells, or ends with the beginning of a number."""
    last = row[-1].lower()
    rests = ("0", "an", "n", "nf", "f")  # they complete "1e-", "n", "na", "i" and "in"
    begins = any(_number(last + rest) is not None for rest in rests)
    return len(row) < cells or (last != "" and _number(last) is None and begins)


class _Object(list[tuple[str, Any]]):
    """The pairs of a JSON object, in which a key may occur twice."""


def _parsed(text: str) -> Any:
    # Integers are read as floats, because Python refuses to read very long ones.
    return json.loads(text, object_pairs_hook=_Object, parse_int=float)


def _from_json(lines: dict[int, str], text: str, source: str) -> Columns:
    rows, wrong = [], None
    for at, line in lines.items():
        try:
            rows.append(_parsed(line))
        except json.JSONDecodeError as error:
            wrong = (at, error.msg)
            break
    # The last line may be incomplete, because the run still writes or was stopped.
    if wrong is not None and (not rows or wrong[0] < max(lines)):
        rows = _whole_json(text, source, wrong if rows else None)
    if len(rows) == 1 and isinstance(rows[0], list) and not isinstance(rows[0], _Object):
        rows = rows[0]
    rows = [[*_flat(row)] if isinstance(row, _Object) else [("0", row)] for row in rows]
    return _gathered(rows, list(dict.fromkeys(name for row in rows for name, _ in row)))


def _whole_json(text: str, source: str, wrong: tuple[int, str] | None) -> list[Any]:
    """The rows of a text that is one JSON value.

    Args:
      text: the text.
      source: its name in messages.
      wrong: the number of the line that is not JSON, and why; reported if the whole text is not
        JSON either.
    """
    try:
        rows = _parsed(text.rstrip())
    except json.JSONDecodeError as error:
        at, message = wrong or (error.lineno, error.msg)
        raise ValueError(f"{source}: not JSON lines: {message} in line {at}") from error
    return rows if isinstance(rows, list) and not isinstance(rows, _Object) else [rows]


def _flat(row: _Object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The cells of nested objects, with the keys that lead to them: `train.grad_norm`."""
    for key, cell in row:
        if isinstance(cell, _Object):
            yield from _flat(cell, f"{prefix}{key}.")
        else:
            yield prefix + key, cell


def _gathered(rows: list[list[tuple[str, Any]]], names: list[str]) -> Columns:
    numbers: dict[str, list[float]] = {name: [] for name in names}
    refused: dict[str, str] = {}
    for at, row in enumerate(rows, start=1):
        seen = collections.Counter(name for name, _ in row)
        twice = [name for name, count in seen.items() if count > 1]
        refused |= dict.fromkeys(twice, "is there more than once: give each its own name")
        for name, cell in row:
            if cell in ("", None):
                continue
            number = _number(cell)
            if number is not None:
                numbers[name].append(number)
            elif isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell):
                remedy = "write numbers with a point"
                refused.setdefault(name, f"{COMMAS} ({cell} in row {at}); {remedy}")
            else:
                shown = f"{json.dumps(cell):.40}"
                refused.setdefault(name, f"has {shown} in row {at}, which is not a number")
    return {name: refused.get(name, values or "is empty") for name, values in numbers.items()}


def _number(cell: Any) -> float | None:
    if isinstance(cell, bool | list):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.copysign(math.inf, cell)


def _from_npy(data: bytes, source: str) -> Columns:
    """An array of norms, or one with a column for each leaf or field."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        message = f"{source} is not an array of numbers that np.save wrote: {error}"
        raise ValueError(message) from error
    if array.dtype.names:
        fields = {name: array[name] for name in array.dtype.names}
    elif array.ndim == 2:
        fields = {str(i): values for i, values in enumerate(array.T)}
    else:
        fields = {"0": array}
    return {name: _numbers(values) for name, values in fields.items()}


def _numbers(values: np.ndarray[Any, Any]) -> Sequence[float] | str:
    if values.dtype.kind not in "fiu":
        return f"has the dtype {values.dtype}; save numbers, np.asarray(norms, np.float32)"
    if values.ndim != 1:
        return f"has the shape {values.shape}; save one axis, the steps"
    return values.tolist() or "is empty"

"""Norms from the files that loggers write: CSV, JSON lines, TensorBoard's event files."""

import csv
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, list[float]]
EVENTS_START = b"brain.Event:"
"""In the first record of every event file."""
STEPS = frozenset({"step", "steps", "global_step", "epoch", "iteration", "time", "wall_time"})
"""Columns of numbers that nobody means."""


def read_norms(
    path: str | os.PathLike[str], column: str | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of one column of a file, float64[rows]; rows without one are left out.

    Args:
      path: a CSV file, JSON lines, an event file, or a directory whose event files are read in the
        order of their names.
      column: its name, as in `optaxclip.tuning.suggest`.

    Raises:
      ValueError: if the column is not found or holds no numbers.
      OSError: if the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        parts = [part.read_bytes() for part in sorted(path.glob("*tfevents*"))]
        if not parts:
            raise ValueError(f"{path} holds no TensorBoard event file (*tfevents*)")
    else:
        parts = [path.read_bytes()]
    return parse_norms(b"".join(parts), column, str(path))


def parse_norms(
    data: bytes, column: str | None, source: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """As `read_norms`, of what a file holds; `source` is its name in messages."""
    columns = _columns(data, source)
    if not any(columns.values()):
        raise ValueError(f"{source} holds no numbers")
    return np.asarray(columns[_chosen(columns, column, source)], np.float64)


def _columns(data: bytes, source: str) -> Columns:
    if EVENTS_START in data[:64]:
        return _from_events(data, source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no CSV, JSON lines or TensorBoard event file") from error
    lines = [line for line in text.splitlines() if line.strip()]
    is_json = bool(lines) and lines[0].lstrip()[0] in "{["
    return _from_json(lines, source) if is_json else _from_csv(lines)


def _chosen(columns: Columns, column: str | None, source: str) -> str:
    if column is not None and columns.get(column):
        return column
    holding = [name for name, values in columns.items() if values]
    if column is not None:
        found = "holds no numbers" if column in columns else "is not there"
        raise ValueError(f"{source}: the column {column!r} {found}; those with numbers: {holding}")
    meant = [name for name in holding if name.lower() not in STEPS]
    norms = [name for name in meant if "norm" in name.lower()]
    for names in (meant, norms):
        if len(names) == 1:
            return names[0]
    raise ValueError(f"{source} has several columns: choose one of {holding}")


def _from_csv(lines: list[str]) -> Columns:
    if not lines:
        return {}
    delimiter = max(",;\t", key=lines[0].count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    if all(_number(cell) is not None for cell in rows[0]):
        names = [str(i) for i in range(len(rows[0]))]
    else:
        names, rows = rows[0], rows[1:]
    return _gathered([dict(zip(names, row, strict=False)) for row in rows], names)


def _from_json(lines: list[str], source: str) -> Columns:
    try:
        rows = [json.loads(line) for line in lines]
    except json.JSONDecodeError:
        rows = _whole_json("\n".join(lines), source)
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    rows = [row if isinstance(row, dict) else {"0": row} for row in rows]
    return _gathered(rows, list(dict.fromkeys(name for row in rows for name in row)))


def _whole_json(text: str, source: str) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not JSON lines: {error.msg} in line {error.lineno}") from error
    return rows if isinstance(rows, list) else [rows]


def _gathered(rows: list[dict[str, Any]], names: list[str]) -> Columns:
    """The columns that hold numbers, and empty ones for those that hold anything else."""
    columns: Columns = {name: [] for name in names}
    other = set()
    for row in rows:
        for name, cell in row.items():
            if cell in ("", None):
                continue
            number = _number(cell)
            if number is None:
                other.add(name)
            else:
                columns[name].append(number)
    return {name: [] if name in other else values for name, values in columns.items()}


def _number(cell: Any) -> float | None:
    if isinstance(cell, bool | list | dict):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _from_events(data: bytes, source: str) -> Columns:
    try:
        from tensorboardX.proto import event_pb2
    except ModuleNotFoundError as error:
        remedy = 'pip install "optaxclip[tensorboard]"'
        raise ValueError(
            f"{source} is an event file, which takes tensorboardX: {remedy}"
        ) from error
    found: dict[str, list[tuple[int, float]]] = {}
    for record in _records(data):
        event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                found.setdefault(value.tag, []).append((event.step, number))
    return {
        tag: [number for _, number in sorted(pairs, key=lambda pair: pair[0])]
        for tag, pairs in found.items()
    }


def _records(data: bytes) -> Iterator[bytes]:
    """The records: each its length, a checksum of that, its data, a checksum of that."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        start, end = at + 12, at + 12 + length
        if end + 4 > len(data):  # the run still writes, or was stopped
            return
        yield data[start:end]
        at = end + 4


def _scalar(value: Any) -> float | None:
    """The number of a summary: a field as PyTorch writes it, or a tensor as TensorFlow does."""
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor
    if not value.HasField("tensor") or math.prod(d.size for d in tensor.tensor_shape.dim) != 1:
        return None
    types = {1: ("<f4", tensor.float_val), 2: ("<f8", tensor.double_val)}
    if tensor.dtype not in types:
        return None
    dtype, listed = types[tensor.dtype]
    return float(listed[0] if listed else np.frombuffer(tensor.tensor_content, dtype)[0])

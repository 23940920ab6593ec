"""Reads norms from files: text, TensorBoard's event files, `.npy`."""

import codecs
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import optaxclip.tuning.events as events
import optaxclip.tuning.texts as texts
from optaxclip._base.host import ArrayLike
from optaxclip._base.validation import did_you_mean
from optaxclip.tuning.columns import Columns, Series, Steps, chosen, listed, numeric_among
from optaxclip.tuning.steps import ordered

NPY_START = b"\x93NUMPY"
EVENT_FILES = "*tfevents*"


class Column(NamedTuple):
    """What was read from a file.

    Attributes:
      name: the column's name; None if the file has only one column.
      norms: float64[rows], its numbers in the order of the steps, without empty rows; or an array
        that is not checked yet.
      steps: int64[rows], the step of each as the log has it; None if it has none.
      again: how many numbers were left out, because their steps came again.
    """

    name: str | None
    norms: ArrayLike
    steps: Steps | None = None
    again: int = 0


def read_norms(path: str | os.PathLike[str], column: str | None = None) -> Column:
    """One column of a file: a log, an event file, or an array of `np.save`.

    Of a directory the event files are read, in the order of their names. The last line or record of
    a file is left out if it is incomplete, because the run still writes the file or was stopped. A
    number in text that was cut short, such as 112.5 to 11, is read as the shorter number, because
    nothing tells it from a whole one.
    """
    path = Path(path)
    if not path.is_dir():
        return parse_norms(path.read_bytes(), column, str(path))
    files = {str(file): file.read_bytes() for file in sorted(path.glob(EVENT_FILES))}
    if not files:
        runs = sorted({str(file.parent) for file in path.rglob(EVENT_FILES)})
        others = f", but its folders do: pass one of {listed(runs)}" if runs else ""
        raise ValueError(f"{path} holds no TensorBoard event file ({EVENT_FILES}){others}")
    return _one_column(events.scalars(files), column, str(path))


def parse_norms(data: bytes, column: str | None, source: str) -> Column:
    """`read_norms` for the bytes of a file, which messages call `source`."""
    return _one_column(_columns(data, source), column, source)


def _one_column(columns: Columns, column: str | None, source: str) -> Column:
    numeric = numeric_among(columns)
    column = chosen(columns, source) if column is None else column
    values = columns.get(column, "is not there")
    if isinstance(values, str):
        others = f"; the columns with numbers are {listed(numeric)}" if numeric else ""
        others += "" if column in columns else did_you_mean(str(column), numeric)
        raise ValueError(f"{source}: the column {column!r} {values}{others}")
    values, steps, again = ordered(columns, column, values)
    return Column(column if len(columns) > 1 else None, values, steps, again)


def _columns(data: bytes, source: str) -> Columns:
    if data.startswith(NPY_START):
        return _from_npy(data, source)
    if events.START in data[: events.BEGINNING]:
        return events.scalars({source: data})
    is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16" if is_utf_16 else "utf-8-sig")()
    try:
        # Left out are an incomplete last character, and zeros at the end: a machine that went down
        # leaves them in place of what was not yet written.
        text = decoder.decode(data, final=is_utf_16).rstrip("\0")
    except UnicodeDecodeError as error:
        kinds = "CSV, JSON lines, a TensorBoard event file or an array of np.save"
        raise ValueError(f"{source} must be {kinds}, and is none of these") from error
    if "\0" in text or (not text and b"\0" in data):
        raise ValueError(f"{source} holds zero bytes in place of text: copy the file anew")
    return texts.columns_in(text, source)


def _from_npy(data: bytes, source: str) -> Columns:
    """An array of norms, or one with a column for each leaf or field."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a damaged header may raise any error of the parsers
        message = f"{source} is not an array of numbers that np.save wrote: {error}"
        raise ValueError(message) from error
    if array.dtype.names:
        fields = {name: array[name] for name in array.dtype.names}
    elif array.ndim == 2:
        fields = {str(i): values for i, values in enumerate(array.T)}
    else:
        fields = {"0": array}
    return {name: _numbers(values) for name, values in fields.items()}


def _numbers(values: np.ndarray[Any, Any]) -> Series | str:
    if values.dtype.kind not in "fiu":
        return f"has the dtype {values.dtype}; save numbers, np.asarray(norms, np.float32)"
    if values.ndim != 1:
        return f"has the shape {values.shape}; save one axis, the steps"
    if not values.size:
        return "is empty"
    return Series(values.astype(np.float64), np.arange(len(values)))

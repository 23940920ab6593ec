"""The columns of a log that is text: CSV, JSON, or lines with names and numbers."""

import collections
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from optaxclip.tuning.columns import Cells, Columns, columns_of, is_number

LINE_BREAK = re.compile(r"\r\n|\n|\r")
"""Not `str.splitlines`, which also splits at characters inside of lines, such as U+2028."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")
TWICE = "is there more than once: give each its own name"
SAMPLE = 1000
"""This many lines are enough to tell CSV from other text."""

# Names have a largest length, so that the search of a long line without numbers is quick.
NUMBER = (
    r"(?:[\w.]{1,20}\()?'?"  # as in tensor(1.5), np.float32(1.5) and '1.5'
    r"([+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|nan|inf(?:inity)?)|None)(?![\w.]|,\d)"
)
QUOTED = re.compile(rf"'([^'\n]{{1,200}})'\s{{0,9}}:\s{{0,9}}{NUMBER}", re.IGNORECASE)
"""A dict that Python printed."""
PIECE = re.compile(
    rf"(?<!\w)([a-z_][\w ()/.%-]{{0,80}}?)(?:\s{{0,20}}[:=]\s{{0,20}}|\s{{1,20}}){NUMBER}",
    re.IGNORECASE,
)
"""In lines such as `iteration 5/ 100 | grad norm: 1.5 |`, names may have spaces in them."""
WORD = re.compile(
    r"(?<![\w./-])([a-z_][\w()/.-]{0,80})"
    r"(?:\s{0,20}[:=]|(?<=step)\s|(?<=iter)\s|(?<=iteration)\s|(?<=epoch)\s)"
    rf"\s{{0,20}}{NUMBER}",
    re.IGNORECASE,
)
SPACED = re.compile(rf"([a-z_][\w()/.-]{{0,80}})\s{{1,20}}{NUMBER}[\s,]{{0,20}}", re.IGNORECASE)
"""Lines such as `[rank 0] step 5 grad_norm 1.5`, if they hold nothing else."""
BRACKETS = re.compile(r"\[[^\]\n]{0,80}\]")
OBJECT = re.compile(r'\{\s*"')
Row = list[tuple[str, Any]]


class _Object(Row):
    """The pairs of a JSON object, in which a key may occur twice."""


# Integers are read as floats, because Python refuses to read very long ones.
DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_int=float)


def columns_in(text: str, source: str) -> Columns:
    """The columns of a text, which messages call `source`."""
    lines = LINE_BREAK.split(COLORS.sub("", text))
    is_ended = not lines[-1].strip()
    while lines and not lines[-1].strip():
        lines.pop()
    try:
        if text.lstrip().startswith(("{", "[")):
            return columns_of(_gathered(_document(text, lines, source)))
        table = _table(lines)
        found = {} if _is_csv(table) else _gathered(_rows(lines, source))
        return columns_of(found or _from_csv(table, is_ended=is_ended))
    except RecursionError as error:
        remedy = 'write a flat object for each step, such as {"grad_norm": 1.5}'
        raise ValueError(f"{source} is nested too deeply to be a log: {remedy}") from error
    except csv.Error as error:
        remedy = "delete what is damaged, or copy the file anew"
        raise ValueError(f"{source} is damaged: {error}; {remedy}") from error


def _table(lines: list[str]) -> list[str]:
    """The lines of a table without comments, but for the last one above it if that has its names.

    If spaces are between cells, they become tabs.
    """
    cells = [line for line in lines if line.strip() and not line.startswith("#")]
    comments = [*itertools.takewhile(lambda line: line.startswith("#"), lines)]
    names = [line.strip("# ") for line in comments[-1:]]
    words = [line.split() for line in cells[:2]]
    is_spaced = len(words) == 2 and len(words[0]) == len(words[1]) > 1
    if is_spaced and _delimiter(cells[0]) not in cells[0] and all(map(_is_cell, words[1])):
        cells, names = (["\t".join(line.split()) for line in each] for each in (cells, names))
    for line in names:
        in_names, in_cells = (x.split(_delimiter(x)) for x in (line, cells[0] if cells else ""))
        if len(in_names) == len(in_cells) > 1 and _is_cell(in_cells[0]):
            return [line, *cells]
    return cells


def _is_csv(lines: list[str]) -> bool:
    """Whether the lines below the first hold cells that are numbers, rather than named numbers."""
    first, *below = lines[:SAMPLE] or [""]
    delimiter = _delimiter(first)
    of_cells = sum(any(map(_is_cell, line.split(delimiter))) for line in below)
    of_pairs = sum(bool(_pairs(line)) for line in below)
    return of_cells > of_pairs or (of_cells == of_pairs > 0 and not _pairs(first))


def _is_cell(cell: str) -> bool:
    return is_number(cell.strip(' "').replace(",", "."))


def _delimiter(line: str) -> str:
    # Other delimiters come first, because a comma beside them may be a decimal comma.
    return next((sign for sign in "\t;" if sign in line), ",")


def _from_csv(lines: list[str], *, is_ended: bool) -> Cells:
    """The columns of CSV; `is_ended` says whether a line break follows the last line."""
    if not lines:
        return {}
    reader = csv.reader(lines, delimiter=_delimiter(lines[0]))
    names = row = [cell.strip() for cell in next(reader)]
    if all(_is_cell(cell) for cell in names):
        names = [str(i) for i in range(len(row))]
        reader = itertools.chain([row], reader)
    columns: list[list[str]] = [[] for _ in names]
    blanks = [""] * len(names)
    for row in reader:
        for column, cell in zip(columns, itertools.chain(row, blanks), strict=False):
            column.append(cell.strip())
    rows = len(columns[0])
    if rows and not is_ended and _is_cut(row, len(names)):
        rows -= 1
    counts = collections.Counter(names)
    return {
        name: TWICE if counts[name] > 1 else (column[:rows], range(1, rows + 1))
        for name, column in zip(names, columns, strict=True)
    }


def _is_cut(row: list[str], cells: int) -> bool:
    """Whether a row lacks some of its cells, or ends with the beginning of a number."""
    last = row[-1].strip().lower()
    rests = ("0", "an", "n", "nf", "f")  # these complete "1e-", "n", "na", "i" and "in"
    begins = any(is_number(last + rest) for rest in rests)
    return len(row) < cells or (last != "" and not is_number(last) and begins)


def _document(text: str, lines: list[str], source: str) -> Iterable[Any]:
    """The rows of a text that begins as JSON: one value, JSON lines, or lines of another kind."""
    try:
        value = DECODER.decode(text.rstrip())
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" and not any(_pairs(line) for line in lines):
            raise _damaged(source, error.msg, error.lineno) from error
        return _rows(lines, source)
    if type(value) is list:
        return value
    # A trainer's state, for example, has its log beside its settings.
    return max(_tables(value), key=len, default=[value])


def _tables(value: Any) -> Iterator[list[Any]]:
    """The lists of objects at any depth in an object."""
    for _, cell in value:
        if isinstance(cell, _Object):
            yield from _tables(cell)
        elif isinstance(cell, list) and any(isinstance(row, _Object) for row in cell):
            yield cell


def _rows(lines: list[str], source: str) -> Iterator[_Object]:
    """The rows of lines that hold JSON objects or named numbers, amid others."""
    for at, line in enumerate(lines, start=1):
        found: list[_Object] = []
        is_last = at == len(lines)  # it may be cut, as the run still writes it or was stopped
        start = OBJECT.search(line)
        if start:
            try:
                found = _objects(line[start.start() :])
            except json.JSONDecodeError as error:
                if not is_last and not line[: start.start()].strip():
                    raise _damaged(source, error.msg, at) from error
        if not found and not (is_last and _is_open(line)):
            found = [_pairs(line)]
        yield from filter(None, found)


def _objects(text: str) -> list[_Object]:
    """The JSON objects of a line, one behind the other."""
    found, at = [], 0
    while at < len(text):
        row, end = DECODER.raw_decode(text, at)
        found.append(row)
        at = end + len(text[end:]) - len(text[end:].lstrip(" ,\t"))
    return found


def _is_open(line: str) -> bool:
    return line.count("{") > line.count("}")


def _pairs(line: str) -> _Object:
    """The names in a line, and the numbers behind them."""
    found = QUOTED.findall(line) or (PIECE if "|" in line else WORD).findall(line)
    bare = BRACKETS.sub("", line)
    is_spaced = bool(bare.strip()) and not SPACED.sub("", bare).strip()
    return _Object(SPACED.findall(bare) if is_spaced else found)


def _damaged(source: str, message: str, line: int) -> ValueError:
    remedy = "mend or delete that line, or copy the file anew"
    return ValueError(f"{source}: not JSON lines: {message} in line {line}; {remedy}")


def _gathered(rows: Iterable[Any]) -> Cells:
    """The columns of rows, each of which has some of them."""
    columns: dict[str, tuple[list[Any], list[int]]] = {}
    twice = set()

    def add(row: Row, at: int, prefix: str = "") -> None:
        for key, cell in row:
            name = prefix + key
            if isinstance(cell, _Object):
                add(cell, at, f"{name}.")
                continue
            if name not in columns:
                columns[name] = ([], [])
            cells, places = columns[name]
            if places and places[-1] == at:
                twice.add(name)
            cells.append(cell)
            places.append(at)

    for at, row in enumerate(rows, start=1):
        add(row if isinstance(row, _Object) else [("0", row)], at)
    return {name: TWICE if name in twice else column for name, column in columns.items()}

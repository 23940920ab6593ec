"""Reads gradient norms from a log."""

import importlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.validation import validate_call, warn

if TYPE_CHECKING:
    import pandas as pd

NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)"
NAME = r"[a-z_][\w/.()@-]{0,99}"
PATTERN = (
    # A name can have up to four words before a sign, as in `grad norm: 1.5` or `| lr | 1 |`.
    rf"(?<![\w/.])['\"]?(?P<name>{NAME}(?: {NAME}){{0,3}}?(?=['\"]?\s*[:=|])|{NAME}(?=\s))['\"]?"
    r"\s*[:=|]?\s*"
    # The number can be in a call such as `np.float64(1.5)`, in quotes, or before `/9`.
    rf"(?:[\w.]{{1,20}}\()?['\"]?(?P<value>{NUMBER})(?![\w.]|:\d|,\d)"
)
"""Finds names and numbers in lines of text."""
PLACE = re.compile(r"\[(?P<epoch>\d+)(?P<epochs>/\d+)?\]\s*\[\s*(?P<at>\d+)/\s*(?P<total>\d+)\]")
"""The epoch and its batch, such as `[3][50/3505]` in mmengine and `[0/300][10/390]` in Swin."""
BATCH = re.compile(r"(?P<epoch>\d+):?\s+\[?\s*(?P<at>\d+)\s*/\s*(?P<total>\d+)\b")
"""The same in timm, `Train: 3 [  50/1251 (  4%)]`, and in fairseq, `epoch 003:   50 / 1251`."""
BAR = re.compile(r"(?<![\d.:/])(?P<at>\d+)/(?P<total>\d+)\s*\[(?:\d+:)+\d+")
"""A progress bar, such as `20/2353 [00:11<...`."""
RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)+[\s:-]*")
"""The line between the header and the rows of a Markdown table."""
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

GRADIENT = r"(g|grads?|gradients?)"
CERTAIN = re.compile(
    rf"((train|training|total|global|raw|unclipped|pre_clip|actor|critic)_)*"
    rf"({GRADIENT}_?)?(global_|total_|l2_|2.0_|g)?norm(_(total|all|global|raw|l2|pre_clip))?"
)
"""Last parts of names that clearly denote a gradient norm."""
CANDIDATE = re.compile(rf"(^|.*_){GRADIENT}_?(.*_)?g?norms?(_.*)?|(^|.*_)gnorm(_.*)?")
"""Last parts of names that may denote a gradient norm."""
SETTING = re.compile(
    r"(.*_)?(max|min|clip|clipping|clipped|limit|threshold|params?|parameters?|weights?|updates?"
    r"|normalized|num|ratio|batch|layer|coef|std|var|after|post)(_.*)?"
)
"""Last parts of names that denote settings, norms of parameters or updates, or statistics."""
SETTINGS = re.compile(
    r"(.*[/.])?(config|args|hparams|hyperparams|params?|parameters?|weights?|updates?)[/.].*"
)
"""Names in groups of settings, parameters, or updates."""
STEP = re.compile(
    r"(.*[/.])?((?P<first>global_?steps?(/max_steps)?|num_updates|_step)"
    r"|(train(er|ing)?_?)?(steps?|iter(ation)?s?|it|updates?))"
)
EPOCH = re.compile(r"(.*[/._])?epochs?")
KEY, VALUE = re.compile(r"key|tag|metric|name|variable"), re.compile(r"values?")


@validate_call()
def read_log(
    path: str | os.PathLike[str] | io.TextIOBase,
    column: str | None = None,
    pattern: str | re.Pattern[str] | None = None,
) -> "pd.Series":
    r"""Reads gradient norms and their steps from a log.

    Supported formats are tables (CSV, TSV, Markdown, also with one number per row), JSON, JSON
    lines, states such as `trainer_state.json`, TensorBoard's JSON and event files, `.npy` files,
    and text. Blank cells are ignored, and null in JSON is read as NaN.

    If a step is repeated, for example after a restart, its norm replaces the earlier norms of this
    step and of later steps. If the steps restart in each epoch, they are converted to global steps.
    If there are no steps, the norms are numbered from 0.

    Args:
      path: A path or an open text file.
      column: The name of the column, key, or tag. By default, it is the name that clearly denotes
        the gradient norm, such as `train/grad_norm`.
      pattern: A regular expression for text logs, which can match several times per line. It must
        have the groups `name` and `value`, or one group per column, for example
        `r"it (?P<step>\d+) gn (?P<grad_norm>\S+)"`. By default, it finds `name: value`,
        `name=value`, `name value`, and `name | value`.

    Returns:
      A pandas Series of float64[norms] with the steps as its index and the column as its name.

    Raises:
      ImportError: If pandas is not installed, or TensorBoard for event files.
      ValueError: If the column is missing or contains text, or if `column` is None and no name or
        several names may denote the gradient norm.

    Example:
      >>> import io
      >>> from optaxclip import tuning
      >>> log = io.StringIO("step 10 | grad norm: 1.5 (1.5)\nstep 20 | grad norm: 2.5 (2.0)")
      >>> tuning.read_log(log).to_dict()
      {10: 1.5, 20: 2.5}
    """
    pd = _import("pandas")
    if isinstance(path, str | os.PathLike):
        source, path = str(path), Path(path)
        if path.is_dir() or "tfevents" in path.name:
            return _read_events(path, column)
        if path.suffix == ".npy":
            return pd.Series(np.load(path), name=path.stem, dtype=np.float64)
        # PowerShell writes UTF-16 with a byte order mark.
        data = path.read_bytes()
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
        text = data.decode(encoding, errors="replace")
    else:
        source, text = "the log", path.read()
    text = COLORS.sub("", text).lstrip("\ufeff")
    table = _pivot(_read_table(text, re.compile(pattern or PATTERN, re.IGNORECASE), source))
    name = _choose(list(table.columns), source, column)
    # Blank cells are steps without a norm.
    cells = table[name]
    cells = cells[~cells.isin(("", "None", "null")) & cells.notna()]
    numbers = pd.to_numeric(cells, errors="coerce")
    wrong = cells[numbers.isna() & (cells.astype(str).str.strip().str.lower() != "nan")]
    if len(wrong):
        raise ValueError(
            f"column {name!r} of {source} must contain numbers, but row {wrong.index[0] + 1} "
            f"contains {str(wrong.iloc[0])[:40]!r}; choose a different column"
        )
    return _index_by_step(numbers.astype(np.float64), table, name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".", maxsplit=1)[0]
        raise ImportError(
            f'read_log requires {package}; run pip install "optaxclip[logs]"'
        ) from error


def _read_table(text: str, pattern: re.Pattern[str], source: str) -> Any:
    """Returns the columns of a text. Cells are strings, numbers, NaN, or blank."""
    pd = _import("pandas")
    lines = [line for line in re.split(r"\r\n|\n|\r", text) if line.strip()]
    if not lines:
        raise ValueError(f"{source} is empty; pass a log that contains gradient norms")
    if lines[0].lstrip()[0] in "{[" and (records := _json_records(text, lines, source)):
        return pd.json_normalize(records)
    rules = [i for i, line in enumerate(lines) if RULE.fullmatch(line.strip())]
    if rules and rules[0] > 0:
        rows = [line.strip().strip("|").split("|") for line in lines[rules[0] - 1 :]]
        names, rule, *rows = [[cell.strip() for cell in row] for row in rows]
        if len(names) == len(rule) > 1:
            return pd.DataFrame([row for row in rows if len(row) == len(names)], columns=names)
    delimiter = _delimiter(lines, pattern)
    # If a table has no header, the first line contains only numbers.
    if delimiter is not None:
        is_header = not all(map(_is_number, re.split(delimiter, lines[0].strip("# "))))
        table = pd.read_csv(
            io.StringIO("\n".join([lines[0].lstrip("# "), *lines[1:]])),
            sep=delimiter,
            header=0 if is_header else None,
            engine="python",
            dtype=str,
            keep_default_na=False,
            on_bad_lines="warn",
            skipinitialspace=True,
        )
        table.columns = [str(name).strip() for name in table.columns]
        # In RLlib, cells can contain dictionaries.
        for name in [name for name in table if table[name].astype(str).str.startswith("{").any()]:
            found = [dict(_pairs(str(cell), pattern)) for cell in table[name]]
            table = pd.concat([table, pd.DataFrame(found).add_prefix(f"{name}.")], axis=1)
        return table
    return pd.DataFrame(_text_records(lines, pattern))


def _json_records(text: str, lines: list[str], source: str) -> list[dict[str, Any]]:
    """Returns the objects of a JSON text, or an empty list for other texts."""

    def mark_null(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Null denotes a non-finite norm, unlike a missing key.
        return {key: "nan" if value is None else value for key, value in pairs}

    try:
        value = json.loads(text, object_pairs_hook=mark_null, parse_constant=str)
    except json.JSONDecodeError:
        found, wrong = [], []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line, object_pairs_hook=mark_null, parse_constant=str)
                found.append(record if isinstance(record, dict) else {})
            except json.JSONDecodeError:
                wrong.append(number)
        if len(found) <= len(wrong):
            return []
        # The last line may be incomplete if the run is still writing it.
        if wrong and wrong != [len(lines)]:
            warn(f"{source} has {len(wrong)} invalid JSON line(s), starting with line {wrong[0]}")
        return found
    if isinstance(value, list) and value and isinstance(value[0], list) and len(value[0]) == 3:
        # TensorBoard uses a list of (wall time, step, value).
        return [{"step": step, "value": number} for _, step, number in value]
    if isinstance(value, list):
        return [row if isinstance(row, dict) else {"value": row} for row in value]
    return max(_lists_of_objects(value), key=len, default=[value])


def _lists_of_objects(value: Any) -> Iterator[list[dict[str, Any]]]:
    for cell in value.values():
        if isinstance(cell, dict):
            yield from _lists_of_objects(cell)
        elif isinstance(cell, list) and any(isinstance(row, dict) for row in cell):
            yield [row for row in cell if isinstance(row, dict)]


def _delimiter(lines: list[str], pattern: re.Pattern[str]) -> str | None:
    """Returns the delimiter of a table as a regular expression, or None for other texts."""
    head, body = lines[0].strip("# "), lines[1:50]
    if not body or (_pairs(head, pattern) and sum(bool(_pairs(x, pattern)) for x in body) > 1):
        return None
    for delimiter in ("\t", ";", ",", r"\s+"):
        count = len(re.split(delimiter, head))
        rows = [re.split(delimiter, line.strip(" ")) for line in body]
        if delimiter == r"\s+":
            is_row = [len(row) == count and all(map(_is_number, row)) for row in rows]
        else:
            # Quoted cells may contain additional delimiters.
            is_row = [len(row) >= count > 1 and any(map(_is_number, row)) for row in rows]
        if sum(is_row) > 0.8 * len(body):
            return delimiter
    return None


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(NUMBER, cell.strip().strip('"'), re.IGNORECASE))


def _pairs(line: str, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Returns the names and numbers that a pattern finds in a line."""
    if {"name", "value"} <= pattern.groupindex.keys():
        return [(m["name"].strip(), m["value"]) for m in pattern.finditer(line)]
    return [pair for m in pattern.finditer(line) for pair in m.groupdict().items() if pair[1]]


def _text_records(lines: list[str], pattern: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    """Yields dicts from names to numbers. A repeated name starts a new dict."""
    record: dict[str, Any] = {}
    for line in lines:
        pairs: list[tuple[str, Any]] = _pairs(line, pattern)
        if place := PLACE.search(line) or BATCH.search(line):
            # Epochs count from 0 in Swin and timm, and from 1 in mmengine and fairseq.
            is_swin = place.re is PLACE and place["epochs"] is not None
            first = 0 if is_swin or (place.re is BATCH and "[" in place[0]) else 1
            epoch = int(place["epoch"]) - first
            pairs.append(("batch/step", epoch * int(place["total"]) + int(place["at"])))
        pairs += [(f"of {bar['total']}/step", bar["at"]) for bar in BAR.finditer(line)]
        if record.keys() & dict(pairs).keys():
            yield record
            record = {}
        for name, value in pairs:
            record.setdefault(name, value)
    if record:
        yield record


def _pivot(table: Any) -> Any:
    """Converts a table with one number per row to one column per key."""
    keys, values = ([n for n in table if x.fullmatch(_last_part(n))] for x in (KEY, VALUE))
    if len(keys) != 1 or len(values) != 1:
        return table
    (key,), (value,) = keys, values
    wide = table.pivot(columns=key, values=value)
    return wide.join(table.drop(columns=[key, value]))


def _choose(names: list[str], source: str, column: str | None) -> str:
    """Returns the name of the column with the gradient norm, which is `column` if given."""
    if column in names:
        return column
    if column is not None:
        raise ValueError(f"{source} has no column {column!r}; use one of {_format_names(names)}")
    if not names:
        raise ValueError(
            f"{source} contains no name/value pairs; set pattern to a regular expression for them"
        )
    # Exports of W&B contain the mean, minimum, and maximum of a curve. The mean is used.
    names = [n for n in names if re.sub(r"__(MIN|MAX)$", "", n) not in set(names) - {n}]
    own = [name for name in names if re.search(r"(^|[/.])record[/.]norm$", name)]
    if len(own) == 1:  # the gradient norm from `monitor.record`
        return own[0]
    possible = [
        name
        for name in names
        if not SETTING.fullmatch(_last_part(name)) and not SETTINGS.fullmatch(_normalize(name))
    ]
    certain = [name for name in possible if CERTAIN.fullmatch(_last_part(name))]
    gradients = [name for name in certain if _last_part(name) != "norm"]
    others = [name for name in possible if CANDIDATE.fullmatch(_last_part(name))]
    found = gradients or certain
    found = [name for name in found if _last_part(name) == _normalize(name)] or found
    if len(found) == 1:
        return found[0]
    rest = [n for n in names if not re.search(r"step|time|^$|unnamed", _normalize(n))]
    if len(rest) == 1 and re.fullmatch(r"\d*|values?", _last_part(rest[0])):
        return rest[0]
    if listed := found or others:
        raise ValueError(
            f"it is unclear which column of {source} contains the gradient norms; pass column="
            f"{listed[0]!r} or another of {_format_names(listed if len(listed) > 1 else names)}"
        )
    raise ValueError(
        f"no column of {source} looks like gradient norms; pass column=NAME, where NAME is one of "
        f"{_format_names(names)}"
    )


def _index_by_step(numbers: Any, table: Any, name: str) -> Any:
    """Indexes the norms by their steps and removes repeated steps."""
    pd = _import("pandas")
    folder = re.sub(r"[^/.]*$", "", name)
    columns = [n for n in table if n != name and STEP.fullmatch(_normalize(n))]

    def rank(other: str) -> tuple[bool, bool]:
        match = STEP.fullmatch(_normalize(other))
        return re.sub(r"[^/.]*$", "", other) != folder, match is None or match["first"] is None

    def read(other: str) -> Any:
        cells = table.loc[numbers.index, other].astype(str).str.split("/").str[0]
        return pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)

    values = numbers.to_numpy()
    for other in sorted(columns, key=rank):
        steps, epochs = read(other), [n for n in table if EPOCH.fullmatch(_normalize(n))]
        is_constant = len(steps) > 1 and not np.ptp(steps)
        if is_constant or not np.array_equal(steps, np.floor(steps)) or np.isinf(steps).any():
            continue
        falls = np.flatnonzero(np.diff(steps) <= 0)
        if len(falls) and epochs:
            epoch = np.floor(read(epochs[0]))
            # The steps start again from 0 in each epoch.
            if np.all(np.diff(epoch)[falls] > 0):
                length = np.max(steps) + np.median(np.diff(steps))
                steps = steps + (epoch - epoch[0]) * max(length, 1)
        # Keeps only steps below all subsequent steps, because a repeated step replaces the earlier
        # norms of this step and of later steps.
        lowest = np.minimum.accumulate(np.append(steps, np.inf)[::-1])[::-1][1:]
        is_kept = steps < lowest
        index = pd.Index(steps[is_kept].astype(np.int64), name="step")
        return pd.Series(values[is_kept], index=index, name=name)
    return pd.Series(values, index=pd.RangeIndex(len(values), name="step"), name=name)


def _read_events(path: Path, column: str | None) -> Any:
    pd = _import("pandas")
    events_of = _import("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    make_ndarray = _import("tensorboard.util.tensor_util").make_ndarray
    files = path.rglob("*tfevents*") if path.is_dir() else [path]
    folders = sorted({str(file.parent if path.is_dir() else file) for file in files})
    if len(folders) != 1:
        raise ValueError(
            f"path must contain the event files of a single run, but {path} contains "
            f"{len(folders)} runs; pass one of {folders}"
        )
    events = events_of(folders[0], {"scalars": 0, "tensors": 0})
    tags = events.Reload().Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        found = [(e.step, make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if all(value.shape == () and value.dtype.kind == "f" for _, value in found):
            scalars[tag] = [(step, float(value)) for step, value in found]
    name = _choose(list(scalars), str(path), column)
    steps, values = zip(*scalars[name], strict=True)
    table = pd.DataFrame({"step": steps, name: values})
    return _index_by_step(table[name].astype(np.float64), table, name)


def _format_names(names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: "norm" not in name.lower())
    more = len(ordered) - 12
    return f"{ordered[:12]}" + (f" and {more} more" if more > 0 else "")


def _normalize(name: str) -> str:
    """Returns `train/grad_norm` for `run 3 - train/Grad Norm`."""
    return re.sub(r"[\s-]+", "_", str(name).rsplit(" - ")[-1].strip().lower())


def _last_part(name: str) -> str:
    """Returns `grad_norm` for `train/Grad Norm`."""
    return re.split(r"/|\.(?!\d)", _normalize(name))[-1].strip("_")

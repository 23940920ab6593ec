"""Reads and writes `docs/evidence.csv`, and formats the tables of the site.

A row contains the results of a method with a fault, for a task and optimizer or for all of them
(`TOGETHER`). Cells are formatted for readers, and empty if unknown.
"""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS = (
    *("tasks", "fault", "method", "rate", "threshold", "start", "loss", "loss_low", "loss_high"),
    *("gain", "gain_low", "gain_high", "verdict"),
    *("beside_best", "beside_best_low", "beside_best_high", "beside_best_verdict"),
    *("helps", "harms", "pairs", "lost", "back", "never_back", "clipped", "largest_rate"),
    *("time", "time_least", "time_most"),
)
TOGETHER, WITH_ADAMW = "all", "all with adamw"
HELPS, UNCLEAR, HARMS = "helps", "no difference shown", "harms"
NONE, BEST, ANY, ABSENT = "none", "constant (best)", "any", "–"
LABELS = {
    "constant (best)": "`clip_by_global_norm` (best)",
    "constant (suggest)": "`clip_by_global_norm` (suggest)",
    "constant, zero": "`clip_by_global_norm` (zero)",
    "block RMS": "`clip_by_block_rms`",
    "AGC": "`adaptive_grad_clip`",
    "AGC (paper)": "`adaptive_grad_clip` (paper)",
    "AutoClip": "`autoclip`",
    "AutoClip 1": "`autoclip` 1",
    "AutoClip 25": "`autoclip` 25",
    "AutoClip 50": "`autoclip` 50",
    "AutoClip 90": "`autoclip` 90",
    "ZClip": "`zclip`",
    "ZClip (paper)": "`zclip` (paper)",
    "quantile": "`clip_by_quantile`",
    "median": "`clip_by_median_norm`",
    "window": "`clip_by_window_norm`",
    "log tracker": "`log_tracker`",
    "AdaGC": "`adagc` (first version)",
    "AdaGC (final)": "`adagc`",
    "EMA": "`clip_by_ema_norm`",
    "moving max": "`clip_by_moving_max`",
    "second moment": "`clip_by_second_moment`",
    "stable Adam": "`scale_by_stable_adam`",
    "normalize": "`normalize_by_global_norm`",
    "normalize by history": "`normalize_by_norm_history`",
    "spectral": "`clip_by_spectral_norm`",
    "skip non-finite": "`skip_nonfinite`",
    "skip above": "`skip_above`",
    "microbatches": "`accumulate`",
    "microbatches, clipped": "`accumulate`, clipped",
    "constant, leaf by leaf": "`clipped_grad` (per leaf)",
    "constant, ZClip": "`clipped_grad`, `zclip`",
    "constant, AutoClip": "`clipped_grad`, `autoclip`",
}
"""The names of methods on pages, which are function names."""
MOST_NAMES = 3
"""The number of methods per fault in the table of the page on evidence."""

GAIN, OVER_BEST = "gain, %", "over the best constant, %"
OF_BATCHES = "no fault, batches of "


class Claim(NamedTuple):
    """A claim of a paper, with the heading of its section and the rows and column to compare."""

    question: str
    tasks: str
    fault: str
    methods: tuple[str, ...]
    column: str


CLAIMS = (
    Claim(
        "AutoClip: optimal percentile",
        WITH_ADAMW,
        "no fault, best rate",
        ("AutoClip 1", "AutoClip", "AutoClip 25", "AutoClip 50", "AutoClip 90"),
        "gain",
    ),
    Claim(
        "ZClip: high learning rates",
        TOGETHER,
        "no fault, rate past the edge",
        (NONE, BEST, "ZClip", "ZClip (paper)"),
        "beside_best",
    ),
    Claim(
        "SPAM: gradient spikes",
        WITH_ADAMW,
        "spikes",
        (NONE, BEST, "skip above", "second moment", "SPAM"),
        "beside_best",
    ),
)
"""The claims of AutoClip, ZClip and SPAM. The claim of AGC requires other batch sizes."""

Row = Mapping[str, str]
Figures = Sequence[Row]


def read(path: Path) -> Figures:
    """Reads the rows of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, figures: Iterable[Row]) -> None:
    """Writes the rows to a file with all columns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(figures)


def list_values(figures: Figures, column: str) -> list[str]:
    """Returns the unique values of a column in the order of the file."""
    return list(dict.fromkeys(row[column] for row in figures))


def add_tables(page: str, figures: Figures) -> str:
    """Adds tables to a page below the headings that name a fault, a method or a task."""
    tables: dict[str, Callable[[], str]] = {
        "overhead by method": lambda: format_times(figures),
        "agc: large batches": lambda: _format_batches(figures),
    }
    for claim in CLAIMS:
        tables[claim.question.lower()] = lambda claim=claim: _format_claim(figures, claim)
    formatters = {"fault": _format_fault, "method": _format_method, "tasks": _format_task}
    for column, make in formatters.items():
        for name in list_values(figures, column):
            tables[get_label(name).lower()] = lambda make=make, name=name: make(figures, name)
    first, *sections = re.split(r"^(?=##+ )", page, flags=re.MULTILINE)
    parts = [first]
    for section in sections:
        heading = section.splitlines()[0].lstrip("# ").lower()
        table = tables[heading]() if heading in tables else ""
        parts.append(f"{section.rstrip()}\n\n{table}".rstrip() + "\n\n")
    return "".join(parts)


def format_summary(figures: Figures) -> str:
    """Formats the methods that help and harm most by fault."""
    lines = []
    for fault in _list_faults(figures):
        fault_rows = [row for row in _pool(figures) if row["fault"] == fault and row["gain"]]
        fault_rows.sort(key=lambda row: -float(row["gain"]))
        helps = [row for row in fault_rows if row["verdict"] == HELPS]
        harms = [row for row in reversed(fault_rows) if row["verdict"] == HARMS]
        lines.append(
            [_link("evidence_figures.md", fault), _format_first(helps), _format_first(harms)]
        )
    return format_table(["", "helps", "harms"], lines)


def format_rates(figures: Figures) -> str:
    """Formats the learning rates and the losses without method and fault."""
    rates = ("calm rate", "rate at the edge", "rate past the edge")
    lines = []
    for task in _list_tasks(figures):
        task_rows = {
            row["fault"]: row for row in figures if (row["tasks"], row["method"]) == (task, NONE)
        }
        found = [task_rows.get(f"no fault, {rate}", {}) for rate in rates]
        start = next((row["start"] for row in found if row), ABSENT)
        each = [f"{row['rate']}, {row['loss']}" if row else ABSENT for row in found]
        lines.append([_link("evidence_figures.md", task), start, *each])
    head = ["", "loss at the start", *(f"{rate}: rate, loss" for rate in ("calm", "edge", "past"))]
    return format_table(head, lines)


def format_times(figures: Figures) -> str:
    """Formats the times of runs relative to runs without a method."""
    lines = []
    for row in _pool(figures):
        if row["time"]:
            time = _format_interval(row, "time")
            lines.append([_link("", row["method"]), time, _format_percent(row["clipped"])])
    return format_table(["", "time of a run, none = 1", "steps clipped, no fault"], lines)


def format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table without empty columns, or an empty string without rows."""
    lines = list(lines)
    known = [i for i in range(len(head)) if any(line[i] != ABSENT for line in lines)]
    rows = [f"| {' | '.join(line[i] for i in known)} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(known) + "|", *rows[1:]]) if lines else ""


def get_label(name: str) -> str:
    """Returns the name of a method, fault or task on pages."""
    return LABELS.get(name, name)


def build_anchor(title: str) -> str:
    """Returns the anchor of a heading on the site and on repository hosts."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _format_fault(figures: Figures, fault: str) -> str:
    rows = [row for row in _pool(figures) if row["fault"] == fault]
    rows.sort(key=lambda row: -float(row["gain"] or "inf"))
    return _format_comparison((row["method"], row) for row in rows)


def _format_method(figures: Figures, method: str) -> str:
    rows = [row for row in _pool(figures) if row["method"] == method]
    return _format_comparison((row["fault"], row) for row in rows if row["fault"] != ANY)


def _format_comparison(rows: Iterable[tuple[str, Row]]) -> str:
    lines = []
    for name, row in rows:
        pairs = f"{row['helps']}, {row['harms']} of {row['pairs']}" if row["pairs"] else ABSENT
        back = row["back"] or ABSENT
        if row["never_back"]:
            back += f" ({_format_percent(row['never_back'])} never)"
        verdict = row["verdict"] if row["verdict"] in (HELPS, HARMS) else ABSENT
        best = " ".join(filter(None, (row["beside_best"] or ABSENT, row["beside_best_verdict"])))
        share = _format_interval(row, "gain")
        lost, clipped = _format_percent(row["lost"]), _format_percent(row["clipped"])
        lines.append([_link("", name), share, verdict, best, pairs, lost, back, clipped])
    head = ["", GAIN, "verdict", OVER_BEST, "tasks: helps, harms"]
    return format_table([*head, "runs lost", "steps until back", "steps clipped"], lines)


def _format_task(figures: Figures, task: str) -> str:
    rows = [row for row in figures if row["tasks"] == task]
    faults = [fault for fault in list_values(rows, "fault") if fault in _list_faults(figures)]
    found = {(row["method"], row["fault"]): row for row in rows}
    mark = {HELPS: " +", HARMS: " −"}
    lines = []
    for method in list_values(rows, "method"):
        cells = [found.get((method, fault)) for fault in faults]
        losses = [row["loss"] + mark.get(row["verdict"], "") if row else ABSENT for row in cells]
        threshold = next((row["threshold"] for row in cells if row and row["threshold"]), ABSENT)
        lines.append([get_label(method), threshold, *losses])
    return format_table(["", "threshold", *(_shorten(fault) for fault in faults)], lines)


def _format_claim(figures: Figures, claim: Claim) -> str:
    rows_by_key = {
        (row["tasks"], row["method"]): row for row in figures if row["fault"] == claim.fault
    }
    methods = [method for method in claim.methods if (claim.tasks, method) in rows_by_key]
    ending = ", adamw" if claim.tasks == WITH_ADAMW else ""
    tasks = [
        name
        for name in _list_tasks(figures)
        if name.endswith(ending) and all((name, method) in rows_by_key for method in methods)
    ]
    lines = []
    for method in methods:
        row = rows_by_key[claim.tasks, method]
        losses = [rows_by_key[name, method]["loss"] for name in tasks]
        lines.append(
            [
                get_label(method),
                *losses,
                _format_percent(row["lost"]),
                _format_interval(row, claim.column),
            ]
        )
    return format_table(
        ["", *tasks, "runs lost", GAIN if claim.column == "gain" else OVER_BEST], lines
    )


def _format_batches(figures: Figures) -> str:
    lines = []
    for row in figures:
        batch = row["fault"].removeprefix(OF_BATCHES)
        if batch != row["fault"]:
            lines.append(
                [batch, get_label(row["method"]), row["rate"], row["loss"], row["largest_rate"]]
            )
    head = ["batch", "method", "best rate", "its loss", "largest rate at which no run is lost"]
    return format_table(head, lines)


def _shorten(fault: str) -> str:
    return fault.removeprefix("no fault, ").removeprefix("a ")


def _pool(figures: Figures) -> list[Row]:
    return [row for row in figures if row["tasks"] == TOGETHER]


def _list_faults(figures: Figures) -> list[str]:
    return [name for name in list_values(_pool(figures), "fault") if name != ANY]


def _list_tasks(figures: Figures) -> list[str]:
    return [name for name in list_values(figures, "tasks") if not name.startswith(TOGETHER)]


def _format_first(rows: Sequence[Row]) -> str:
    shown = [f"{get_label(row['method'])} {row['gain']}" for row in rows[:MOST_NAMES]]
    more = [f"{len(rows) - MOST_NAMES} more"] if len(rows) > MOST_NAMES else []
    return ", ".join(shown + more) or "none"


def _format_interval(row: Row, name: str) -> str:
    low, high = ("low", "high") if name != "time" else ("least", "most")
    return (
        f"{row[name]} ({row[f'{name}_{low}']} to {row[f'{name}_{high}']})" if row[name] else ABSENT
    )


def _format_percent(part: str) -> str:
    return f"{part} %" if part else ABSENT


def _link(page: str, title: str) -> str:
    return f"[{get_label(title)}]({page}#{build_anchor(get_label(title))})"

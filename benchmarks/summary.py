"""Prints short tables of the results of `benchmarks.times`, with one row per case.

python -m benchmarks.times --json figures.json
python benchmarks/summary.py figures.json
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

OURS, THEIRS, TORCH = "optaxclip", "Optax", "PyTorch"
Rows = dict[tuple[str, str], dict[str, Any]]


def print_table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    """Prints a table in Markdown, unless it is empty."""
    head, lines = list(head), list(lines)
    if lines:
        print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n", flush=True)


def format_number(figure: Any) -> str:
    """Formats a median or a number."""
    value = figure["median"] if isinstance(figure, dict) else figure
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def get_rows(report: dict[str, Any], name: str) -> Rows:
    """Returns the rows of a section, or nothing if the section was not measured."""
    sections = [section for section in report["sections"] if section["name"] == name]
    return {(row["case"], row["way"]): row for section in sections for row in section["rows"]}


def format_cells(row: dict[str, Any], *names: str) -> list[str]:
    """Formats figures of a row, with empty cells for unknown figures."""
    return [format_number(row.get(name)) for name in names]


def print_steps(rows: Rows) -> None:
    """Prints the overhead of clipping in a step."""
    added = "added_ms", "of_reads", "of_optax", "extra_memory"
    head = (
        "added to a step",
        "ms",
        "read passes",
        "of Optax's",
        "memory, %",
        "Optax: ms",
        "memory, %",
    )
    lines = []
    for (case, variant), row in rows.items():
        if variant == OURS:
            optax_row = rows.get((case, THEIRS), {})
            lines.append(
                [
                    case,
                    *format_cells(row, *added),
                    *format_cells(optax_row, "added_ms", "extra_memory"),
                ]
            )
    print_table(head, lines)


def print_calls(rows: Rows, name: str) -> None:
    """Prints the times of calls."""
    others = [variant for variant in (THEIRS, TORCH) if any(variant == other for _, other in rows)]
    lines = [
        [
            case,
            *format_cells(row, "ms", "of_optax"),
            *(_format_ms(rows, case, other) for other in others),
        ]
        for (case, variant), row in rows.items()
        if variant == OURS
    ]
    print_table([name, "ms", "of Optax's", *(f"{other}, ms" for other in others)], lines)


def _format_ms(rows: Rows, case: str, variant: str) -> str:
    return format_cells(rows.get((case, variant), {}), "ms")[0]


def main() -> None:
    """Prints the tables."""
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    print("; ".join(f"{name} {report[name]}" for name in report if name != "sections"))
    for name in ("steps", "large steps"):
        print_steps(get_rows(report, name))
    titles = {
        "clip": "clipping in place",
        "leaves": "many small leaves",
        "eager": "outside `jit`",
        "growth": "clipping gradients of different sizes",
        "large clips": "clipping",
    }
    for name, title in titles.items():
        print_calls(get_rows(report, name), title)


if __name__ == "__main__":
    main()

"""Short tables, as in `measured` beside this file, of what the benchmarks wrote.

  python -m benchmarks.times --json figures.json
  python benchmarks/summary.py figures.json

A line for each case; quartiles are in the file.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

OURS, THEIRS, TORCH = "optaxclip", "Optax", "PyTorch"
Rows = dict[tuple[str, str], dict[str, Any]]


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    """Prints it as Markdown, if there is anything to say."""
    head, lines = list(head), list(lines)
    if lines:
        print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n", flush=True)


def number(figure: Any) -> str:
    """A median, or a number as it is."""
    value = figure["median"] if isinstance(figure, dict) else figure
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def rows_of(report: dict[str, Any], name: str) -> Rows:
    """The rows of a section, if it was measured."""
    sections = [section for section in report["sections"] if section["name"] == name]
    return {(row["case"], row["way"]): row for section in sections for row in section["rows"]}


def cells(row: dict[str, Any], *names: str) -> list[str]:
    """Figures of a row; one that is not known is left empty."""
    return [number(row.get(name)) for name in names]


def steps(rows: Rows) -> None:
    """What a clip adds to a step."""
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
    for (case, way), row in rows.items():
        if way == OURS:
            beside = rows.get((case, THEIRS), {})
            lines.append([case, *cells(row, *added), *cells(beside, "added_ms", "extra_memory")])
    table(head, lines)


def calls(rows: Rows, name: str) -> None:
    """What a call takes."""
    others = [way for way in (THEIRS, TORCH) if any(way == other for _, other in rows)]
    lines = [
        [case, *cells(row, "ms", "of_optax"), *(_ms(rows, case, other) for other in others)]
        for (case, way), row in rows.items()
        if way == OURS
    ]
    table([name, "ms", "of Optax's", *(f"{other}, ms" for other in others)], lines)


def _ms(rows: Rows, case: str, way: str) -> str:
    return cells(rows.get((case, way), {}), "ms")[0]


def main() -> None:
    """Prints the tables."""
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    print("; ".join(f"{name} {report[name]}" for name in report if name != "sections"))
    for name in ("steps", "large steps"):
        steps(rows_of(report, name))
    named = {
        "clip": "a clip alone, in place",
        "leaves": "many small leaves",
        "eager": "outside of `jit`",
        "growth": "a clip alone, as gradients grow",
        "large clips": "a clip alone",
    }
    for name, title in named.items():
        calls(rows_of(report, name), title)


if __name__ == "__main__":
    main()

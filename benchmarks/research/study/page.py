"""Writes the data, pictures and tables of the study from its results.

  python -m benchmarks.research.study.page study.jsonl

Writes `docs/evidence.csv`, the pictures, and the marked parts of `docs/evidence.md`. Other text on
that page, and the descriptions in `docs/evidence_figures.md`, are written by hand. The site adds
the tables to the latter (`benchmarks.research.study.figures`).
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.research.study import claims, figures, pictures, rows
from benchmarks.research.study.figures import Figures
from benchmarks.research.study.summary import Summary, load

DOCS = Path(__file__).parents[3] / "docs"
MARKED = re.compile(
    r"(?<=<!-- made by benchmarks.research.study.page: )(.+?) -->\n(.*?)(?=<!-- end -->)", re.DOTALL
)


def fill_marks(page: str, texts: Mapping[str, str]) -> str:
    """Replaces the texts between the marks of their names on a page."""

    def replace(match: re.Match[str]) -> str:
        name, old = match.groups()
        return f"{name} -->\n" + (f"{texts[name]}\n" if name in texts else old)

    return MARKED.sub(replace, page)


def format_tables(found: Figures) -> dict[str, str]:
    """Returns the tables of the figures by name."""
    return {"in short": figures.format_summary(found), "rates": figures.format_rates(found)}


def describe_runs(summary: Summary, versions: Mapping[str, str]) -> str:
    """Describes the number of runs and the versions."""
    cells = summary.study.cells.values()
    seeds = sorted({len(cell.seeds) for cell in cells})
    num_seeds = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    steps = {cell.every * (cell.held_out.shape[1] - 1) for cell in cells}
    num_steps = " or ".join(map(str, sorted(steps)))
    total = sum(len(cell.seeds) for cell in cells)
    description = f"{total:,} runs of {num_steps} steps, {num_seeds} seeds of each"
    return "; ".join([description, *(f"{name} {x}" for name, x in versions.items())]) + "."


def main(arguments: list[str] | None = None) -> None:
    """Writes the data, the tables and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="file of JSON lines, one per run")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    options = parser.parse_args(arguments)
    summary, versions = load(options.results)
    data_rows = [*rows.format_summary(summary)]
    data_rows += claims.format_claims(summary.study, options.results)
    data, page = options.docs / "evidence.csv", options.docs / "evidence.md"
    figures.write(data, data_rows)
    texts = {**format_tables(figures.read(data)), "runs": describe_runs(summary, versions)}
    page.write_text(fill_marks(page.read_text("utf-8"), texts), "utf-8")
    pictures.draw(summary, options.docs)
    descriptions = (options.docs / "evidence_figures.md").read_text("utf-8").lower()
    for method in figures.list_values(data_rows, "method"):
        if f"\n### {figures.get_label(method).lower()}\n" not in descriptions:
            print(f"evidence_figures.md does not describe {method}")


if __name__ == "__main__":
    main()

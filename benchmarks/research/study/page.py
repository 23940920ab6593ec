"""Writes the study's figures from its results.

  python -m benchmarks.research.study.page study.jsonl

It writes `docs/evidence.csv`, the pictures, and on the page `docs/evidence.md` what stands between
marks. All else on that page, and what `docs/evidence_figures.md` says of each method, is written by
hand; the site adds the tables there (`benchmarks.research.study.figures`).
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


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page's Markdown, with these texts between the marks of their names."""

    def replaced(match: re.Match[str]) -> str:
        name, old = match.groups()
        return f"{name} -->\n" + (f"{made[name]}\n" if name in made else old)

    return MARKED.sub(replaced, page)


def tables(found: Figures) -> dict[str, str]:
    """What is made of the figures alone."""
    return {"in short": figures.in_short(found), "rates": figures.of_rates(found)}


def runs(summary: Summary, versions: Mapping[str, str]) -> str:
    """How many runs there were, and with what."""
    cells = summary.study.cells.values()
    seeds = sorted({len(cell.seeds) for cell in cells})
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    steps = {cell.every * (cell.held_out.shape[1] - 1) for cell in cells}
    long = " or ".join(map(str, sorted(steps)))
    total = sum(len(cell.seeds) for cell in cells)
    of_each = f"{total:,} runs of {long} steps, {many} seeds of each"
    return "; ".join([of_each, *(f"{name} {x}" for name, x in versions.items())]) + "."


def main(arguments: list[str] | None = None) -> None:
    """Writes the data, the tables on the page, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the page")
    options = parser.parse_args(arguments)
    summary, versions = load(options.results)
    found = [*rows.of_summary(summary), *claims.of_papers(summary.study, options.results)]
    data, page = options.docs / "evidence.csv", options.docs / "evidence.md"
    figures.write(data, found)
    made = {**tables(figures.read(data)), "runs": runs(summary, versions)}
    page.write_text(filled(page.read_text("utf-8"), made), "utf-8")
    pictures.draw(summary, options.docs)
    described = (options.docs / "evidence_figures.md").read_text("utf-8").lower()
    for method in figures.names(found, "method"):
        if f"\n### {figures.label(method).lower()}\n" not in described:
            print(f"evidence_figures.md does not say what {method} is")


if __name__ == "__main__":
    main()

"""Writes the page on evidence from results: `python -m benchmarks.study.page results.jsonl`.

It writes `docs/evidence.md`, `docs/evidence_tasks.md` and the pictures in `docs/`. Figures are made
of the results; what they mean is in `words.md`, written by hand, and stands where its headings say.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.study import claims, pictures, rows
from benchmarks.study.comparing import HARMS, HELPS, Case
from benchmarks.study.faults import FAULTS
from benchmarks.study.methods import METHODS
from benchmarks.study.rows import link, table
from benchmarks.study.runs import NONE, RATES, Key, Pair
from benchmarks.study.summary import Summary, load

DOCS = Path(__file__).parents[2] / "docs"
WORDS = Path(__file__).parent / "words.md"
Texts = Mapping[str, str]
MOST_NAMES = 6
"""Methods that the table on top names for each fault."""


def words(path: Path = WORDS) -> dict[str, str]:
    """The texts by their headings, with links as of a page in `docs/`."""
    parts = re.split(r"^## (.+)\n", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    texts = (
        text.replace("](../../docs/", "](").replace("](../../", "](../") for text in parts[1::2]
    )
    return {title: text.strip() for title, text in zip(parts[::2], texts, strict=True)}


def evidence(
    summary: Summary, texts: Texts, versions: Mapping[str, str], papers: Mapping[str, str]
) -> str:
    """The page; `papers` has the tables of their claims."""
    blocks = [
        "# Evidence: which method helps?",
        texts.get("opening", ""),
        *_in_short(summary, texts),
        *_how(summary, texts, versions),
        *_by_case(summary, texts),
        *_by_method(summary, texts),
        "## What methods cost",
        texts.get("costs", ""),
        rows.of_costs(summary),
        *_apart(summary, texts),
        *_claims(texts, papers),
        *_with_title("Limits of this study", texts.get("limits", "")),
    ]
    return _joined(blocks)


def by_task(summary: Summary, texts: Texts) -> str:
    """The page with all losses."""
    back = "What they say together is on [the page on evidence](evidence.md)."
    blocks = ["# Evidence, task by task", texts.get("task by task", ""), back]
    for pair in summary.study.pairs:
        blocks += [f"## {pair}", _limits(summary, pair), rows.of_pair(summary, pair)]
    return _joined(blocks)


def _limits(summary: Summary, pair: Pair) -> str:
    found = {
        key.method: f"{key.method} {cell.limit:.3g}"
        for key, cell in summary.study.cells.items()
        if key.pair == pair and cell.limit is not None
    }
    return f"Limits: {', '.join(found.values())}." if found else ""


def _joined(blocks: list[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _with_title(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _in_short(summary: Summary, texts: Texts) -> Iterator[str]:
    yield "## In short"
    yield texts.get("in short", "")
    lines = []
    for case in summary.cases:
        names = (_named(summary, verdict, case) for verdict in (HELPS, HARMS))
        others = len(summary.pooled[case.name])
        others -= sum(len(summary.found(verdict, case)) for verdict in (HELPS, HARMS))
        lines.append([f"[{case.title}](#{rows.anchor(case.title)})", *names, str(others)])
    yield table(["", "helps", "harms", "no difference shown"], lines)
    nowhere = ", ".join(map(link, summary.helps_nowhere())) or "none of the methods"
    yield f"**Helps nowhere in this study:** {nowhere}."
    yield "![What each method is worth in each case: the figures of the tables below](evidence.png)"
    yield texts.get("picture", "")


def _named(summary: Summary, verdict: str, case: Case) -> str:
    names = summary.found(verdict, case)
    names = names if verdict == HELPS else names[::-1]  # the largest differences first
    of_case = summary.pooled[case.name]
    shown = [f"{link(x)} {rows.points(of_case[x].share.mean)}" for x in names[:MOST_NAMES]]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join(shown + more) or "none"


def _how(summary: Summary, texts: Texts, versions: Mapping[str, str]) -> Iterator[str]:
    yield "## How it was measured"
    yield texts.get("measured", "")
    faults = [(case.title, FAULTS[case.fault]) for case in summary.cases if case.fault != "none"]
    yield "\n".join(f"- **{title}**: {text};" for title, text in faults)[:-1] + "." * bool(faults)
    cells = summary.study.cells
    seeds = sorted({len(cell.seeds) for cell in cells.values()})
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    runs = sum(len(cell.seeds) for cell in cells.values())
    steps = {cell.every * (cell.held_out.shape[1] - 1) for cell in cells.values()}
    long = " or ".join(map(str, sorted(steps)))
    of_each = f"{runs:,} runs of {long} steps, {many} seeds of each"
    yield "; ".join([of_each, *(f"{name} {x}" for name, x in versions.items())]) + "."
    head = ["", "loss at the start", *(f"{rate}: rate, loss" for rate in RATES)]
    yield "Without a method and without a fault:"
    yield table(head, (_of_pair(summary, pair) for pair in summary.study.pairs))
    yield texts.get("reading", "")


def _of_pair(summary: Summary, pair: Pair) -> list[str]:
    found = [summary.study.cells.get(Key(pair, NONE, "none", rate)) for rate in RATES]
    starts = [float(np.mean(cell.start)) for cell in found if cell is not None]
    shown = [
        rows.ABSENT if cell is None else f"{cell.learning_rate:.2g}, {np.mean(cell.end):.3g}"
        for cell in found
    ]
    start = f"{np.mean(starts):.3g}" if starts else rows.ABSENT
    return [f"[{pair}](evidence_tasks.md#{rows.anchor(str(pair))})", start, *shown]


def _by_case(summary: Summary, texts: Texts) -> Iterator[str]:
    yield "## By fault"
    yield texts.get("by fault", "")
    yield "The losses themselves are on [a page of their own](evidence_tasks.md)."
    for case in summary.cases:
        yield f"### {case.title[0].upper()}{case.title[1:]}"
        yield texts.get(f"fault: {case.name}", "")
        yield rows.of_case(summary, case)
        if case.name == "past":
            yield "![The share of runs lost at each rate, by method](evidence_lost.png)"
        if case.name == "spike":
            yield "![Losses before and after a spike, with some methods](evidence_recovery.png)"


def _by_method(summary: Summary, texts: Texts) -> Iterator[str]:
    yield "## By method"
    yield texts.get("by method", "")
    nowhere = summary.helps_nowhere()
    for method in summary.study.methods:
        of_method = rows.of_method(summary, method)
        if of_method:
            yield f"### {method}"
            yield texts.get(method, "")
            yield "It helps nowhere in this study." if method in nowhere else ""
            yield of_method


def _apart(summary: Summary, texts: Texts) -> Iterator[str]:
    for pair in summary.study.pairs:
        if pair not in summary.pairs:
            yield f"## Apart: {pair}"
            yield "".join(texts.get(name, "") for name in pair)
            yield rows.of_pair(summary, pair)


def _claims(texts: Texts, papers: Mapping[str, str]) -> Iterator[str]:
    yield "## Claims of four papers"
    yield texts.get("papers", "")
    for paper, question in claims.QUESTIONS.items():
        if papers.get(paper):
            yield f"### {paper}: {question}"
            yield texts.get(f"paper: {paper}", "")
            yield papers[paper]


def main(arguments: list[str] | None = None) -> None:
    """Writes both pages and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a file of JSON lines, one for each run")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where to write")
    options = parser.parse_args(arguments)
    (summary, versions), texts = load(options.results), words()
    papers = claims.tables(summary.study, options.results)
    pages = {
        "evidence.md": evidence(summary, texts, versions, papers),
        "evidence_tasks.md": by_task(summary, texts),
    }
    for name, text in pages.items():
        (options.docs / name).write_text(text, "utf-8")
        print(options.docs / name)
    pictures.draw(summary, options.docs)
    for method in summary.study.methods:
        if method in METHODS and method not in texts:
            print(f"words.md has no text on {method}")


if __name__ == "__main__":
    main()

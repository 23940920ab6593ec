"""Tables of the page: figures become text, and texts rows of Markdown."""

import math
import re
from collections.abc import Iterable, Sequence

from benchmarks.study import inference
from benchmarks.study.comparing import HARMS, HELPS, Case, Comparison
from benchmarks.study.inference import Interval
from benchmarks.study.runs import NONE, Pair
from benchmarks.study.summary import Recovery, Summary

ABSENT = "–"
BESIDE = ("beside none, %", "verdict", "beside the best constant, %")
OF_RUNS = ("pairs: helps, harms", "runs lost", "steps until back", "steps clipped")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, without columns of which nothing is known; nothing without rows."""
    rows = list(rows)
    shown = [i for i in range(len(head)) if any(row[i] != ABSENT for row in rows)]
    lines = [f"| {' | '.join(row[i] for i in shown)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(shown) + "|", *lines[1:]]) if rows else ""


def link(method: str) -> str:
    """To the method's place on the page, whose heading is its name."""
    return f"[{method}](#{anchor(method)})"


def anchor(title: str) -> str:
    """Of a heading, as hosts of repositories and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def points(part: float) -> str:
    """A difference in percent, signed if it is one."""
    text = f"{100 * part:+.1f}"
    return text if float(text) else "0.0"


def share(found: Interval) -> str:
    """A mean difference with its interval."""
    return f"{points(found.mean)} ({points(found.low)} to {points(found.high)})"


def loss(found: Interval) -> str:
    """The same without a sign, to so many digits that the interval can be seen."""
    width = found.high - found.low
    digits = 3 if width <= 0 else min(max(1 - math.floor(math.log10(width)), 0), 4)
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def percent(part: float | None) -> str:
    """A part of all, in whole percents; what is neither none nor all never looks so."""
    if part is None:
        return ABSENT
    if 0 < part < 0.005:
        return "< 1 %"
    return "> 99 %" if 0.995 <= part < 1 else f"{100 * part:.0f} %"


def steps(found: Recovery | None) -> str:
    """The median, and how many runs never were back."""
    if found is None:
        return ABSENT
    middle = "never" if math.isinf(found.steps) else f"{found.steps:.0f}"
    return f"{middle} ({percent(found.never)} never)" if 0 < found.never < 1 else middle


def beside(found: Comparison | None, best: Comparison | None) -> list[str]:
    """The columns `BESIDE`."""
    of_best = ABSENT
    if best:
        word = {HELPS: ", better", HARMS: ", worse"}.get(best.verdict, "")
        of_best = share(best.share) + word
    return [share(found.share), found.verdict, of_best] if found else [ABSENT, ABSENT, of_best]


def of_runs(summary: Summary, method: str, case: Case) -> list[str]:
    """The columns `OF_RUNS`."""
    counts = [len(summary.pairs_with(verdict, method, case)) for verdict in (HELPS, HARMS)]
    found = summary.pooled[case.name].get(method)
    return [
        f"{counts[0]}, {counts[1]} of {found.pairs}" if found else ABSENT,
        percent(summary.lost(method, case)),
        steps(summary.recovery(method, case)),
        percent(summary.clipped(method, case)),
    ]


def of_case(summary: Summary, case: Case) -> str:
    """A row for each method, the best first and nothing, which they are beside, on top."""
    best = summary.beside_best[case.name]
    pooled = summary.pooled[case.name]
    names = [NONE, *sorted(pooled, key=lambda name: -pooled[name].share.mean)]
    rows = [
        [link(name), *beside(pooled.get(name), best.get(name)), *of_runs(summary, name, case)]
        for name in names
        if any(summary.cells(name, case))
    ]
    return table(["", *BESIDE, *OF_RUNS], rows)


def of_method(summary: Summary, method: str) -> str:
    """A row for each case."""
    rows = []
    for case in summary.cases:
        if any(summary.cells(method, case)):
            found = summary.pooled[case.name].get(method)
            best = summary.beside_best[case.name].get(method)
            title = f"[{case.title}](#{anchor(case.title)})"
            rows.append([title, *beside(found, best), *of_runs(summary, method, case)])
    return table(["", *BESIDE, *OF_RUNS], rows)


def of_pair(summary: Summary, pair: Pair) -> str:
    """The loss at the end for each method, and what it says beside nothing."""
    rows = []
    for method in summary.study.methods:
        cells = []
        for case in summary.cases:
            cell = summary.study.cell(pair, method, case)
            found = summary.single[case.name][pair].get(method)
            mark = {HELPS: " +", HARMS: " −"}.get(found.verdict, "") if found else ""
            cells.append(loss(inference.interval(cell.end)) + mark if cell is not None else ABSENT)
        if set(cells) != {ABSENT}:
            rows.append([method, *cells])
    return table(["", *(case.title for case in summary.cases)], rows)


def of_costs(summary: Summary) -> str:
    """Time, and how much of the training a method changes where there is nothing to mend."""
    calm = next((case for case in summary.cases if case.name == "edge"), None)
    rows = []
    for method in summary.study.methods:
        found = summary.seconds(method)
        if found and method != NONE:
            time = "{:.2f} ({:.2f} to {:.2f})".format(*found)
            clipped = percent(summary.clipped(method, calm)) if calm else ABSENT
            rows.append([link(method), time, clipped])
    return table(["", "time of a run, none = 1", "steps clipped, no fault"], rows)

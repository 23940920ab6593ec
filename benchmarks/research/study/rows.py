"""Formats the rows of `docs/evidence.csv`."""

import math
from collections.abc import Iterator

from benchmarks.research.study import inference
from benchmarks.research.study.comparing import HARMS, HELPS, Case, Comparison
from benchmarks.research.study.figures import ANY, NONE, TOGETHER, Row
from benchmarks.research.study.inference import Interval
from benchmarks.research.study.runs import Pair
from benchmarks.research.study.summary import Recovery, Summary

BETTER = {HELPS: "better", HARMS: "worse"}


def format_summary(summary: Summary) -> Iterator[Row]:
    """Yields all rows except those of claims."""
    for case in summary.cases:
        yield from _format_case(summary, case)
    yield from _format_times(summary)
    for pair in summary.study.pairs:
        yield from _format_pair(summary, pair)


def _format_case(summary: Summary, case: Case) -> Iterator[Row]:
    for method in summary.study.methods:
        if any(summary.list_cells(method, case)):
            counts = [len(summary.list_pairs(verdict, method, case)) for verdict in (HELPS, HARMS)]
            found = summary.pooled[case.name].get(method)
            best = summary.beside_best[case.name].get(method)
            yield {
                "tasks": TOGETHER,
                "fault": case.title,
                "method": method,
                **format_share("gain", found),
                **({"verdict": found.verdict} if found else {}),
                **format_share("beside_best", best),
                **({"beside_best_verdict": BETTER.get(best.verdict, "")} if best else {}),
                **(dict(zip(("helps", "harms"), map(str, counts), strict=True)) if found else {}),
                **({"pairs": str(found.pairs)} if found else {}),
                "lost": format_percent(summary.compute_lost(method, case)),
                **format_recovery(summary.compute_recovery(method, case)),
                "clipped": format_percent(summary.compute_clipped(method, case)),
            }


def _format_times(summary: Summary) -> Iterator[Row]:
    calm = next((case for case in summary.cases if case.name == "edge"), None)
    for method in summary.study.methods:
        found = summary.compute_times(method)
        if found and method != NONE:
            columns = ("time", "time_least", "time_most")
            yield {
                "tasks": TOGETHER,
                "fault": ANY,
                "method": method,
                **{name: f"{x:.2f}" for name, x in zip(columns, found, strict=True)},
                "clipped": format_percent(summary.compute_clipped(method, calm)) if calm else "",
            }


def _format_pair(summary: Summary, pair: Pair) -> Iterator[Row]:
    for case in summary.cases:
        for method in summary.study.methods:
            cell = summary.study.get_cell(pair, method, case)
            if cell is not None:
                found = summary.single[case.name][pair].get(method)
                yield {
                    "tasks": str(pair),
                    "fault": case.title,
                    "method": method,
                    "rate": f"{cell.learning_rate:.2g}",
                    "threshold": "" if cell.threshold is None else f"{cell.threshold:.3g}",
                    "start": f"{cell.start.mean():.3g}",
                    **format_loss(inference.compute_interval(cell.end)),
                    "verdict": found.verdict if found else "",
                }


def format_points(part: float) -> str:
    """Formats a signed percentage."""
    text = f"{100 * part:+.1f}"
    return text if float(text) else "0.0"


def format_share(column: str, found: Comparison | None) -> Row:
    """Formats a mean difference with its interval."""
    names = (column, f"{column}_low", f"{column}_high")
    return dict(zip(names, map(format_points, found.share), strict=True)) if found else {}


def format_loss(found: Interval) -> Row:
    """Formats a loss with enough digits to show its interval."""
    width = found.high - found.low
    digits = 3 if width <= 0 else min(max(1 - math.floor(math.log10(width)), 0), 4)
    names = ("loss", "loss_low", "loss_high")
    return {name: f"{x:.{digits}f}" for name, x in zip(names, found, strict=True)}


def format_percent(part: float | None) -> str:
    """Formats a whole percentage, which is 0 or 100 only if it is exact."""
    if part is None:
        return ""
    if 0 < part < 0.005:
        return "< 1"
    return "> 99" if 0.995 <= part < 1 else f"{100 * part:.0f}"


def format_recovery(found: Recovery | None) -> Row:
    """Formats the median recovery time, and the percentage of runs that never recover."""
    if found is None:
        return {}
    middle = "never" if math.isinf(found.steps) else f"{found.steps:.0f}"
    return {
        "back": middle,
        "never_back": format_percent(found.never) if 0 < found.never < 1 else "",
    }

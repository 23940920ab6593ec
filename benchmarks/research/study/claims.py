"""Tests a claim of four papers at the scale of the study.

AutoClip: the 10th percentile is best. ZClip: it trains with learning rates that are too high for a
constant threshold. AGC: networks without normalization need it for large batches. SPAM: it is
better than Adam, with or without a constant threshold, if there are spikes.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.research.study import comparing, inference, plan, results, rows
from benchmarks.research.study.comparing import CASES, Study
from benchmarks.research.study.figures import CLAIMS, OF_BATCHES, WITH_ADAMW, Claim, Row
from benchmarks.research.study.runs import BEST, NONE
from benchmarks.research.study.summary import select_pooled


def format_claims(study: Study, path: Path) -> Iterator[Row]:
    """Yields the rows of comparisons on AdamW's tasks, and of AGC's runs at `path`."""
    for claim in CLAIMS:
        if claim.tasks == WITH_ADAMW:
            yield from _format_adamw_claim(study, claim)
    yield from _format_batches(results.read(path))


def _format_adamw_claim(study: Study, claim: Claim) -> Iterator[Row]:
    pairs = [pair for pair in select_pooled(study.pairs) if pair.optimizer == "adamw"]
    case = next(case for case in CASES if case.title == claim.fault)
    base = NONE if claim.column == "gain" else BEST
    pooled = comparing.compare(study, pairs, base, case)
    for method in claim.methods:
        cells = [study.get_cell(pair, method, case) for pair in pairs]
        known = [cell for cell in cells if cell is not None]
        if known and len(known) == len(cells):
            yield {
                "tasks": claim.tasks,
                "fault": claim.fault,
                "method": method,
                **rows.format_share(claim.column, pooled.get(method)),
                "lost": rows.format_percent(
                    float(np.mean([cell.is_lost.mean() for cell in known]))
                ),
            }


def _format_batches(lines: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Yields the best rate, its loss, and the largest successful rate by batch size and method."""
    found: dict[tuple[int, str], dict[float, dict[int, np.ndarray]]] = {}
    for line in lines:
        if "clip" in line:
            by_rate = found.setdefault((line["batch"], line["clip"]), {})
            by_seed = by_rate.setdefault(line["learning_rate"], {})
            by_seed[line["seed"]] = np.array(line["held_out"], float)
    for (batch, method), by_rate in sorted(found.items(), key=lambda item: item[0][0]):
        held_out = {rate: np.stack(list(seeds.values())) for rate, seeds in by_rate.items()}
        ends = {rate: plan.get_final_losses(x) for rate, x in held_out.items()}
        best = min(ends, key=lambda rate: ends[rate].mean())
        trains = [rate for rate, x in held_out.items() if not plan.is_lost(x).any()]
        yield {
            "tasks": "conv, sgd",
            "fault": f"{OF_BATCHES}{batch}",
            "method": method,
            "rate": f"{best:g}",
            **rows.format_loss(inference.compute_interval(ends[best])),
            "largest_rate": f"{max(trains):g}" if trains else "none",
        }

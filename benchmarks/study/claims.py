"""One claim of each of four papers, tried at the study's scale: the tables of it.

AutoClip's, that the percentile 10 is the best; ZClip's, that it trains at rates that are too high
for a constant; AGC's, that without normalization large batches need it; SPAM's, that it beats Adam,
with a constant too, where there are spikes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import comparing, inference, plan, results, rows
from benchmarks.study.comparing import CASES, Case, Study
from benchmarks.study.runs import BEST, NONE, Pair
from benchmarks.study.summary import together

QUESTIONS = {
    "AutoClip": "is the percentile 10 the best?",
    "ZClip": "does it train at rates that are too high for a constant?",
    "AGC": "do large batches need it?",
    "SPAM": "is it better than a constant where there are spikes?",
}
"""What each paper says yes to."""
PERCENTILES = ("AutoClip 1", "AutoClip", "AutoClip 25", "AutoClip 50", "AutoClip 90")
AT_HIGH_RATES = (NONE, BEST, "ZClip", "ZClip (paper)")
IN_SPIKES = (NONE, BEST, "skip above", "second moment", "SPAM")


def tables(study: Study, path: Path) -> dict[str, str]:
    """By the paper's method, Markdown; empty where the runs are not there."""
    pairs = together(study.pairs)
    adamw = [pair for pair in pairs if pair.optimizer == "adamw"]
    return {
        "AutoClip": _beside(study, adamw, PERCENTILES, _case("best"), NONE),
        "ZClip": _beside(study, pairs, AT_HIGH_RATES, _case("past"), BEST),
        "AGC": _of_batches(results.read(path)),
        "SPAM": _beside(study, adamw, IN_SPIKES, _case("spike"), BEST),
    }


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _beside(
    study: Study, pairs: Sequence[Pair], methods: Sequence[str], case: Case, base: str
) -> str:
    """For each method its losses, and its difference from the base over all pairs."""
    pooled = comparing.compare(study, pairs, base, case)
    lines = []
    for method in methods:
        cells = [study.cell(pair, method, case) for pair in pairs]
        if None in cells:
            continue
        losses = [rows.ABSENT if cell is None else f"{cell.end.mean():.3g}" for cell in cells]
        lost = np.mean([cell.is_lost.mean() for cell in cells if cell is not None])
        found = pooled.get(method)
        differences = rows.share(found.share) if found else rows.ABSENT
        lines.append([method, *losses, rows.percent(float(lost)), differences])
    return rows.table(["", *map(str, pairs), "runs lost", f"beside {base}, %"], lines)


def _of_batches(lines: Iterable[dict[str, Any]]) -> str:
    """Of each batch and method the best rate, its loss, and the largest rate that trains."""
    found: dict[tuple[int, str], dict[float, dict[int, np.ndarray]]] = {}
    for line in lines:
        if "clip" in line:
            of_rate = found.setdefault((line["batch"], line["clip"]), {})
            of_seed = of_rate.setdefault(line["learning_rate"], {})
            of_seed[line["seed"]] = np.array(line["held_out"], float)
    texts = []
    for (batch, method), of_rate in sorted(found.items(), key=lambda item: item[0][0]):
        held_out = {rate: np.stack(list(seeds.values())) for rate, seeds in of_rate.items()}
        ends = {rate: plan.final(x) for rate, x in held_out.items()}
        best = min(ends, key=lambda rate: ends[rate].mean())
        trains = [rate for rate, x in held_out.items() if not plan.is_lost(x).any()]
        most = f"{max(trains):g}" if trains else "none"
        loss = rows.loss(inference.interval(ends[best]))
        texts.append([str(batch), method, f"{best:g}", loss, most])
    head = ["batch", "", "best rate", "its loss", "largest rate at which no run is lost"]
    return rows.table(head, texts)

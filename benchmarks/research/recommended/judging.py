"""Selects a candidate by the rule of `benchmarks/research/recommended.md`."""

from collections.abc import Iterable, Mapping

import numpy as np

from benchmarks.research.recommended.runs import JUDGED, METHODS, NONE, ONE, REFERENCE, SEEDS

NAMES = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "sgd": "SGD"}
CANDIDATES = tuple(method for method in METHODS if method != NONE)
SAMPLES = 2000
Cells = Mapping[tuple[str, ...], np.ndarray]
"""Percentages by optimizer, task, fault and method, float[seeds]."""


def read_cells(rows: Iterable[Mapping[str, str]]) -> Cells:
    """Returns the percentages of the rows."""
    keys = ("optimizer", "task", "fault", "method")
    return {tuple(row[x] for x in keys): np.array(row["percent"].split(), float) for row in rows}


def find_worst(cells: Cells, optimizer: str, method: str, draws: np.ndarray) -> np.ndarray:
    """Returns the worst mean over tasks and faults for every sample of seeds, float[samples].

    `draws` are the indices of seeds for all samples and tasks, int[samples, tasks, seeds].
    """
    tasks = list_tasks(cells)
    means = []
    for (x, task, fault, y), percentages in cells.items():
        if (x, y) == (optimizer, method) and task in tasks:
            drawn = draws[:, tasks.index(task)]  # int[samples, seeds]
            reference = cells[optimizer, task, REFERENCE.get(fault, "none"), NONE]
            means.append(100 * percentages[drawn].mean(-1) / reference[drawn].mean(-1))
    return np.min(means, 0)


def list_tasks(cells: Cells) -> list[str]:
    """Returns the tasks that ran with all judged optimizers."""
    names = dict.fromkeys(task for _, task, _, _ in cells)
    ran = {(optimizer, task) for optimizer, task, _, _ in cells}
    return [task for task in names if all((x, task) in ran for x in JUDGED)]


def decide(cells: Cells) -> tuple[str, list[str]]:
    """Returns the recommended candidate, and a table row for every candidate."""
    tasks = list_tasks(cells)
    shape = (SAMPLES, len(tasks), SEEDS)
    drawn = np.random.default_rng(0).integers(0, SEEDS, shape)
    whole = np.broadcast_to(np.arange(SEEDS), (1, *shape[1:]))
    draws = np.concatenate([whole, drawn])  # The first sample has all seeds.
    worst_by_method = {
        method: np.min([find_worst(cells, x, method, draws) for x in JUDGED], 0)
        for method in CANDIDATES
    }
    lines, better = [], {}
    for method, worst in worst_by_method.items():
        difference = worst - worst_by_method[ONE]
        low, high = np.percentile(difference[1:], (2.5, 97.5))
        if low > 0:
            better[method] = worst[0]
        by_optimizer = [find_worst(cells, x, method, whole)[0] for x in JUDGED]
        ends = "" if method == ONE else f"{difference[0]:+.1f} ({low:+.1f} to {high:+.1f})"
        shown = [f"`{method}`", *(f"{x:.1f}" for x in by_optimizer), f"{worst[0]:.1f}", ends]
        lines.append(f"| {' | '.join(shown)} |")
    return max(better, key=lambda x: better[x], default=ONE), lines


def list_means(cells: Cells, optimizer: str) -> list[str]:
    """Returns a table of an optimizer: the mean over tasks (the worst) by fault, in percent."""
    faults = dict.fromkeys(fault for x, _, fault, _ in cells if x == optimizer)
    lines = [f"| {NAMES[optimizer]} | {' | '.join(faults)} |", "|---" * (len(faults) + 1) + "|"]
    for method in METHODS:
        shown = []
        for fault in faults:
            means = [
                percentages.mean()
                for (x, _, y, z), percentages in cells.items()
                if (x, y, z) == (optimizer, fault, method)
            ]
            shown.append(f"{np.mean(means):.0f} ({min(means):.0f})")
        title = "no clipping" if method == NONE else f"`{method}`"
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return lines


def format_report(rows: Iterable[Mapping[str, str]]) -> str:
    """Returns all tables and the decision in Markdown."""
    cells = read_cells(rows)
    lines = []
    for optimizer in NAMES:
        if any(x == optimizer for x, *_ in cells):
            lines += [*list_means(cells, optimizer), ""]
    tasks = list_tasks(cells)
    if tasks:
        chosen, found = decide(cells)
        head = ["worst case", *(NAMES[x] for x in JUDGED), "all", "compared with 1.0"]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *found, ""]
        lines += [f"Judged on {', '.join(tasks)}. Recommended: `{chosen}`."]
    return "\n".join(lines)

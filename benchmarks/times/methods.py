"""Measures the overhead of all methods in AdamW steps, compared with the closest Optax methods."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.every_method import Step, build_method_steps
from benchmarks.table_file import Row, TableFile, describe_versions, get_device_name, start_timer
from benchmarks.times.effort import Effort, Log
from benchmarks.times.report import format_number
from benchmarks.times.seeds import build_training, compute_loss, draw_networks
from benchmarks.times.steps import OPTIMIZERS, OURS, PLAIN, THEIRS, compile_steps
from benchmarks.times.timing import Program, Times, choose_clock, summarize, time_calls
from benchmarks.times.trees import build_leaves, build_transformer, count_elements, fill_tree
from optaxclip._base.types import PyTree

KEYS = ("device", "tree", "dtype", "method")
ADDED = ("adds, ms", "Optax's adds, ms")
COLUMNS = (
    *("Optax's", "step, ms", "adds, ms", "low", "high", "Optax's adds, ms"),
    *("of Optax's step", "versions"),
)
ADAMW = OPTIMIZERS["AdamW"]


class Case(NamedTuple):
    """A tree with a dtype.

    Attributes:
      tree: The name of the tree.
      dtype: The dtype of all leaves.
      prepare: Returns the parameters of a network, and a function that compiles the steps of a
        transformation.
    """

    tree: str
    dtype: str
    prepare: Callable[[], tuple[PyTree, Callable[[Step], Program]]]


def build_cases(effort: Effort) -> list[Case]:
    """Returns three trees in two dtypes. The tree that compiles slowest is last."""
    model, count = build_transformer(*effort.models[0]), effort.leaf_counts[-1]
    trees = {
        f"{count_elements(model):,} elements": partial(_prepare_tree, model),
        f"{effort.seeds} networks, {effort.scanned} steps": partial(_prepare_networks, effort),
        f"{count} leaves of {effort.small_leaf}": partial(
            _prepare_tree, build_leaves(count, effort.small_leaf)
        ),
    }
    return [
        Case(tree, dtype, partial(prepare, dtype))
        for tree, prepare in trees.items()
        for dtype in effort.dtypes
        if dtype != "float16"
    ]


def _prepare_tree(shapes: PyTree, dtype: str) -> tuple[PyTree, Callable[[Step], Program]]:
    grads = fill_tree(shapes, dtype)
    return grads, lambda tx: compile_steps(tx, grads)


def _prepare_networks(effort: Effort, dtype: str) -> tuple[PyTree, Callable[[Step], Program]]:
    params, batches = draw_networks(effort, dtype)

    def compile_steps(tx: Step) -> Program:
        return Program(
            build_training(tx, compute_loss), (params, jax.vmap(tx.init)(params)), batches
        )

    return jax.tree.map(lambda x: x[0], params), compile_steps


def measure_methods(effort: Effort, path: Path, minutes: float, log: Log) -> str:
    """Adds missing rows to the file while there is time, and formats them as a Markdown table."""
    table, has_time, num_missing = TableFile(path, KEYS, COLUMNS), start_timer(minutes), 0
    lines = {"no clip, ms": []}
    for case in build_cases(effort):
        params, compile_steps = case.prepare()
        methods = build_method_steps(ADAMW, params)
        keys = {name: table.key(**_build_key(case, name)) for name in methods}
        todo = {name: steps for name, steps in methods.items() if keys[name] not in table.rows}
        for row in _measure_rows(case, todo, compile_steps, effort.rounds, has_time, log):
            table.add(**row)
        rows = {name: table.rows.get(key) for name, key in keys.items()}
        num_missing += sum(row is None for row in rows.values())
        steps = [row["step, ms"] for row in rows.values() if row]
        lines["no clip, ms"].append(steps[0] if steps else "")
        for name, row in rows.items():
            lines.setdefault(name, []).append(_format_cell(row))
    headers = [f"adds, ms (Optax's): {case.tree}, {case.dtype}" for case in build_cases(effort)]
    text = [f"| {get_device_name()} | {' | '.join(headers)} |", "|---" * (1 + len(headers)) + "|"]
    text += [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()]
    if num_missing:
        text.append(f"\nMissing (run the command again): {num_missing} figures")
    return "\n".join(text)


def _measure_rows(
    case: Case,
    methods: Mapping[str, tuple[Step, tuple[str, Step] | None]],
    compile_steps: Callable[[Step], Program],
    rounds: int,
    has_time: Callable[[], bool],
    log: Log,
) -> Iterator[dict[str, Any]]:
    """Measures methods with the same Optax method consecutively, to compile it only once."""
    plain, groups = None, defaultdict(list)
    for name, (ours, theirs) in methods.items():
        groups[theirs and theirs[0]].append((name, ours, theirs))
    for group in groups.values():
        optax_program = {}
        for name, ours, theirs in group:
            if not has_time():
                return
            log(f"{case.tree}, {case.dtype}: {name}")
            plain = plain or compile_steps(ADAMW())
            if theirs and not optax_program:
                optax_program = {THEIRS: compile_steps(theirs[1])}
            variants = {PLAIN: plain, OURS: compile_steps(ours), **optax_program}
            times = time_calls(variants, rounds, choose_clock())
            yield _build_key(case, name) | _format_figures(times, theirs[0] if theirs else "")


def _build_key(case: Case, name: str) -> dict[str, str]:
    return dict(zip(KEYS, (get_device_name(), case.tree, case.dtype, name), strict=True))


def _format_figures(times: Times, theirs: str) -> dict[str, Any]:
    plain, ours = times[PLAIN], times[OURS]
    added = summarize(ours - plain).scale(1e3)
    figures = {
        "Optax's": theirs,
        "step, ms": summarize(plain).median * 1e3,
        **dict(zip(("adds, ms", "low", "high"), added, strict=True)),
        "Optax's adds, ms": summarize(times[THEIRS] - plain).median * 1e3 if theirs else "",
        "of Optax's step": summarize(ours / times[THEIRS]).median if theirs else "",
        "versions": describe_versions(),
    }
    return {name: x if isinstance(x, str) else f"{x:.4g}" for name, x in figures.items()}


def _format_cell(row: Row | None) -> str:
    if row is None:
        return ""
    ours, theirs = (row[name] and format_number(float(row[name])) for name in ADDED)
    return f"{ours} ({theirs})" if theirs else ours

"""What each method adds to AdamW's step, beside Optax's nearest: a table that grows by rows."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.every_method import Step, build_method_steps
from benchmarks.table_file import Row, TableFile, describe_versions, get_device_name, start_timer
from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import number
from benchmarks.times.seeds import loss, networks, trained
from benchmarks.times.steps import OPTIMIZERS, OURS, PLAIN, THEIRS, step_program
from benchmarks.times.timing import Program, Times, race, spread, usual_clock
from benchmarks.times.trees import filled, leaves, num_entries, transformer
from optaxclip._base.types import PyTree

KEYS = ("device", "tree", "dtype", "method")
ADDED = ("adds, ms", "Optax's adds, ms")
COLUMNS = (
    *("Optax's", "step, ms", "adds, ms", "low", "high", "Optax's adds, ms"),
    *("of Optax's step", "versions"),
)
ADAMW = OPTIMIZERS["AdamW"]


class Case(NamedTuple):
    """A tree in a format.

    Attributes:
      tree: what it is called.
      dtype: of all its leaves.
      prepare: gives the parameters, of one network, and a function that compiles the steps of a
        transformation.
    """

    tree: str
    dtype: str
    prepare: Callable[[], tuple[PyTree, Callable[[Step], Program]]]


def cases(effort: Effort) -> list[Case]:
    """Three trees in two formats; what takes the longest to compile comes last."""
    model, count = transformer(*effort.models[0]), effort.leaf_counts[-1]
    trees = {
        f"{num_entries(model):,} entries": partial(_once, model),
        f"{effort.seeds} networks, {effort.scanned} steps": partial(_scanned, effort),
        f"{count} leaves of {effort.small_leaf}": partial(_once, leaves(count, effort.small_leaf)),
    }
    return [
        Case(tree, dtype, partial(prepare, dtype))
        for tree, prepare in trees.items()
        for dtype in effort.dtypes
        if dtype != "float16"
    ]


def _once(shapes: PyTree, dtype: str) -> tuple[PyTree, Callable[[Step], Program]]:
    grads = filled(shapes, dtype)
    return grads, lambda tx: step_program(tx, grads)


def _scanned(effort: Effort, dtype: str) -> tuple[PyTree, Callable[[Step], Program]]:
    params, batches = networks(effort, dtype)

    def program(tx: Step) -> Program:
        return Program(trained(tx, loss), (params, jax.vmap(tx.init)(params)), batches)

    return jax.tree.map(lambda x: x[0], params), program


def measure_methods(effort: Effort, path: Path, minutes: float, tell: Tell) -> str:
    """Adds the rows that the file lacks, as long as there is time; gives its table as Markdown."""
    table, has_time, lacking = TableFile(path, KEYS, COLUMNS), start_timer(minutes), 0
    lines = {"no clip, ms": []}
    for case in cases(effort):
        params, program = case.prepare()
        methods = build_method_steps(ADAMW, params)
        keys = {name: table.key(**_keys(case, name)) for name in methods}
        todo = {name: both for name, both in methods.items() if keys[name] not in table.rows}
        for row in _rows(case, todo, program, effort.rounds, has_time, tell):
            table.add(**row)
        found = {name: table.rows.get(key) for name, key in keys.items()}
        lacking += sum(row is None for row in found.values())
        steps = [row["step, ms"] for row in found.values() if row]
        lines["no clip, ms"].append(steps[0] if steps else "")
        for name, row in found.items():
            lines.setdefault(name, []).append(_cell(row))
    heads = [f"adds, ms (Optax's): {case.tree}, {case.dtype}" for case in cases(effort)]
    text = [f"| {get_device_name()} | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    text += [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()]
    if lacking:
        text.append(f"\nMissing, and had by the same command again: {lacking} figures")
    return "\n".join(text)


def _rows(
    case: Case,
    methods: Mapping[str, tuple[Step, tuple[str, Step] | None]],
    program: Callable[[Step], Program],
    rounds: int,
    has_time: Callable[[], bool],
    tell: Tell,
) -> Iterator[dict[str, Any]]:
    """Those with the same of Optax's one after another, so that it is compiled once."""
    plain, by_theirs = None, defaultdict(list)
    for name, (ours, theirs) in methods.items():
        by_theirs[theirs and theirs[0]].append((name, ours, theirs))
    for group in by_theirs.values():
        beside = {}
        for name, ours, theirs in group:
            if not has_time():
                return
            tell(f"{case.tree}, {case.dtype}: {name}")
            plain = plain or program(ADAMW())
            if theirs and not beside:
                beside = {THEIRS: program(theirs[1])}
            ways = {PLAIN: plain, OURS: program(ours), **beside}
            times = race(ways, rounds, usual_clock())
            yield _keys(case, name) | _figures(times, theirs[0] if theirs else "")


def _keys(case: Case, name: str) -> dict[str, str]:
    return dict(zip(KEYS, (get_device_name(), case.tree, case.dtype, name), strict=True))


def _figures(times: Times, theirs: str) -> dict[str, Any]:
    plain, ours = times[PLAIN], times[OURS]
    added = spread(ours - plain).times(1e3)
    figures = {
        "Optax's": theirs,
        "step, ms": spread(plain).median * 1e3,
        **dict(zip(("adds, ms", "low", "high"), added, strict=True)),
        "Optax's adds, ms": spread(times[THEIRS] - plain).median * 1e3 if theirs else "",
        "of Optax's step": spread(ours / times[THEIRS]).median if theirs else "",
        "versions": describe_versions(),
    }
    return {name: x if isinstance(x, str) else f"{x:.4g}" for name, x in figures.items()}


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    ours, theirs = (row[name] and number(float(row[name])) for name in ADDED)
    return f"{ours} ({theirs})" if theirs else ours

"""A clip by itself: of large gradients, of many leaves, outside of `jit`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip
from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import Figure, Row
from benchmarks.times.timing import Program, Times, Turn, Way, phases, race, ratio, spread
from benchmarks.times.trees import (
    FALL,
    NORM,
    filled,
    free_bytes,
    leaves,
    num_bytes,
    read,
    scale,
    torch_clip,
    transformer,
)
from optaxclip._base.types import PyTree

OURS, THEIRS, TORCH = "optaxclip", "Optax", "PyTorch"
READ, SCALE, PLAIN = "read", "scale in place", "plain norm"
CLIPS = {OURS: optaxclip.clip_by_global_norm, THEIRS: optax.clip_by_global_norm}


def _plain_clip(threshold: Array) -> optax.GradientTransformation:
    def clip(grads: PyTree, params: PyTree) -> PyTree:
        del params
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        factor = threshold / jnp.maximum(norm, threshold)
        return jax.tree.map(lambda leaf: leaf * factor, grads)

    return optax.stateless(clip)


WITH_FLOOR = CLIPS | {PLAIN: _plain_clip}
# All the ways of a race, each on gradients of its own, and PyTorch's way to them.
COPIES = 8


def alone(effort: Effort, tell: Tell) -> list[Row]:
    """The clip by the global norm, in place, beside the threshold of what memory allows."""
    rows = []
    trees = {
        "one leaf": leaves(1, effort.entries),
        "transformer": transformer(effort.layers, effort.width),
    }
    for name, shapes in trees.items():
        for dtype in effort.dtypes:
            case = f"{name}, {dtype}"
            tell(case)
            rows += _in_place(case, shapes, dtype, effort.rounds)
    return rows


def growth(effort: Effort, tell: Tell) -> list[Row]:
    """The same over the number of entries, and of leaves with as many entries in all."""
    rows = []
    cases = {f"{total:,} entries in 10 leaves": (10, total) for total in effort.totals}
    most = effort.totals[-1] // 10
    cases |= {f"{most:,} entries in {count} leaves": (count, most) for count in effort.splits}
    for case, (count, total) in cases.items():
        if 4 * total * COPIES > free_bytes():
            rows.append(Row(case, "left out: too large for the free memory", {}))
            continue
        tell(case)
        rows += _in_place(case, leaves(count, total // count), "float32", effort.rounds)
    return rows


def many_leaves(effort: Effort, tell: Tell) -> list[Row]:
    """Small leaves: to trace, lower and compile from empty caches, and to run.

    Beside what clips by a plain norm, and with least work: norms may overflow, no entry is kept.
    """
    rows = []
    for count in effort.leaf_counts:
        case = f"{count} leaves"
        tell(case)
        shapes = leaves(count, effort.small_leaf)
        grads = filled(shapes, jnp.float32)
        ways: dict[str, Any] = {way: _clip_program(way, grads) for way in WITH_FLOOR}
        ways |= torch_way(shapes, jnp.float32)
        steps = {way: partial(clip, way) for way in WITH_FLOOR}
        compiling = phases(steps, [(grads, jnp.asarray(NORM / 2))], effort.repetitions)
        for phase, times in {**compiling, "run": race(ways, effort.rounds)}.items():
            rows += [Row(f"{case}, {phase}", way, beside_optax(times, way)) for way in times]
    return rows


def eager(effort: Effort, tell: Tell) -> list[Row]:
    """Calls outside of `jit`."""
    rows = []
    count, entries = effort.eager_leaves, effort.small_leaf
    trees = {
        f"one leaf of {entries}": leaves(1, entries),
        f"{count} leaves of {entries}": leaves(count, entries),
        "transformer": transformer(effort.layers, effort.narrow),
    }
    for case, shapes in trees.items():
        tell(case)
        grads = filled(shapes, jnp.float32)
        ways: dict[str, Way] = {way: _eager_call(way, grads) for way in CLIPS}
        times = race(ways | torch_way(shapes, jnp.float32), effort.rounds)
        rows += [Row(case, way, beside_optax(times, way)) for way in times]
    return rows


def _in_place(case: str, shapes: PyTree, dtype: jax.typing.DTypeLike, rounds: int) -> list[Row]:
    grads = filled(shapes, dtype)
    programs = {
        READ: Program(read, jnp.zeros(()), grads),
        SCALE: Program(scale, (grads, jnp.ones(()))),
        **{way: _clip_program(way, grads) for way in CLIPS},
    }
    return in_place(case, programs, torch_way(shapes, dtype), num_bytes(grads), rounds)


def in_place(
    case: str,
    programs: Mapping[str, Turn],
    others: Mapping[str, Way],
    size: int,
    rounds: int,
) -> list[Row]:
    """A clip's rows, beside a read and a scaling, of gradients of `size` bytes."""
    times = race({**programs, **others}, rounds)
    rows = [Row(case, way, {"ms": spread(times[way]).times(1e3)}) for way in (READ, SCALE)]
    for way in times:
        if way in (READ, SCALE):
            continue
        figures = beside_optax(times, way)
        figures["of_threshold"] = ratio(times[way], times[READ] + times[SCALE])
        if way in CLIPS and (more := programs[way].temporary_bytes) is not None:
            figures["extra_memory"] = 100 * more / size
        rows.append(Row(case, way, figures))
    return rows


def beside_optax(times: Times, way: str) -> dict[str, Figure]:
    """A way's times, and their ratio to Optax's if it is among them."""
    figures: dict[str, Figure] = {"ms": spread(times[way]).times(1e3)}
    if way != THEIRS and THEIRS in times:
        figures["of_optax"] = ratio(times[way], times[THEIRS])
    return figures


def _clip_program(way: str, grads: PyTree) -> Program:
    return Program(partial(clip, way), (grads, jnp.asarray(NORM / 2)))


def clip(way: str, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
    """A clip by a threshold that falls, so that every call clips."""
    grads, threshold = carry
    tx = WITH_FLOOR[way](threshold)
    return tx.update(grads, tx.init(grads))[0], threshold * FALL


def torch_way(shapes: PyTree, dtype: jax.typing.DTypeLike) -> dict[str, Way]:
    """PyTorch's way, if there is one."""
    way = torch_clip(shapes, dtype)
    return {} if way is None else {TORCH: way}


def _eager_call(way: str, grads: PyTree) -> Way:
    tx = CLIPS[way](NORM / 2)
    state = tx.init(grads)
    return lambda: jax.block_until_ready(tx.update(grads, state))

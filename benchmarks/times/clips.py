"""Measures clipping of large gradients, of many leaves, and outside `jit`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optaxclip
from benchmarks.times.effort import Effort, Log
from benchmarks.times.report import Figure, Row
from benchmarks.times.timing import (
    Call,
    InPlaceProgram,
    Program,
    Times,
    compute_ratio,
    measure_phases,
    summarize,
    time_calls,
)
from benchmarks.times.trees import (
    NORM,
    THRESHOLD_DECAY,
    build_leaves,
    build_torch_clip,
    build_transformer,
    count_bytes,
    fill_tree,
    get_free_bytes,
    read_grads,
    scale_grads,
)
from optaxclip._base.types import PyTree

OURS, THEIRS, TORCH = "optaxclip", "Optax", "PyTorch"
READ, SCALE, PLAIN = "read", "scale in place", "plain norm"
CLIPS = {OURS: optaxclip.clip_by_global_norm, THEIRS: optax.clip_by_global_norm}


def _clip_by_plain_norm(threshold: Array) -> optax.GradientTransformation:
    def clip(grads: PyTree, params: PyTree) -> PyTree:
        del params
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        factor = threshold / jnp.maximum(norm, threshold)
        return jax.tree.map(lambda leaf: leaf * factor, grads)

    return optax.stateless(clip)


ALL_CLIPS = CLIPS | {PLAIN: _clip_by_plain_norm}
# All variants need their own gradients.
COPIES = 8


def measure_clipping(effort: Effort, log: Log) -> list[Row]:
    """Measures clipping by the global norm in place, compared with the memory bandwidth."""
    rows = []
    trees = {
        "one leaf": build_leaves(1, effort.num_elements),
        "transformer": build_transformer(effort.layers, effort.width),
    }
    for name, shapes in trees.items():
        for dtype in effort.dtypes:
            case = f"{name}, {dtype}"
            log(case)
            rows += _measure_tree(case, shapes, dtype, effort.rounds)
    return rows


def measure_sizes(effort: Effort, log: Log) -> list[Row]:
    """Measures clipping in place for different numbers of elements and leaves."""
    rows = []
    cases = {f"{total:,} elements in 10 leaves": (10, total) for total in effort.totals}
    most = effort.totals[-1] // 10
    cases |= {f"{most:,} elements in {count} leaves": (count, most) for count in effort.splits}
    for case, (count, total) in cases.items():
        if 4 * total * COPIES > get_free_bytes():
            rows.append(Row(case, "left out: too large for the free memory", {}))
            continue
        log(case)
        rows += _measure_tree(case, build_leaves(count, total // count), "float32", effort.rounds)
    return rows


def measure_many_leaves(effort: Effort, log: Log) -> list[Row]:
    """Measures the compile phases with empty caches and the run time for many small leaves.

    The plain norm is a lower bound, whose norm may overflow.
    """
    rows = []
    for count in effort.leaf_counts:
        case = f"{count} leaves"
        log(case)
        shapes = build_leaves(count, effort.small_leaf)
        grads = fill_tree(shapes, jnp.float32)
        variants: dict[str, Any] = {name: _compile_clip(name, grads) for name in ALL_CLIPS}
        variants |= build_torch_call(shapes, jnp.float32)
        steps = {name: partial(clip_tree, name) for name in ALL_CLIPS}
        compiling = measure_phases(steps, [(grads, jnp.asarray(NORM / 2))], effort.repetitions)
        for phase, times in {**compiling, "run": time_calls(variants, effort.rounds)}.items():
            rows += [
                Row(f"{case}, {phase}", name, compare_with_optax(times, name)) for name in times
            ]
    return rows


def measure_eager(effort: Effort, log: Log) -> list[Row]:
    """Measures calls outside `jit`."""
    rows = []
    count, num_elements = effort.eager_leaves, effort.small_leaf
    trees = {
        f"one leaf of {num_elements}": build_leaves(1, num_elements),
        f"{count} leaves of {num_elements}": build_leaves(count, num_elements),
        "transformer": build_transformer(effort.layers, effort.narrow),
    }
    for case, shapes in trees.items():
        log(case)
        grads = fill_tree(shapes, jnp.float32)
        variants: dict[str, Call] = {name: _build_eager_call(name, grads) for name in CLIPS}
        times = time_calls(variants | build_torch_call(shapes, jnp.float32), effort.rounds)
        rows += [Row(case, name, compare_with_optax(times, name)) for name in times]
    return rows


def _measure_tree(case: str, shapes: PyTree, dtype: jax.typing.DTypeLike, rounds: int) -> list[Row]:
    grads = fill_tree(shapes, dtype)
    programs = {
        READ: Program(read_grads, jnp.zeros(()), grads),
        SCALE: Program(scale_grads, (grads, jnp.ones(()))),
        **{name: _compile_clip(name, grads) for name in CLIPS},
    }
    return measure_in_place(
        case, programs, build_torch_call(shapes, dtype), count_bytes(grads), rounds
    )


def measure_in_place(
    case: str,
    programs: Mapping[str, InPlaceProgram],
    others: Mapping[str, Call],
    size: int,
    rounds: int,
) -> list[Row]:
    """Measures clipping in place, compared with reading and scaling `size` bytes."""
    times = time_calls({**programs, **others}, rounds)
    rows = [Row(case, name, {"ms": summarize(times[name]).scale(1e3)}) for name in (READ, SCALE)]
    for name in times:
        if name in (READ, SCALE):
            continue
        figures = compare_with_optax(times, name)
        figures["of_threshold"] = compute_ratio(times[name], times[READ] + times[SCALE])
        if name in CLIPS and (more := programs[name].temporary_bytes) is not None:
            figures["extra_memory"] = 100 * more / size
        rows.append(Row(case, name, figures))
    return rows


def compare_with_optax(times: Times, name: str) -> dict[str, Figure]:
    """Returns the time of a variant, and its ratio to Optax if Optax was measured."""
    figures: dict[str, Figure] = {"ms": summarize(times[name]).scale(1e3)}
    if name != THEIRS and THEIRS in times:
        figures["of_optax"] = compute_ratio(times[name], times[THEIRS])
    return figures


def _compile_clip(name: str, grads: PyTree) -> Program:
    return Program(partial(clip_tree, name), (grads, jnp.asarray(NORM / 2)))


def clip_tree(name: str, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
    """Clips by a decreasing threshold, so that all calls clip."""
    grads, threshold = carry
    tx = ALL_CLIPS[name](threshold)
    return tx.update(grads, tx.init(grads))[0], threshold * THRESHOLD_DECAY


def build_torch_call(shapes: PyTree, dtype: jax.typing.DTypeLike) -> dict[str, Call]:
    """Returns the call of PyTorch if PyTorch is installed."""
    call = build_torch_clip(shapes, dtype)
    return {} if call is None else {TORCH: call}


def _build_eager_call(name: str, grads: PyTree) -> Call:
    tx = CLIPS[name](NORM / 2)
    state = tx.init(grads)
    return lambda: jax.block_until_ready(tx.update(grads, state))

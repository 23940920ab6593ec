"""Measures clipping and AdamW steps for large models on accelerators.

All variants of a case use the same arrays, so the memory contains only one copy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.times.clips import CLIPS, READ, SCALE, build_torch_call, clip_tree, measure_in_place
from benchmarks.times.effort import Effort, Log
from benchmarks.times.report import Row
from benchmarks.times.steps import OPTIMIZERS, PLAIN, build_clips, measure_programs
from benchmarks.times.timing import InPlaceProgram
from benchmarks.times.trees import (
    NORM,
    build_leaves,
    build_transformer,
    count_bytes,
    count_elements,
    fill_tree,
    get_free_bytes,
    read_grads,
    scale_grads,
)
from optaxclip._base.types import PyTree

# Steps need gradients, parameters and two moments. Both numbers include some reserve.
ALONE, IN_A_STEP = 1.1, 4.2


def measure_large_clips(effort: Effort, log: Log) -> list[Row]:
    """Measures clipping by the global norm in place."""
    return _measure_trees(effort, log, ALONE, _measure_clips)


def measure_large_steps(effort: Effort, log: Log) -> list[Row]:
    """Measures clipping by the global norm in AdamW steps."""
    return _measure_trees(effort, log, IN_A_STEP, _measure_steps)


def _measure_trees(
    effort: Effort, log: Log, copies: float, measure: Callable[..., list[Row]]
) -> list[Row]:
    rows, models = [], [build_transformer(*size) for size in effort.models]
    trees = {f"{count_elements(shapes):,} elements": shapes for shapes in models}
    count, size = effort.leaf_counts[-1], effort.small_leaf
    trees[f"{count} leaves of {size}"] = build_leaves(count, size)
    for name, shapes in trees.items():
        for dtype in (dtype for dtype in effort.dtypes if dtype != "float16"):
            case = f"{name}, {dtype}"
            if copies * count_elements(shapes) * jnp.dtype(dtype).itemsize > get_free_bytes():
                rows.append(Row(case, "left out: too large for the free memory", {}))
                continue
            log(case)
            rows += measure(case, shapes, dtype, effort.rounds)
    return rows


def _measure_clips(case: str, shapes: PyTree, dtype: str, rounds: int) -> list[Row]:
    grads = fill_tree(shapes, dtype)
    size = count_bytes(grads)
    memory = {"grads": grads, "threshold": jnp.asarray(NORM / 2)}
    memory |= {"total": jnp.zeros(()), "one": jnp.ones(())}
    programs = {
        READ: InPlaceProgram(_read_grads, memory, ("total",), ("grads",)),
        SCALE: InPlaceProgram(scale_grads, memory, ("grads", "one")),
        **{
            name: InPlaceProgram(partial(clip_tree, name), memory, ("grads", "threshold"))
            for name in CLIPS
        },
    }
    return measure_in_place(case, programs, build_torch_call(shapes, dtype), size, rounds)


def _measure_steps(case: str, shapes: PyTree, dtype: str, rounds: int) -> list[Row]:
    grads, optimizer = fill_tree(shapes, dtype), OPTIMIZERS["AdamW"]()
    params = jax.tree.map(jnp.ones_like, grads)
    clips = {PLAIN: optax.identity(), **build_clips()}
    memory = {"grads": grads, "params": params, "moments": optimizer.init(params)}
    memory |= {"total": jnp.zeros(())} | {name: tx.init(params) for name, tx in clips.items()}
    programs = {READ: InPlaceProgram(_read_grads, memory, ("total",), ("grads",))}
    for name, tx in clips.items():
        changes = ("params", "moments", name)
        programs[name] = InPlaceProgram(
            partial(_run_step, tx, optimizer), memory, changes, ("grads",)
        )
    return measure_programs(case, programs, count_bytes(grads), rounds)


def _read_grads(total: tuple[Array], grads: PyTree) -> tuple[Array]:
    return (read_grads(*total, grads),)


def _run_step(
    clip: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    carry: tuple[PyTree, Any, Any],
    grads: PyTree,
) -> tuple[PyTree, Any, Any]:
    params, moments, state = carry
    updates, state = clip.update(grads, state, params)
    updates, moments = optimizer.update(updates, moments, params)
    return optax.apply_updates(params, updates), moments, state

"""Gradients of models that accelerators train: clipped alone, and in AdamW's step.

No way has a copy of its own: all ways of a case take turns on the same arrays, in the same memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.times.clips import CLIPS, READ, SCALE, clip, in_place, torch_way
from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import Row
from benchmarks.times.steps import OPTIMIZERS, PLAIN, by_global_norm, step_rows
from benchmarks.times.timing import Turn
from benchmarks.times.trees import (
    NORM,
    filled,
    free_bytes,
    leaves,
    num_bytes,
    num_entries,
    read,
    scale,
    transformer,
)
from optaxclip._base.types import PyTree

# In the step, gradients, parameters and two moments; and some room.
ALONE, IN_A_STEP = 1.1, 4.2


def large_clips(effort: Effort, tell: Tell) -> list[Row]:
    """The clip by the global norm, in place."""
    return _rows(effort, tell, ALONE, _clip_rows)


def large_steps(effort: Effort, tell: Tell) -> list[Row]:
    """The same in AdamW's step."""
    return _rows(effort, tell, IN_A_STEP, _step_rows)


def _rows(
    effort: Effort, tell: Tell, copies: float, measured: Callable[..., list[Row]]
) -> list[Row]:
    rows, models = [], [transformer(*size) for size in effort.models]
    trees = {f"{num_entries(shapes):,} entries": shapes for shapes in models}
    count, size = effort.leaf_counts[-1], effort.small_leaf
    trees[f"{count} leaves of {size}"] = leaves(count, size)
    for name, shapes in trees.items():
        for dtype in (dtype for dtype in effort.dtypes if dtype != "float16"):
            case = f"{name}, {dtype}"
            if copies * num_entries(shapes) * jnp.dtype(dtype).itemsize > free_bytes():
                rows.append(Row(case, "left out: too large for the free memory", {}))
                continue
            tell(case)
            rows += measured(case, shapes, dtype, effort.rounds)
    return rows


def _clip_rows(case: str, shapes: PyTree, dtype: str, rounds: int) -> list[Row]:
    grads = filled(shapes, dtype)
    size = num_bytes(grads)
    memory = {"grads": grads, "threshold": jnp.asarray(NORM / 2)}
    memory |= {"total": jnp.zeros(()), "one": jnp.ones(())}
    programs = {
        READ: Turn(_read, memory, ("total",), ("grads",)),
        SCALE: Turn(scale, memory, ("grads", "one")),
        **{way: Turn(partial(clip, way), memory, ("grads", "threshold")) for way in CLIPS},
    }
    return in_place(case, programs, torch_way(shapes, dtype), size, rounds)


def _step_rows(case: str, shapes: PyTree, dtype: str, rounds: int) -> list[Row]:
    grads, optimizer = filled(shapes, dtype), OPTIMIZERS["AdamW"]()
    params = jax.tree.map(jnp.ones_like, grads)
    clips = {PLAIN: optax.identity(), **by_global_norm()}
    memory = {"grads": grads, "params": params, "moments": optimizer.init(params)}
    memory |= {"total": jnp.zeros(())} | {way: tx.init(params) for way, tx in clips.items()}
    programs = {READ: Turn(_read, memory, ("total",), ("grads",))}
    for way, tx in clips.items():
        changes = ("params", "moments", way)
        programs[way] = Turn(partial(_step, tx, optimizer), memory, changes, ("grads",))
    return step_rows(case, programs, num_bytes(grads), rounds)


def _read(total: tuple[Array], grads: PyTree) -> tuple[Array]:
    return (read(*total, grads),)


def _step(
    clip: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    carry: tuple[PyTree, Any, Any],
    grads: PyTree,
) -> tuple[PyTree, Any, Any]:
    params, moments, state = carry
    updates, state = clip.update(grads, state, params)
    updates, moments = optimizer.update(updates, moments, params)
    return optax.apply_updates(params, updates), moments, state

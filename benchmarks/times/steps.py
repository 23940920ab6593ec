"""Measures the overhead of clipping in optimizer steps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip
from benchmarks.times.effort import Effort, Log
from benchmarks.times.report import Figure, Row
from benchmarks.times.timing import (
    InPlaceProgram,
    Program,
    Times,
    compute_ratio,
    summarize,
    time_calls,
)
from benchmarks.times.trees import build_transformer, count_bytes, fill_tree, read_grads
from optaxclip._base.types import PyTree

Clips = Mapping[str, optax.GradientTransformation]

PLAIN, OURS, THEIRS, READ = "no clip", "optaxclip", "Optax", "read"
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": partial(optax.adamw, 1e-3),
    "SGD": partial(optax.sgd, 1e-3),
}


def measure_steps(effort: Effort, log: Log) -> list[Row]:
    """Measures clipping by the global norm in all kinds of steps."""
    rows = []
    for dtype in (name for name in effort.dtypes if name != "float16"):
        grads = fill_tree(build_transformer(effort.layers, effort.width), dtype)
        for name, optimizer in OPTIMIZERS.items():
            for every in effort.accumulated:
                accumulated = f", MultiSteps of {every}" if every > 1 else ""
                case = f"{name}, {dtype}{accumulated}"
                log(case)
                rows += measure_step(case, build_clips(), optimizer, grads, effort, every)
    return rows


def build_clips() -> Clips:
    """Returns clipping by the global norm of optaxclip and Optax."""
    return {OURS: optaxclip.clip_by_global_norm(1.0), THEIRS: optax.clip_by_global_norm(1.0)}


def measure_step(
    case: str,
    clips: Clips,
    optimizer: Callable[[], optax.GradientTransformation],
    grads: PyTree,
    effort: Effort,
    every: int = 1,
) -> list[Row]:
    """Measures a step with and without clipping."""
    programs = {PLAIN: compile_steps(optimizer(), grads, every)}
    for name, clip in clips.items():
        programs[name] = compile_steps(optax.chain(clip, optimizer()), grads, every)
    programs[READ] = Program(read_grads, jnp.zeros(()), grads)
    return measure_programs(case, programs, count_bytes(grads), effort.rounds)


def measure_programs(
    case: str, programs: Mapping[str, InPlaceProgram], size: int, rounds: int
) -> list[Row]:
    """Measures the step `PLAIN`, and what clipping of `size` bytes adds in other programs."""
    times, plain = time_calls(programs, rounds), programs[PLAIN].temporary_bytes
    baselines = [name for name in (READ, PLAIN) if name in programs]
    rows = [Row(case, name, {"ms": summarize(times[name]).scale(1e3)}) for name in baselines]
    for name in (name for name in programs if name not in baselines):
        extra_bytes = _subtract(programs[name].temporary_bytes, plain)
        percentage = None if extra_bytes is None else 100 * extra_bytes / size
        rows.append(Row(case, name, _compute_figures(times, name) | {"extra_memory": percentage}))
    return rows


def _compute_figures(times: Times, name: str) -> dict[str, Figure]:
    added = times[name] - times[PLAIN]
    figures: dict[str, Figure] = {
        "ms": summarize(times[name]).scale(1e3),
        "added_ms": summarize(added).scale(1e3),
    }
    if READ in times:
        figures["of_reads"] = compute_ratio(added, times[READ])
    if name != THEIRS and THEIRS in times:
        figures["of_optax"] = compute_ratio(added, times[THEIRS] - times[PLAIN])
    return figures


def _subtract(x: int | None, y: int | None) -> int | None:
    return None if x is None or y is None else x - y


def compile_steps(tx: optax.GradientTransformation, grads: PyTree, every: int = 1) -> Program:
    """Compiles the steps of an optimizer until it updates the parameters."""
    stepper: Any = tx if every == 1 else optax.MultiSteps(tx, every)
    params = jax.tree.map(jnp.ones_like, grads)

    def step(carry: tuple[PyTree, Any], grads: PyTree) -> tuple[PyTree, Any]:
        params, state = carry
        updates, state = stepper.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Program(step, (params, stepper.init(params)), grads)

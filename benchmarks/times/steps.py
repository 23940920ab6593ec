"""What a clip adds to an optimizer's step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optaxclip
from benchmarks.times.effort import Effort, Tell
from benchmarks.times.report import Figure, Row
from benchmarks.times.timing import Program, Times, Turn, race, ratio, spread
from benchmarks.times.trees import filled, num_bytes, read, transformer
from optaxclip._base.types import PyTree

Clips = Mapping[str, optax.GradientTransformation]

PLAIN, OURS, THEIRS, READ = "no clip", "optaxclip", "Optax", "read"
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": partial(optax.adamw, 1e-3),
    "SGD": partial(optax.sgd, 1e-3),
}


def added_to_steps(effort: Effort, tell: Tell) -> list[Row]:
    """The clip by the global norm, in every kind of step."""
    rows = []
    for dtype in (name for name in effort.dtypes if name != "float16"):
        grads = filled(transformer(effort.layers, effort.width), dtype)
        for name, optimizer in OPTIMIZERS.items():
            for every in effort.accumulated:
                accumulated = f", MultiSteps of {every}" if every > 1 else ""
                case = f"{name}, {dtype}{accumulated}"
                tell(case)
                rows += added(case, by_global_norm(), optimizer, grads, effort, every)
    return rows


def by_global_norm() -> Clips:
    """The clip by the global norm, ours and Optax's."""
    return {OURS: optaxclip.clip_by_global_norm(1.0), THEIRS: optax.clip_by_global_norm(1.0)}


def added(
    case: str,
    clips: Clips,
    optimizer: Callable[[], optax.GradientTransformation],
    grads: PyTree,
    effort: Effort,
    every: int = 1,
) -> list[Row]:
    """The step with each clip and without one, whose time and memory are subtracted."""
    programs = {PLAIN: step_program(optimizer(), grads, every)}
    for way, clip in clips.items():
        programs[way] = step_program(optax.chain(clip, optimizer()), grads, every)
    programs[READ] = Program(read, jnp.zeros(()), grads)
    return step_rows(case, programs, num_bytes(grads), effort.rounds)


def step_rows(case: str, programs: Mapping[str, Turn], size: int, rounds: int) -> list[Row]:
    """A step's rows: the step without a clip, perhaps a read, and what clips add.

    Args:
      case: its name.
      programs: `PLAIN`, maybe `READ`, and those with clips.
      size: the bytes of the gradients.
      rounds: how often each runs.
    """
    times, plain = race(programs, rounds), programs[PLAIN].temporary_bytes
    bare = [way for way in (READ, PLAIN) if way in programs]
    rows = [Row(case, way, {"ms": spread(times[way]).times(1e3)}) for way in bare]
    for way in (way for way in programs if way not in bare):
        bytes_more = _difference(programs[way].temporary_bytes, plain)
        share = None if bytes_more is None else 100 * bytes_more / size
        rows.append(Row(case, way, _figures(times, way) | {"extra_memory": share}))
    return rows


def _figures(times: Times, way: str) -> dict[str, Figure]:
    added = times[way] - times[PLAIN]
    figures: dict[str, Figure] = {
        "ms": spread(times[way]).times(1e3),
        "added_ms": spread(added).times(1e3),
    }
    if READ in times:
        figures["of_reads"] = ratio(added, times[READ])
    if way != THEIRS and THEIRS in times:
        figures["of_optax"] = ratio(added, times[THEIRS] - times[PLAIN])
    return figures


def _difference(x: int | None, y: int | None) -> int | None:
    return None if x is None or y is None else x - y


def step_program(tx: optax.GradientTransformation, grads: PyTree, every: int = 1) -> Program:
    """An optimizer's steps from one change of the parameters to the next."""
    stepper: Any = tx if every == 1 else optax.MultiSteps(tx, every)
    params = jax.tree.map(jnp.ones_like, grads)

    def step(carry: tuple[PyTree, Any], grads: PyTree) -> tuple[PyTree, Any]:
        params, state = carry
        updates, state = stepper.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Program(step, (params, stepper.init(params)), grads)

"""The runs of a sweep: many at once under `vmap`, the rest after them; on a CPU, in groups."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optaxclip._base.types import PyTree
from optaxclip.ops import global_norm

CHUNK = 25
"""The largest number of steps between two reports of progress."""

Numbers = np.ndarray[Any, Any]
StepFn = Callable[..., tuple[PyTree, Array, Array]]
Progress = Callable[[int], object]
Runs = tuple[Array, ...]
"""Thresholds and learning rates, float32[runs] each."""
Record = tuple[Array, Array, Array]
"""Losses, norms and shares of clipped groups, float32[runs..., steps] each."""


def in_groups(count: int, parallel: int | None) -> tuple[list[Numbers], int | None]:
    """The runs of each group, and how many runs of a group go at once (None: all).

    On a CPU, XLA computes small operations on one core, so a `vmap` over runs is hardly faster than
    one run after the other. Therefore each core gets a group of runs. All groups have one size: the
    last one is filled up with copies of the last run.
    """
    if jax.default_backend() != "cpu":
        return [np.arange(count)], parallel
    cores = _cores()
    parallel = min(parallel or cores, count)
    size = math.ceil(count / min(parallel, cores))
    groups = math.ceil(count / size)
    runs = np.minimum(np.arange(groups * size), count - 1).reshape(groups, size)
    return list(runs), max(1, parallel // groups)


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def all_steps(
    step: StepFn,
    at_once: int | None,
    states: Sequence[PyTree],
    runs: Sequence[Runs],
    data: PyTree,
    steps: int,
    report: Progress,
) -> list[Numbers]:
    """Runs all steps of all groups; returns the records, [runs of all groups, steps].

    Chunks of steps have one size, so one program serves all; the last drops surplus steps.
    """
    size = math.ceil(steps / math.ceil(steps / CHUNK))
    chunk = jax.jit(partial(_chunk, step, at_once), donate_argnums=0)
    records, over_groups = [], None
    with ThreadPoolExecutor(len(states)) as pool:
        for start in range(0, steps, size):
            at = np.minimum(np.arange(start, start + size), steps - 1)
            batches = jax.tree.map(lambda x: jnp.asarray(x[at]), data)  # noqa: B023
            if over_groups is None:
                over_groups = _over_groups(chunk, states, (runs[0], batches), pool)
            states, parts = zip(*over_groups(states, runs, repeat(batches)), strict=True)
            records.append(_concatenated(parts, axis=0))
            report(min(size, steps - start))
    return [record[:, :steps] for record in _concatenated(records, axis=1)]


def _over_groups(
    chunk: Any, states: Sequence[PyTree], rest: tuple[Runs, PyTree], pool: ThreadPoolExecutor
) -> Callable[..., Iterable[tuple[PyTree, Sequence[Numbers]]]]:
    """A function like `map` that runs a chunk for each group, in threads if there is one device."""
    if len(states) == 1:
        return partial(map, partial(_fetched, chunk))
    # Compiled in this thread, because other threads lack its settings, such as 64-bit types.
    compiled = chunk.lower(states[0], *rest).compile()
    if any(len(s.device_set) > 1 for s in jax.tree.leaves(compiled.output_shardings)):
        # No threads here: programs with collectives could wait for each other for ever.
        return partial(map, partial(_fetched, chunk))
    return partial(pool.map, partial(_fetched, compiled))


def _fetched(chunk: Any, *args: Any) -> tuple[PyTree, Sequence[Numbers]]:
    """Runs a chunk and waits for it, so that a thread finishes a group before it takes another."""
    states, record = chunk(*args)
    return states, jax.device_get(record)


def _concatenated(records: Sequence[Sequence[Numbers]], axis: int) -> list[Numbers]:
    return [np.concatenate(parts, axis) for parts in zip(*records, strict=True)]


def _chunk(
    step: StepFn, at_once: int | None, states: PyTree, runs: Runs, batches: PyTree
) -> tuple[PyTree, Record]:
    """A chunk of steps of all runs of a group."""

    def one_run(args: tuple[PyTree, Runs]) -> tuple[PyTree, Record]:
        start, (threshold, rate) = args

        def one_step(state: PyTree, batch: PyTree) -> tuple[PyTree, Record]:
            state, loss, norm = step(state, batch, threshold, rate)
            norms = jnp.atleast_1d(norm).astype(jnp.float32)
            share = jnp.mean((norms > threshold).astype(jnp.float32))
            return state, (jnp.asarray(loss, jnp.float32), global_norm(norms), share)

        return jax.lax.scan(one_step, start, batches)

    args = (states, runs)
    if at_once is None or at_once >= len(runs[0]):
        return jax.vmap(one_run)(args)
    return jax.lax.map(one_run, args, batch_size=at_once)

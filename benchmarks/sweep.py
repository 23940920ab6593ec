"""What sixteen limits at once cost on the demo's model, in single runs.

The sweeps and a single run take turns, so that a machine's moods meet all. The figures are ratios
of medians: without the first chunk, which compiles, and of the whole calls.

  python benchmarks/sweep.py
"""

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from optaxclip import demo, tuning
from optaxclip._demo_task import Task, encode, sweep_functions

LIMITS, STEPS, ROUNDS = 16, 100, 3


def seconds(task: Task, limits: Sequence[float], parallel: int | None) -> tuple[float, float]:
    """After the first chunk, and in all."""
    init_fn, step_fn, data = sweep_functions(task, STEPS)
    key, ticks = jax.random.key(0), [time.perf_counter()]
    tuning.sweep(
        *(init_fn, step_fn, limits, STEPS),
        key=key,
        data=data,
        parallel=parallel,
        progress=lambda _: ticks.append(time.perf_counter()),
    )
    return ticks[-1] - ticks[1], ticks[-1] - ticks[0]


def main() -> None:
    """Prints the medians and their ratios to the single run's."""
    task = Task(encode(demo.read_text(None)), seed=0)
    limits = np.geomspace(0.1, 100.0, LIMITS).tolist()
    subjects = {
        "one limit": (limits[:1], None),
        f"{LIMITS} at once": (limits, None),
        f"{LIMITS} in turns": (limits, 1),
    }
    times = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, subject in subjects.items():
            times[name].append(seconds(task, *subject))
    medians = {
        name: [statistics.median(x) for x in zip(*t, strict=True)] for name, t in times.items()
    }
    single = medians["one limit"]
    print(f"{jax.default_backend()}, {STEPS} steps")
    for name, (compiled, whole) in medians.items():
        ratios = f"{compiled / single[0]:.1f} and {whole / single[1]:.1f} single runs"
        print(f"{name:12} {compiled:6.2f} s compiled, {whole:6.2f} s in all: {ratios}")


if __name__ == "__main__":
    main()

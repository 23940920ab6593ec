"""What sixteen limits at once cost on the demo's model, in single runs.

The sweep and a single run take turns, so that a machine's moods meet both; compilation is left out.
The figure is the ratio of the medians.

  python benchmarks/sweep.py
"""

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from optaxclip import demo, tuning
from optaxclip._demo_task import Task, encode, sweep_functions

LIMITS, STEPS, ROUNDS = 16, 50, 5


def seconds(task: Task, limits: Sequence[float]) -> float:
    """From the end of the first chunk, which compiles, to the end of the last."""
    init_fn, step_fn, data = sweep_functions(task, STEPS)
    ticks = []
    tuning.sweep(
        init_fn,
        step_fn,
        limits,
        STEPS,
        key=jax.random.key(0),
        data=data,
        progress=lambda _: ticks.append(time.perf_counter()),
    )
    return ticks[-1] - ticks[0]


def main() -> None:
    """Prints both medians and their ratio."""
    task = Task(encode(demo.read_text(None)), seed=0)
    limits = np.geomspace(0.1, 100.0, LIMITS).tolist()
    pairs = [(seconds(task, limits[:1]), seconds(task, limits)) for _ in range(ROUNDS)]
    single, many = map(statistics.median, zip(*pairs, strict=True))
    print(f"one limit:  {1000 * single:.0f} ms")
    print(f"{LIMITS} limits: {1000 * many:.0f} ms")
    print(f"ratio:      {many / single:.2f}")


if __name__ == "__main__":
    main()

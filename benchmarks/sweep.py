"""What sixteen limits cost on the demo's model, in single runs.

As `sweep` does it by itself, all at once, and in turns. The sweeps and a single run take turns, so
that a machine's moods meet all. The figures are ratios of medians: without the first chunk, which
compiles, and of the whole calls. Then what is left to gain: the rate of a single run's products of
matrices, beside that of large products, and what the sweep costs at the rate of the large ones.

  python benchmarks/sweep.py
"""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optaxclip import tuning
from optaxclip.commands import demo, demo_task

LIMITS, STEPS, ROUNDS = 16, 100, 3
LARGE = 2048


def seconds(
    task: demo_task.Task, limits: Sequence[float], parallel: int | None
) -> tuple[float, float]:
    """For a step after the first chunk, and for all."""
    init_fn, step_fn, data = demo_task.sweep_functions(task, STEPS)
    key, ticks, done = jax.random.key(0), [time.perf_counter()], []

    def tick(steps: int) -> None:
        ticks.append(time.perf_counter())
        done.append(steps)

    options = {"key": key, "data": data, "parallel": parallel, "progress": tick}
    tuning.sweep(init_fn, step_fn, limits, STEPS, **options)
    return (ticks[-1] - ticks[1]) / sum(done[1:]), ticks[-1] - ticks[0]


def product_seconds() -> float:
    """For a large product of matrices."""
    x = jnp.ones((LARGE, LARGE))
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    start = time.perf_counter()
    product(x, x).block_until_ready()
    return time.perf_counter() - start


def main() -> None:
    """Prints the medians and their ratios to the single run's, and how fast the machine is."""
    task = demo_task.Task(demo_task.encode(demo.read_text(None)), seed=0)
    limits = np.geomspace(0.1, 100.0, LIMITS).tolist()
    subjects = {
        "one limit": (limits[:1], None),
        f"{LIMITS} limits": (limits, None),
        f"{LIMITS} at once": (limits, LIMITS),
        f"{LIMITS} in turns": (limits, 1),
    }
    times, products = {name: [] for name in subjects}, []
    for _ in range(ROUNDS):
        for name, subject in subjects.items():
            times[name].append(seconds(task, *subject))
        products.append(product_seconds())
    medians = {
        name: [statistics.median(x) for x in zip(*t, strict=True)] for name, t in times.items()
    }
    single = medians["one limit"]
    print(f"{jax.default_backend()}, {STEPS} steps")
    for name, (step, whole) in medians.items():
        ratios = f"{step / single[0]:.1f} and {whole / single[1]:.1f} single runs"
        print(f"{name:12} {1e3 * step:6.1f} ms a step, {whole:6.2f} s in all: {ratios}")
    _print_rates(single[0], statistics.median(products))


def _print_rates(step: float, product: float) -> None:
    """Of the products of a step, three passes of two matrices; and what follows from them."""
    parameters = demo_task.HIDDEN * (demo_task.HIDDEN + demo_task.MAX_SYMBOLS)
    rate = 6 * demo_task.BATCH * demo_task.LENGTH * parameters / step
    peak = 2 * LARGE**3 / product
    print(f"one limit's products: {rate / 1e9:.0f} GFLOP/s, large products {peak / 1e9:.0f}")
    print(f"{LIMITS} limits, were that all: {LIMITS * rate / peak:.1f} single runs")


if __name__ == "__main__":
    main()

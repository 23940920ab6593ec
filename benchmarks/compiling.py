"""Compares the trace, compile, run and startup times of all methods with Optax.

  python -m benchmarks.compiling
  python -m benchmarks.compiling --tree alike --method zclip adagc --rounds 5

The table contains medians over rounds of the ratio to the closest Optax method. Times to trace
(including lowering) and to compile are CPU seconds of all threads with empty caches. The program
contains only the update, so no optimizer hides the overhead. The first `init` is reported in
milliseconds (optaxclip / Optax), because most Optax methods have no state. Use `--phase derivative`
to compile a derivative of the update, which takes minutes with Optax.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.every_method import Step, build_methods, find_optax_method
from benchmarks.times.timing import time_calls

Shapes = list[tuple[int, ...]]
TREES: dict[str, Shapes] = {
    "alike": [shape for _ in range(100) for shape in ((32, 32), (32,))],
    "mixed": [(n % 7 + 3, n % 11 + 5) if n % 3 else (n % 13 + 2,) for n in range(100)],
    "few": [shape for _ in range(15) for shape in ((32, 32), (32,))],
    "one": [(64, 64)],
}
PHASES = ("trace", "compile", "steady", "eager", "derivative", "init")


def main() -> None:
    """Prints the table."""
    options = _parse_arguments()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    phases = [phase for phase in PHASES if phase in options.phase]
    if "init" in phases:
        print(f"`import optaxclip` after JAX and Optax: {1e3 * _measure_import():.0f} ms")
    columns = ["tree", "method", "Optax's", *phases]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for tree in options.tree or TREES:
        params = _draw_params(TREES[tree])
        for name, tx in build_methods().items():
            if options.method and name not in options.method:
                continue
            optax_name, optax_tx = find_optax_method(name, tx, params)
            medians = measure_ratios(tx, optax_tx, params, options.rounds, phases)
            cells = [f"{medians[phase]:.2f}" for phase in phases if phase != "init"]
            if "init" in phases:
                cells.append(
                    " / ".join(
                        f"{_measure_init(variant, params):.0f} ms" for variant in (tx, optax_tx)
                    )
                )
            print(f"| {tree} | {name} | {optax_name} | {' | '.join(cells)} |", flush=True)


def measure_ratios(
    ours: Step, theirs: Step, params: Any, rounds: int, phases: Iterable[str] = PHASES
) -> dict[str, float]:
    """Returns the median ratio of optaxclip to Optax for every phase."""
    grads = jax.tree.map(lambda x: 0.5 * x, params)
    ratios: dict[str, list[float]] = {}
    for measure, measured in (
        (_measure_compilation, ("trace", "compile")),
        (_measure_derivative, ("derivative",)),
    ):
        for round_index in range(rounds if set(measured) & set(phases) else 0):
            variants = (ours, theirs) if round_index % 2 else (theirs, ours)
            results = {variant: measure(variant, grads, params) for variant in variants}
            for phase in measured:
                ratio = results[ours][phase] / results[theirs][phase]
                ratios.setdefault(phase, []).append(ratio)
    medians = {phase: statistics.median(values) for phase, values in ratios.items()}
    for phase, prepare in (("steady", _compile_update), ("eager", _call_eagerly)):
        if phase in phases:
            variants = {
                "ours": prepare(ours, grads, params),
                "theirs": prepare(theirs, grads, params),
            }
            times = time_calls(variants, 5 * rounds)
            medians[phase] = float(np.median(times["ours"] / times["theirs"]))
    return medians


def _measure_compilation(tx: Step, grads: Any, params: Any) -> dict[str, float]:
    """Measures the CPU seconds to trace and lower an update, and to compile it."""
    return _measure_phases(tx.update, grads, tx.init(params), params)


def _measure_derivative(tx: Step, grads: Any, params: Any) -> dict[str, float]:
    """Measures the CPU seconds to trace, lower and compile the derivative of an update."""
    state = tx.init(params)

    def total(grads: Any) -> Any:
        updates, _ = tx.update(grads, state, params)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(updates))

    return {"derivative": sum(_measure_phases(jax.grad(total), grads).values())}


def _measure_phases(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Measures the CPU seconds to trace and lower, and to compile, with empty caches."""
    jax.clear_caches()
    # The time of a garbage collection (50 to 100 milliseconds) depends on earlier programs.
    gc.collect()
    gc.disable()
    ticks = [time.process_time()]
    lowered = jax.jit(fn).trace(*args).lower()
    ticks.append(time.process_time())
    lowered.compile()
    ticks.append(time.process_time())
    gc.enable()
    return dict(zip(("trace", "compile"), np.diff(ticks).tolist(), strict=True))


def _measure_init(tx: Step, params: Any) -> float:
    """Measures the median milliseconds of three calls of `init` with empty caches."""
    times = []
    for _ in range(3):
        jax.clear_caches()
        gc.collect()
        start = time.perf_counter()
        jax.block_until_ready(tx.init(params))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _measure_import() -> float:
    """Measures the median seconds of `import optaxclip` in five new processes."""
    code = (
        "import time, jax, optax; start = time.perf_counter(); import optaxclip; "
        "print(time.perf_counter() - start)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(5)]
    return statistics.median(map(float, runs))


def _compile_update(tx: Step, grads: Any, params: Any) -> Callable[[], object]:
    state = tx.init(params)
    update = jax.jit(tx.update).lower(grads, state, params).compile()
    return lambda: jax.block_until_ready(update(grads, state, params))


def _call_eagerly(tx: Step, grads: Any, params: Any) -> Callable[[], object]:
    state = tx.init(params)
    return lambda: jax.block_until_ready(tx.update(grads, state, params))


def _draw_params(shapes: Shapes) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", nargs="+", choices=TREES)
    parser.add_argument("--method", nargs="+", help="names in the table")
    usual = [phase for phase in PHASES if phase != "derivative"]
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=usual)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()

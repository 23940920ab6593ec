"""What every method costs beside Optax's nearest clip: to trace, compile and run, and to start.

  python -m benchmarks.compiling
  python -m benchmarks.compiling --tree alike --method zclip adagc --rounds 5

Seconds to trace (with lowering) and to compile are the processor's, of all threads, from empty
caches. What is told is the median over the rounds of the ratio to Optax's, which takes turns with
ours. The update is the whole program: no optimizer hides what a clip costs. What a first `init`
takes is told in milliseconds, ours / Optax's, because most of Optax's clips have no state. A
derivative of the update, traced and compiled, is told where it is asked for: Optax's takes minutes.
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

from benchmarks.every_method import Step, every_method, nearest
from benchmarks.times.timing import race

Shapes = list[tuple[int, ...]]
TREES: dict[str, Shapes] = {
    "alike": [shape for _ in range(100) for shape in ((32, 32), (32,))],
    "mixed": [(n % 7 + 3, n % 11 + 5) if n % 3 else (n % 13 + 2,) for n in range(100)],
    "few": [shape for _ in range(15) for shape in ((32, 32), (32,))],
    "one": [(64, 64)],
}
PHASES = ("trace", "compile", "steady", "eager", "derivative", "init")
# What aims are for.
COMPILE, COMPILE_ALIKE, TRACE, STEADY = 2.0, 3.0, 2.5, 1.05


def main() -> None:
    """Prints the table."""
    options = _options()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    phases = [phase for phase in PHASES if phase in options.phase]
    if "init" in phases:
        print(f"`import optaxclip` after JAX and Optax: {1e3 * _import_seconds():.0f} ms")
    heads = ["tree", "method", "Optax's", *phases]
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for tree in options.tree or TREES:
        params = _filled(TREES[tree])
        for name, tx in every_method().items():
            if options.method and name not in options.method:
                continue
            theirs, optax_tx = nearest(name, tx, params)
            found = ratios(tx, optax_tx, params, options.rounds, phases)
            cells = [f"{found[phase]:.2f}" for phase in phases if phase != "init"]
            if "init" in phases:
                cells.append(
                    " / ".join(f"{_init_ms(way, params):.0f} ms" for way in (tx, optax_tx))
                )
            print(f"| {tree} | {name} | {theirs} | {' | '.join(cells)} |", flush=True)


def ratios(
    ours: Step, theirs: Step, params: Any, rounds: int, phases: Iterable[str] = PHASES
) -> dict[str, float]:
    """For each phase the median of the rounds' ratios of ours to theirs."""
    grads = jax.tree.map(lambda x: 0.5 * x, params)
    seconds: dict[str, list[float]] = {}
    for cold, of_phases in ((_cold, ("trace", "compile")), (_cold_derivative, ("derivative",))):
        for turn in range(rounds if set(of_phases) & set(phases) else 0):
            ways = (ours, theirs) if turn % 2 else (theirs, ours)
            taken = {way: cold(way, grads, params) for way in ways}
            for phase in of_phases:
                ratio = taken[ours][phase] / taken[theirs][phase]
                seconds.setdefault(phase, []).append(ratio)
    found = {phase: statistics.median(values) for phase, values in seconds.items()}
    for phase, prepared in (("steady", _compiled), ("eager", _eager)):
        if phase in phases:
            ways = {
                "ours": prepared(ours, grads, params),
                "theirs": prepared(theirs, grads, params),
            }
            times = race(ways, 5 * rounds)
            found[phase] = float(np.median(times["ours"] / times["theirs"]))
    return found


def _cold(tx: Step, grads: Any, params: Any) -> dict[str, float]:
    """The processor's seconds to trace and lower an update, and to compile it."""
    return _seconds(tx.update, grads, tx.init(params), params)


def _cold_derivative(tx: Step, grads: Any, params: Any) -> dict[str, float]:
    """The same of the derivative of a sum over the update, together."""
    state = tx.init(params)

    def total(grads: Any) -> Any:
        updates, _ = tx.update(grads, state, params)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(updates))

    return {"derivative": sum(_seconds(jax.grad(total), grads).values())}


def _seconds(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """The processor's seconds to trace and lower, and to compile, with nothing in the caches."""
    jax.clear_caches()
    # When Python collects garbage (50 to 100 milliseconds) depends on what ran before.
    gc.collect()
    gc.disable()
    ticks = [time.process_time()]
    lowered = jax.jit(fn).trace(*args).lower()
    ticks.append(time.process_time())
    lowered.compile()
    ticks.append(time.process_time())
    gc.enable()
    return dict(zip(("trace", "compile"), np.diff(ticks).tolist(), strict=True))


def _init_ms(tx: Step, params: Any) -> float:
    """The milliseconds of a first `init`, with nothing in the caches: the median of three."""
    times = []
    for _ in range(3):
        jax.clear_caches()
        gc.collect()
        start = time.perf_counter()
        jax.block_until_ready(tx.init(params))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _import_seconds() -> float:
    """The seconds of `import optaxclip` in a new process: the median of five."""
    code = (
        "import time, jax, optax; start = time.perf_counter(); import optaxclip; "
        "print(time.perf_counter() - start)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(5)]
    return statistics.median(map(float, runs))


def _compiled(tx: Step, grads: Any, params: Any) -> Callable[[], object]:
    state = tx.init(params)
    update = jax.jit(tx.update).lower(grads, state, params).compile()
    return lambda: jax.block_until_ready(update(grads, state, params))


def _eager(tx: Step, grads: Any, params: Any) -> Callable[[], object]:
    state = tx.init(params)
    return lambda: jax.block_until_ready(tx.update(grads, state, params))


def _filled(shapes: Shapes) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", nargs="+", choices=TREES)
    parser.add_argument("--method", nargs="+", help="by their names in the table")
    usual = [phase for phase in PHASES if phase != "derivative"]
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=usual)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()

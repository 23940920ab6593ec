"""Compares rejecting microbatches with a manual `scan` and `optax.MultiSteps`.

  python -m benchmarks.accumulating                 # seconds on a CPU
  python -m benchmarks.accumulating --device h100   # bytes and memory, as compiled for a GPU

The gradients of `k` microbatches are compared with `k` separate calls of `jax.value_and_grad`, each
followed by an addition of trees. Times are CPU seconds of all threads, which a busy machine hardly
affects, and wall time.
"""

import argparse
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optaxclip import accumulate

WIDTHS, NUMBER = (512, 1024, 1024, 512), 8
ROWS = (64, 512)
STEPS = "k steps"
Fn = Callable[..., Any]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Computes the mean square of the outputs of a network."""
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def make_zeros(params: Any) -> Any:
    """Returns a loss and a gradient of 0."""
    return jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def accumulate_manually(params: Any, x: jax.Array) -> Any:
    """Computes the mean gradient in a manual `scan`."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])

    def add(total: Any, i: jax.Array) -> tuple[Any, None]:
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    total, _ = jax.lax.scan(add, make_zeros(params), jnp.arange(NUMBER))
    return jax.tree.map(lambda leaf: leaf / NUMBER, total)


def accumulate_finite_manually(params: Any, x: jax.Array) -> Any:
    """Computes the mean gradient of all microbatches with a finite loss and norm."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])

    def add(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        total, count = carry
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        found = jax.value_and_grad(loss_fn)(params, part)
        norm = optax.global_norm(found[1])
        counts = jnp.isfinite(norm) & jnp.isfinite(found[0])
        total = jax.tree.map(lambda t, leaf: t + jnp.where(counts, leaf, 0), total, found)
        return (total, count + counts), norm

    (total, count), norms = jax.lax.scan(add, (make_zeros(params), 0), jnp.arange(NUMBER))
    return jax.tree.map(lambda leaf: leaf / count, total), norms


def accumulate_with_optax(params: Any, x: jax.Array) -> Any:
    """Computes the mean gradient with `optax.MultiSteps` around the identity, in a `scan`."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])
    tx = optax.MultiSteps(optax.identity(), NUMBER)

    def add(state: Any, i: jax.Array) -> tuple[Any, Any]:
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        state, _ = state
        loss, grads = jax.value_and_grad(loss_fn)(params, part)
        updates, state = tx.update(grads, state, params)
        return (state, updates), loss

    start = (tx.init(params), make_zeros(params)[1])
    (_, grads), losses = jax.lax.scan(add, start, jnp.arange(NUMBER))
    return jnp.mean(losses), grads


def accumulate_with_optaxclip(rows: int, **options: Any) -> Fn:
    """Returns `accumulate.value_and_grad` of the loss."""
    return accumulate.value_and_grad(loss_fn, microbatch_size=rows, **options)


def build_variants(rows: int) -> dict[str, Fn]:
    """Returns the compared functions by name."""
    return {
        "a scan by hand": accumulate_manually,
        "a judge by hand": accumulate_finite_manually,
        "optax.MultiSteps": accumulate_with_optax,
        "accumulate": accumulate_with_optaxclip(rows),
        "accumulate, clip=1.0": accumulate_with_optaxclip(rows, clip=1.0),
        "accumulate, compute_norms=False": accumulate_with_optaxclip(
            rows, reject_rule=None, compute_norms=False
        ),
    }


def build_shapes(rows: int, sharding: Any = None) -> tuple[Any, Any]:
    """Returns the shapes of the parameters and the batch."""
    describe = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=sharding)
    pairs = itertools.pairwise(WIDTHS)
    params = [{"kernel": describe((n, m)), "bias": describe((m,))} for n, m in pairs]
    return params, describe((rows * NUMBER, WIDTHS[0]))


class Seconds(NamedTuple):
    """The CPU time and the wall time of a call."""

    processor: float
    clock: float

    @classmethod
    def read_clocks(cls) -> "Seconds":
        """Reads both clocks."""
        return cls(time.process_time(), time.perf_counter())

    def subtract(self, start: "Seconds") -> "Seconds":
        """Returns the seconds since `start`."""
        return Seconds(*(x - y for x, y in zip(self, start, strict=True)))


def time_separate_steps(params: Any, x: Any, rows: int) -> Callable[[], Seconds]:
    """Returns a function that measures `k` separate steps and additions."""
    step = jax.jit(jax.value_and_grad(loss_fn))
    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
    parts = [jax.block_until_ready(x[i * rows : (i + 1) * rows]) for i in range(NUMBER)]
    zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)))

    def run() -> Seconds:
        total = jax.block_until_ready(zeros())
        start = Seconds.read_clocks()
        for part in parts:
            total = add(total, step(params, part))
        jax.block_until_ready(total)
        return Seconds.read_clocks().subtract(start)

    return run


def time_calls(compiled: Fn, *args: Any) -> Callable[[], Seconds]:
    """Returns a function that measures a call."""

    def run() -> Seconds:
        start = Seconds.read_clocks()
        jax.block_until_ready(compiled(*args))
        return Seconds.read_clocks().subtract(start)

    return run


def print_times(rows: int, rounds: int) -> None:
    """Prints a table of times."""
    shapes, keys = build_shapes(rows), itertools.count()
    params, x = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(next(keys)), s.shape) / s.shape[0] ** 0.5, shapes
    )
    runs = {STEPS: time_separate_steps(params, x, rows)}
    temporary = {}
    for name, fn in build_variants(rows).items():
        compiled = jax.jit(fn).lower(params, x).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
        runs[name] = time_calls(compiled, params, x)
    seconds_by_name, order = {name: [] for name in runs}, list(runs)
    rng = random.Random(0)
    for _ in range(rounds):
        for name in order:
            seconds_by_name[name].append(runs[name]())
        rng.shuffle(order)
    medians = {
        name: Seconds(*map(statistics.median, zip(*seconds[1:], strict=True)))
        for name, seconds in seconds_by_name.items()
    }
    base = medians[STEPS]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"\n{NUMBER} microbatches of {rows} rows, {size / 2**20:.1f} MiB of gradients")
    print("| way | ms | of k steps | of k steps, wall time | temporary |\n|---|---|---|---|---|")
    for name, median in medians.items():
        ratios = [f"{x / y:.3f}" for x, y in zip(median, base, strict=True)]
        memory = f"{temporary[name] / size:.2f}" if name in temporary else ""
        cells = [name, f"{1e3 * median.processor:.1f}", *ratios, memory]
        print(f"| {' | '.join(cells)} |", flush=True)


def count_work(device: str, rows: int, name: str) -> dict[str, float]:
    """Counts the work per microbatch in a program compiled for a described device.

    Read, written and temporary bytes are multiples of the bytes of the gradients.
    """
    from benchmarks.accelerators.devices import get_devices
    from benchmarks.accelerators.steps import compile_program

    args = build_shapes(rows, jax.sharding.SingleDeviceSharding(get_devices(device, 1)[0]))
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    run = compile_program(
        build_variants(rows)[name], args, size, donate_argnums=(), trip_count=NUMBER
    )
    return {
        "read": run.counts.read / size / NUMBER,
        "written": run.counts.written / size / NUMBER,
        "kernels": run.counts.kernels / NUMBER,
        "branches": run.counts.branches,
        "temporary": run.temporary / size,
    }


def print_bytes(device: str, rows: int) -> None:
    """Prints a table of bytes."""
    print(f"\n{device}, {NUMBER} microbatches of {rows} rows")
    print("| way | read | written | kernels | branches | temporary |\n|---|---|---|---|---|---|")
    for name in build_variants(rows):
        cells = (f"{x:.3g}" for x in count_work(device, rows, name).values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="count bytes for h100, a100, v5e, ...")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, Optax {optax.__version__}")
    for rows in args.rows:
        print_bytes(args.device, rows) if args.device else print_times(rows, args.rounds)


if __name__ == "__main__":
    main()

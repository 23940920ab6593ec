"""What microbatches that are judged cost, beside a `scan` by hand and `optax.MultiSteps`.

  python -m benchmarks.accumulating                 # seconds on a CPU, all ways in turns
  python -m benchmarks.accumulating --device h100   # bytes and memory, as compiled for a GPU

A plain step is `jax.value_and_grad` of one microbatch; what is measured is the gradient of `k` of
them, in parts of `k` plain steps with one addition of trees each, which are called one by one.
Seconds are of the processor, of all threads together, which a busy machine changes little.
"""

import argparse
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optaxclip import accumulate

WIDTHS, NUMBER = (512, 1024, 1024, 512), 8
ROWS = (64, 512)
STEPS = "k steps"
Way = Callable[..., Any]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """A network's mean square."""
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def by_hand(params: Any, x: jax.Array) -> Any:
    """The mean gradient, in a `scan` as people write it."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])

    def add(total: Any, i: jax.Array) -> tuple[Any, None]:
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    zeros = (jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    total, _ = jax.lax.scan(add, zeros, jnp.arange(NUMBER))
    return jax.tree.map(lambda leaf: leaf / NUMBER, total)


def multi_steps(params: Any, x: jax.Array) -> Any:
    """The same by `optax.MultiSteps` around an optimizer that hands gradients on, in a `scan`."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])
    tx = optax.MultiSteps(optax.identity(), NUMBER)

    def add(state: Any, i: jax.Array) -> tuple[Any, Any]:
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        state, _ = state
        loss, grads = jax.value_and_grad(loss_fn)(params, part)
        updates, state = tx.update(grads, state, params)
        return (state, updates), loss

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (_, grads), losses = jax.lax.scan(add, (tx.init(params), zeros), jnp.arange(NUMBER))
    return jnp.mean(losses), grads


def ours(rows: int, **options: Any) -> Way:
    """`accumulate.value_and_grad`."""
    return accumulate.value_and_grad(loss_fn, microbatch_size=rows, **options)


def ways(rows: int) -> dict[str, Way]:
    """All that is compared, by name."""
    return {
        "a scan by hand": by_hand,
        "optax.MultiSteps": multi_steps,
        "accumulate": ours(rows),
        "accumulate, clip=1.0": ours(rows, clip=1.0),
        "accumulate, measure=False": ours(rows, reject=None, measure=False),
    }


def shapes(rows: int, place: Any = None) -> tuple[Any, Any]:
    """The parameters and the batch."""
    at = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=place)
    pairs = itertools.pairwise(WIDTHS)
    params = [{"kernel": at((n, m)), "bias": at((m,))} for n, m in pairs]
    return params, at((rows * NUMBER, WIDTHS[0]))


def steps_one_by_one(params: Any, x: Any, rows: int) -> Callable[[], Any]:
    """`k` compiled steps and additions."""
    step = jax.jit(jax.value_and_grad(loss_fn))
    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
    parts = [jax.block_until_ready(x[i * rows : (i + 1) * rows]) for i in range(NUMBER)]
    zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)))

    def run() -> Any:
        total = jax.block_until_ready(zeros())
        begin = time.process_time()
        for part in parts:
            total = add(total, step(params, part))
        jax.block_until_ready(total)
        return time.process_time() - begin

    return run


def called(compiled: Way, *args: Any) -> Callable[[], float]:
    """The seconds of a call."""

    def run() -> float:
        begin = time.process_time()
        jax.block_until_ready(compiled(*args))
        return time.process_time() - begin

    return run


def times(rows: int, rounds: int) -> None:
    """Prints a line for each way."""
    like, keys = shapes(rows), itertools.count()
    params, x = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(next(keys)), s.shape) / s.shape[0] ** 0.5, like
    )
    runs = {STEPS: steps_one_by_one(params, x, rows)}
    temporary = {}
    for name, way in ways(rows).items():
        compiled = jax.jit(way).lower(params, x).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
        runs[name] = called(compiled, params, x)
    taken, order = {name: [] for name in runs}, list(runs)
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in order:
            taken[name].append(runs[name]())
        shuffled.shuffle(order)
    base = statistics.median(taken[STEPS][1:])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"\n{rows} rows in a microbatch, {NUMBER} of them, {size / 2**20:.1f} MiB of gradients")
    print("| way | ms | of k steps with additions | temporary, gradients |\n|---|---|---|---|")
    for name, seconds in taken.items():
        median = statistics.median(seconds[1:])
        memory = f"{temporary[name] / size:.2f}" if name in temporary else ""
        print(f"| {name} | {1e3 * median:.1f} | {median / base:.3f} | {memory} |", flush=True)


def per_microbatch(device: str, rows: int, name: str) -> dict[str, float]:
    """What a way does for one microbatch, as compiled for a device that is only described.

    Bytes read and written, and the temporary ones of all, are in those of the gradients.
    """
    from benchmarks.accelerators.devices import devices
    from benchmarks.accelerators.steps import timed

    args = shapes(rows, jax.sharding.SingleDeviceSharding(devices(device, 1)[0]))
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    run = timed(ways(rows)[name], args, size, donated=(), turns=NUMBER)
    return {
        "read": run.counts.read / size / NUMBER,
        "written": run.counts.written / size / NUMBER,
        "kernels": run.counts.kernels / NUMBER,
        "branches": run.counts.branches,
        "temporary": run.temporary / size,
    }


def bytes_on(device: str, rows: int) -> None:
    """Prints a line for each way."""
    print(f"\n{device}, {rows} rows in a microbatch, {NUMBER} of them")
    print("| way | read | written | kernels | branches | temporary |\n|---|---|---|---|---|---|")
    for name in ways(rows):
        cells = (f"{x:.3g}" for x in per_microbatch(device, rows, name).values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="h100, a100, v5e, ...: bytes in the place of seconds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, Optax {optax.__version__}")
    for rows in args.rows:
        bytes_on(args.device, rows) if args.device else times(rows, args.rounds)


if __name__ == "__main__":
    main()

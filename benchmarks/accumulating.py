"""What microbatches that are judged cost, beside a `scan` by hand and `optax.MultiSteps`.

  python -m benchmarks.accumulating                 # seconds on a CPU, all ways in turns
  python -m benchmarks.accumulating --device h100   # bytes and memory, as compiled for a GPU

A plain step is `jax.value_and_grad` of one microbatch; what is measured is the gradient of `k` of
them, in parts of `k` plain steps with one addition of trees each, which are called one by one.
Seconds are of the processor, of all threads together, which a busy machine changes little, and of
the clock.
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
Way = Callable[..., Any]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """A network's mean square."""
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def zeros_of(params: Any) -> Any:
    """A loss and a gradient of 0."""
    return jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def by_hand(params: Any, x: jax.Array) -> Any:
    """The mean gradient, in a `scan` as people write it."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])

    def add(total: Any, i: jax.Array) -> tuple[Any, None]:
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    total, _ = jax.lax.scan(add, zeros_of(params), jnp.arange(NUMBER))
    return jax.tree.map(lambda leaf: leaf / NUMBER, total)


def judged_by_hand(params: Any, x: jax.Array) -> Any:
    """The same, but for microbatches whose loss or norm is not finite: the least a judge can do."""
    parts = x.reshape(-1, NUMBER, x.shape[-1])

    def add(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        total, count = carry
        part = jax.lax.dynamic_index_in_dim(parts, i, axis=1, keepdims=False)
        found = jax.value_and_grad(loss_fn)(params, part)
        norm = optax.global_norm(found[1])
        counts = jnp.isfinite(norm) & jnp.isfinite(found[0])
        total = jax.tree.map(lambda t, leaf: t + jnp.where(counts, leaf, 0), total, found)
        return (total, count + counts), norm

    (total, count), norms = jax.lax.scan(add, (zeros_of(params), 0), jnp.arange(NUMBER))
    return jax.tree.map(lambda leaf: leaf / count, total), norms


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

    start = (tx.init(params), zeros_of(params)[1])
    (_, grads), losses = jax.lax.scan(add, start, jnp.arange(NUMBER))
    return jnp.mean(losses), grads


def ours(rows: int, **options: Any) -> Way:
    """`accumulate.value_and_grad`."""
    return accumulate.value_and_grad(loss_fn, microbatch_size=rows, **options)


def ways(rows: int) -> dict[str, Way]:
    """All that is compared, by name."""
    return {
        "a scan by hand": by_hand,
        "a judge by hand": judged_by_hand,
        "optax.MultiSteps": multi_steps,
        "accumulate": ours(rows),
        "accumulate, clip=1.0": ours(rows, clip=1.0),
        "accumulate, compute_norms=False": ours(rows, reject_rule=None, compute_norms=False),
    }


def shapes(rows: int, place: Any = None) -> tuple[Any, Any]:
    """The parameters and the batch."""
    at = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=place)
    pairs = itertools.pairwise(WIDTHS)
    params = [{"kernel": at((n, m)), "bias": at((m,))} for n, m in pairs]
    return params, at((rows * NUMBER, WIDTHS[0]))


class Seconds(NamedTuple):
    """How long a call took."""

    processor: float
    clock: float

    @classmethod
    def now(cls) -> "Seconds":
        """Since some start."""
        return cls(time.process_time(), time.perf_counter())

    def since(self, begin: "Seconds") -> "Seconds":
        """The difference."""
        return Seconds(*(x - y for x, y in zip(self, begin, strict=True)))


def steps_one_by_one(params: Any, x: Any, rows: int) -> Callable[[], Seconds]:
    """`k` compiled steps and additions."""
    step = jax.jit(jax.value_and_grad(loss_fn))
    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
    parts = [jax.block_until_ready(x[i * rows : (i + 1) * rows]) for i in range(NUMBER)]
    zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)))

    def run() -> Seconds:
        total = jax.block_until_ready(zeros())
        begin = Seconds.now()
        for part in parts:
            total = add(total, step(params, part))
        jax.block_until_ready(total)
        return Seconds.now().since(begin)

    return run


def called(compiled: Way, *args: Any) -> Callable[[], Seconds]:
    """The seconds of a call."""

    def run() -> Seconds:
        begin = Seconds.now()
        jax.block_until_ready(compiled(*args))
        return Seconds.now().since(begin)

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
    medians = {
        name: Seconds(*map(statistics.median, zip(*seconds[1:], strict=True)))
        for name, seconds in taken.items()
    }
    base = medians[STEPS]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"\n{rows} rows in a microbatch, {NUMBER} of them, {size / 2**20:.1f} MiB of gradients")
    print("| way | ms | of k steps | of k steps, by the clock | temporary |\n|---|---|---|---|---|")
    for name, median in medians.items():
        ratios = [f"{x / y:.3f}" for x, y in zip(median, base, strict=True)]
        memory = f"{temporary[name] / size:.2f}" if name in temporary else ""
        cells = [name, f"{1e3 * median.processor:.1f}", *ratios, memory]
        print(f"| {' | '.join(cells)} |", flush=True)


def per_microbatch(device: str, rows: int, name: str) -> dict[str, float]:
    """What a way does for one microbatch, as compiled for a device that is only described.

    Bytes read and written, and the temporary ones of all, are in those of the gradients.
    """
    from benchmarks.accelerators.devices import get_devices
    from benchmarks.accelerators.steps import compile_program

    args = shapes(rows, jax.sharding.SingleDeviceSharding(get_devices(device, 1)[0]))
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    run = compile_program(
        ways(rows)[name], args, size, donate_argnums=(), default_trip_count=NUMBER
    )
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

"""Per-example gradients, clipped and summed: both methods of ours, beside what else there is.

  python -m benchmarks.per_example                    # some models on this machine
  python -m benchmarks.per_example --models mlp --dtype bfloat16
  python -m benchmarks.per_example --device h100 v5e  # bytes and memory, as compiled for those

For each model and way it prints time and temporary memory over those of the plain gradient of the
batch's mean, and the seconds to compile. Ways take turns, in another order each round, and figures
are medians of the rounds' ratios. By default times are the processor's, of all threads together,
which other work on the machine changes little; `--wall` takes the clock's. `clipped_grad` and
jax-privacy are shown in the microbatch that is fastest for each, of those of `--microbatches`.
jax-privacy is left out if not installed. For devices that are only described, in the environment
of the extra `accelerators`, the bytes that are read and written are counted as in
`benchmarks.accelerators`; a loop counts as often as it turns.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.example_models import LARGE, MODELS, Model
from benchmarks.times.timing import race, ratio
from optaxclip import per_example

LIMIT = 1.0
LARGEST = 2**31
"""Ways that would take more temporary bytes than that are not run."""
SIZE = 8
"""Of the microbatches of the plain gradient and of the ghost method."""
Way = Callable[..., Any]
PLAIN = "plain gradient"


def plain(model: Model) -> Way:
    """The gradient of the batch's mean."""

    def loss(params: Any, *batch: Any) -> Any:
        axes = (None, *[0] * len(batch))
        return jnp.mean(jax.vmap(model.loss, axes)(params, *batch))

    return jax.grad(loss)


def plain_in_microbatches(model: Model, size: int) -> Way:
    """The same, a microbatch at a time."""
    of_microbatch = plain(model)

    def run(params: Any, *batch: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)

        def step(total: Any, part: Any) -> tuple[Any, None]:
            grads = of_microbatch(params, *part)
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return jax.lax.scan(step, zeros, cut)[0]

    return run


def ours(model: Model, method: str, size: int | None) -> Way:
    """Our `clipped_grad`."""
    clipped = per_example.clipped_grad(model.loss, LIMIT, method=method, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def with_optax(model: Model) -> Way:
    """`vmap(grad)`, then Optax's function."""

    def run(params: Any, *batch: Any) -> Any:
        grads = jax.vmap(jax.grad(model.loss), (None, *[0] * len(batch)))(params, *batch)
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten(optax.per_example_global_norm_clip(leaves, LIMIT)[0])

    return run


def with_jax_privacy(model: Model, size: int | None) -> Way:
    """jax-privacy's, which takes examples as batches of one and drops NaN likewise."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        model.loss,
        l2_clip_norm=LIMIT,
        batch_argnums=tuple(range(1, 1 + len(model.batch))),
        keep_batch_dim=False,
        microbatch_size=size,
        dtype=jnp.float32,  # as ours
    )


def ways(model: Model, sizes: list[int]) -> dict[str, dict[str, Way]]:
    """All that is compared; of several under one name the fastest is shown."""
    usable = [size for size in sizes if size < model.examples and model.examples % size == 0]
    cuts = {**{f"{size}": size for size in usable}, "all": None}
    found = {
        PLAIN: {"": plain(model)},
        f"plain, microbatches of {SIZE}": {"": plain_in_microbatches(model, SIZE)},
        "ghost": {"": ours(model, "ghost", None)},
        f"ghost, microbatches of {SIZE}": {"": ours(model, "ghost", SIZE)},
        "vmap": {name: ours(model, "vmap", size) for name, size in cuts.items()},
        "Optax, vmap(grad)": {"": with_optax(model)},
    }
    if importlib.util.find_spec("jax_privacy"):
        found["jax-privacy"] = {k: with_jax_privacy(model, size) for k, size in cuts.items()}
    return found


def table(name: str, model: Model, sizes: list[int], rounds: int, clock: Any) -> None:
    """Prints one line for each way."""
    arrays = model.arrays()
    calls, memory, seconds, several = {}, {}, {}, ways(model, sizes)
    for way, kinds in several.items():
        for kind, run in kinds.items():
            start = time.process_time()
            compiled = jax.jit(run).lower(*arrays).compile()
            seconds[way, kind] = time.process_time() - start
            memory[way, kind] = compiled.memory_analysis().temp_size_in_bytes
            if memory[way, kind] <= LARGEST:
                calls[way, kind] = functools.partial(_wait, compiled, arrays)
    # Under one name only the fastest of some calls stays in the race.
    shortest = {}
    for way, kinds in several.items():
        run = {kind: calls[way, kind] for kind in kinds if (way, kind) in calls}
        times = race(run, 3, clock) if len(run) > 1 else dict.fromkeys(run, 0.0)
        if run:
            shortest[way] = min(run, key=lambda kind: np.median(times[kind]))
    times = race({way: calls[way, kind] for way, kind in shortest.items()}, rounds, clock)
    entries = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    print(
        f"\n{name}: {entries:,} parameters, {model.examples} examples; plain gradient "
        f"{np.median(times[PLAIN]) * 1e3:.1f} ms, {memory[PLAIN, ''] / 2**20:.1f} MiB"
    )
    print("| way | time | memory | compile, s |\n|---|---|---|---|")
    for way, kind in shortest.items():
        of_plain = ratio(times[way], times[PLAIN])
        cells = [f"{of_plain.median:.2f}", f"{memory[way, kind] / memory[PLAIN, '']:.2f}"]
        label = f"{way}, {'microbatches of ' * (kind != 'all')}{kind}" if kind else way
        print(f"| {label} | {' | '.join(cells)} | {seconds[way, kind]:.1f} |", flush=True)
    for way in several.keys() - shortest.keys():
        share = memory[way, next(iter(several[way]))] / memory[PLAIN, ""]
        print(f"| {way} | not run | {share:.0f} | |", flush=True)


def _wait(compiled: Any, arrays: Any) -> None:
    jax.block_until_ready(compiled(*arrays))


def counted(name: str, model: Model, device: str) -> Iterator[str]:
    """One line for each way: bytes and temporary memory over those of the plain gradient."""
    from benchmarks.accelerators.devices import devices
    from benchmarks.accelerators.steps import timed

    sharding = jax.sharding.SingleDeviceSharding(devices(device, 1)[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (model.params, *model.batch),
    )
    base = None
    compared = {way: kinds for way, kinds in ways(model, []).items() if way != "jax-privacy"}
    for way, kinds in compared.items():
        turns = model.examples // SIZE if "microbatches" in way else 1
        found = timed(next(iter(kinds.values())), shapes, 1, donated=(), turns=turns)
        moved = found.counts.read + found.counts.written
        base = base or (moved, found.temporary)
        both = zip((moved, found.temporary), base, strict=True)
        # On a TPU what lies in VMEM is not counted, and that may be all.
        cells = [f"{x / y:.2f}" if y else f"{x / 2**20:.1f} MiB" for x, y in both]
        cells += [f"{found.counts.kernels}", f"{found.trace + found.compile:.1f}"]
        yield f"| {device} | {name} | {way} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted({*MODELS, *LARGE}))
    parser.add_argument("--dtype", default=None, help="float32, on accelerators bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--wall", action="store_true", help="the clock's time")
    parser.add_argument("--device", nargs="+", help="h100, v5e: only described")
    options = parser.parse_args(arguments)
    models = LARGE if options.device else MODELS
    dtype = jnp.dtype(options.dtype or ("bfloat16" if options.device else "float32"))
    chosen = {name: models[name](dtype) for name in options.models or models}
    print(f"JAX {jax.__version__}, Optax {optax.__version__}, {dtype.name}, limit {LIMIT}")
    if options.device:
        print("| device | model | way | bytes | memory | kernels | trace and compile, s |")
        print("|---" * 7 + "|")
        for device in options.device:
            for name, model in chosen.items():
                for line in counted(name, model, device):
                    print(line, flush=True)
        return
    clock = time.perf_counter if options.wall else time.process_time
    for name, model in chosen.items():
        table(name, model, options.microbatches, options.rounds, clock)


if __name__ == "__main__":
    main()

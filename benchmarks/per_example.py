"""Per-example gradients, clipped and summed: both methods of ours, beside what else there is.

  python -m benchmarks.per_example                    # on this machine, larger models on a GPU
  python -m benchmarks.per_example --models mlp --dtype bfloat16
  python -m benchmarks.per_example --summary --ours --microbatches 8  # one table, in minutes
  python -m benchmarks.per_example --summary --out rows.csv --minutes 4  # goes on with the file
  python -m benchmarks.per_example --device h100 v5e  # bytes and memory, as compiled for those

For each model and way it prints time and temporary memory over those of the plain gradient of the
batch's mean, and the seconds to compile. Ways take turns, in another order each round, and figures
are medians of the rounds' ratios. On a CPU times are the processor's, of all threads together,
which other work on the machine changes little; `--wall` takes the clock's. "vmap" in
microbatches and jax-privacy are shown in the microbatch that is fastest for each, of those of
`--microbatches`. jax-privacy is left out if not installed. With `--out` what is measured of a
model is written to the file, and not measured again. For devices that are only described, in the
environment of the extra `accelerators`, the bytes that are read and written are counted as in
`benchmarks.accelerators`; a loop counts as often as it turns, and of two branches the cheaper one:
the other one is taken where an example's tokens cancel or it is not finite.
"""

import argparse
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.example_models import LARGE, MODELS, Model
from benchmarks.table_file import TableFile, device_name, time_left, versions
from benchmarks.times.timing import race, ratio, usual_clock
from optaxclip import per_example

THRESHOLD = 1.0
LARGEST, LARGEST_OF_ACCELERATORS = 2**31, 2**35
"""Ways that would take more temporary bytes than that are not run."""
SIZE = 8
"""Of the microbatches of the plain gradient and of the ghost method."""
KEYS = ("device", "dtype", "model", "way")
COLUMNS = ("microbatches", "time", "memory", "compile, s", "what it is", "versions")
Way = Callable[..., Any]
PLAIN = "plain gradient"
OPTAX, JAX_PRIVACY = OTHERS = ("Optax, vmap(grad)", "jax-privacy")


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
    clipped = per_example.clipped_grad(model.loss, THRESHOLD, method=method, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def with_optax(model: Model) -> Way:
    """`vmap(grad)`, then Optax's function."""

    def run(params: Any, *batch: Any) -> Any:
        grads = jax.vmap(jax.grad(model.loss), (None, *[0] * len(batch)))(params, *batch)
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten(optax.per_example_global_norm_clip(leaves, THRESHOLD)[0])

    return run


def with_jax_privacy(model: Model, size: int | None) -> Way:
    """jax-privacy's, which takes examples as batches of one and drops NaN likewise."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        model.loss,
        l2_clip_norm=THRESHOLD,
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
        "vmap": {"": ours(model, "vmap", None)},
        "vmap, microbatches": {f"{size}": ours(model, "vmap", size) for size in usable},
        OPTAX: {"": with_optax(model)},
    }
    if importlib.util.find_spec("jax_privacy"):
        found[JAX_PRIVACY] = {k: with_jax_privacy(model, size) for k, size in cuts.items()}
    return {way: kinds for way, kinds in found.items() if kinds}


class Row(NamedTuple):
    """What was measured of a way.

    Attributes:
      way: its name.
      kind: the fastest of its microbatches, if there are several.
      time: over that of the plain gradient; None if it was not run.
      memory: likewise, the temporary bytes.
      compile: seconds.
    """

    way: str
    kind: str
    time: float | None
    memory: float
    compile: float


def measured(
    model: Model, several: dict[str, dict[str, Way]], rounds: int, clock: Any
) -> tuple[str, list[Row]]:
    """The plain gradient in words, and a row for each way."""
    arrays = model.arrays()
    largest = LARGEST if jax.default_backend() == "cpu" else LARGEST_OF_ACCELERATORS
    calls, memory, seconds = {}, {}, {}
    for way, kinds in several.items():
        for kind, run in kinds.items():
            start = time.process_time()
            compiled = jax.jit(run).lower(*arrays).compile()
            seconds[way, kind] = time.process_time() - start
            memory[way, kind] = compiled.memory_analysis().temp_size_in_bytes
            if memory[way, kind] <= largest:
                calls[way, kind] = functools.partial(_wait, compiled, arrays)
    # Under one name only the fastest of some calls stays in the race.
    shortest = {}
    for way, kinds in several.items():
        run = {kind: calls[way, kind] for kind in kinds if (way, kind) in calls}
        times = race(run, 3, clock) if len(run) > 1 else dict.fromkeys(run, 0.0)
        if run:
            shortest[way] = min(run, key=lambda kind: np.median(times[kind]))
    times = race({way: calls[way, kind] for way, kind in shortest.items()}, rounds, clock)
    entries, least = (sum(leaf.size for leaf in jax.tree.leaves(model.params)), memory[PLAIN, ""])
    words = f"{entries:,} parameters, {model.examples} examples; plain gradient "
    words += f"{np.median(times[PLAIN]) * 1e3:.1f} ms, {least / 2**20:.1f} MiB"
    rows = []
    for way, kinds in several.items():
        kind = shortest.get(way, next(iter(kinds)))
        found = ratio(times[way], times[PLAIN]) if way in shortest else None
        of_plain = found and found.median
        rows.append(Row(way, kind, of_plain, memory[way, kind] / least, seconds[way, kind]))
    return words, rows


def stored(
    table: TableFile, dtype: str, model: str, several: dict[str, Any]
) -> tuple[str, list[Row]] | None:
    """What `measured` gave for a model on this device, if the file has all its ways."""
    keys = [table.key(device=device_name(), dtype=dtype, model=model, way=way) for way in several]
    if not all(key in table.rows for key in keys):
        return None
    lines = [table.rows[key] for key in keys]
    rows = [
        Row(
            line["way"],
            line["microbatches"],
            float(line["time"]) if line["time"] else None,
            float(line["memory"]),
            float(line["compile, s"] or "nan"),
        )
        for line in lines
    ]
    return lines[0]["what it is"], rows


def store(table: TableFile, dtype: str, model: str, words: str, rows: list[Row]) -> None:
    """Writes the same."""
    for row in rows:
        table.add(
            device=device_name(),
            dtype=dtype,
            model=model,
            way=row.way,
            microbatches=row.kind,
            time="" if row.time is None else f"{row.time:.6g}",
            memory=f"{row.memory:.6g}",
            **{"compile, s": f"{row.compile:.6g}", "what it is": words, "versions": versions()},
        )


def print_table(name: str, words: str, rows: list[Row]) -> None:
    """One line for each way."""
    print(f"\n{name}: {words}\n| way | time | memory | compile, s |\n|---|---|---|---|")
    for row in rows:
        label = f", {'microbatches of ' * (row.kind != 'all')}{row.kind}" if row.kind else ""
        cells = [row.way + label, "not run" if row.time is None else f"{row.time:.2f}"]
        print(f"| {' | '.join([*cells, f'{row.memory:.2f}', f'{row.compile:.1f}'])} |", flush=True)


def print_summary(name: str, words: str, rows: list[Row], *, is_first: bool) -> None:
    """One line for each model: time and memory of each way."""
    if is_first:
        print(f"| model | plain gradient | {' | '.join(row.way for row in rows[1:])} |")
        print("|---" * (1 + len(rows)) + "|")
    plain = words.rsplit("plain gradient ", 1)[1]
    cells = [f"{'-' if x.time is None else f'{x.time:.2f}'}, {x.memory:.2f}" for x in rows[1:]]
    print(f"| {name} | {plain} | {' | '.join(cells)} |", flush=True)


def _wait(compiled: Any, arrays: Any) -> None:
    jax.block_until_ready(compiled(*arrays))


def compiled_for(device: str, model: Model, run: Way, default_trip_count: int = 1) -> Any:
    """A way as compiled for a device that is only described."""
    from benchmarks.accelerators.devices import get_devices
    from benchmarks.accelerators.steps import compile_program

    sharding = jax.sharding.SingleDeviceSharding(get_devices(device, 1)[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (model.params, *model.batch),
    )
    return compile_program(
        run,
        shapes,
        1,
        donate_argnums=(),
        default_trip_count=default_trip_count,
        cheapest_branches=True,
    )


def counted(name: str, model: Model, device: str) -> Iterator[str]:
    """One line for each way: bytes and temporary memory over those of the plain gradient."""
    base = None
    for way in (PLAIN, "ghost", "vmap"):
        (run, *_) = ways(model, [])[way].values()
        found = compiled_for(device, model, run)
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
    parser.add_argument("--summary", action="store_true", help="a table with a line for a model")
    parser.add_argument("--ours", action="store_true", help="without Optax and jax-privacy")
    parser.add_argument("--wall", action="store_true", help="the clock's time")
    parser.add_argument("--device", nargs="+", help="h100, v5e: only described")
    parser.add_argument("--out", type=Path, help="a file for the rows, which a rerun goes on with")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no model begins later")
    options = parser.parse_args(arguments)
    is_large = bool(options.device) or jax.default_backend() != "cpu"
    dtype = jnp.dtype(options.dtype or ("bfloat16" if is_large else "float32"))
    names = options.models or (LARGE if is_large else MODELS)
    chosen = {name: (MODELS | LARGE)[name](dtype) for name in names}
    print(f"JAX {jax.__version__}, Optax {optax.__version__}, {dtype.name}, threshold {THRESHOLD}")
    if options.device:
        print("| device | model | way | bytes | memory | kernels | trace and compile, s |")
        print("|---" * 7 + "|")
        for device in options.device:
            for name, model in chosen.items():
                for line in counted(name, model, device):
                    print(line, flush=True)
        return
    clock = time.perf_counter if options.wall else usual_clock()
    table = TableFile(options.out, KEYS, COLUMNS) if options.out else None
    has_time, lacking, is_first = time_left(options.minutes), [], True
    for name, model in chosen.items():
        compared = ways(model, options.microbatches)
        if options.ours:
            compared = {way: kinds for way, kinds in compared.items() if way not in OTHERS}
        found = stored(table, dtype.name, name, compared) if table else None
        if found is None:
            if not has_time():
                lacking.append(name)
                continue
            found = measured(model, compared, options.rounds, clock)
            if table:
                store(table, dtype.name, name, *found)
        if options.summary:
            print_summary(name, *found, is_first=is_first)
        else:
            print_table(name, *found)
        is_first = False
    if lacking:
        print(f"\nMissing, and had by the same command again: {', '.join(lacking)}")


if __name__ == "__main__":
    main()

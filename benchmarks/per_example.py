"""Compares methods that clip and sum per-example gradients.

  python -m benchmarks.per_example                    # on this machine, larger models on a GPU
  python -m benchmarks.per_example --models mlp --dtype bfloat16
  python -m benchmarks.per_example --summary --ours --microbatches 8  # one table, in minutes
  python -m benchmarks.per_example --summary --out rows.csv --minutes 4  # continues the file
  python -m benchmarks.per_example --device h100 v5e  # bytes and memory, as compiled for these

Prints the time and the temporary memory relative to the gradient of the batch mean, and the seconds
to compile. The variants run in a random order in every round, and figures are medians over rounds
of the ratios. On CPUs, times are CPU seconds of all threads, which other work hardly affects; use
`--wall` for wall time. For jax-privacy and "vmap, microbatches", the fastest size of
`--microbatches` is shown. jax-privacy is omitted if it is not installed. With `--out`, models in
the file are not measured again. `--device` requires the extra `accelerators`, and counts the bytes
as in `benchmarks.accelerators`. It counts all iterations of loops, but only the cheaper branch of
conditionals. The other branch handles non-finite examples, and examples whose tokens cancel.
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
from benchmarks.table_file import TableFile, describe_versions, get_device_name, start_timer
from benchmarks.times.timing import choose_clock, compute_ratio, time_calls
from optaxclip import per_example

THRESHOLD = 1.0
LARGEST, LARGEST_OF_ACCELERATORS = 2**31, 2**35
"""Variants with more temporary bytes are not run."""
SIZE = 8
"""The microbatch size of the plain gradient and the ghost method."""
KEYS = ("device", "dtype", "model", "way")
COLUMNS = ("microbatches", "time", "memory", "compile, s", "what it is", "versions")
Fn = Callable[..., Any]
PLAIN = "plain gradient"
OPTAX, JAX_PRIVACY = OTHERS = ("Optax, vmap(grad)", "jax-privacy")


def compute_plain_grad(model: Model) -> Fn:
    """Returns the gradient of the batch mean."""

    def loss(params: Any, *batch: Any) -> Any:
        axes = (None, *[0] * len(batch))
        return jnp.mean(jax.vmap(model.loss, axes)(params, *batch))

    return jax.grad(loss)


def accumulate(model: Model, size: int) -> Fn:
    """Returns a function that sums gradients of microbatches."""
    grad_fn = compute_plain_grad(model)

    def run(params: Any, *batch: Any) -> Any:
        microbatches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)

        def step(total: Any, part: Any) -> tuple[Any, None]:
            grads = grad_fn(params, *part)
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return jax.lax.scan(step, zeros, microbatches)[0]

    return run


def clip_grads(model: Model, method: str, size: int | None) -> Fn:
    """Returns `per_example.clipped_grad` of the loss."""
    clipped = per_example.clipped_grad(model.loss, THRESHOLD, method=method, microbatch_size=size)
    return lambda *args: clipped(*args).grads


def clip_with_optax(model: Model) -> Fn:
    """Returns `vmap(grad)`, followed by Optax's clipping."""

    def run(params: Any, *batch: Any) -> Any:
        grads = jax.vmap(jax.grad(model.loss), (None, *[0] * len(batch)))(params, *batch)
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten(optax.per_example_global_norm_clip(leaves, THRESHOLD)[0])

    return run


def clip_with_jax_privacy(model: Model, size: int | None) -> Fn:
    """Returns `clipped_grad` of jax-privacy, which also drops NaN."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        model.loss,
        l2_clip_norm=THRESHOLD,
        batch_argnums=tuple(range(1, 1 + len(model.batch))),
        keep_batch_dim=False,
        microbatch_size=size,
        dtype=jnp.float32,  # optaxclip also sums in float32.
    )


def build_variants(model: Model, sizes: list[int]) -> dict[str, dict[str, Fn]]:
    """Returns the compared functions by name and microbatch size."""
    sizes = [size for size in sizes if size < model.examples and model.examples % size == 0]
    all_sizes = {**{f"{size}": size for size in sizes}, "all": None}
    variants = {
        PLAIN: {"": compute_plain_grad(model)},
        f"plain, microbatches of {SIZE}": {"": accumulate(model, SIZE)},
        "ghost": {"": clip_grads(model, "ghost", None)},
        f"ghost, microbatches of {SIZE}": {"": clip_grads(model, "ghost", SIZE)},
        "vmap": {"": clip_grads(model, "vmap", None)},
        "vmap, microbatches": {f"{size}": clip_grads(model, "vmap", size) for size in sizes},
        OPTAX: {"": clip_with_optax(model)},
    }
    if importlib.util.find_spec("jax_privacy"):
        variants[JAX_PRIVACY] = {
            k: clip_with_jax_privacy(model, size) for k, size in all_sizes.items()
        }
    return {variant: kinds for variant, kinds in variants.items() if kinds}


class Row(NamedTuple):
    """The time and memory of a variant relative to the plain gradient, and its compile time.

    If there are several microbatch sizes, `kind` is the fastest one. `time` is None if not run.
    """

    variant: str
    kind: str
    time: float | None
    memory: float
    compile: float


def measure(
    model: Model, variants: dict[str, dict[str, Fn]], rounds: int, clock: Any
) -> tuple[str, list[Row]]:
    """Measures all variants, and describes the plain gradient."""
    arrays = model.draw_arrays()
    largest = LARGEST if jax.default_backend() == "cpu" else LARGEST_OF_ACCELERATORS
    calls, memory, seconds = {}, {}, {}
    for variant, kinds in variants.items():
        for kind, run in kinds.items():
            start = time.process_time()
            compiled = jax.jit(run).lower(*arrays).compile()
            seconds[variant, kind] = time.process_time() - start
            memory[variant, kind] = compiled.memory_analysis().temp_size_in_bytes
            if memory[variant, kind] <= largest:
                calls[variant, kind] = functools.partial(_wait, compiled, arrays)
    # Only the fastest microbatch size of a variant is compared with the other variants.
    fastest = {}
    for variant, kinds in variants.items():
        run = {kind: calls[variant, kind] for kind in kinds if (variant, kind) in calls}
        times = time_calls(run, 3, clock) if len(run) > 1 else dict.fromkeys(run, 0.0)
        if run:
            fastest[variant] = min(run, key=lambda kind: np.median(times[kind]))
    times = time_calls({key[0]: calls[key] for key in fastest.items()}, rounds, clock)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    plain_memory = memory[PLAIN, ""]
    description = f"{num_params:,} parameters, {model.examples} examples; plain gradient "
    description += f"{np.median(times[PLAIN]) * 1e3:.1f} ms, {plain_memory / 2**20:.1f} MiB"
    rows = []
    for variant, kinds in variants.items():
        kind = fastest.get(variant, next(iter(kinds)))
        found = compute_ratio(times[variant], times[PLAIN]) if variant in fastest else None
        relative_time = found and found.median
        relative_memory = memory[variant, kind] / plain_memory
        rows.append(Row(variant, kind, relative_time, relative_memory, seconds[variant, kind]))
    return description, rows


def load(
    table: TableFile, dtype: str, model: str, variants: dict[str, Any]
) -> tuple[str, list[Row]] | None:
    """Loads the measurements of a model on this device if the file contains all variants."""
    device = get_device_name()
    keys = [table.key(device=device, dtype=dtype, model=model, way=x) for x in variants]
    if not all(key in table.rows for key in keys):
        return None
    stored_rows = [table.rows[key] for key in keys]
    rows = [
        Row(
            row["way"],
            row["microbatches"],
            float(row["time"]) if row["time"] else None,
            float(row["memory"]),
            float(row["compile, s"] or "nan"),
        )
        for row in stored_rows
    ]
    return stored_rows[0]["what it is"], rows


def store(table: TableFile, dtype: str, model: str, description: str, rows: list[Row]) -> None:
    """Stores the measurements of a model."""
    for row in rows:
        table.add(
            device=get_device_name(),
            dtype=dtype,
            model=model,
            way=row.variant,
            microbatches=row.kind,
            time="" if row.time is None else f"{row.time:.6g}",
            memory=f"{row.memory:.6g}",
            **{
                "compile, s": f"{row.compile:.6g}",
                "what it is": description,
                "versions": describe_versions(),
            },
        )


def print_table(name: str, description: str, rows: list[Row]) -> None:
    """Prints a table with one row per variant."""
    print(f"\n{name}: {description}\n| way | time | memory | compile, s |\n|---|---|---|---|")
    for row in rows:
        label = f", {'microbatches of ' * (row.kind != 'all')}{row.kind}" if row.kind else ""
        cells = [row.variant + label, "not run" if row.time is None else f"{row.time:.2f}"]
        print(f"| {' | '.join([*cells, f'{row.memory:.2f}', f'{row.compile:.1f}'])} |", flush=True)


def print_summary(name: str, description: str, rows: list[Row], *, is_first: bool) -> None:
    """Prints one row per model with the time and memory of all variants."""
    if is_first:
        print(f"| model | plain gradient | {' | '.join(row.variant for row in rows[1:])} |")
        print("|---" * (1 + len(rows)) + "|")
    description = description.rsplit("plain gradient ", 1)[1]
    cells = [f"{'-' if x.time is None else f'{x.time:.2f}'}, {x.memory:.2f}" for x in rows[1:]]
    print(f"| {name} | {description} | {' | '.join(cells)} |", flush=True)


def _wait(compiled: Any, arrays: Any) -> None:
    jax.block_until_ready(compiled(*arrays))


def compile_for(device: str, model: Model, run: Fn, trip_count: int = 1) -> Any:
    """Compiles a variant for a described device."""
    from benchmarks.accelerators.devices import get_devices
    from benchmarks.accelerators.steps import compile_program

    sharding = jax.sharding.SingleDeviceSharding(get_devices(device, 1)[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (model.params, *model.batch),
    )
    return compile_program(
        run, shapes, 1, donate_argnums=(), trip_count=trip_count, cheapest_branches=True
    )


def count_rows(name: str, model: Model, device: str) -> Iterator[str]:
    """Yields rows with bytes and temporary memory relative to the plain gradient."""
    base = None
    for variant in (PLAIN, "ghost", "vmap"):
        (run, *_) = build_variants(model, [])[variant].values()
        found = compile_for(device, model, run)
        moved = found.counts.read + found.counts.written
        base = base or (moved, found.temporary)
        both = zip((moved, found.temporary), base, strict=True)
        # Bytes in the VMEM of TPUs are not counted, so the total may be 0.
        cells = [f"{x / y:.2f}" if y else f"{x / 2**20:.1f} MiB" for x, y in both]
        cells += [f"{found.counts.kernels}", f"{found.trace + found.compile:.1f}"]
        yield f"| {device} | {name} | {variant} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted({*MODELS, *LARGE}))
    parser.add_argument("--dtype", default=None, help="float32, on accelerators bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--summary", action="store_true", help="print one row per model")
    parser.add_argument("--ours", action="store_true", help="omit Optax and jax-privacy")
    parser.add_argument("--wall", action="store_true", help="measure wall time")
    parser.add_argument("--device", nargs="+", help="compile for h100, v5e, ...")
    parser.add_argument("--out", type=Path, help="file for the rows, which a rerun continues")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no model starts later")
    options = parser.parse_args(arguments)
    is_accelerator = bool(options.device) or jax.default_backend() != "cpu"
    dtype = jnp.dtype(options.dtype or ("bfloat16" if is_accelerator else "float32"))
    names = options.models or (LARGE if is_accelerator else MODELS)
    chosen = {name: (MODELS | LARGE)[name](dtype) for name in names}
    print(f"JAX {jax.__version__}, Optax {optax.__version__}, {dtype.name}, threshold {THRESHOLD}")
    if options.device:
        print("| device | model | way | bytes | memory | kernels | trace and compile, s |")
        print("|---" * 7 + "|")
        for device in options.device:
            for name, model in chosen.items():
                for row in count_rows(name, model, device):
                    print(row, flush=True)
        return
    clock = time.perf_counter if options.wall else choose_clock()
    table = TableFile(options.out, KEYS, COLUMNS) if options.out else None
    has_time, missing, is_first = start_timer(options.minutes), [], True
    for name, model in chosen.items():
        variants = build_variants(model, options.microbatches)
        if options.ours:
            variants = {key: kinds for key, kinds in variants.items() if key not in OTHERS}
        found = load(table, dtype.name, name, variants) if table else None
        if found is None:
            if not has_time():
                missing.append(name)
                continue
            found = measure(model, variants, options.rounds, clock)
            if table:
                store(table, dtype.name, name, *found)
        if options.summary:
            print_summary(name, *found, is_first=is_first)
        else:
            print_table(name, *found)
        is_first = False
    if missing:
        print(f"\nMissing (run the command again): {', '.join(missing)}")


if __name__ == "__main__":
    main()

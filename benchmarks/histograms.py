"""Histograms of gradients: ours beside what else people count with.

  python -m benchmarks.histograms                    # time and memory on this machine
  python -m benchmarks.histograms --device h100 v5e  # bytes and kernels, as compiled for those

The gradients are those of a transformer, 50 million entries in 76 leaves, and each way makes a
histogram for each leaf. On a CPU ways take turns, and times are the processor's, of all threads
together, which other work on the machine changes little; `--wall` takes the clock's. Memory is
what XLA takes beside arguments and results; without XLA, what the process takes more at its peak
than before the call. For devices that are only described,
in the environment of the extra `accelerators`, the counts are what a histogram adds to AdamW's
step, as in `benchmarks.accelerators`; a loop counts as often as it turns. PyTorch's ways are left
out if it is not installed.

Ways of others are written here after their sources: Levanter's `Histogram.from_array` (64 bins),
marin's `SummaryStats.from_array` as of pull request 4358 (31 bins, tiles of 1024 entries), and
`log_tensor_stats` of Weights & Biases' `watch` (64 bins). "NumPy on the host" is what
`wandb.Histogram(gradient)` does.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from benchmarks.times import trees
from benchmarks.times.timing import race, ratio
from optaxclip import monitor

SHAPES = trees.transformer(6, 768)
TILE = 1024
BINS, BINS_OF_MARIN = 64, 31
OURS, READ = "monitor.histogram, a step that counts", "a read: the sum of all entries"
CALM = "monitor.histogram, any other step"
OTHERS: dict[str, Callable[[Array], Any]] = {}


def way(name: str) -> Callable[[Callable[[Array], Any]], Callable[[Array], Any]]:
    """Adds another way to count the entries of one leaf."""

    def add(count: Callable[[Array], Any]) -> Callable[[Array], Any]:
        OTHERS[name] = count
        return count

    return add


@way("Levanter")
def levanter(x: Array) -> Any:
    """Five statistics, and equal bins between the extremes."""
    x = x.ravel()
    statistics = x.min(), x.max(), x.sum(), (x**2).sum()
    return statistics, jnp.histogram(x, bins=BINS)


@way("marin")
def marin(x: Array) -> Any:
    """The same and the number of zeros; each tile is compared with all edges of the bins."""
    x = x.ravel()
    statistics = x.min(), x.max(), jnp.count_nonzero(x), x.sum(), (x**2).sum()
    edges = jnp.histogram_bin_edges(jnp.stack(statistics[:2]), bins=BINS_OF_MARIN)
    left, right = edges[:-1, None], edges[1:, None]
    is_last = jnp.arange(BINS_OF_MARIN)[:, None] == BINS_OF_MARIN - 1
    padded = jnp.pad(x, (0, -x.size % TILE))

    def of_tile(number: Array, counts: Array) -> Array:
        tile = lax.dynamic_slice_in_dim(padded, number * TILE, TILE)[None]
        inside = (tile >= left) & ((tile < right) | is_last & (tile <= right))
        inside &= number * TILE + jnp.arange(TILE)[None] < x.size
        return counts + inside.sum(1, dtype=jnp.int32)

    none = jnp.zeros(BINS_OF_MARIN, jnp.int32)
    return statistics, edges, lax.fori_loop(0, padded.size // TILE, of_tile, none)


@way("jnp.histogram")
def alone(x: Array) -> Any:
    """Without statistics."""
    return jnp.histogram(x, bins=BINS)


def stage(count: Callable[[Array], Any]) -> optax.GradientTransformation:
    """A stage of a chain that counts each leaf at each step, and stores what it counted."""

    def of_tree(grads: Any) -> Any:
        return [count(leaf) for leaf in jax.tree.leaves(grads)]

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_tree, params))

    return optax.GradientTransformation(init, lambda grads, *_: (grads, of_tree(grads)))


def stages() -> dict[str, optax.GradientTransformation]:
    """All ways of JAX by name."""
    return {OURS: monitor.histogram(every=100), **{x: stage(count) for x, count in OTHERS.items()}}


def to_the_host(grads: Any) -> Any:
    """NumPy's histogram of each leaf."""
    return [np.histogram(np.asarray(leaf), bins=BINS) for leaf in jax.tree.leaves(grads)]


def ways_of_torch(grads: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's function, and what `watch` does around it."""
    torch = importlib.import_module("torch")
    tensors = [torch.from_numpy(np.array(leaf)) for leaf in jax.tree.leaves(grads)]

    def watch(tensor: Any) -> Any:
        flat = tensor.detach().clone().reshape(-1)
        is_finite = [torch.isfinite(flat).all().item() for _ in range(2)]
        low, high = flat.min().item(), flat.max().item()
        return is_finite, flat.histc(bins=BINS, min=low, max=high).tolist()

    return {
        "W&B watch": lambda: [watch(tensor) for tensor in tensors],
        "torch.histc": lambda: [torch.histc(tensor, bins=BINS) for tensor in tensors],
    }


def more_at_the_peak(run: Callable[[], Any]) -> int:
    """The bytes that the process takes more at its peak than before; on Linux alone."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    run()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def measured(rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """A line for each way: its time, over that of ours, and its memory."""
    grads = trees.filled(SHAPES, jnp.float32)
    runs: dict[str, Callable[[], Any]] = {}
    memory: dict[str, int] = {}

    def add(name: str, compiled: Any, *arguments: Any) -> None:
        runs[name] = lambda: jax.block_until_ready(compiled(*arguments))
        memory[name] = compiled.memory_analysis().temp_size_in_bytes

    for name, tx in stages().items():
        state = tx.init(grads)
        count = jax.jit(lambda grads, state, tx=tx: tx.update(grads, state)[1])
        compiled = count.lower(grads, state).compile()
        add(name, compiled, grads, state)
        if name == OURS:  # the first step counts, the second does not
            add(CALM, compiled, grads, compiled(grads, state))
    add(READ, jax.jit(trees.read).lower(jnp.zeros(()), grads).compile(), 0.0, grads)
    beside = {"NumPy on the host": lambda: to_the_host(grads)}
    if importlib.util.find_spec("torch"):
        beside |= ways_of_torch(grads)
    runs |= beside
    memory |= {name: (run(), more_at_the_peak(run))[1] for name, run in beside.items()}
    times = race(runs, rounds, clock)
    for name, own in times.items():
        of_ours = ratio(own, times[OURS])
        share = memory[name] / trees.num_bytes(grads)
        yield _row(name, np.median(own), of_ours and of_ours.median, share)


def counted(device: str) -> Iterator[str]:
    """A line for each way: what it adds to AdamW's step as compiled for a device."""
    from benchmarks.accelerators.cases import added
    from benchmarks.accelerators.counting import count
    from benchmarks.accelerators.methods import adamw
    from benchmarks.accelerators.steps import Place, compiled

    def step(*stages: optax.GradientTransformation) -> Any:
        return compiled(optax.chain(*stages, adamw()), SHAPES, jnp.float32, Place(device))

    plain = step()
    steps = {name: step(tx) for name, tx in stages().items()}
    # What it does at a step that counts is the body of a loop, which turns once there.
    calm = count(steps[OURS].text, turns=0)
    ours = steps.pop(OURS)
    steps = {OURS: ours, CALM: dataclasses.replace(ours, counts=calm), **steps}
    for name, run in steps.items():
        found = added(run, plain)
        counts = found.counts
        numbers = f"{counts.kernels:+d}", str(counts.branches), str(counts.loops)
        bytes_ = f"{found.read:.2f}", f"{found.written:.2f}", f"{100 * found.temporary:.1f}"
        yield _row(device, name, *bytes_, *numbers)


def _row(*cells: Any) -> str:
    shown = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells)
    return f"| {' | '.join(shown)} |"


def _head(*titles: str) -> None:
    print(_row(*titles), "|---" * len(titles) + "|", sep="\n", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="the clock's time")
    parser.add_argument("--device", nargs="+", help="h100, v5e: only described")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {trees.num_entries(SHAPES):,} float32 entries\n")
    if options.device:
        bytes_ = "read", "written", "temporary, %"
        _head("device", "way", *bytes_, "kernels", "branches", "loops")
        for device in options.device:
            for line in counted(device):
                print(line, flush=True)
        return
    _head("way", "seconds", "of ours", "memory, of the gradients")
    for line in measured(options.rounds, time.perf_counter if options.wall else time.process_time):
        print(line, flush=True)


if __name__ == "__main__":
    main()

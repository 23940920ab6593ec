"""Compares the time of clipping on this machine with Optax, PyTorch and the memory bandwidth.

python -m benchmarks.times
python -m benchmarks.times --quick --json figures.json
python -m benchmarks.times --methods --out methods.csv --minutes 5  # every method, in AdamW's step
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import jax

from benchmarks.times.clips import (
    measure_clipping,
    measure_eager,
    measure_many_leaves,
    measure_sizes,
)
from benchmarks.times.effort import FULL, QUICK, Effort, Log
from benchmarks.times.large import measure_large_clips, measure_large_steps
from benchmarks.times.methods import measure_methods
from benchmarks.times.report import Row, Section, describe_machine, get_load_average
from benchmarks.times.steps import measure_steps

Workloads = Mapping[str, tuple[str, Callable[[Effort, Log], list[Row]]]]
WORKLOADS: Workloads = {
    "clip": ("Clipping in place", measure_clipping),
    "steps": ("Overhead of clipping in a step", measure_steps),
    "leaves": ("Many small leaves", measure_many_leaves),
    "eager": ("Calls outside jit", measure_eager),
    "growth": ("Clipping gradients of different sizes", measure_sizes),
}
LARGE: Workloads = {
    "large clips": ("Clipping gradients of large models in place", measure_large_clips),
    "large steps": ("Overhead of clipping in an AdamW step of large models", measure_large_steps),
}
DISK_CACHE = "jax_enable_compilation_cache"
EPILOG = """\
The variants run one after another in every round. Figures are medians over rounds with quartiles,
and ratios compare times of the same round. The command takes a few minutes on two idle cores, less
than a minute with --quick, and up to 4 GB of memory. On GPUs and TPUs, or with --large, it also
measures AdamW steps with up to 5 billion elements, which require 84 GB (bfloat16: 42 GB).

--methods measures all methods and skips in AdamW steps, compared with the closest Optax methods,
for a large model, 64 small networks, and many small leaves in float32 and bfloat16. On CPUs, it
measures CPU time. Rows are stored immediately. Run the command again to add missing rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and stores the results, and returns the exit code."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.json:
        try:
            # Fail before the measurements if the file cannot be written.
            args.json.open("a", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"cannot write {args.json}: {error.strerror}")
    if find_spec("torch"):
        # Otherwise JAX preallocates most of the GPU memory that PyTorch needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.methods:
        effort = QUICK if args.quick else FULL
        with _show_progress() as log:
            print(measure_methods(effort, args.out, args.minutes, log))
        return 0
    is_large = args.large or jax.default_backend() != "cpu"
    workloads = {**WORKLOADS, **LARGE} if is_large else WORKLOADS
    with _show_progress() as log:
        report = measure(workloads, QUICK if args.quick else FULL, log)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    description = "Compares the time of clipping on this machine with Optax and PyTorch."
    parser = argparse.ArgumentParser(
        "benchmarks.times", description=description, epilog=EPILOG, usage="%(prog)s [options]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="smaller gradients, fewer rounds")
    parser.add_argument("--large", action="store_true", help="also large models on a CPU")
    parser.add_argument("--methods", action="store_true", help="all methods in AdamW steps")
    rows = Path("methods.csv")
    parser.add_argument("--out", type=Path, default=rows, metavar="FILE", help="rows of --methods")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no method starts later")
    return parser


def measure(workloads: Workloads, effort: Effort, log: Log) -> dict[str, object]:
    """Runs workloads, prints their tables, and returns the report for `--json`."""
    report: dict[str, object] = describe_machine()
    print("; ".join(f"{name} {value}" for name, value in report.items()), end="\n\n")
    sections = []
    with _disable_disk_cache():
        for name, (title, workload) in workloads.items():
            section = Section(name, title, workload(effort, log), get_load_average())
            print(section.to_markdown(), flush=True)
            sections.append(section.to_json())
    return report | {"sections": sections}


@contextlib.contextmanager
def _disable_disk_cache() -> Iterator[None]:
    """Disables the compilation cache on disk, so that compile times are measured."""
    before = getattr(jax.config, DISK_CACHE)
    jax.config.update(DISK_CACHE, False)
    try:
        yield
    finally:
        jax.config.update(DISK_CACHE, before)


@contextlib.contextmanager
def _show_progress() -> Iterator[Log]:
    """Reports progress on standard error."""
    if find_spec("rich") is None:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


if __name__ == "__main__":
    sys.exit(main())

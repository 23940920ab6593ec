"""What a clip costs on this machine, beside Optax, PyTorch and the threshold of memory.

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

from benchmarks.times.clips import alone, eager, growth, many_leaves
from benchmarks.times.effort import FULL, QUICK, Effort, Tell
from benchmarks.times.large import large_clips, large_steps
from benchmarks.times.methods import measure_methods
from benchmarks.times.report import Row, Section, load_average, machine
from benchmarks.times.steps import added_to_steps

Workloads = Mapping[str, tuple[str, Callable[[Effort, Tell], list[Row]]]]
WORKLOADS: Workloads = {
    "clip": ("A clip alone, in place", alone),
    "steps": ("What a clip adds to a step", added_to_steps),
    "leaves": ("Many small leaves", many_leaves),
    "eager": ("Calls outside of jit", eager),
    "growth": ("A clip alone, as the gradients grow", growth),
}
LARGE: Workloads = {
    "large clips": ("A clip alone, in place, of models that accelerators train", large_clips),
    "large steps": ("What it adds to an AdamW step of such models", large_steps),
}
DISK_CACHE = "jax_enable_compilation_cache"
EPILOG = """\
Ways of doing the same take turns in one process, and ratios are those of a round. Figures are
medians over the rounds, with the quartiles. Some minutes on two idle cores, less than one with
--quick; it takes up to 4 GB of memory. On a GPU or TPU, or with --large, it goes on to what these
are for: AdamW's step of up to 5 thousand million entries, where 84 GB are free (float32; 42 GB
for bfloat16).

--methods has every method and skip in AdamW's step instead, beside Optax's nearest, on three trees
in float32 and bfloat16: one large model, 64 small networks at once, and many small leaves. On a CPU
its times are the processor's. A row is written as a method ends, and the same command again goes
on with what the file lacks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes the file; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json:
        try:
            # Now, not when all is measured.
            args.json.open("a", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"cannot write {args.json}: {error.strerror}")
    if find_spec("torch"):
        # Else JAX takes most of a GPU's memory at once, and leaves PyTorch little.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.methods:
        effort = QUICK if args.quick else FULL
        with _progress() as tell:
            print(measure_methods(effort, args.out, args.minutes, tell))
        return 0
    is_large = args.large or jax.default_backend() != "cpu"
    workloads = {**WORKLOADS, **LARGE} if is_large else WORKLOADS
    with _progress() as tell:
        report = measure(workloads, QUICK if args.quick else FULL, tell)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "What a clip costs on this machine, beside Optax and PyTorch."
    parser = argparse.ArgumentParser(
        "benchmarks.times", description=description, epilog=EPILOG, usage="%(prog)s [options]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the figures as JSON, too")
    parser.add_argument("--quick", action="store_true", help="smaller gradients, fewer rounds")
    parser.add_argument(
        "--large", action="store_true", help="on a CPU too what GPUs are measured by"
    )
    parser.add_argument("--methods", action="store_true", help="every method, in AdamW's step")
    rows = Path("methods.csv")
    parser.add_argument("--out", type=Path, default=rows, metavar="FILE", help="the methods' rows")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no further method begins"
    )
    return parser


def measure(workloads: Workloads, effort: Effort, tell: Tell) -> dict[str, object]:
    """Runs workloads and prints each one's table as it is done.

    Args:
      workloads: by name, with their titles.
      effort: sizes and repetitions.
      tell: told the name of each case before it begins.

    Returns:
      The machine and the figures, as `--json` writes them.
    """
    report: dict[str, object] = machine()
    print("; ".join(f"{name} {value}" for name, value in report.items()), end="\n\n")
    sections = []
    with _without_stored_programs():
        for name, (title, workload) in workloads.items():
            section = Section(name, title, workload(effort, tell), load_average())
            print(section.markdown(), flush=True)
            sections.append(section.as_json())
    return report | {"sections": sections}


@contextlib.contextmanager
def _without_stored_programs() -> Iterator[None]:
    """Without the compilation cache on disk, which would answer instead of the compiler."""
    before = getattr(jax.config, DISK_CACHE)
    jax.config.update(DISK_CACHE, False)
    try:
        yield
    finally:
        jax.config.update(DISK_CACHE, before)


@contextlib.contextmanager
def _progress() -> Iterator[Tell]:
    """Says on standard error what is being measured."""
    if find_spec("rich") is None:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


if __name__ == "__main__":
    sys.exit(main())

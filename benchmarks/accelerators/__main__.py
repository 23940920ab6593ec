"""Counts what clipping adds to an AdamW step compiled for a GPU and a TPU, on a CPU.

XLA's compilers for GPUs and TPUs run on Linux x86-64 without the devices. Counts are reproducible.
Times are CPU seconds of all threads, so other work on the machine hardly affects them. Use a
separate environment, because JAX looks for a TPU if libtpu is installed.

  pip install ".[accelerators]"
  python -m benchmarks.accelerators
  python -m benchmarks.accelerators --device h100 --model transformer4 --method global_norm
"""

import argparse
import pathlib

from benchmarks.accelerators.cases import (
    ALL_MODELS,
    COUNTED,
    DTYPES,
    H100,
    MESHES,
    NAMED,
    ONE,
    TIMED,
    V5E,
    build_cases,
)
from benchmarks.accelerators.methods import METHODS, OURS, THEIRS
from benchmarks.accelerators.table import COUNTS, SECONDS, format_header, measure_rows

ROUNDS = 3


def main() -> None:
    """Prints all tables, or one table with the selected rows."""
    options = _parse_arguments()
    axes = [getattr(options, name) for name in ("device", "model", "dtype", "mesh", "method")]
    defaults = [(H100, V5E), ["transformer4"], DTYPES, [ONE], NAMED]
    sections = {title: (cases, 1, COUNTS) for title, cases in COUNTED.items()}
    sections |= {title: (cases, ROUNDS, SECONDS) for title, cases in TIMED.items()}
    if any(axes):
        chosen = [axis or default for axis, default in zip(axes, defaults, strict=True)]
        sections = {"": (list(build_cases(*chosen)), options.rounds, COUNTS + SECONDS)}
    variants = [OURS, THEIRS] if options.optax else [OURS]
    for title, (cases, rounds, columns) in sections.items():
        print(f"\n### {title}\n" if title else "")
        print(format_header(columns), flush=True)
        for row, runs in measure_rows(cases, variants, rounds, columns):
            print(row, flush=True)
            if options.text:
                options.text.write_text(runs[OURS][0].text)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", nargs="+", help="h100, a100, v5e, v5p, v6e")
    parser.add_argument("--model", nargs="+", choices=ALL_MODELS)
    parser.add_argument("--dtype", nargs="+")
    parser.add_argument("--mesh", nargs="+", choices=MESHES)
    parser.add_argument("--method", nargs="+", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=1, help="rounds for the selected rows")
    parser.add_argument("--no-optax", dest="optax", action="store_false", help="omit Optax")
    parser.add_argument("--text", type=pathlib.Path, help="file for the HLO text of the last row")
    return parser.parse_args()


if __name__ == "__main__":
    main()

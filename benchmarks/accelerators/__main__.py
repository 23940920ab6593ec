"""What a clip adds to an AdamW step on a GPU and a TPU, seen from a machine that has neither.

XLA's compilers for both run on Linux x86-64 for devices that are only described. Counts are the
same at every run. Seconds, which are not, are of the processor, of all threads together, so that
whatever else the machine does changes them little. It needs an environment of its own: with libtpu
JAX looks for a TPU.

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
    product,
)
from benchmarks.accelerators.methods import METHODS, OURS, THEIRS
from benchmarks.accelerators.table import COUNTS, SECONDS, header, rows

ROUNDS = 3


def main() -> None:
    """Prints the table, or some rows of it."""
    options = _options()
    axes = [getattr(options, name) for name in ("device", "model", "dtype", "mesh", "method")]
    defaults = [(H100, V5E), ["transformer4"], DTYPES, [ONE], NAMED]
    sections = {title: (cases, 1, COUNTS) for title, cases in COUNTED.items()}
    sections |= {title: (cases, ROUNDS, SECONDS) for title, cases in TIMED.items()}
    if any(axes):
        chosen = [axis or default for axis, default in zip(axes, defaults, strict=True)]
        sections = {"": (list(product(*chosen)), options.rounds, COUNTS + SECONDS)}
    ways = [OURS, THEIRS] if options.optax else [OURS]
    for title, (cases, rounds, columns) in sections.items():
        print(f"\n### {title}\n" if title else "")
        print(header(columns), flush=True)
        for row, runs in rows(cases, ways, rounds, columns):
            print(row, flush=True)
            if options.text:
                options.text.write_text(runs[OURS][0].text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", nargs="+", help="h100, a100, v5e, v5p, v6e")
    parser.add_argument("--model", nargs="+", choices=ALL_MODELS)
    parser.add_argument("--dtype", nargs="+")
    parser.add_argument("--mesh", nargs="+", choices=MESHES)
    parser.add_argument("--method", nargs="+", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=1, help="of chosen rows; medians are told")
    parser.add_argument("--no-optax", dest="optax", action="store_false", help="ours alone")
    parser.add_argument("--text", type=pathlib.Path, help="for the compiled text of the last row")
    return parser.parse_args()


if __name__ == "__main__":
    main()

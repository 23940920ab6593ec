"""The command `sweep`: trains the demo's model with many limits at once."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import optaxclip.commands.figures as figures
from optaxclip.commands.demo import integer, read_text, writable

if TYPE_CHECKING:
    from optaxclip.tuning import SweepResult

HELP: str = "train the demo's model with many limits at once, and name the best of them"
NEEDS: tuple[str, ...] = ("flax", "matplotlib", "rich")
EXTRA: str = "demo"

LOWEST, HIGHEST = 0.03, 1000.0
LIMITS = np.geomspace(LOWEST, HIGHEST, 10).round(3).tolist()
PICTURE = "optaxclip_sweep.png"
EXAMPLES = """examples:
  python -m optaxclip sweep
  python -m optaxclip sweep --limits 0.3 1 3 10 --steps 400 --seeds 2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--limits",
        nargs="+",
        type=_positive,
        default=LIMITS,
        metavar="LIMIT",
        help=f"limits of the global norm (default: ten from {LOWEST:g} to {HIGHEST:g})",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text, as for the demo")
    parser.add_argument(
        "--steps", type=integer(10, 10**6), default=200, metavar="N", help="default: 200"
    )
    parser.add_argument(
        "--seeds", type=integer(1, 1000), default=1, metavar="N", help="runs per limit; default: 1"
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**32 - 1), default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="for the picture; by default here"
    )


def run(args: argparse.Namespace) -> int:
    """Trains, prints the table, writes the picture; returns the exit code."""
    text, out = read_text(args.text), writable(args.out)
    result = train(text, args.limits, args.steps, args.seed, args.seeds)
    print(result.table(more_seeds="--seeds 3"))
    path = out / PICTURE
    draw(result, path)
    print(f"curve: {path}")
    print(
        "next: which limit for a training of your own? Log its gradient norms, and "
        "python -m optaxclip suggest LOG"
    )
    return 0


def train(
    text: str, limits: Sequence[float], steps: int, seed: int, seeds: int = 1
) -> "SweepResult":
    """Trains the demo's network with all limits."""
    import jax

    from optaxclip.commands.demo_task import Task, encode, sweep_functions
    from optaxclip.tuning import sweep

    init_fn, step_fn, data = sweep_functions(Task(encode(text), seed), steps)
    key = jax.random.key(seed)
    return sweep(init_fn, step_fn, limits, steps, key=key, data=data, seeds=seeds)


def draw(result: "SweepResult", path: Path) -> None:
    """Draws the final loss over the limit."""
    from optaxclip import plots

    figure = figures.side_by_side(columns=1)
    plots.sweep_curve(result, ax=figure.axes[0])
    figures.legends_below(figure)
    figure.savefig(path, dpi=150)


def _positive(text: str) -> float:
    """A number that is positive in float32; it may be infinite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.float32(number)
    if narrow == 0 or (np.isinf(narrow) and "inf" not in text.lower()):
        message = f"{text!r} is outside of the range of float32, about 1e-45 to 3e38"
        raise argparse.ArgumentTypeError(message)
    return number

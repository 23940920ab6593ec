"""The command `suggest`: suggests a threshold from a log of gradient norms."""

import argparse
import io
import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from optaxclip._base.optional_imports import install_command
from optaxclip.tuning import Suggestion, read_log, suggest

HELP: str = "suggest a threshold from a log of gradient norms"
NEEDS: tuple[str, ...] = ("pandas",)
EXTRA: str = "logs"

EXAMPLES = """examples:
  python -m optaxclip suggest trainer_state.json
  python -m optaxclip suggest runs/today --column clip_by_global_norm/norm --plot norms.png
  tail -n 2000 metrics.jsonl | python -m optaxclip suggest - --column train.grad_norm --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "log",
        metavar="LOG",
        help="a log with names and numbers (CSV, JSON, what a trainer prints), .npy, a TensorBoard "
        "event file or a directory of these; - for the standard input",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column, key (a.b for b in the object a) or tag; needed if no name is plainly that of "
        "the gradient norm",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PICTURE", help="draw the norms, and their histogram"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the suggestion, draws it if asked to; returns the exit code."""
    if args.plot and find_spec("matplotlib") is None:
        raise argparse.ArgumentError(None, f"--plot needs matplotlib: {install_command('plot')}")
    picture = args.plot and _picture(args.plot)
    suggestion, column = _suggestion(args.log, args.column)
    if picture:
        _draw(suggestion, picture)
    print(
        json.dumps({"column": column} | suggestion.to_dict(), indent=2)
        if args.json
        else f"{suggestion}\nnote: the norms are those of {column!r}"
    )
    if picture:
        print(f"picture: {picture}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _picture(path: Path) -> Path:
    """The file to draw to: `path`, with the suffix `.png` if it has none."""
    if path.is_dir():
        message = f"--plot must be a file, and {path} is a directory: pass {path / 'norms.png'}"
        raise argparse.ArgumentError(None, message)
    return path if path.suffix else path.with_name(f"{path.name}.png")


def _suggestion(log: str, column: str | None) -> tuple[Suggestion, str]:
    """Returns the suggestion for a log, and the name of its column."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the suggestion prints them
            source = io.StringIO(sys.stdin.read()) if log == "-" else log
            norms = read_log(source, column)
            return suggest(norms), str(norms.name)
    except OSError as error:
        raise argparse.ArgumentError(None, f"cannot read {log}: {error.strerror}") from error
    except (ImportError, ValueError) as error:
        message = str(error).replace("column=", "--column ")
        raise argparse.ArgumentError(None, message) from error


def _draw(suggestion: Suggestion, path: Path) -> None:
    from matplotlib.figure import Figure

    from optaxclip import plots
    from optaxclip.plots.style import legend_below

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    legend_below(plots.norms_over_steps(suggestion, ax=left))
    legend_below(plots.norm_histogram(suggestion, ax=right))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        message = f"cannot write to {path}: {error.strerror}"
        raise argparse.ArgumentError(None, message) from error
    except ValueError as error:
        raise argparse.ArgumentError(None, f"cannot write {path}: {error}") from error

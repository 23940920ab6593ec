"""The command `suggest`: suggests a threshold from a log of gradient norms."""

import argparse
import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from optaxclip._base.optional_imports import install_command
from optaxclip.tuning import Suggestion, suggest
from optaxclip.tuning.files import parse_norms
from optaxclip.tuning.suggesting import suggested

HELP: str = "suggest a threshold from a log of gradient norms"
NEEDS: tuple[str, ...] = ()
EXTRA: str = "plot"

EXAMPLES = """examples:
  python -m optaxclip suggest trainer_state.json
  python -m optaxclip suggest runs/today --column clip_by_global_norm/norm --plot norms.png
  tail -n 2000 metrics.jsonl | python -m optaxclip suggest - --column train.grad_norm --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a log with names and numbers (CSV, JSON, what a trainer prints), .npy, a TensorBoard "
        "event file or a directory of these; - for the standard input",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column, key (a.b for b in the object a) or tag; by default what is plainly the norm",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PICTURE", help="draw the norms, and their histogram"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the suggestion, draws it if asked to; returns the exit code."""
    if args.plot and find_spec("matplotlib") is None:
        raise argparse.ArgumentError(None, f"--plot needs matplotlib: {install_command(EXTRA)}")
    picture = args.plot and _picture(args.plot)
    suggestion = _suggestion(args.file, args.column)
    if picture:
        _draw(suggestion, picture)
    print(json.dumps(suggestion.to_dict(), indent=2) if args.json else suggestion)
    if picture:
        print(f"picture: {picture}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _picture(path: Path) -> Path:
    """The file to draw to: `path`, with the suffix `.png` if it has none."""
    if path.is_dir():
        message = f"--plot must be a file, and {path} is a directory: pass {path / 'norms.png'}"
        raise argparse.ArgumentError(None, message)
    return path if path.suffix else path.with_name(f"{path.name}.png")


def _suggestion(file: str, column: str | None) -> Suggestion:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the same text is printed as notes
            if file != "-":
                return suggest(file, column=column)
            return suggested(parse_norms(sys.stdin.buffer.read(), column, "the input"))
    except OSError as error:
        raise argparse.ArgumentError(None, f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
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

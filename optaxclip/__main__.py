"""The command line: `python -m optaxclip suggest LOG`, or `optaxclip suggest LOG`."""

import argparse
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from optaxclip import __version__
from optaxclip._base.validation import install_command
from optaxclip.tuning import Suggestion, read_log, suggest

EXAMPLES = """examples:
  python -m optaxclip suggest trainer_state.json
  python -m optaxclip suggest runs/today --column clip_by_global_norm/norm --plot norms.png
  tail -n 2000 metrics.jsonl | python -m optaxclip suggest - --column train.grad_norm --json"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      argv: The command-line arguments. Defaults to the arguments of the process.

    Returns:
      0 after success, 130 after Ctrl-C, or 141 if the output pipe was closed.

    Raises:
      SystemExit: With code 2 if an argument is invalid.
    """
    parser = _Parser(prog="optaxclip", description="Gradient clipping for JAX.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    description = "suggest a threshold from a log of gradient norms"
    subparser = commands.add_parser("suggest", help=description, description=description)
    _add_suggest_arguments(subparser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.exit(2, parser.format_help())
    try:
        _run_suggest(args, subparser)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Python flushes again at exit, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _add_suggest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "log",
        metavar="LOG",
        help="a CSV, JSON, .npy, or TensorBoard event file, the printed output of a trainer, or a "
        "directory with event files; use - for standard input",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="the column, key (a.b for b in the object a), or tag of the gradient norm; required "
        "if it is unclear",
    )
    plot_help = "save a plot of the norms and their histogram"
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help=plot_help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_suggest(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Prints a suggestion, and saves a plot if `--plot` is used."""
    path = args.plot
    if find_spec("pandas") is None:
        parser.error(f"pandas is required; run {install_command('logs')}")
    if path and find_spec("matplotlib") is None:
        parser.error(f"--plot requires Matplotlib; run {install_command('plot')}")
    if path and path.is_dir():
        parser.error(f"--plot must be a file, but {path} is a directory; pass {path / 'norms.png'}")
    try:
        with warnings.catch_warnings():
            # The printed suggestion contains the warnings.
            warnings.simplefilter("ignore", UserWarning)
            source = io.StringIO(sys.stdin.read()) if args.log == "-" else args.log
            norms = read_log(source, args.column)
            suggestion = suggest(norms)
    except OSError as error:
        parser.error(f"cannot read {args.log}: {error.strerror}")
    except (ImportError, ValueError) as error:
        parser.error(str(error).replace("column=", "--column "))
    if path:
        path = path if path.suffix else path.with_name(f"{path.name}.png")
        try:
            _save_plot(suggestion, path)
        except OSError as error:
            parser.error(f"cannot write to {path}: {error.strerror}")
        except ValueError as error:
            parser.error(f"cannot write {path}: {error}")
    if args.json:
        print(json.dumps({"column": norms.name} | suggestion.to_dict(), indent=2))
    else:
        print(f"{suggestion}\nnote: the norms are from {norms.name!r}")
    if path:
        print(f"plot: {path}", file=sys.stderr if args.json else sys.stdout)


def _save_plot(suggestion: Suggestion, path: Path) -> None:
    from matplotlib.figure import Figure

    from optaxclip import plots
    from optaxclip.plots.style import legend_below

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    legend_below(plots.norms_over_steps(suggestion, ax=left))
    legend_below(plots.norm_histogram(suggestion, ax=right))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())

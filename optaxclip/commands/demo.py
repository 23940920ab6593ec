"""The command `demo`: trains a recurrent network on text with and without clipping."""

import argparse
import inspect
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optax

import optaxclip
import optaxclip.commands.figures as figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from optaxclip.commands.demo_task import History

HELP: str = "train a recurrent network on text without clipping and with several methods"
NEEDS: tuple[str, ...] = ("flax", "matplotlib", "rich")
EXTRA: str = "demo"

LIMIT = 1.0
METHODS = {
    "none": partial(optax.identity),
    "global_norm": partial(optaxclip.clip_by_global_norm, LIMIT),
    "norm": partial(optaxclip.clip_by_norm, 0.15),
    "value": partial(optaxclip.clip, 0.005),
    "agc": partial(optaxclip.adaptive_grad_clip, 0.01),
    "block_rms": partial(optaxclip.clip_by_block_rms, 0.001),
    "normalize": partial(optaxclip.normalize_by_global_norm, 1.0),
    "autoclip": partial(optaxclip.autoclip),
    "zclip": partial(optaxclip.zclip, max_norm=LIMIT),
    "adagc": partial(optaxclip.adagc),
    "median": partial(optaxclip.clip_by_median_norm, scale=2.0),
    "quantile": partial(optaxclip.clip_by_quantile, target=0.5),
    "ema": partial(optaxclip.clip_by_ema_norm, ratio=2.0),
}
DEFAULT_METHODS = ("global_norm", "norm", "value", "agc")
UNCLIPPED = "none"
PICTURE = "optaxclip_demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text; by default Python's help topics"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=DEFAULT_METHODS,
        metavar="METHOD",
        help=f"what to compare with '{UNCLIPPED}' (default: {' '.join(DEFAULT_METHODS)})",
    )
    parser.add_argument(
        "--steps", type=integer(1, 10**6), default=600, metavar="N", help="default: 600"
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**32 - 1), default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="for the picture; by default here"
    )


def run(args: argparse.Namespace) -> int:
    """Trains, prints the table, writes the picture; returns the exit code."""
    text = read_text(args.text)
    out = writable(args.out)
    methods = dict.fromkeys([UNCLIPPED, *args.methods])
    print(
        f"a recurrent network learns the characters of {args.text or 'the help topics of Python'}, "
        f"{args.steps} steps with each of: {', '.join(methods)}"
    )
    histories = train(text, methods, args.steps, args.seed)
    print_table(histories)
    for note in notes(histories):
        print(note)
    figure = figures.side_by_side()
    draw(histories, figure)
    figure.savefig(out / PICTURE, dpi=150)
    print(f"curves: {out / PICTURE}")
    text_option = f" --text {shlex.quote(str(args.text))}" if args.text else ""
    print(f"next: which limit is best here? python -m optaxclip sweep{text_option}")
    return 0


def train(text: str, methods: Iterable[str], steps: int, seed: int) -> "dict[str, History]":
    """Trains with each method; returns what each run recorded."""
    from rich.console import Console
    from rich.progress import Progress

    from optaxclip.commands.demo_task import Task, encode

    task = Task(encode(text), seed)
    histories = {}
    with Progress(console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=steps) for name in methods}
        for name, bar in bars.items():
            progress.update(bar, description=f"{name}: compiling")

            def report(done: int, bar: Any = bar, name: str = name) -> None:
                progress.update(bar, advance=done, description=name)

            histories[name] = task.train(METHODS[name](), steps, report)
    return histories


def warmup_of(name: str) -> int:
    """From how many steps a method learns before it has a limit."""
    parameters = inspect.signature(METHODS[name]).parameters
    return parameters["warmup_steps"].default if "warmup_steps" in parameters else 0


def print_table(histories: "Mapping[str, History]") -> None:
    """A row for each method."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for title in (
        *("last\nlimit", "final\nloss", "best\nloss", "largest\nraw norm"),
        *("clipped", "non-finite"),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, history in histories.items():
        table.add_row(name, _last_limit(name, history), *_cells(history))
    Console().print(table)


def notes(histories: "Mapping[str, History]") -> list[str]:
    """What the table does not say: which methods were still learning, and which runs were lost."""
    found = []
    for name, history in histories.items():
        steps, bad = len(history.loss), history.nonfinite
        if steps <= (warmup := warmup_of(name)):
            found.append(
                f"{name}: its warm-up of {warmup} steps, without a limit of its own, is not over "
                f"after {steps} steps; pass --steps {4 * warmup}"
            )
        if name != UNCLIPPED and len(bad):
            limits = history.limit[: bad[0]]
            bound = f", with a limit of {limits[-1]:.3g}" if np.isfinite(limits[-1:]).any() else ""
            norms = f", after raw norms up to {history.norm[: bad[0]].max():.3g}" if bad[0] else ""
            found.append(f"{name}: lost at step {bad[0] + 1}{norms}{bound}")
    return found


def _last_limit(name: str, history: "History") -> str:
    """The limit at the last step; a constant limit comes from the method's arguments."""
    if METHODS[name].args:
        return f"{METHODS[name].args[0]:g}"
    several = "" if name == UNCLIPPED else "per leaf"
    return several if np.isnan(history.limit[-1]) else f"{history.limit[-1]:.3g}"


def _cells(history: "History") -> tuple[str, ...]:
    final, bad = history.held_out[-1], history.nonfinite
    norms = history.norm[np.isfinite(history.norm)]
    return (
        f"{final:.4g}" if np.isfinite(final) else "diverged",
        f"{np.nanmin(history.held_out):.4g}",
        f"{norms.max():.3g}" if len(norms) else "not finite",
        f"{np.mean(history.clipped):.0%}",
        f"{len(bad)}, first {bad[0] + 1}" if len(bad) else "0",
    )


def draw(histories: "Mapping[str, History]", figure: "Figure") -> None:
    """Losses and norms of all methods, on the two axes of a figure."""
    from optaxclip import plots

    left, right = figure.axes
    evals = next(iter(histories.values())).evals
    plots.loss_curves({name: h.held_out for name, h in histories.items()}, evals, ax=left)
    left.set_ylabel("held-out loss (nats)")
    limit = {"global_norm": LIMIT} if "global_norm" in histories else None
    # Only the largest norm between two evaluations is drawn: noisy lines would hide each other.
    norms = {name: np.maximum.reduceat(h.norm, evals[:-1] - 1) for name, h in histories.items()}
    plots.norm_curves(norms, evals[1:] - 1, limit, ax=right)
    right.set_ylabel(f"largest raw norm of {evals[1] - 1} steps")
    figures.shared_legend(figure)


def read_text(path: Path | None) -> str:
    """The text of a file, or of Python's own help topics."""
    from optaxclip.commands.demo_task import MIN_CHARACTERS

    try:
        text = path.read_text(encoding="utf-8") if path else _help_topics()
    except OSError as error:
        raise argparse.ArgumentError(None, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        remedy = f"save it as UTF-8: iconv -f latin1 -t utf-8 '{path}' > utf8.txt"
        raise argparse.ArgumentError(None, f"{path} is not UTF-8 text; {remedy}") from error
    if len(text) < MIN_CHARACTERS:
        message = f"{path} has {len(text)} characters; the demo needs at least {MIN_CHARACTERS}"
        raise argparse.ArgumentError(None, message)
    return text


def _help_topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        message = "this Python comes without its help topics: give a text with --text FILE"
        raise argparse.ArgumentError(None, message) from error
    return "\n".join(topics.values())


def writable(directory: Path) -> Path:
    """The directory, created if need be; called before the training, so that no result is lost."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        message = f"cannot write to {directory}: {error.strerror}"
        raise argparse.ArgumentError(None, message) from error
    return directory


def integer(low: int, high: int) -> Callable[[str], int]:
    """The type of a command-line argument that is an integer from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            message = f"{text!r} is not a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(message)
        return number

    return parse


def _epilog() -> str:
    lines = []
    for name, make in METHODS.items():
        given = [*map(str, make.args), *(f"{key}={value}" for key, value in make.keywords.items())]
        lines.append(f"  {name:<12} {make.func.__name__}({', '.join(given)})")
    table = "\n".join(lines)
    return f"methods:\n{table}\n\nexample:\n  python -m optaxclip demo --methods global_norm agc"

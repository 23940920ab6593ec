"""The command line: `python -m optaxclip COMMAND`, or `optaxclip COMMAND` once installed."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn, Protocol

from optaxclip import __version__
from optaxclip._base.extras import remedy
from optaxclip.commands import demo, suggest, sweep, version


class Command(Protocol):
    """The names that a module with a command has.

    Attributes:
      HELP: one line for `--help`.
      NEEDS: the optional packages that the command imports.
      EXTRA: the extra of this package that installs them.
    """

    HELP: str
    NEEDS: tuple[str, ...]
    EXTRA: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to its parser."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Does the work, returns the exit code; raises `argparse.ArgumentError` for wrong input."""
        ...


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "suggest": suggest,
    "sweep": sweep,
    "version": version,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments; if None, those of the process.

    Returns:
      The exit code: 0, 130 after Ctrl-C, or 141 if whoever reads the output wants no more of it.

    Raises:
      SystemExit: with code 2, for arguments that cannot be used.
    """
    parser = _Parser(prog="optaxclip", description="Gradient clipping for JAX.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.exit(2, parser.format_help())
    try:
        code = _run(COMMANDS[args.command], args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at its end, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except argparse.ArgumentError as error:
        commands.choices[args.command].error(str(error))
    except KeyboardInterrupt:
        return 130


def _run(command: Command, args: argparse.Namespace) -> int:
    missing = [package for package in command.NEEDS if find_spec(package) is None]
    if missing:
        needs = f"needs {', '.join(missing)}: {remedy(command.EXTRA)}"
        raise argparse.ArgumentError(None, needs)
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `python -m optaxclip suggest LOG`, or `optaxclip suggest LOG`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

import optaxclip.commands.suggest as suggest
from optaxclip import __version__
from optaxclip._base.optional_imports import install_command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

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
    subparser = commands.add_parser("suggest", help=suggest.HELP, description=suggest.HELP)
    suggest.add_arguments(subparser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.exit(2, parser.format_help())
    try:
        if missing := [package for package in suggest.NEEDS if find_spec(package) is None]:
            needs = f"needs {', '.join(missing)}: {install_command(suggest.EXTRA)}"
            raise argparse.ArgumentError(None, needs)
        code = suggest.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at its end, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except argparse.ArgumentError as error:
        subparser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

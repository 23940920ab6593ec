"""How to install the packages that a part of the library needs beside its own."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
"""The folder that the package lies in: a checkout, or where packages are installed."""


def remedy(extra: str) -> str:
    """The command that installs what an extra asks for.

    A checkout is named by its path. It need not be installed itself, and the package index may not
    have it.
    """
    project = CHECKOUT / "pyproject.toml"
    name = "optaxclip"
    if project.is_file() and f'name = "{name}"' in project.read_text("utf-8"):
        name = "." if Path.cwd() == CHECKOUT else str(CHECKOUT)
    return f'pip install "{name}[{extra}]"'

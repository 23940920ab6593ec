"""How to install the optional packages that a part of the library needs."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
"""The folder with the package: a checkout, or the folder where packages are installed."""


def remedy(extra: str) -> str:
    """The command that installs what an extra asks for.

    A checkout is named by its path, because it may not be installed, and the package index may not
    have it.
    """
    project = CHECKOUT / "pyproject.toml"
    name = "optaxclip"
    if project.is_file() and f'name = "{name}"' in project.read_text("utf-8"):
        name = "." if Path.cwd() == CHECKOUT else str(CHECKOUT)
    return f'pip install "{name}[{extra}]"'

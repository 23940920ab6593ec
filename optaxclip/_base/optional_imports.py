"""Optional packages: commands to install them, and callbacks when they are imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

REPO_ROOT = Path(__file__).parents[2]
"""The folder that contains the package: a checkout, or the folder with installed packages."""


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra.

    A checkout is denoted by its path, because it may not be installed or published.
    """
    project = REPO_ROOT / "pyproject.toml"
    name = "optaxclip"
    if project.is_file() and f'name = "{name}"' in project.read_text("utf-8"):
        name = "." if Path.cwd() == REPO_ROOT else str(REPO_ROOT)
    return f'pip install "{name}[{extra}]"'


def call_on_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act` with a module, immediately if it is imported, and on import otherwise."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds a module with the other finders, and calls a function once after loading it."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]):
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader

        def load_and_act(module: ModuleType) -> None:
            del loader.exec_module  # Restores the method of the class.
            loader.exec_module(module)
            self.act(module)

        if loader is not None:
            loader.exec_module = load_and_act
        return spec

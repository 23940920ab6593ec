"""Acting on a module that somebody else imports, without importing it."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act` with a module: at once if it is imported, else as soon as somebody imports it."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(importlib.abc.MetaPathFinder):
    """Lets others find the module, and adds a call to its loading; it is asked once."""

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
            del loader.exec_module  # the method of its class is back
            loader.exec_module(module)
            self.act(module)

        if loader is not None:
            loader.exec_module = load_and_act
        return spec

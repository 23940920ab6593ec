"""Stores the settings, explored pairs and runs of a study as JSON lines."""

import json
import platform
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import optaxclip
from benchmarks.research.study import plan
from benchmarks.research.study.plan import Cell, Effort, Found, OfBatches

PACKAGES = ("jax", "optax", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Returns the versions of Python and packages."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "optaxclip": optaxclip.__version__, **found}


class Results:
    """A file of results, which can be continued.

    Incomplete cells of an interrupted run are removed.

    Args:
      path: The file, which is created if it does not exist.
      effort: The effort of the study.

    Raises:
      ValueError: If the file belongs to a study with other settings.
    """

    def __init__(self, path: Path, effort: Effort):
        self.path = path
        self.found: dict[tuple[str, str], Found] = {}
        self.done: set[Cell | OfBatches] = set()
        settings = json.loads(json.dumps(plan.settings(effort)))
        lines = list(read(path)) if path.exists() else []
        if lines and lines[0].get("settings") != settings:
            remedy = "use another path, or remove the file"
            raise ValueError(f"--out: {path} contains a study with other settings; {remedy}")
        counts = Counter(map(_cell, lines))

        def is_whole(line: dict[str, Any]) -> bool:
            of = _cell(line)
            return of is None or counts[of] == plan.runs(of, effort)

        kept = [line for line in lines if is_whole(line)]
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(_text(kept or [{"settings": settings, "versions": versions()}]))
        whole.replace(path)  # Atomic, so that an interruption loses no results.
        self._take(kept)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Adds lines to the file."""
        with self.path.open("a") as file:
            file.write(_text(lines))
        self._take(lines)

    def _take(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "pair" in line:
                self.found[tuple(line["pair"])] = Found(**line["found"])
            elif of := _cell(line):
                self.done.add(of)


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file, without an incomplete last line."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _cell(line: dict[str, Any]) -> Cell | OfBatches | None:
    for kind in (Cell, OfBatches):
        if kind._fields[-1] in line:
            return kind(*(line[name] for name in kind._fields))
    return None

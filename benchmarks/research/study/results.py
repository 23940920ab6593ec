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
from benchmarks.research.study.plan import BatchCell, Cell, Effort, Found

PACKAGES = ("jax", "optax", "numpy", "scikit-learn")


def get_versions() -> dict[str, str]:
    """Returns the versions of Python and packages."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "optaxclip": optaxclip.__version__, **found}


class Results:
    """A file of results, which can be continued.

    The file is created if it does not exist. Incomplete cells of an interrupted run are removed.

    Raises:
      ValueError: If the file belongs to a study with other settings.
    """

    def __init__(self, path: Path, effort: Effort):
        self.path = path
        self.found: dict[tuple[str, str], Found] = {}
        self.done: set[Cell | BatchCell] = set()
        settings = json.loads(json.dumps(plan.get_settings(effort)))
        lines = list(read(path)) if path.exists() else []
        if lines and lines[0].get("settings") != settings:
            remedy = "use another path, or remove the file"
            raise ValueError(f"--out: {path} contains a study with other settings; {remedy}")
        counts = Counter(map(_parse_cell, lines))

        def is_complete(line: dict[str, Any]) -> bool:
            cell = _parse_cell(line)
            return cell is None or counts[cell] == plan.count_runs(cell, effort)

        kept = [line for line in lines if is_complete(line)]
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(
            _format_lines(kept or [{"settings": settings, "versions": get_versions()}])
        )
        whole.replace(path)  # Atomic, so that an interruption loses no results.
        self._update(kept)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Adds lines to the file."""
        with self.path.open("a") as file:
            file.write(_format_lines(lines))
        self._update(lines)

    def _update(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "pair" in line:
                self.found[tuple(line["pair"])] = Found(**line["found"])
            elif cell := _parse_cell(line):
                self.done.add(cell)


def _format_lines(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file, without an incomplete last line."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _parse_cell(line: dict[str, Any]) -> Cell | BatchCell | None:
    for kind in (Cell, BatchCell):
        if kind._fields[-1] in line:
            return kind(*(line[name] for name in kind._fields))
    return None

"""The results of a study, JSON lines: its settings, what was found of each pair, and the runs."""

import json
import platform
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.study.plan import Cell, Found

PACKAGES = ("jax", "optax", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Of what the results depend on."""
    import optaxclip

    found = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "optaxclip": optaxclip.__version__, **found}


class Results:
    """A file to which lines are added, and which says what is in it already.

    A cell of which a run that was stopped has left a part only is taken out, and run again.

    Args:
      path: the file; it is made if it is not there.
      settings: the study's. A file with others is not gone on with.
      runs: how many a cell has.

    Raises:
      ValueError: for a file of another study.
    """

    def __init__(self, path: Path, settings: dict[str, Any], runs: int):
        self.path = path
        self.found: dict[tuple[str, str], Found] = {}
        self.done: set[Cell] = set()
        lines = list(read(path)) if path.exists() else []
        if lines and lines[0].get("settings") != json.loads(json.dumps(settings)):
            remedy = "give another path by --out, or remove it"
            raise ValueError(f"--out: {path} holds a study of other settings; {remedy}")
        counts = Counter(map(_cell, lines))
        path.write_text("")
        self.add(lines[:1] or [{"settings": settings, "versions": versions()}])
        self.add([line for line in lines[1:] if not _cell(line) or counts[_cell(line)] == runs])

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Writes lines, all at once."""
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            if "pair" in line:
                self.found[tuple(line["pair"])] = Found(**line["found"])
            elif of := _cell(line):
                self.done.add(of)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; a last one that was cut off is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _cell(line: dict[str, Any]) -> Cell | None:
    return Cell(*(line[name] for name in Cell._fields)) if "method" in line else None

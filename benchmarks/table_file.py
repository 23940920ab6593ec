"""A table in a CSV file: each case adds a row as it ends, and the next run goes on from there."""

import csv
import io
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

import optaxclip

Row = Mapping[str, str]


class TableFile:
    """What is in a file, and a way to add to it.

    Args:
      path: the file; it is made if it is not there. A row that was cut off is taken out.
      keys: the columns that say which case a row is.
      columns: the other ones.

    Attributes:
      rows: by the values of the keys.

    Raises:
      ValueError: for a file with other columns.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], columns: tuple[str, ...]):
        self.path, self.keys, self.columns = path, keys, (*keys, *columns)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        found = csv.DictReader(io.StringIO(whole))
        if whole and tuple(found.fieldnames or ()) != self.columns:
            raise ValueError(
                f"{path} must have the columns {list(self.columns)}, got {found.fieldnames}; give "
                "the path of another file"
            )
        if not whole or whole != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(whole or self._line(self.columns), encoding="utf-8")
        self.rows: dict[tuple[str, ...], Row] = {self.key(**row): row for row in found}

    def key(self, **values: Any) -> tuple[str, ...]:
        """Of a case, from the values of at least the keys."""
        return tuple(str(values[name]) for name in self.keys)

    def add(self, **values: Any) -> Row:
        """Writes a row."""
        row = {name: str(values[name]) for name in self.columns}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(tuple(row.values())))
        self.rows[self.key(**row)] = row
        return row

    def _line(self, cells: tuple[str, ...]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()


def device_name() -> str:
    """The name of the device at hand."""
    return jax.devices()[0].device_kind


def versions() -> str:
    """Of what figures depend on; optaxclip's is the commit, where Git tells it."""
    command = ("git", "describe", "--always", "--dirty")
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        ours = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        ours = optaxclip.__version__
    return f"jax {jax.__version__}, optax {optax.__version__}, optaxclip {ours}"


def time_left(minutes: float) -> Callable[[], bool]:
    """Gives a function that says whether another case may begin."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < end

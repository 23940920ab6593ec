"""Stores the rows of a benchmark in a CSV file, so that another run can continue it."""

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
    """The rows of a CSV file.

    Args:
      path: The file, which is created if it does not exist. An incomplete last row is removed.
      keys: The columns that identify a row.
      columns: The other columns.

    Attributes:
      rows: The rows by the values of their keys.

    Raises:
      ValueError: If the file has other columns.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], columns: tuple[str, ...]):
        self.path, self.keys, self.columns = path, keys, (*keys, *columns)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(complete))
        if complete and tuple(reader.fieldnames or ()) != self.columns:
            raise ValueError(
                f"{path} must have the columns {list(self.columns)}, got {reader.fieldnames}; use "
                "another path"
            )
        if not complete or complete != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(complete or self._format_row(self.columns), encoding="utf-8")
        self.rows: dict[tuple[str, ...], Row] = {self.key(**row): row for row in reader}

    def key(self, **values: Any) -> tuple[str, ...]:
        """Returns the key of a row."""
        return tuple(str(values[name]) for name in self.keys)

    def add(self, **values: Any) -> Row:
        """Adds a row to the file."""
        row = {name: str(values[name]) for name in self.columns}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._format_row(tuple(row.values())))
        self.rows[self.key(**row)] = row
        return row

    def _format_row(self, cells: tuple[str, ...]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()


def get_device_name() -> str:
    """Returns the name of the first device."""
    return jax.devices()[0].device_kind


def describe_versions() -> str:
    """Returns the versions of JAX, Optax and optaxclip, as a commit if Git is available."""
    command = ("git", "describe", "--always", "--dirty")
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        ours = result.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        ours = optaxclip.__version__
    return f"jax {jax.__version__}, optax {optax.__version__}, optaxclip {ours}"


def start_timer(minutes: float) -> Callable[[], bool]:
    """Returns a function that checks whether there is time for another case."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < end

"""What the benchmarks found, as tables and as JSON."""

import dataclasses
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from benchmarks.times.timing import Spread

# A figure's name in the JSON file, and the head of its column.
COLUMNS = {
    "ms": "ms",
    "added_ms": "added, ms",
    "of_threshold": "of read + scale",
    "of_reads": "of a read",
    "of_optax": "of Optax",
    "of_step": "of the step, %",
    "extra_memory": "extra memory, % of the gradients",
}

Figure = Spread | float | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to do a case, with its figures by the names of `COLUMNS`."""

    case: str
    way: str
    figures: dict[str, Figure]


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of one workload, what they show, and the load average meanwhile."""

    name: str
    title: str
    rows: list[Row]
    load: float | None = None

    def markdown(self) -> str:
        """A table, for reading and for a page alike."""
        names = [name for name in COLUMNS if any(name in row.figures for row in self.rows)]
        table = [["case", "way", *(COLUMNS[name] for name in names)]]
        for row in self.rows:
            cells = (_text(row.figures.get(name)) for name in names)
            table.append([row.case, row.way, *cells])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, ["-" * width for width in widths])
        lines = (
            " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            for cells in table
        )
        title = [f"### {self.title}", "", *self._alarm()]
        return "\n".join([*title, *(f"| {line} |" for line in lines), ""])

    def as_json(self) -> dict[str, Any]:
        """The same as plain objects."""
        rows = [
            {"case": row.case, "way": row.way}
            | {name: _plain(figure) for name, figure in row.figures.items()}
            for row in self.rows
        ]
        return {"name": self.name, "title": self.title, "load": self.load, "rows": rows}

    def _alarm(self) -> list[str]:
        """A measurement alone keeps no more than the cores busy."""
        cores = os.cpu_count() or 1
        if self.load is None or self.load <= cores:
            return []
        loaded = f"LOADED MACHINE: a load average of {self.load} on {cores} cores"
        return [f"**{loaded}. Others were measured too: do not use these figures.**", ""]


def load_average() -> float | None:
    """Of the last minute, where the system tells it."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    packages = ("optaxclip", "jax", "jaxlib", "optax", "torch")
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": load_average(),
        "versions": {name: version(name) for name in packages if find_spec(name)},
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(figure: Figure) -> str:
    if figure is None:
        return ""
    if isinstance(figure, Spread):
        return f"{number(figure.median)} ({number(figure.low)} to {number(figure.high)})"
    return number(figure)


def number(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"


def _plain(figure: Figure) -> Any:
    return figure._asdict() if isinstance(figure, Spread) else figure

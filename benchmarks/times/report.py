"""Formats results as tables and as JSON."""

import dataclasses
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from benchmarks.times.timing import Spread

# The names of figures in the JSON file, and the headers of their columns.
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
    """A variant of a case with its figures by the names of `COLUMNS`."""

    case: str
    variant: str
    figures: dict[str, Figure]


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of a workload, its title, and the load average during the measurement."""

    name: str
    title: str
    rows: list[Row]
    load: float | None = None

    def to_markdown(self) -> str:
        """Formats an aligned Markdown table."""
        names = [name for name in COLUMNS if any(name in row.figures for row in self.rows)]
        table = [["case", "way", *(COLUMNS[name] for name in names)]]
        for row in self.rows:
            cells = (_format_figure(row.figures.get(name)) for name in names)
            table.append([row.case, row.variant, *cells])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, ["-" * width for width in widths])
        lines = (
            " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            for cells in table
        )
        title = [f"### {self.title}", "", *self._warn_about_load()]
        return "\n".join([*title, *(f"| {line} |" for line in lines), ""])

    def to_json(self) -> dict[str, Any]:
        """Converts the section to objects for JSON."""
        rows = [
            {"case": row.case, "way": row.variant}
            | {name: _convert_figure(figure) for name, figure in row.figures.items()}
            for row in self.rows
        ]
        return {"name": self.name, "title": self.title, "load": self.load, "rows": rows}

    def _warn_about_load(self) -> list[str]:
        """Returns a warning if the load exceeds the number of cores."""
        cores = os.cpu_count() or 1
        if self.load is None or self.load <= cores:
            return []
        loaded = f"LOADED MACHINE: a load average of {self.load} on {cores} cores"
        return [f"**{loaded}. Do not use these figures.**", ""]


def get_load_average() -> float | None:
    """Returns the load average of the last minute, if available."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def describe_machine() -> dict[str, Any]:
    """Describes the machine and the package versions."""
    packages = ("optaxclip", "jax", "jaxlib", "optax", "torch")
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processor": _get_processor_name(),
        "cores": os.cpu_count(),
        "load": get_load_average(),
        "versions": {name: version(name) for name in packages if find_spec(name)},
    }


def _get_processor_name() -> str:
    """Returns the name of the processor."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _format_figure(figure: Figure) -> str:
    if figure is None:
        return ""
    if isinstance(figure, Spread):
        median, low, high = map(format_number, figure)
        return f"{median} ({low} to {high})"
    return format_number(figure)


def format_number(x: float) -> str:
    """Formats a number with three digits, or without decimals from 1000."""
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"


def _convert_figure(figure: Figure) -> Any:
    return figure._asdict() if isinstance(figure, Spread) else figure

"""Says how the norms of each parameter are found."""

import numpy as np

from optaxclip.per_example.ghost.norms import NormTerm
from optaxclip.per_example.ghost.program import GhostNormPlan

_WAYS = {
    "vectors": "norms of its inputs and of their cotangents",
    "gram": "Gram matrices of its inputs and of their cotangents",
    "direct": "gradients of examples, which cost less than Gram matrices",
    "chunks": "gradients of examples, a few at a time",
    "rows": "rows of cotangents, added up where they are of one row",
    "tied": "Gram matrices, and rows of cotangents",
}


def format_plan(plan: GhostNormPlan, names: list[str]) -> str:
    """A table with a line for each parameter."""
    lines = [["parameter", "shape", "norms from", "positions", "memory"]]
    for i, (name, aval) in enumerate(zip(names, plan.types, strict=True)):
        start = [name, str(aval.shape)]
        size = aval.size * aval.dtype.itemsize
        if i in plan.materialized:
            why = f"gradients of examples, as it {plan.materialized[i]}"
            lines.append([*start, why, "-", _format_bytes(size)])
        elif not plan.parts[i]:
            lines.append([*start, "is not used: norm 0", "-", "0 B"])
        lines += [[*start, *_format_term(part)] for part in plan.parts[i]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_row(line, widths) for line in lines)


def _format_term(part: NormTerm) -> list[str]:
    itemsize = np.dtype(np.float32).itemsize
    return [
        _WAYS[part.way],
        str(part.sizes.positions),
        _format_bytes(part.bytes_of(False, itemsize)),
    ]


def _row(line: list[str], widths: list[int]) -> str:
    cells = [text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)]
    return "  ".join([*cells, *(x.rjust(n) for x, n in zip(line[3:], widths[3:], strict=True))])


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"

"""The steps of a log's rows, each of which counts once."""

import re
from typing import Any, NamedTuple

import numpy as np

from optaxclip.tuning.columns import Columns, Floats, Series, Steps, last_part

STEP = re.compile(r"(global_|train_)?steps?|it(er)?(ations?)?")
EPOCH = re.compile(r"epochs?")


class Ordered(NamedTuple):
    """The numbers of a column by rising steps, or None; and how many came again."""

    values: Floats
    steps: Steps | None
    again: int


def ordered(columns: Columns, name: str, series: Series) -> Ordered:
    """The numbers of a column, the last one of each step.

    A step that comes again, after a restart or in the lines of another process, takes the place of
    itself and of all later steps.
    """
    steps = _of_the_rows(columns, name, series, STEP) if series.steps is None else series.steps
    if steps is None or np.ptp(steps) == 0 or not np.array_equal(steps, steps.round()):
        return Ordered(series.values, None, 0)
    if np.all(np.diff(steps) > 0):
        return Ordered(series.values, steps.astype(np.int64), 0)
    epochs = _of_the_rows(columns, name, series, EPOCH)
    epochs = np.zeros_like(steps) if epochs is None else epochs
    places, first, at = np.unique(
        np.stack([epochs, steps], axis=1), axis=0, return_index=True, return_inverse=True
    )
    if np.any(np.diff(places[:, 1]) <= 0):  # as of steps that begin anew in each epoch
        return Ordered(series.values, None, 0)
    at = at.ravel()
    comes_again = np.full(len(at), len(places))
    comes_again[np.setdiff1d(np.arange(len(at)), first)] = 0
    later = np.maximum(comes_again, at)  # where a step comes again its place, else beyond all
    lowest = np.minimum.accumulate(np.append(later, len(places))[::-1])[::-1][1:]
    kept = np.flatnonzero(at < lowest)
    kept = kept[np.argsort(at[kept])]
    return Ordered(series.values[kept], steps[kept].astype(np.int64), len(at) - len(kept))


def _of_the_rows(columns: Columns, name: str, series: Series, kind: re.Pattern[str]) -> Any:
    """The numbers that columns of a kind have in the rows of a column; None if some have none."""
    names = [other for other in columns if kind.fullmatch(last_part(other))]
    # That of the same object or folder first, and `global_step` before `step`.
    folders = {each: re.sub(r"[^/.]*$", "", each) for each in (name, *names)}
    names.sort(key=lambda each: (folders[each] != folders[name], "global" not in each))
    for other in names:
        of_kind = columns[other]
        if not isinstance(of_kind, str):
            number = dict(zip(of_kind.rows.tolist(), of_kind.values.tolist(), strict=True))
            found = np.array([number.get(row, np.nan) for row in series.rows.tolist()])
            if np.isfinite(found).all():
                return found
    return None

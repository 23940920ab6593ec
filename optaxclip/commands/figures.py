"""Figures of the commands: axes beside each other, with legends below them."""

from typing import TYPE_CHECKING

from optaxclip.plots.style import fewest_rows, legend_below, with_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LABELS_IN_A_ROW = 6
"""If there are more labels than this, two short rows are easier to read than one long row."""


def side_by_side(columns: int = 2) -> "Figure":
    """An empty figure of `columns` axes for a page's width, outside of `pyplot`."""
    with with_matplotlib():
        from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * columns, 4.2), layout="constrained")
    figure.subplots(1, columns)
    return figure


def shared_legend(figure: "Figure") -> None:
    """One legend below all axes of the figure, each label once, in as few rows as fit."""
    entries = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    look = {"loc": "outside lower center", "frameon": False}
    fewest_rows(
        figure,
        len(entries),
        MAX_LABELS_IN_A_ROW,
        lambda columns: figure.legend(entries.values(), entries.keys(), ncols=columns, **look),
    )


def legends_below(figure: "Figure") -> None:
    """A legend of its own below each axes of the figure."""
    for ax in figure.axes:
        legend_below(ax)

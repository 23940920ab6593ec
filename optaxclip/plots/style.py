"""The look that all pictures share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# For print in grey. As 4 and 7 have no common factor, a pair comes again only after 28 lines.
STYLES = ("-", "--", "-.", ":")


def new_axes(ax: "Axes | None") -> "Axes":
    """The axes given, or new ones."""
    if ax is not None:
        return ax
    from matplotlib import pyplot as plt

    return plt.subplots(layout="constrained")[1]


def finished(ax: "Axes", xlabel: str = "step", *, legend: bool) -> "Axes":
    """The axes with what every picture has."""
    ax.set_xlabel(xlabel)
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax

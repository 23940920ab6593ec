"""A picture of the norms of examples: which of them stand out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from optaxclip._base.arguments import checked_int, short
from optaxclip._base.host import ArrayLike
from optaxclip.plots.limits import bars_of_norms, edges_of_bars, line_of_limit
from optaxclip.plots.style import COLORS, curve, finished, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = np.ndarray[Any, Any]
HATCHES = ("////", "....", "\\\\\\\\", "xxxx", "++++", "oooo", "----")
LEAST = 1e-6
"""The smallest share of the largest norm that is drawn: learned examples have tiny norms."""
MARKS = tuple(color for i, color in enumerate(COLORS) if i != 1)
"""The colours of marked examples; the limit has the second colour."""


def example_norms(
    norms: ArrayLike,
    limit: float | None = None,
    marked: Mapping[str, ArrayLike] | None = None,
    ax: "Axes | None" = None,
    *,
    most: int = 5,
) -> "Axes":
    """Draws how many examples have gradients of each norm, and lists the largest by index.

    Both axes are logarithmic, so that one example among thousands is visible. Norms that are not
    finite, or below a millionth of the largest norm, are not drawn: the label of the axis counts
    them.

    Args:
      norms: float[examples], from `per_example.grad_norms` or `PerExampleResult.norms`.
      limit: the limit of an example, drawn as a line.
      marked: for each name, the indices of the examples that get the colour of that name. An
        example belongs to the first name that has it.
      ax: where to draw.
      most: how many of the largest norms are listed.

    Raises:
      ValueError: for no norms, for norms that do not have one axis, or that are all 0 or not
        finite; for a limit that is not above 0; for indices of no example, more than 7 names, or
        `most` below 0.
      TypeError: for norms that are not real numbers, indices or `most` that are not ints, and
        `marked` that is not a dict.

    Example:
      >>> import numpy as np
      >>> from optaxclip import plots
      >>> norms = np.exp(0.3 * np.random.default_rng(0).normal(size=1000))
      >>> norms[[17, 205]] = 20.0, 50.0
      >>> ax = plots.example_norms(norms, limit=2.0, marked={"wrong label": [17, 205]}, most=2)
      >>> print(ax.get_legend_handles_labels()[1][1:])
      ['wrong label (2)', 'others (998)']
      >>> print(ax.texts[0].get_text())
      example: norm
      205: 50
      17: 20
    """
    _, values = curve(norms, None, "norms")
    finite = values[np.isfinite(values)]
    if not np.any(finite > 0):
        raise ValueError("norms must have one that is finite and above 0 to draw, got none")
    least = LEAST * finite.max()
    is_shown = np.isfinite(values) & (values >= least)
    if limit is not None and not 0 < float(limit) < np.inf:
        raise ValueError(f"limit must be a finite number above 0, got {limit!r}")
    most = checked_int(most, 0, "most")
    groups = _groups(marked, len(values))
    axes = new_axes(ax)
    edges = edges_of_bars(values[is_shown], values[is_shown].max() if limit is None else limit)
    parts, rest = [], is_shown
    for (name, of_name), color, hatch in zip(groups.items(), MARKS, HATCHES, strict=False):
        look = {"color": color, "hatch": hatch, "edgecolor": "white"}
        parts.append((name, rest & of_name, look))
        rest = rest & ~of_name
    # On top, because a logarithmic axis shows the lowest part of a bar as the largest.
    parts.append(("others" if groups else "examples", rest, {"color": "0.7"}))
    bars_of_norms(axes, values, edges, parts)
    if limit is not None:
        share = np.mean(finite > limit)
        line_of_limit(axes, limit, f"limit {limit:.3g}, clips {share:.1%}")
    _name_largest(axes, np.where(is_shown, values, 0.0), most)
    axes.set_ylabel("number of examples")
    left_out = {
        f"below {least:.1g}": np.sum(finite < least),
        "not finite": len(values) - len(finite),
    }
    words = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
    label = "norm of an example's gradient" + (f" ({words})" if words else "")
    return finished(axes, label, legend=ax is None)


def _groups(marked: Mapping[str, ArrayLike] | None, examples: int) -> dict[str, Numbers]:
    """For each name, which examples belong to it."""
    if marked is not None and not isinstance(marked, Mapping):
        wanted = "a dict from names to the indices of examples"
        raise TypeError(f"marked must be {wanted}, got {short(marked)}")
    found = {}
    for name, indices in (marked or {}).items():
        numbers = np.asarray(indices)
        if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
            raise TypeError(f"marked[{name!r}] must be indices, got {short(indices)}")
        numbers = numbers.astype(np.int64)
        if np.any((numbers < 0) | (numbers >= examples)):
            raise ValueError(
                f"marked[{name!r}] must be indices of {examples} examples, from 0 to "
                f"{examples - 1}, got {short(indices)}"
            )
        found[name] = np.isin(np.arange(examples), numbers)
    if len(found) > len(MARKS):
        raise ValueError(f"marked must have at most {len(MARKS)} names, got {len(found)}")
    return found


def _name_largest(ax: "Axes", values: Numbers, most: int) -> None:
    """Lists the largest norms in the upper right corner, above their bars, which are low."""
    largest = [i for i in np.argsort(-values, kind="stable")[:most] if values[i] > 0]
    if largest:
        lines = "\n".join(["example: norm", *(f"{i}: {values[i]:.3g}" for i in largest)])
        look = {"ha": "right", "va": "top", "fontsize": "small", "transform": ax.transAxes}
        ax.text(0.99, 0.98, lines, **look)

"""Draws the pictures of the page on evidence, legible on a phone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.research.study.comparing import HARMS, HELPS, UNCLEAR, Case
from benchmarks.research.study.figures import get_label
from benchmarks.research.study.runs import BEST, NONE, RATES, Cell, Pair
from benchmarks.research.study.summary import Summary
from optaxclip import plots
from optaxclip.plots.style import COLORS, finish_axes

NAMES = ("evidence.png", "evidence_lost.png", "evidence_recovery.png")
LETTERS, WIDTH, DPI = {"font.size": 13}, 6.0, 200
"""In points and inches. Letters have 12 pixels in a picture of 400 pixels."""
ROW, MARGIN = 0.265, 1.7
"""The heights of a row, and of everything else, in inches."""
IN_PICTURE = ("best", "past", "spike", "tails", "nan", "jump", "stretch")
LOOK = {HELPS: (COLORS[1], 0.35), HARMS: (COLORS[0], 0.45), UNCLEAR: ("white", 0.0)}
"""The colors and opacities of the verdicts."""
WORDS = {HELPS: "better", HARMS: "worse", UNCLEAR: "not significant"}
"""The labels of the verdicts in the legend."""
SHOWN = (NONE, BEST, "ZClip", "AutoClip", "skip above")
BEFORE, AFTER, MAX_PAIRS = 4, 14, 2
"""The numbers of evaluations before and after a spike, and of pairs."""


def draw(summary: Summary, folder: Path) -> None:
    """Draws all pictures for which there are results."""
    with mpl.rc_context(LETTERS):
        for name, make in zip(NAMES, (draw_verdicts, draw_lost_runs, draw_recovery), strict=True):
            figure = make(summary)
            if figure.axes:
                figure.savefig(folder / name, dpi=DPI)


def _create_figure(rows: int) -> Figure:
    return Figure(figsize=(WIDTH, ROW * rows + MARGIN), layout="constrained")


def draw_verdicts(summary: Summary) -> Figure:
    """Draws a table of differences by method and case, with the color of the verdict."""
    cases = [case for case in summary.cases if case.name in IN_PICTURE]
    found = {
        method: [summary.pooled[case.name].get(method) for case in cases]
        for method in summary.study.methods
    }
    found = {method: row for method, row in found.items() if any(row)}

    def get_order(method: str) -> tuple[float, float]:
        known = [x for x in found[method] if x is not None]
        helps = sum((x.verdict == HELPS) - (x.verdict == HARMS) for x in known)
        return -helps, -float(np.mean([x.share.mean for x in known]))

    figure = _create_figure(len(found))
    if not found:
        return figure
    ax = figure.subplots()
    methods = sorted(found, key=get_order)
    for y, method in enumerate(methods):
        for x, of_case in enumerate(found[method]):
            if of_case is not None:
                draw_tile(ax, x, y, of_case.share.mean, of_case.verdict)
    ax.set_xlim(-0.5, len(cases) - 0.5)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_yticks(range(len(methods)), [get_plain_label(method) for method in methods])
    look = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
    ax.set_xticks(range(len(cases)), [case.short for case in cases], **look)
    ax.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    ax.spines[:].set_visible(False)
    add_legend(figure, HELPS, HARMS, UNCLEAR)
    return figure


def add_legend(figure: Figure, *verdicts: str) -> None:
    """Adds a legend with the colors of the verdicts."""
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=color, alpha=alpha or None, edgecolor="0.7", label=label)
        for label, (color, alpha) in ((WORDS[verdict], LOOK[verdict]) for verdict in verdicts)
    ]
    look = {"loc": "outside lower center", "ncols": 3, "frameon": False, "columnspacing": 1.0}
    figure.legend(handles=handles, handlelength=1.0, **look)


def draw_tile(ax: Any, x: int, y: int, share: float, verdict: str) -> None:
    """Draws a percentage with the color of the verdict."""
    color, alpha = LOOK[verdict]
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, alpha=alpha, edgecolor="w"))
    text = f"{100 * share:+.{1 if abs(share) < 0.0995 else 0}f}"
    is_zero = float(text) == 0.0
    look = {"weight": "bold", "color": "black"} if alpha else {"weight": "normal", "color": "0.4"}
    size = 9 if abs(share) < 0.995 else 8
    ax.text(x, y, text[is_zero:], ha="center", va="center", fontsize=size, **look)


def draw_lost_runs(summary: Summary) -> Figure:
    """Draws the fraction of lost runs without a fault by method and learning rate."""
    cases = [case for case in summary.cases if case.fault == "none" and case.rate in RATES]
    shares = {
        method: [summary.compute_lost(method, case) for case in cases]
        for method in (NONE, *summary.pooled["past"])
    }
    shares = {method: row for method, row in shares.items() if None not in row and row}
    figure = _create_figure(len(shares))
    if not shares:
        return figure
    ax = figure.subplots()
    methods = sorted(shares, key=lambda method: shares[method][::-1])
    for number, case in enumerate(cases):
        percent = [100 * (shares[method][number] or 0.0) for method in methods]
        look = {"color": COLORS[(2, 1, 0)[number]], "markersize": 9 - 2 * number, "clip_on": False}
        look |= {"markerfacecolor": "none" if number < 2 else None, "markeredgewidth": 1.8}
        ax.plot(percent, range(len(methods)), "o^s"[number], label=case.short, zorder=3, **look)
    ax.set_yticks(range(len(methods)), [get_plain_label(method) for method in methods])
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_xlim(left=0)
    finish_axes(ax, "lost runs, %", legend=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, columnspacing=1.0)
    return figure


def draw_recovery(summary: Summary) -> Figure:
    """Draws the median losses around a spike for the pairs with the largest increase."""
    case = next((case for case in summary.cases if case.name == "spike"), None)
    figure = Figure(figsize=(WIDTH, 7.2), layout="constrained")
    cells = {} if case is None else dict(summary.list_cells(NONE, case))
    cells = {pair: cell for pair, cell in cells.items() if cell.onset is not None}
    pairs = sorted(cells, key=lambda pair: -_compute_harm(cells[pair], summary.study.gains[pair]))[
        :MAX_PAIRS
    ]
    if case is None or not pairs:
        return figure
    axes = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    for ax, pair in zip(axes, pairs, strict=True):
        _draw_losses_around_spike(ax, summary, pair, case)
    figure.axes[-1].set_xlabel("steps after the spike")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _compute_harm(cell: Cell, gain: float) -> float:
    """Returns the increase of the loss as a fraction of the gain, at most 1."""
    losses = align_losses(cell)
    rise = np.nanmax(losses[BEFORE:]) - losses[BEFORE]
    return float(min(rise / gain, 1.0)) if np.isfinite(losses[BEFORE]) else -1.0


def align_losses(cell: Cell) -> np.ndarray:
    """Aligns median losses, infinite for lost runs, with the last evaluation before a bad step."""
    if cell.onset is None:
        raise ValueError("cell must be of a fault with a first bad step")
    number = cell.onset[:, None] // cell.every + np.arange(-BEFORE, AFTER + 1)
    is_available = (number >= 0) & (number < cell.held_out.shape[1])
    losses = np.take_along_axis(cell.held_out, np.where(is_available, number, 0), 1)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    columns = [losses[there, i] for i, there in enumerate(is_available.T)]
    return np.array([_compute_upper_median(column) for column in columns])


def _compute_upper_median(values: Sequence[float]) -> float:
    # Use the upper median, because the mean with an infinite loss is also infinite.
    return float(np.sort(values)[len(values) // 2]) if len(values) else np.nan


def _draw_losses_around_spike(ax: Any, summary: Summary, pair: Pair, case: Case) -> None:
    found = {name: summary.study.get_cell(pair, name, case) for name in SHOWN}
    shown = {name: align_losses(cell) for name, cell in found.items() if cell is not None}
    every = next(cell.every for cell in found.values() if cell is not None)
    is_available = ~np.isnan(list(shown.values())).any(0)
    shown = {get_plain_label(name): losses[is_available] for name, losses in shown.items()}
    plots.loss_curves(shown, every * np.arange(-BEFORE, AFTER + 1)[is_available], ax=ax)
    losses = np.concatenate(list(shown.values()))
    losses, gain = losses[np.isfinite(losses)], summary.study.gains[pair]
    low = np.min(losses)
    ax.set_ylim(low - 0.03 * gain, min(np.max(losses), low + gain) + 0.03 * gain)
    ax.axvline(0.0, color="0.6", linewidth=1.0, zorder=0)
    ax.set_title(str(pair))
    ax.set_xlabel("")
    ax.set_ylabel("held-out loss")


def get_plain_label(method: str) -> str:
    """Returns the name of a method on the page, without code quotes."""
    return get_label(method).replace("`", "")

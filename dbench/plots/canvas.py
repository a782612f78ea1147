"""How every figure looks, and how it reaches the disk beside the table that it draws.

Colours are told apart with the common colour blindnesses (Okabe and Ito's set).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbench.result_files import replacing, rounded, write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
YELLOW = "#E69F00"
SKY = "#56B4E9"
INK = "#1F2937"
GREY = "#6B7280"
LINE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, INK)

WIDTH_IN = 7.6
PANEL_IN = 3.4
HEADER_IN = 0.9
DPI = 150
LEGEND_ROW_PT = 15
ENTRIES_PER_LEGEND_ROW = 5

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelsize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9CA3AF",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.8,
    "xtick.color": "#4B5563",
    "ytick.color": "#4B5563",
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Title:
    """What a figure shows, and of which run."""

    text: str
    run: str
    """Such as "embedded · arxiv · 2 QPS offered"."""


Draw = Callable[["pd.DataFrame", Title], "Figure"]


def save_figure(table: pd.DataFrame, stem: Path, title: Title, draw: Draw, exact: Sequence[str] = ()) -> None:
    """Write the table to `stem`.csv, and to `stem`.png the figure of the very values in it.

    `exact`: columns of the CSV that keep twelve digits (see write_csv).
    """
    write_csv(stem.with_name(f"{stem.name}.csv"), table, exact)
    with style():
        figure = draw(rounded(table, exact), title) if len(table) else _empty_figure(title)
        with replacing(stem.with_name(f"{stem.name}.png")) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": "dbench"})


@contextmanager
def style() -> Iterator[None]:
    """Figures made inside look alike; nothing outside changes."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def new_figure(title: Title, panels: Sequence[float] = (1.0,), num_entries: int = 0) -> tuple[Figure, list[Axes]]:
    """An empty figure: title, run, a legend of `num_entries`, and panels of the given relative heights.

    The panels share their horizontal axis. Call inside `style()`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    legend_rows = -(-num_entries // ENTRIES_PER_LEGEND_ROW)
    height = HEADER_IN + LEGEND_ROW_PT * legend_rows / 72 + PANEL_IN * sum(panels)
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=panels)
    all_axes = list(grid[:, 0])
    room = 9 + LEGEND_ROW_PT * legend_rows
    top = all_axes[0]
    top.set_title(title.text, loc="left", fontweight="bold", fontsize=12.5, color=INK, pad=room + 16)
    top.annotate(
        title.run,
        (0, 1),
        (0, room),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        color=GREY,
        va="bottom",
    )
    return figure, all_axes


def legend_above(axes: Axes, order: Sequence[str] = ()) -> None:
    """Between the run's line and the panel, where no curve is; `order` sorts the labels that are there."""
    handles, labels = axes.get_legend_handles_labels()
    pairs = list(zip(handles, labels, strict=True))
    if order:
        pairs.sort(key=lambda pair: order.index(pair[1]))
    axes.legend(
        [handle for handle, _ in pairs],
        [label for _, label in pairs],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=ENTRIES_PER_LEGEND_ROW,
        borderpad=0.0,
        borderaxespad=0.5,
        handlelength=1.4,
        columnspacing=1.4,
    )


def log_x(axes: Axes, low: float, high: float) -> None:
    """A logarithmic horizontal axis from `low` to `high`."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    _plain_ticks(axes.xaxis, high / low)


def log_y(axes: Axes, low: float, high: float) -> None:
    """A logarithmic vertical axis from `low` to `high`."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    _plain_ticks(axes.yaxis, high / low)


def _plain_ticks(axis: Axis, ratio: float) -> None:
    """Ticks that read as numbers: 1, 2, 5, 10 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    if ratio < 8:
        axis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 500 else (1,)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))


def _empty_figure(title: Title) -> Figure:
    figure, (axes,) = new_figure(title)
    axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure

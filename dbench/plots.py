"""The figures of a run. Each draws one table, the one in the CSV that stands beside it.

`save_figure` writes both files. Colours are told apart with the common colour blindnesses (Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbench.measure.curves import share_at
from dbench.metric_names import REQUEST_METRICS
from dbench.result_files import replacing, rounded, write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#333333",
)
LINE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK)
GREY = "#6B7280"
GRID = "#E5E7EB"

PHASE_COLOURS = {
    "prefill_ratio": BLUE,
    "mixed_ratio": SKY,
    "decode_ratio": GREEN,
    "queued_ratio": YELLOW,
    "lost_ratio": BLACK,
}

WIDTH_IN, HEIGHT_IN, DPI = 7.6, 4.3, 150

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.labelsize": 10.5,
    "axes.labelcolor": BLACK,
    "axes.edgecolor": "#9CA3AF",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
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
    "svg.hashsalt": "dbench",
}


@dataclass(frozen=True, slots=True)
class Title:
    """What a figure shows, and of which run."""

    text: str
    run: str
    """Such as "embedded · arxiv · 2 QPS"."""


def save_figure(table: pd.DataFrame, stem: Path, title: Title, draw: Callable[[pd.DataFrame, Title], Figure]) -> None:
    """Write the table to `stem`.csv and the figure of the very same values to `stem`.png."""
    write_csv(stem.with_name(f"{stem.name}.csv"), table)
    with style():
        figure = draw(rounded(table), title) if len(table) else _empty_figure(title)
        write_png(figure, stem.with_name(f"{stem.name}.png"))


@contextmanager
def style() -> Iterator[None]:
    """Figures made and written inside look alike; nothing outside changes."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def write_png(figure: Figure, path: Path) -> None:
    """Call inside `style()`."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": "dbench"})


def cdf_figure(table: pd.DataFrame, title: Title) -> Figure:
    """A curve from cdf_table, with its p50, p90 and p99."""
    metric = table.columns[1]
    figure, (axes,) = new_figure(title)
    draw_cdf(axes, table, BLUE)
    _mark_quantiles(axes, table)
    finish_cdf(axes, metric)
    return figure


def arrivals_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Cumulated arrivals and completions; the band between them is what was in flight."""
    figure, (axes,) = new_figure(title)
    time_s = table["time_s"]
    axes.fill_between(
        time_s,
        table["completions"] + table["failures"],
        table["arrivals"],
        step="post",
        color=BLUE,
        alpha=0.10,
        linewidth=0,
        label="in flight",
    )
    axes.step(time_s, table["arrivals"], where="post", color=BLUE, label="arrivals (intended)")
    axes.step(time_s, table["completions"], where="post", color=GREEN, label="completions")
    if table["failures"].any():
        axes.step(time_s, table["failures"], where="post", color=ORANGE, label="failures")
    axes.set_ylabel("requests")
    _finish_time(axes, time_s)
    legend_above(axes, order=("arrivals (intended)", "completions", "failures", "in flight"))
    return figure


def depths_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Refreshes that wait, and sequences that decode, per worker."""
    figure, (top, bottom) = new_figure(title, rows=2)
    _lines_per_worker(top, table, "queue_depth_waiting")
    _lines_per_worker(bottom, table, "queue_depth_active")
    top.set_ylabel("waiting refreshes")
    bottom.set_ylabel("active sequences")
    for axes in (top, bottom):
        _finish_time(axes, table["time_s"])
    top.set_xlabel("")
    if table["worker_id"].nunique() > 1:
        legend_above(top)
    return figure


def kv_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Share of the KV pages in use, per worker."""
    figure, (axes,) = new_figure(title)
    _lines_per_worker(axes, table, "kv_page_utilization_ratio", scale=100.0)
    axes.set_ylabel("KV pages in use (%)")
    _finish_time(axes, table["time_s"])
    if table["worker_id"].nunique() > 1:
        legend_above(axes)
    return figure


def utilization_figure(table: pd.DataFrame, title: Title) -> Figure:
    """What each worker did with its time, as stacked shares; white is idle."""
    workers = sorted(table["worker_id"].unique())
    figure, rows = new_figure(title, rows=max(1, len(workers)))
    shown = [name for name in PHASE_COLOURS if table[name].any()]
    for axes, worker_id in zip(rows, workers, strict=False):
        own = table[table["worker_id"] == worker_id]
        axes.stackplot(
            own["time_s"],
            *(100.0 * own[name] for name in shown),
            colors=[PHASE_COLOURS[name] for name in shown],
            labels=[name.removesuffix("_ratio") for name in shown],
            linewidth=0,
        )
        axes.set_ylabel(f"worker {worker_id}\n(% of time)")
        _finish_time(axes, table["time_s"])
        axes.set_ylim(0, 100)
        axes.set_yticks((0, 50, 100))
    for axes in rows[:-1]:
        axes.set_xlabel("")
    if shown:
        legend_above(rows[0])
    return figure


def _empty_figure(title: Title) -> Figure:
    figure, (axes,) = new_figure(title)
    axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure


def new_figure(title: Title, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with its title and `rows` panels over one time axis. Call inside `style()`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = HEIGHT_IN if rows == 1 else max(HEIGHT_IN + 0.7, 1.1 + 1.5 * rows)
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title.text, loc="left", fontweight="bold", fontsize=12.5, color=BLACK, pad=26)
    panels[0].annotate(
        title.run,
        (0, 1),
        (0, 10),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        color=GREY,
        va="bottom",
    )
    return figure, panels


def draw_cdf(axes: Axes, table: pd.DataFrame, colour: str, label: str | None = None) -> None:
    """Steps from 0 at the smallest value."""
    x, y = table.iloc[:, 1].to_numpy(), table["cdf"].to_numpy()
    if x.size:
        axes.step([x[0], *x], [0.0, *y], where="post", color=colour, label=label)


def finish_cdf(axes: Axes, metric: str) -> None:
    known = REQUEST_METRICS[metric]
    axes.set_xlabel(f"{known.label} ({known.unit})")
    axes.set_ylabel("share of values" if known.is_distribution else "share of requests")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)


def legend_above(axes: Axes, order: tuple[str, ...] = ()) -> None:
    """In one line at the top right, where no curve is."""
    handles, labels = axes.get_legend_handles_labels()
    pairs = list(zip(handles, labels, strict=True))
    if order:
        pairs.sort(key=lambda pair: order.index(pair[1]))
    axes.legend(
        [handle for handle, _ in pairs],
        [label for _, label in pairs],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=min(len(pairs), 6),
        borderaxespad=0.3,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _mark_quantiles(axes: Axes, table: pd.DataFrame) -> None:
    for q in (0.5, 0.9, 0.99):
        value = share_at(table, q)
        if value is None:
            continue
        axes.plot([value], [q], "o", color=ORANGE, markersize=5, zorder=4)
        axes.annotate(
            f"p{100 * q:.0f}  {value:.3g}",
            (value, q),
            (9, -11),
            textcoords="offset points",
            fontsize=9.5,
            color=BLACK,
        )


def _lines_per_worker(axes: Axes, table: pd.DataFrame, name: str, scale: float = 1.0) -> None:
    for index, (worker_id, own) in enumerate(table.groupby("worker_id")):
        colour = LINE_COLOURS[index % len(LINE_COLOURS)]
        dash = ("-", "--", ":")[index // len(LINE_COLOURS) % 3]
        axes.plot(own["time_s"], scale * own[name], color=colour, linestyle=dash, label=f"worker {worker_id}", lw=1.3)


def _finish_time(axes: Axes, time_s: pd.Series) -> None:
    axes.set_xlabel("time since the first arrival (s)")
    axes.set_ylim(bottom=0)
    if len(time_s) and time_s.max() > 0:
        axes.set_xlim(0, float(time_s.max()))

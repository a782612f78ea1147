"""The figures of a run. Each draws one table of `dbench.measure.curves`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbench.measure.curves import share_at
from dbench.metric_names import REQUEST_METRICS
from dbench.plots.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    Title,
    legend_above,
    log_x,
    new_figure,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_COLOURS = {
    "prefill_ratio": BLUE,
    "mixed_ratio": SKY,
    "decode_ratio": GREEN,
    "queued_ratio": YELLOW,
    "lost_ratio": INK,
}

FEW_WORKERS = 3
"""Up to here a worker's panel is high; beyond, the figure would not fit a page."""

VISIBLE_SHARE = 0.02
"""What never takes more of an interval has no place in the legend: nobody would find its colour."""

RIGHT_MARGIN = 1.015
"""Of the time axis, so that a step at the last moment is seen whole."""

LOG_SCALED = ("request_time_between_tokens",)
"""Gaps inside a block and between blocks differ by a factor of ten and more."""


def cdf_figure(table: pd.DataFrame, title: Title) -> Figure:
    """A curve of cdf_table, with its p50, p90 and p99, and the share that never ends."""
    metric = table.columns[1]
    figure, (axes,) = new_figure(title)
    draw_cdf(axes, table, BLUE)
    finish_cdf(axes, metric)
    positive = table[table[metric] > 0]
    if metric in LOG_SCALED and len(positive):
        low, high = float(positive[metric].iloc[0]), float(positive[metric].iloc[-1])
        log_x(axes, 0.7 * low, 1.8 * max(high, 1.5 * low))
        _say_share_of_zeros(axes, table)
    _mark_quantiles(axes, table)
    missing = 1.0 - float(table["cdf"].iloc[-1])
    if missing > 1e-6:
        axes.axhline(1.0 - missing, color=ORANGE, linestyle=":", linewidth=1.2)
        _note(axes, f"{missing:.1%} of the requests failed: the curve ends there", (0.985, 0.09), ORANGE)
    return figure


def arrivals_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Cumulated arrivals and completions, and below the requests in flight."""
    has_failures = bool(table["failures"].any())
    figure, (top, bottom) = new_figure(title, (1.0, 0.42), 2 + has_failures)
    time_s, ended = table["time_s"], table["completions"] + table["failures"]
    top.step(time_s, table["arrivals"], where="post", color=BLUE, label="arrivals (intended sends)")
    top.step(time_s, table["completions"], where="post", color=GREEN, label="completions")
    top.fill_between(time_s, ended, table["arrivals"], step="post", color=BLUE, alpha=0.12, linewidth=0)
    if has_failures:
        top.fill_between(
            time_s, table["completions"], ended, step="post", color=ORANGE, linewidth=0, label="failures, on top"
        )
    top.set_ylabel("requests so far")
    legend_above(top)
    bottom.fill_between(time_s, 0, table["in_flight"], step="post", color=BLUE, alpha=0.12, linewidth=0)
    bottom.step(time_s, table["in_flight"], where="post", color=BLUE, linewidth=1.3)
    bottom.set_ylabel("in flight")
    _whole_numbers(bottom)
    _finish_time([top, bottom], time_s)
    return figure


def depths_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Refreshes that wait and sequences that are active, a panel per worker on one scale."""
    columns = {"queue_depth_active": ("active sequences", BLUE), "queue_depth_waiting": ("waiting refreshes", ORANGE)}
    figure, panels = _panel_per_worker(table, title, len(columns))
    for axes, (_, own) in zip(panels, table.groupby("worker_id"), strict=True):
        for name, (label, colour) in columns.items():
            axes.fill_between(own["time_s"], 0, own[name], color=colour, alpha=0.15, linewidth=0)
            axes.plot(own["time_s"], own[name], color=colour, linewidth=1.2, label=label)
        axes.set_ylim(0, 1.08 * max(1.0, float(table[list(columns)].max().max())))
        _whole_numbers(axes)
    legend_above(panels[0])
    _finish_time(panels, table["time_s"])
    return figure


def kv_figure(table: pd.DataFrame, title: Title) -> Figure:
    """Share of the KV pages in use, a panel per worker on one scale."""
    figure, panels = _panel_per_worker(table, title, 0)
    highest = 100.0 * float(table["kv_page_utilization_ratio"].max())
    for axes, (_, own) in zip(panels, table.groupby("worker_id"), strict=True):
        percent = 100.0 * own["kv_page_utilization_ratio"]
        axes.fill_between(own["time_s"], 0, percent, color=PURPLE, alpha=0.2, linewidth=0)
        axes.plot(own["time_s"], percent, color=PURPLE, linewidth=1.2)
        axes.set_ylim(0, 105.0 if highest > 50 else 1.15 * max(1.0, highest))
    figure.supylabel("KV pages in use (%)", fontsize=10.5, color=INK)
    _finish_time(panels, table["time_s"])
    return figure


def utilization_figure(table: pd.DataFrame, title: Title) -> Figure:
    """What each worker did with its time, as stacked shares; white is idle."""
    shown = [name for name in PHASE_COLOURS if table[name].any()]
    labels = [name.removesuffix("_ratio") if table[name].max() >= VISIBLE_SHARE else f"_{name}" for name in shown]
    figure, panels = _panel_per_worker(table, title, len(shown))
    for axes, (_, own) in zip(panels, table.groupby("worker_id"), strict=True):
        if shown:
            axes.stackplot(
                own["time_s"],
                *(100.0 * own[name] for name in shown),
                colors=[PHASE_COLOURS[name] for name in shown],
                labels=labels,
                linewidth=0,
                step="mid",
            )
        axes.set_ylim(0, 100)
        axes.set_yticks((0, 50, 100))
    figure.supylabel("share of time (%)", fontsize=10.5, color=INK)
    if shown:
        legend_above(panels[0])
    _finish_time(panels, table["time_s"])
    return figure


def draw_cdf(axes: Axes, table: pd.DataFrame, colour: str, label: str | None = None) -> None:
    """Steps from 0 at the smallest value."""
    x, y = table.iloc[:, 1].to_numpy(), table["cdf"].to_numpy()
    if x.size:
        axes.step([x[0], *x], [0.0, *y], where="post", color=colour, label=label)


def finish_cdf(axes: Axes, metric: str) -> None:
    """Labels, and room to the right for the marks of the quantiles."""
    known = REQUEST_METRICS[metric]
    axes.set_xlabel(f"{known.label} ({known.unit})")
    axes.set_ylabel("share of values" if known.is_distribution else "share of requests")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0, 1.16 * axes.dataLim.x1 or 1.0)


def _panel_per_worker(table: pd.DataFrame, title: Title, num_entries: int) -> tuple[Figure, list[Axes]]:
    workers = list(table["worker_id"].unique())
    heights = [1.0 if len(workers) == 1 else 0.6 if len(workers) <= FEW_WORKERS else 0.3] * len(workers)
    figure, panels = new_figure(title, heights, num_entries)
    for axes, worker_id in zip(panels, workers, strict=True):
        axes.set_ylabel(f"worker {worker_id}")
    return figure, panels


def _mark_quantiles(axes: Axes, table: pd.DataFrame) -> None:
    unit = REQUEST_METRICS[table.columns[1]].unit
    for q in (0.5, 0.9, 0.99):
        value = share_at(table, q)
        if value is None or (value == 0 and axes.get_xscale() == "log"):
            continue
        axes.plot([value], [q], "o", color=ORANGE, markersize=5, zorder=4)
        axes.annotate(
            f"p{100 * q:.0f}  {_readable(value, unit)}",
            (value, q),
            (9, -12),
            textcoords="offset points",
            fontsize=9.5,
        )


def _readable(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.4g}"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _say_share_of_zeros(axes: Axes, table: pd.DataFrame) -> None:
    zeros = table[table.iloc[:, 1] == 0]
    if len(zeros):
        share = float(zeros["cdf"].iloc[-1])
        foot = max(share, 0.09)
        _note(axes, f"{share:.0%} are 0: fixed in the same step as the token before", (0.985, foot), GREY)
        axes.axhline(share, color=GREY, linestyle=":", linewidth=1.2)


def _note(axes: Axes, text: str, where: tuple[float, float], colour: str) -> None:
    """Right-aligned below `where` = (share of the width, value on the vertical axis)."""
    axes.annotate(
        text,
        where,
        (0, -4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9.5,
        color=colour,
    )


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _finish_time(panels: list[Axes], time_s: pd.Series) -> None:
    panels[-1].set_xlabel("time since the first arrival (s)")
    for axes in panels:
        axes.set_ylim(bottom=0)
    if time_s.max() > 0:
        panels[-1].set_xlim(0, RIGHT_MARGIN * float(time_s.max()))

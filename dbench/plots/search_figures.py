"""The figures of a capacity search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from dbench.measure.curves import cdf_table
from dbench.metric_names import REQUEST_METRICS
from dbench.plots.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINE_COLOURS,
    ORANGE,
    Title,
    legend_above,
    log_x,
    log_y,
    new_figure,
    save_figure,
)
from dbench.plots.run_figures import draw_cdf, finish_cdf
from dbench.search.sla import Rule

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AT_LEAST = "fail_stopped_early"
"""A fail whose value was not waited for to the end."""

VERDICTS = {
    "pass": ("pass", "o", GREEN),
    "fail": ("fail", "X", ORANGE),
    AT_LEAST: ("fail, stopped early: at least this", "^", ORANGE),
    "invalid": ("invalid (load generator)", "s", GREY),
    "unjudged": ("not judged", "D", BLUE),
}
"""Verdict -> label, marker, colour."""

SIGNS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">", "==": "="}

LOG_FROM_RATIO = 12.0
"""Largest over smallest value from which the vertical axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """One trial in the figure of one rule."""

    qps: float
    value: float
    """What the rule compares; inf where the trial has no figure, or an infinite one."""
    verdict: str
    """Of the whole trial: a key of VERDICTS."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found; None where it found no such rate."""

    highest_pass: float | None
    lowest_fail: float | None
    capacity: float | None


@dataclass(frozen=True, slots=True)
class _Ends:
    """Heights at which infinite values are drawn, each with an arrow to its edge."""

    bottom: float
    top: float


def sla_metric_vs_qps(points: Sequence[TrialPoint], rule: Rule, outcome: Outcome, stem: Path, title: Title) -> None:
    """Write `stem`.csv (qps, value, verdict) and `stem`.png: every trial, the limit, the bracket, the capacity."""
    import pandas as pd

    ordered = sorted(points, key=lambda point: point.qps)
    table = pd.DataFrame(
        {
            "qps": [float(p.qps) for p in ordered],
            rule.metric: [float(p.value) for p in ordered],
            "verdict": pd.Series([p.verdict for p in ordered], dtype=object),
        }
    )
    save_figure(table, stem, title, lambda rows, text: qps_figure(rows, text, rule, outcome), exact=("qps",))


def latency_cdfs(curves: Mapping[str, ArrayLike], rule: Rule | None, stem: Path, title: Title) -> None:
    """Write `stem`.csv and `stem`.png: distributions of request_e2e_time by label, failed requests as inf.

    A rule on request_e2e_time adds its limit.
    """
    import pandas as pd

    metric = "request_e2e_time"
    tables = [cdf_table(metric, values).assign(run=label) for label, values in curves.items()]
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    limit = rule.threshold if rule is not None and rule.metric == metric else None
    save_figure(table, stem, title, lambda rows, text: cdfs_figure(rows, text, limit))


def qps_figure(table: pd.DataFrame, title: Title, rule: Rule, outcome: Outcome) -> Figure:
    """The figure of sla_metric_vs_qps."""
    shown = [verdict for verdict in VERDICTS if (table["verdict"] == verdict).any()]
    has_bracket = outcome.highest_pass is not None and outcome.lowest_fail is not None
    figure, (axes,) = new_figure(title, (1.1,), len(shown) + has_bracket)
    values = table[rule.metric]
    ends = _scale_values(axes, values[values.map(math.isfinite)], rule.threshold)
    low, high = float(table["qps"].min()), float(table["qps"].max())
    margin = 1.12 if high / low < 4 else 1.25
    log_x(axes, low / margin, high * margin)
    if outcome.highest_pass is not None and outcome.lowest_fail is not None:
        axes.axvspan(outcome.highest_pass, outcome.lowest_fail, color=BLUE, alpha=0.12, linewidth=0, label="bracket")
    judged = table[values.map(math.isfinite) & (table["verdict"] != "invalid")]
    axes.plot(judged["qps"], judged[rule.metric], color=GREY, linewidth=1.0, alpha=0.7, zorder=2)
    for verdict in shown:
        _draw_trials(axes, table[table["verdict"] == verdict], rule.metric, ends)
    _draw_limit(axes, rule)
    if outcome.capacity is not None:
        _draw_capacity(axes, outcome.capacity)
    axes.set_xlabel("offered load (requests per second)")
    axes.set_ylabel(_value_label(rule))
    legend_above(axes, (*(VERDICTS[v][0] for v in VERDICTS), "bracket"))
    return figure


def cdfs_figure(table: pd.DataFrame, title: Title, limit: float | None) -> Figure:
    """The figure of latency_cdfs."""
    runs = list(table["run"].unique())
    figure, (axes,) = new_figure(title, (1.0,), len(runs))
    for index, run in enumerate(runs):
        draw_cdf(axes, table[table["run"] == run], LINE_COLOURS[index % len(LINE_COLOURS)], run)
    finish_cdf(axes, table.columns[1])
    if limit is not None:
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.25 * limit))
        axes.axvline(limit, color=INK, linestyle="--", linewidth=1.2)
        axes.annotate(f"limit {limit:.4g} s", (limit, 0.02), (5, 0), textcoords="offset points", fontsize=9.5)
    legend_above(axes)
    return figure


def _scale_values(axes: Axes, finite: pd.Series, threshold: float) -> _Ends:
    """Set the vertical axis so that limit and values have room; returns where infinite values are drawn."""
    known = [*finite.tolist(), threshold]
    low, high = min(known), max(known)
    if low > 0 and high / low > LOG_FROM_RATIO:
        log_y(axes, low / 1.8, high * 2.4)
        return _Ends(low / 1.5, 1.7 * high)
    high = high if high > 0 else 1.0
    axes.set_ylim(0, 1.28 * high)
    return _Ends(0.1 * high, 1.18 * high)


def _draw_trials(axes: Axes, trials: pd.DataFrame, metric: str, ends: _Ends) -> None:
    label, marker, colour = VERDICTS[trials["verdict"].iloc[0]]
    heights = trials[metric].replace({math.inf: ends.top, -math.inf: ends.bottom})
    axes.scatter(
        trials["qps"],
        heights,
        s=62,
        marker=marker,
        color="white" if marker == "s" else colour,
        edgecolors=colour if marker == "s" else "white",
        linewidths=1.4 if marker == "s" else 0.8,
        label=label,
        zorder=4,
        clip_on=False,
    )
    for qps, value in zip(trials["qps"], trials[metric], strict=True):
        if math.isfinite(value):
            continue
        axes.annotate(
            "",
            (qps, 1.0 if value > 0 else 0.0),
            (qps, ends.top if value > 0 else ends.bottom),
            xycoords=("data", "axes fraction"),
            textcoords="data",
            arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 4, "shrinkB": 0},
            zorder=3,
        )


def _draw_limit(axes: Axes, rule: Rule) -> None:
    axes.axhline(rule.threshold, color=INK, linestyle="--", linewidth=1.2, zorder=3)
    axes.annotate(
        f"limit {SIGNS[rule.op]} {rule.threshold:.4g} {rule.unit}".rstrip(),
        (0.0, rule.threshold),
        (6, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=9.5,
        va="bottom",
    )


def _draw_capacity(axes: Axes, capacity: float) -> None:
    """A line, and its rate where trials are rare: left of it at the top, or right of it at the foot."""
    low, high = axes.get_xlim()
    has_room = math.log(capacity / low) > 0.32 * math.log(high / low)
    axes.axvline(capacity, color=BLUE, linewidth=1.6, zorder=2)
    axes.annotate(
        f"capacity {capacity:.3g} QPS",
        (capacity, 1.0 if has_room else 0.0),
        (-7, -5) if has_room else (7, 7),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=10.5,
        fontweight="bold",
        color=BLUE,
        ha="right" if has_room else "left",
        va="top" if has_room else "bottom",
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )


def _value_label(rule: Rule) -> str:
    known = REQUEST_METRICS.get(rule.metric)
    name = known.label if known else rule.metric.replace("_", " ")
    unit = f" ({known.unit})" if known and known.unit != "1" else ""
    return f"{rule.aggregate} {name}{unit}".strip()

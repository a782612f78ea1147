"""The view of `dbench run`, and its short form inside the search's view."""

from __future__ import annotations

import math

from rich.text import Text

from dbench.console.layout import LABEL, Lines, Page, beside, box, ends, pairs, titled
from dbench.console.look import bar, clean, duration, elapsed, number, pad, percent, progress_line, share_of, shorten
from dbench.console.rates import RateTable
from dbench.console.stack import stack
from dbench.console.workers import errors_box, workers_box, workers_line
from dbench.progress import RunPhase, RunProgress

MAX_ERRORS = 5
TWO_BOXES_FROM = 72


def run_view(progress: RunProgress, rates: RateTable, page: Page) -> Lines:
    """Progress, load beside latency, worker table, last errors."""
    head = _head(progress, page)
    figures = _figures(progress, page)
    room = page.height - len(head) - len(figures)
    errors = errors_box(progress.recent_errors, page, min(MAX_ERRORS, room - 3 - min(len(progress.workers), 4) - 2))
    workers = workers_box(progress.workers, rates, page, max(1, room - len(errors) - 3))
    return stack([head, figures, workers, errors], page.height)


def run_summary(progress: RunProgress, rates: RateTable, page: Page) -> Lines:
    """The run in four lines, five with an error."""
    width = page.inner_width
    load = pairs(
        [
            ("offered", f"{number(progress.offered_qps)} QPS"),
            ("achieved", f"{number(progress.achieved_qps)} QPS"),
            ("in flight", f"{progress.in_flight:,}"),
            ("failed", f"{progress.num_failed:,}"),
        ],
        width,
    )
    latency = pairs([*_latencies(progress), ("send lag p99", duration(progress.lag_p99_s))], width)
    lines = [_progress_row(progress, page), load, latency, workers_line(progress.workers, rates, width)]
    if progress.recent_errors:
        newest = Text.assemble(("error ", "red"), clean(progress.recent_errors[-1], page.glyphs))
        lines.append(shorten(newest, width, page.glyphs))
    return lines


def finished_share(progress: RunProgress) -> float | None:
    """Share of the measured requests that are final."""
    return share_of(progress.num_completed + progress.num_failed, progress.num_requests)


def _latencies(progress: RunProgress) -> list[tuple[str, str]]:
    return [
        ("p50", duration(progress.latency_p50_s)),
        ("p90", duration(progress.latency_p90_s)),
        ("p99", duration(progress.latency_p99_s)),
    ]


def _head(progress: RunProgress, page: Page) -> Lines:
    g = page.glyphs
    phases = Text()
    for phase in RunPhase:
        phases.append(f" {g.step} " if phases else "", style=LABEL)
        current = phase == progress.phase
        phases.append(f"{g.running} {phase.value}" if current else phase.value, "bold green" if current else LABEL)
    if phases.cell_len + 18 > page.inner_width:
        phases = Text.assemble(("phase ", LABEL), (progress.phase.value, "bold green"))
    gone = pairs([("elapsed", elapsed(progress.elapsed_s))], page.inner_width)
    body = [ends(phases, gone, page.inner_width, g), _progress_row(progress, page)]
    target = Text(clean(progress.target, g), style=LABEL)
    return box(titled("dbench run", clean(progress.name, g)), body, page, target)


def _progress_row(progress: RunProgress, page: Page) -> Text:
    share = finished_share(progress)
    done = progress.num_completed + progress.num_failed
    tail = f" {done:,}/{progress.num_requests:,}  {percent(share):>4}  ETA {elapsed(progress.eta_s):>6}"
    style = "red" if progress.num_failed else "green"
    line = progress_line(share, page.inner_width - len(tail), page.glyphs, style)
    return shorten(line.append(tail, style=""), page.inner_width, page.glyphs)


def _figures(progress: RunProgress, page: Page) -> Lines:
    """Load and latency: side by side where there is room, else one below the other."""
    if page.width < TWO_BOXES_FROM:
        load = [pairs([(label, value)], page.inner_width) for label, value in _load(progress)]
        latency = pairs([*_latencies(progress), ("send lag p99", duration(progress.lag_p99_s))], page.inner_width)
        return box(titled("load"), [*load, latency], page)
    left = page.of_width(page.width // 2)
    right = page.of_width(page.width - left.width)
    return beside(
        box(titled("load"), _load_rows(progress, left), left),
        box(titled("latency"), _latency_bars(progress, right), right),
    )


def _load(progress: RunProgress) -> list[tuple[str, str]]:
    return [
        ("offered", f"{number(progress.offered_qps)} QPS"),
        ("achieved", f"{number(progress.achieved_qps)} QPS"),
        ("in flight", f"{progress.in_flight:,}    "),
        ("sent", f"{progress.num_sent:,}    "),
        ("failed", f"{progress.num_failed:,}    "),
    ]


def _load_rows(progress: RunProgress, page: Page) -> Lines:
    """Figures in a column; beside the achieved rate its share of the offered one."""
    rows = [Text.assemble((f"{label:<10}", LABEL), (f"{value:>12}", "bold")) for label, value in _load(progress)]
    share = share_of(progress.achieved_qps, progress.offered_qps)
    if share is not None and math.isfinite(progress.offered_qps):
        room = page.inner_width - rows[1].cell_len - 8
        rows[1].append("  ").append_text(bar(share, room, page.glyphs, "cyan")).append(f" {percent(share):>4}")
    return rows


def _latency_bars(progress: RunProgress, page: Page) -> Lines:
    """Percentiles as figures and as bars on one scale, so that the spread is seen; then the generator's lag."""
    values = (progress.latency_p50_s, progress.latency_p90_s, progress.latency_p99_s)
    top = max((v for v in values if v is not None), default=0.0)
    lines = []
    for (label, written), value in zip(_latencies(progress), values, strict=True):
        share = None if value is None else share_of(value, top)
        head = Text.assemble((f"{label} ", LABEL), pad(Text(written, style="bold"), 8, page.glyphs, right=True), "  ")
        lines.append(head.append_text(bar(share, page.inner_width - head.cell_len, page.glyphs, "cyan")))
    lines.append(Text())
    lines.append(pairs([("send lag p99", duration(progress.lag_p99_s))], page.inner_width))
    return lines

"""The view of `dbench run`, and its short form inside the search's view."""

from __future__ import annotations

import math

from rich.text import Text

from dbench.console.layout import LABEL, Lines, Page, beside, box, ends, pair_lines, pairs, stack, titled
from dbench.console.look import bar, clean, duration, elapsed, number, offered_rate, pad, percent, share_of, shorten
from dbench.console.rates import RateTable
from dbench.console.workers import errors_box, workers_box, workers_lines
from dbench.progress import RunPhase, RunProgress

MAX_ERRORS = 5
ROOMY_WIDTH = 76
ROOMY_HEIGHT = 18


def run_view(progress: RunProgress, rates: RateTable, page: Page) -> Lines:
    """Progress, load beside latency, worker table, last errors; all in one box on a small terminal."""
    small = page.width < ROOMY_WIDTH or page.height < ROOMY_HEIGHT
    top = _small_head(progress, rates, page) if small else [*_head(progress, page), *_figures(progress, page)]
    room = page.height - len(top)
    errors = errors_box(progress.recent_errors, page, min(MAX_ERRORS, room - 3 - min(len(progress.workers), 4) - 2))
    workers = workers_box(progress.workers, rates, page, room - len(errors) - 3)
    return stack([top, workers, errors], page.height)


def run_summary(progress: RunProgress, rates: RateTable, page: Page) -> Lines:
    """The run in four lines, five with an error, more on a narrow terminal."""
    width = page.inner_width
    load = [
        ("offered", offered_rate(progress.offered_qps)),
        ("achieved", f"{number(progress.achieved_qps)} QPS"),
        ("in flight", f"{progress.in_flight:,}"),
        ("failed", f"{progress.num_failed:,}"),
    ]
    latency = [*_latencies(progress), ("send lag p99", duration(progress.lag_p99_s))]
    lines = [_progress_row(progress, page), *pair_lines(load, width), *pair_lines(latency, width)]
    lines += workers_lines(progress.workers, rates, width)
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
    gone = pairs([("elapsed", elapsed(progress.elapsed_s))], page.inner_width)
    body = [ends(phases, gone, page.inner_width, g), _progress_row(progress, page)]
    target = shorten(Text(clean(progress.target, g), style=LABEL), page.width // 2, g)
    return box(titled("dbench run", clean(progress.name, g)), body, page, target)


def _small_head(progress: RunProgress, rates: RateTable, page: Page) -> Lines:
    note = phase_note(progress, page)
    return box(titled("dbench run", clean(progress.name, page.glyphs)), run_summary(progress, rates, page), page, note)


def phase_note(progress: RunProgress, page: Page) -> Text:
    """The phase and the time since the start."""
    note = Text().append(progress.phase.value, style="green")
    return note.append(f" {page.glyphs.separator} {elapsed(progress.elapsed_s)}", style=LABEL)


def _progress_row(progress: RunProgress, page: Page) -> Text:
    share = finished_share(progress)
    done = progress.num_completed + progress.num_failed
    tail = f" {done:,}/{progress.num_requests:,}  {percent(share):>4}  ETA {elapsed(progress.eta_s):>6}"
    line = bar(share, page.inner_width - len(tail), page.glyphs)
    return shorten(line.append(tail), page.inner_width, page.glyphs)


def _figures(progress: RunProgress, page: Page) -> Lines:
    """Load and latency, side by side."""
    left = page.of_width(page.width // 2)
    right = page.of_width(page.width - left.width)
    return beside(
        box(titled("load"), _load_rows(progress, left), left),
        box(titled("latency"), _latency_bars(progress, right), right),
    )


def _load(progress: RunProgress) -> list[tuple[str, str]]:
    return [
        ("offered", offered_rate(progress.offered_qps)),
        ("achieved", f"{number(progress.achieved_qps)} QPS"),
        ("in flight", f"{progress.in_flight:,}    "),
        ("sent", f"{progress.num_sent:,}    "),
        ("failed", f"{progress.num_failed:,}    "),
    ]


def _load_rows(progress: RunProgress, page: Page) -> Lines:
    """Figures in a column; beside the achieved rate its share of the offered one."""
    rows = [Text.assemble((f"{label:<10}", LABEL), (f"{value:>12}", "bold")) for label, value in _load(progress)]
    if progress.num_failed:
        rows[-1].stylize("red", len("failed"))
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

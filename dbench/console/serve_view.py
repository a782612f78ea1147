"""The view of `dbench serve`."""

from __future__ import annotations

from rich.text import Text

from dbench.console.layout import Lines, Page, box, ends, pair_lines, pairs, stack, titled
from dbench.console.look import clean, elapsed, number
from dbench.console.rates import RateTable
from dbench.console.workers import errors_box, workers_box
from dbench.progress import ServeProgress, ServerState

MAX_ERRORS = 5


def serve_view(progress: ServeProgress, rates: RateTable, page: Page) -> Lines:
    """Header with the totals, worker table, last errors."""
    head = _head(progress, rates, page)
    room = page.height - len(head)
    errors = errors_box(progress.recent_errors, page, min(MAX_ERRORS, room - 3 - min(len(progress.workers), 4) - 2))
    workers = workers_box(progress.workers, rates, page, max(1, room - len(errors) - 3))
    return stack([head, workers, errors], page.height)


def _head(progress: ServeProgress, rates: RateTable, page: Page) -> Lines:
    g = page.glyphs
    note = Text(progress.state, style="bold green" if progress.state is ServerState.READY else "bold yellow")
    where = pairs([("address", clean(progress.address, g) or "-")], page.inner_width, style="bold")
    up = pairs([("up", elapsed(progress.uptime_s))], page.inner_width)
    totals = pair_lines(
        [
            ("in server", f"{progress.num_in_server:,}"),
            ("pending", f"{progress.num_pending:,}"),
            ("completed", f"{progress.num_completed:,}"),
            ("failed", f"{progress.num_failed:,}"),
            ("cancelled", f"{progress.num_cancelled:,}"),
        ],
        page.inner_width,
    )
    speed = [
        ("requests/s", number(rates.requests_per_s)),
        ("tokens/s", number(rates.total.tokens_per_s)),
        ("TPF", number(rates.total.tokens_per_pass)),
    ]
    body = [ends(where, up, page.inner_width, g)]
    if page.is_wide:
        body.append(ends(totals[0], pairs(speed, page.inner_width), page.inner_width, g))
    else:
        body += [*totals, *pair_lines(speed, page.inner_width)]
    return box(titled("dbench serve", clean(progress.model, g)), body, page, note)

"""Boxes that several views share: the worker table and the last errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from rich.text import Text

from dbench.console.layout import BORDER, Cell, Column, Lines, Page, box, pair_lines, table, titled
from dbench.console.look import NOTHING, Glyphs, bar, clean, number, percent, share_of, shorten, sparkline
from dbench.console.rates import Rate, RateTable
from dbench.progress import WorkerProgress

STATE_STYLES = {
    "busy": "green",
    "idle": "dim",
    "queued": "yellow",
    "starting": "yellow",
    "awaited": "yellow",
    "draining": "magenta",
    "ended": "dim",
    "lost": "bold red",
}
_HOLLOW = frozenset({"idle", "starting", "awaited", "ended"})


def workers_box(workers: Sequence[WorkerProgress], rates: RateTable, page: Page, max_rows: int) -> Lines:
    """One row per worker, at most `max_rows` of them, the last of which counts the rest; empty without room."""
    if max_rows < min(2, len(workers)):
        return []
    if not workers:
        return box(titled("workers"), [Text("no worker has reported yet", style="dim")], page)
    shown = workers if len(workers) <= max_rows else workers[: max(0, max_rows - 1)]
    with_losses = any(w.num_losses for w in workers)
    rows = [_row(w, rates.of(w.worker_id), page, with_losses=with_losses) for w in shown]
    body = table(_columns(page, with_losses=with_losses), rows, page.inner_width, page.glyphs)
    hidden = workers[len(shown) :]
    if hidden:
        more = f"{page.glyphs.ellipsis} {len(hidden)} more: {_states(hidden)}"
        body.append(shorten(Text(more, style="dim"), page.inner_width, page.glyphs))
    note = f"{_states(workers)} {page.glyphs.separator} {number(rates.total.tokens_per_s)} tokens/s"
    return box(titled("workers"), body, page, Text(note, style="dim"))


def workers_lines(workers: Sequence[WorkerProgress], rates: RateTable, width: int) -> Lines:
    """All workers together: one line where the width allows it."""
    used, total = sum(w.pages_used for w in workers), sum(w.pages_total for w in workers)
    return pair_lines(
        [
            ("workers", _states(workers) if workers else NOTHING),
            ("tokens/s", number(rates.total.tokens_per_s)),
            ("TPF", number(rates.total.tokens_per_pass)),
            ("KV use", percent(share_of(used, total))),
            ("waiting", f"{sum(w.queue_depth_waiting for w in workers):,}"),
        ],
        width,
    )


def errors_box(errors: Sequence[str], page: Page, max_rows: int) -> Lines:
    """The newest errors, newest last; equal neighbours become one row with a count. Empty without errors."""
    if not errors or max_rows < 1:
        return []
    rows = []
    for error, same in groupby(errors):
        times = len(list(same))
        count = f" (x{times})" if times > 1 else ""
        room = max(0, page.inner_width - len(count))
        rows.append(shorten(Text(clean(error, page.glyphs)), room, page.glyphs).copy().append(count, BORDER))
    return box(Text("last errors", style="bold red"), rows[-max_rows:], page)


def state_style(state: str) -> str:
    return STATE_STYLES.get(state, "")


def _states(workers: Sequence[WorkerProgress]) -> str:
    counts = Counter(w.state for w in workers)
    order = {state: n for n, state in enumerate(STATE_STYLES)}
    return ", ".join(f"{counts[s]} {s}" for s in sorted(counts, key=lambda s: (order.get(s, len(order)), s)))


def _columns(page: Page, *, with_losses: bool) -> list[Column]:
    columns = [
        Column("id", right=True),
        Column("device", rank=5, min_width=8),
        Column("state", min_width=10),
        Column("waiting", rank=1, right=True),
        Column("active", right=True),
        Column("tokens/s", rank=2, right=True),
        Column("TPF", rank=3, right=True),
        Column("KV use", rank=4, min_width=6, max_width=24),
    ]
    if with_losses:
        columns.append(Column("lost", right=True))
    if page.is_wide:
        columns.append(Column("pages", rank=6, right=True))
        columns.append(Column("tokens", rank=7, right=True))
        if page.glyphs.spark:
            columns.append(Column("tokens/s, last 2 minutes", rank=8, min_width=10, max_width=60))
    return columns


def _row(worker: WorkerProgress, rate: Rate, page: Page, *, with_losses: bool) -> list[Cell]:
    g = page.glyphs
    state = clean(worker.state, g)
    mark = "" if g.only_ascii else (g.hollow if state in _HOLLOW else g.dot) + " "
    row: list[Cell] = [
        Text(str(worker.worker_id), style="bold"),
        Text(clean(worker.device, g)),
        Text(mark + state, style=state_style(state)),
        Text(f"{worker.queue_depth_waiting:,}", style="yellow" if worker.queue_depth_waiting else ""),
        Text(f"{worker.queue_depth_active:,}"),
        Text(number(rate.tokens_per_s), style="cyan"),
        Text(number(rate.tokens_per_pass)),
        _kv_cell(worker, g),
    ]
    if with_losses:
        times = f"{worker.num_losses} x" if worker.num_losses else ""
        row.append(Text(times, style="red"))
    if page.is_wide:
        row.append(Text(f"{worker.pages_used:,}/{worker.pages_total:,}" if worker.pages_total else NOTHING))
        row.append(Text(f"{worker.num_unmasked_tokens:,}"))
        if g.spark:
            row.append(partial(_history, rate.history, g))
    return row


def _kv_cell(worker: WorkerProgress, glyphs: Glyphs) -> Callable[[int], Text]:
    return partial(_share_bar, share_of(worker.pages_used, worker.pages_total), glyphs)


def _share_bar(share: float | None, glyphs: Glyphs, width: int) -> Text:
    """A bar and its percentage; the percentage alone where there is no room for a bar."""
    style = "red" if (share or 0) >= 0.9 else "yellow" if (share or 0) >= 0.7 else "green"
    figure = Text(f"{percent(share):>4}")
    room = width - figure.cell_len - 1
    return Text.assemble(bar(share, room, glyphs, style), " ", figure) if room >= 4 else figure


def _history(values: tuple[float, ...], glyphs: Glyphs, width: int) -> Text:
    return sparkline(values, width, glyphs)

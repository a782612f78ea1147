"""Which view draws which snapshot."""

from __future__ import annotations

from typing import TypeAlias

from dbench.console.layout import Lines, Page
from dbench.console.rates import RateTable
from dbench.console.run_view import run_view
from dbench.console.search_view import search_view
from dbench.console.serve_view import serve_view
from dbench.progress import RunProgress, SearchProgress, ServeProgress, WorkerProgress

Progress: TypeAlias = ServeProgress | RunProgress | SearchProgress


def draw(progress: Progress, rates: RateTable, page: Page) -> Lines:
    """The lines of a snapshot's view, within the page."""
    match progress:
        case ServeProgress():
            return serve_view(progress, rates, page)
        case RunProgress():
            return run_view(progress, rates, page)
        case SearchProgress():
            return search_view(progress, rates, page)


def workers_of(progress: Progress) -> tuple[WorkerProgress, ...]:
    """The workers that a snapshot shows, directly or in its running trial."""
    if isinstance(progress, SearchProgress):
        return progress.running.workers if progress.running else ()
    return progress.workers

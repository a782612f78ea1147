"""The live view: a region at the bottom of the terminal, drawn anew four times a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from dbench.console.board import Board
from dbench.console.layout import Lines, Page
from dbench.console.look import Glyphs, print_lines
from dbench.console.rates import RateTable
from dbench.console.run_view import run_view
from dbench.console.search_view import search_view
from dbench.console.serve_view import serve_view
from dbench.progress import Progress, RunProgress, SearchProgress, ServeProgress

REFRESHES_PER_S = 4.0


class LiveView:
    """Draws the newest snapshot; text printed through it goes above the region and stays.

    The terminal belongs to one thread at a time (`_screen`); `update` never waits for it. On every exit the
    last frame is left on the screen and the cursor is shown again.
    """

    is_live = True

    def __init__(self, console: Console, glyphs: Glyphs, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._glyphs = glyphs
        self._board = Board(clock)
        self._frame = _Frame(self._board, glyphs)
        self._reflow = _Reflow(console, self._frame)
        self._screen = RLock()
        self._live = Live(
            self._frame,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,  # results go to stdout, wherever that leads
            redirect_stderr=console.file is sys.stderr,
            vertical_overflow="crop",
        )
        self._leave = Event()
        self._thread: Thread | None = None
        self._hooked = False

    def __enter__(self) -> Self:
        try:
            self._live.start(refresh=True)
            self._console.push_render_hook(self._reflow)
            self._hooked = True
            self._thread = Thread(target=self._refresh_often, name="view", daemon=True)
            self._thread.start()
        except BaseException:  # Ctrl-C after the cursor was hidden: nobody else would show it again
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            with self._screen, suppress(OSError):  # the terminal itself may be gone
                self._restore()

    def update(self, progress: Progress) -> None:
        self._board.post(progress)

    def print(self, text: str, style: str = "") -> None:
        with self._screen:
            print_lines(self._console, text, style, self._glyphs)

    def _restore(self) -> None:
        try:
            if self._hooked:
                self._console.pop_render_hook()  # ours; `stop` takes off Live's own, which lies below
                self._hooked = False
                self._reflow.prepare()
        finally:
            self._live.stop()

    def _refresh_often(self) -> None:
        while not self._leave.wait(1 / REFRESHES_PER_S):
            try:
                with self._screen:
                    self._live.refresh()
            except OSError:  # the terminal is gone; the work that is shown goes on
                return


def draw(progress: Progress, rates: RateTable, page: Page) -> Lines:
    """The lines of a snapshot's view, within the page."""
    match progress:
        case ServeProgress():
            return serve_view(progress, rates, page)
        case RunProgress():
            return run_view(progress, rates, page)
        case SearchProgress():
            return search_view(progress, rates, page)


class _Frame:
    """The region's content as rich asks for it: at the terminal's size of that moment."""

    def __init__(self, board: Board, glyphs: Glyphs) -> None:
        self._board = board
        self._glyphs = glyphs
        self.line_widths: list[int] = []
        """Columns that each line of the last drawing took."""
        self.drawn_width = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(options.max_width, _rows(options.size.height), self._glyphs)
        lines = self._lines(page)
        self.line_widths = [line.cell_len for line in lines]
        self.drawn_width = page.width
        yield Text("\n", no_wrap=True, overflow="crop").join(lines)

    def _lines(self, page: Page) -> Lines:
        shown = self._board.read()
        if shown.progress is None:
            return [Text("starting" + self._glyphs.ellipsis, style="dim")]
        try:
            return draw(shown.progress, shown.rates, page)
        except Exception as error:  # edge of the drawing thread: a view that fails must not end a run
            message = f"this view cannot be drawn: {type(error).__name__}: {error}".replace("\n", " ")
            return [Text(message[: page.width], style="red")]


class _Code:
    """A control code that rich has no name for."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self._code, None, [(ControlType.HOME,)])  # the mark only says that the text takes no columns


_BEGIN_FRAME = _Code("\x1b[?2026h")
_END_FRAME = _Code("\r\x1b[?2026l")
"""Synchronized output: terminals that know it show a frame at once, without flicker; others ignore it.

The cursor waits at the left: behind a full line, the ^C that a terminal echoes would wrap and move the region.
"""


class _Reflow(RenderHook):
    """Frames each drawing, and puts the cursor where Live expects it after the terminal became narrower.

    Terminals wrap the lines that no longer fit, so the region takes more rows than Live will erase.
    """

    def __init__(self, console: Console, frame: _Frame) -> None:
        self._console = console
        self._frame = frame

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_BEGIN_FRAME, *self._controls(), *renderables, _END_FRAME]

    def prepare(self) -> None:
        """The same for a drawing that this hook does not see."""
        for control in self._controls():
            self._console.control(control)

    def _controls(self) -> list[Control]:
        frame, width = self._frame, self._console.width
        if not frame.line_widths or width >= frame.drawn_width:
            return []
        rows = sum(max(1, -(-used // width)) for used in frame.line_widths)
        frame.drawn_width = width
        up: list[tuple[ControlType, int]] = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        return [
            Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * (rows - 1)),
            Control((ControlType.CURSOR_DOWN, len(frame.line_widths) - 1)),
        ]


def _rows(terminal_height: int) -> int:
    """Rows of the region: some are left for the newest log lines."""
    return max(1, terminal_height - (1 if terminal_height <= 30 else terminal_height // 8))

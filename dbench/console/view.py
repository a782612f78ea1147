"""Live or plain: what the terminal can do decides."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console

from dbench.console.live import LiveView
from dbench.console.look import ASCII, UNICODE, Glyphs
from dbench.console.plain import PlainView
from dbench.progress import Progress

_DUMB = frozenset({"", "dumb", "unknown"})
_NO = frozenset({"", "0", "false", "no", "off"})
_FIXED_SIZE = frozenset({"COLUMNS", "LINES"})
"""Exported by some shells and stale after a resize; the terminal itself is asked instead."""


class View(Protocol):
    """What shows the progress of a command. Made by `make_view`, which does nothing to the terminal yet."""

    @property
    def is_live(self) -> bool:
        """Whether a region is redrawn, as opposed to lines being printed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def update(self, progress: Progress) -> None:
        """Show this snapshot from now on. Cheap, from any thread, never waits for the terminal."""

    def print(self, text: str, style: str = "") -> None:
        """A line above the live region, or a plain one; also before and after the view is entered."""


class PatientConsole(Console):
    """A console whose reader may go away: rich would end the program then, and take stdout with it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a stream can show."""

    redraws: bool
    only_ascii: bool
    colours: bool


def abilities(stream: TextIO, environment: Mapping[str, str]) -> Abilities:
    """A terminal that is neither dumb nor a CI log redraws; NO_COLOR and the locale are honoured."""
    in_ci = environment.get("CI", "").lower() not in _NO
    redraws = stream.isatty() and environment.get("TERM", "") not in _DUMB and not in_ci
    return Abilities(
        redraws=redraws,
        only_ascii=_is_c_locale(environment) or not _can_write(stream, UNICODE),
        colours=redraws and not environment.get("NO_COLOR"),
    )


def make_view(*, dashboard: bool, stream: TextIO | None = None, environment: Mapping[str, str] | None = None) -> View:
    """A live view where `dashboard` and the stream (default: stderr) allow it, else a plain one."""
    stream = sys.stderr if stream is None else stream
    environment = os.environ if environment is None else environment
    able = abilities(stream, environment)
    live = dashboard and able.redraws
    console = PatientConsole(
        file=stream,
        force_terminal=live,
        no_color=not able.colours,
        color_system="auto" if live else None,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={k: v for k, v in environment.items() if k not in _FIXED_SIZE},
    )
    glyphs = ASCII if able.only_ascii else UNICODE
    return LiveView(console, glyphs) if live else PlainView(console, glyphs)


def _is_c_locale(environment: Mapping[str, str]) -> bool:
    """Python writes UTF-8 under LC_ALL=C, but the terminal was told otherwise."""
    names = (environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((n for n in names if n), "") in ("C", "POSIX")


def _can_write(stream: TextIO, glyphs: Glyphs) -> bool:
    used = "".join((glyphs.corners, glyphs.down, glyphs.full, glyphs.half, glyphs.passed, glyphs.spark, "…"))
    try:
        used.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

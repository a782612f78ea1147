"""Glyphs and the written form of names, numbers and durations in the terminal views."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

NOTHING = "-"
"""What stands for a figure that is not known."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Every character beyond letters and digits that a view draws; each takes one column, but for the ellipsis."""

    only_ascii: bool
    corners: str
    """Top left, top right, bottom left, bottom right."""
    across: str
    down: str
    ellipsis: str
    separator: str
    step: str
    full: str
    empty: str
    half: str
    """Half a bar's cell; empty: bars grow by whole cells."""
    axis: str
    tick: str
    bracket: str
    passed: str
    failed: str
    running: str
    invalid: str
    before: str
    after: str
    dot: str
    hollow: str
    spark: str
    """Columns of a history line, from zero up; empty: no history line."""


UNICODE = Glyphs(
    only_ascii=False,
    corners="╭╮╰╯",
    across="─",
    down="│",
    ellipsis="…",
    separator="·",
    step="›",
    full="━",
    empty="─",
    half="╸",
    axis="─",
    tick="┬",
    bracket="━",
    passed="✓",
    failed="✗",
    running="◆",
    invalid="?",
    before="‹",
    after="›",
    dot="●",
    hollow="○",
    spark="▁▂▃▄▅▆▇",
)

ASCII = Glyphs(
    only_ascii=True,
    corners="++++",
    across="-",
    down="|",
    ellipsis="...",
    separator="-",
    step=">",
    full="#",
    empty=".",
    half="",
    axis="-",
    tick="+",
    bracket="=",
    passed="o",
    failed="x",
    running="*",
    invalid="?",
    before="<",
    after=">",
    dot="*",
    hollow=" ",
    spark="",
)

_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, glyphs: Glyphs) -> str:
    """Blanks for control characters: a name or a message from elsewhere must not steer the terminal."""
    line = "".join(" " if unicodedata.category(c) in _UNPRINTABLE else c for c in text)
    return line.encode("ascii", "replace").decode("ascii") if glyphs.only_ascii else line


def clean(text: str, glyphs: Glyphs) -> str:
    """`text` as one printable line."""
    return printable(" ".join(text.splitlines()), glyphs).strip()


def print_lines(console: Console, text: str, style: str, glyphs: Glyphs) -> None:
    """Print `text` without control characters; the terminal wraps what is too long."""
    lines = [printable(line, glyphs) for line in text.splitlines()]
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)


def shorten(text: Text, width: int, glyphs: Glyphs) -> Text:
    """The text itself, or a copy that ends in an ellipsis and takes at most `width` columns."""
    if text.cell_len <= width:
        return text
    room = width - cell_len(glyphs.ellipsis)
    short = text.copy()
    if room < 1:
        short.truncate(max(width, 0), overflow="crop")
        return short
    short.truncate(room, overflow="crop")
    short.rstrip()
    return short.append(glyphs.ellipsis)


def pad(text: Text, width: int, glyphs: Glyphs, *, right: bool = False) -> Text:
    """A copy of exactly `width` columns; `right` puts the blanks in front."""
    short = shorten(text, width, glyphs).copy()
    blanks = width - short.cell_len
    if right:
        short.pad_left(blanks)
    else:
        short.pad_right(blanks)
    return short


def duration(seconds: float | None) -> str:
    """A measured time: 812 ms, 1.42 s, 1:03 (minutes), 1:00:03 (hours)."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    if math.isinf(seconds):
        return "inf" if seconds > 0 else "-inf"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.9995:
        return f"{_digits(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{_digits(seconds)} s"
    return _clock(round(seconds))


def elapsed(seconds: float | None) -> str:
    """Time gone or to go, to the second: 34 s, 1:03, 1:00:03."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, int(seconds))
    return f"{whole} s" if whole < 60 else _clock(whole)


def number(value: float | None) -> str:
    """Three significant digits below 100, whole above, thousands marked."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    return _digits(value)


def offered_rate(qps: float) -> str:
    """The rate that a run offers; 0 stands for a closed loop, which has none."""
    return f"{number(qps)} QPS" if qps else "closed loop"


def rate(qps: float | None) -> str:
    """A searched rate to four digits, so that neighbours in a bisection stay apart."""
    if qps is None or not math.isfinite(qps) or abs(qps) >= 1e9:
        return number(qps)
    return _digits(qps, 4)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share * 100:.0f}%"


def _digits(value: float, significant: int = 3) -> str:
    """Fixed point with so many significant digits, whole numbers in full; tiny values in scientific form."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    if abs(round(value, decimals)) >= 10.0 ** (significant - decimals):  # 9.999 becomes 10.0, not 10.00
        decimals = max(0, decimals - 1)
    return f"{value:,.{decimals}f}"


def _clock(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def share_of(part: float, whole: float) -> float | None:
    """part / whole within 0 and 1; None when there is no whole."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


def bar(share: float | None, width: int, glyphs: Glyphs, style: str = "green") -> Text:
    """A filled line of `width` columns; empty when the share is not known."""
    width = max(0, width)
    halves = int((share or 0.0) * width * 2)
    filled = glyphs.full * (halves // 2) + (glyphs.half if halves % 2 else "")
    return Text.assemble((filled, style), (glyphs.empty * (width - len(filled)), "dim"))


def sparkline(values: tuple[float, ...], width: int, glyphs: Glyphs) -> Text:
    """The newest `width` values as columns, scaled to their largest; nothing without glyphs for it."""
    if not glyphs.spark or width <= 0:
        return Text()
    shown = values[-width:]
    top = max(shown, default=0.0)
    steps = len(glyphs.spark) - 1
    levels = [round(v / top * steps) if top > 0 else 0 for v in shown]
    return Text("".join(glyphs.spark[level] for level in levels), style="cyan")

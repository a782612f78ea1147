"""The search's picture: trials and bracket on a logarithmic axis of QPS, in two text lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from dbench.console.layout import LABEL, Lines
from dbench.console.look import Glyphs
from dbench.progress import SearchProgress, Verdict

ZOOM_BELOW = 1 / 8
"""When the bracket takes less than this share of the axis, the axis closes in on it."""
ZOOMED_SHARE = 1 / 3
LABEL_GAP = 2
TICK_GAP = 8
DECADES = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
"""Round numbers of a decade, the densest set first."""

_STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "red",
    Verdict.RUNNING: "bold cyan",
    Verdict.INVALID: "yellow",
    Verdict.UNJUDGED: "blue",
    Verdict.UNDECIDED: "yellow",
}
_ORDER = (Verdict.UNDECIDED, Verdict.UNJUDGED, Verdict.INVALID, Verdict.FAIL, Verdict.PASS, Verdict.RUNNING)
"""Which mark wins a column that several trials share: the last."""


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    width: int

    def column(self, qps: float) -> int:
        """Column of a rate; below 0 or from `width` on when it lies outside."""
        share = math.log(qps / self.low) / math.log(self.high / self.low)
        return math.floor(share * (self.width - 1) + 0.5)


def axis(progress: SearchProgress, width: int, glyphs: Glyphs) -> Lines:
    """Marks on the axis, and the labels below them; empty text until a trial is known."""
    known = [*(t.qps for t in progress.trials), progress.highest_pass, progress.lowest_fail, running_qps(progress)]
    shown = _drawable(known)
    if not shown or width < 16:
        return [Text(), Text()]
    scale = _zoomed(progress, min(shown), max(shown), width)
    ticks = _ticks(scale)
    return [_marks(progress, scale, glyphs, [scale.column(t) for t, _ in ticks]), _labels(ticks, scale)]


def running_qps(progress: SearchProgress) -> float | None:
    """Rate of the trial that runs now."""
    running = [t.qps for t in progress.trials if t.verdict == Verdict.RUNNING]
    if running:
        return running[-1]
    return progress.running.offered_qps if progress.running else None


def verdict_mark(verdict: Verdict, glyphs: Glyphs) -> tuple[str, str]:
    """Glyph and style of a verdict."""
    marks = {
        Verdict.PASS: glyphs.passed,
        Verdict.FAIL: glyphs.failed,
        Verdict.RUNNING: glyphs.running,
        Verdict.INVALID: glyphs.invalid,
        Verdict.UNJUDGED: glyphs.dot,
        Verdict.UNDECIDED: glyphs.hollow,
    }
    return marks[verdict], _STYLES[verdict]


def _drawable(rates: Iterable[float | None]) -> list[float]:
    """The rates that have a place on a logarithmic axis."""
    return [q for q in rates if q is not None and math.isfinite(q) and q > 0]


def _bracket(progress: SearchProgress) -> tuple[float, float] | None:
    low, high = progress.highest_pass, progress.lowest_fail
    if low is None or high is None or not 0 < low < high < math.inf:
        return None
    return low, high


def _zoomed(progress: SearchProgress, low: float, high: float, width: int) -> _Range:
    """All trials with a margin, or the surroundings of a bracket that would be too small to see."""
    bracket = _bracket(progress)
    if bracket and math.log(bracket[1] / bracket[0]) < ZOOM_BELOW * math.log(high / low):
        spread = math.log(bracket[1] / bracket[0])
        margin = math.exp(spread * (1 / ZOOMED_SHARE - 1) / 2)
        return _Range(bracket[0] / margin, bracket[1] * margin, width)
    margin = max((high / low) ** 0.06, 1.1) if high > low else 2.0
    return _Range(low / margin, high * margin, width)


def _marks(progress: SearchProgress, scale: _Range, glyphs: Glyphs, ticks: Iterable[int]) -> Text:
    cells = [(glyphs.axis, LABEL)] * scale.width
    for column in ticks:
        cells[column] = (glyphs.tick, LABEL)
    if bracket := _bracket(progress):
        for column in range(max(0, scale.column(bracket[0])), min(scale.width, scale.column(bracket[1]) + 1)):
            cells[column] = (glyphs.bracket, "yellow")
    running = running_qps(progress)
    for verdict in _ORDER:
        rates = [t.qps for t in progress.trials if t.verdict == verdict]
        if verdict == Verdict.RUNNING and running is not None:
            rates.append(running)
        _put(cells, [scale.column(q) for q in _drawable(rates)], verdict_mark(verdict, glyphs))
    if bracket:
        _put(cells, [scale.column(bracket[0])], (glyphs.passed, "bold green"))
        _put(cells, [scale.column(bracket[1])], (glyphs.failed, "bold red"))
    _note_outside(cells, progress, scale, glyphs)
    return Text.assemble(*cells)


def _put(cells: list[tuple[str, str]], columns: Sequence[int], mark: tuple[str, str]) -> None:
    for column in columns:
        if 0 <= column < len(cells):
            cells[column] = mark


def _note_outside(cells: list[tuple[str, str]], progress: SearchProgress, scale: _Range, glyphs: Glyphs) -> None:
    """How many trials lie beyond the ends, written over the ends of the axis."""
    columns = [scale.column(q) for q in _drawable(t.qps for t in progress.trials)]
    left, right = sum(c < 0 for c in columns), sum(c >= scale.width for c in columns)
    if left:
        for n, c in enumerate(f"{glyphs.before}{left} "):
            cells[n] = (c, LABEL)
    if right:
        text = f" {right}{glyphs.after}"
        for n, c in enumerate(text):
            cells[scale.width - len(text) + n] = (c, LABEL)


def _labels(ticks: Sequence[tuple[float, str]], scale: _Range) -> Text:
    line = [" "] * scale.width
    free = 0
    for value, text in ticks:
        start = min(max(0, scale.column(value) - len(text) // 2), scale.width - len(text))
        if start >= free:
            line[start : start + len(text)] = text
            free = start + len(text) + LABEL_GAP
    return Text("".join(line).rstrip(), style=LABEL)


def _ticks(scale: _Range) -> list[tuple[float, str]]:
    """Round rates inside the range with their labels: the densest that leaves room, even steps in a narrow range."""
    if scale.high / scale.low > 4:
        first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
        for multiples in DECADES:
            values = [m * 10.0**e for e in range(first, last + 1) for m in multiples]
            values = [v for v in values if scale.low <= v <= scale.high]
            columns = [scale.column(v) for v in values]
            if all(b - a >= TICK_GAP for a, b in pairwise(columns)):
                break
        return [(v, f"{v:,.6g}") for v in values]
    wanted = (scale.high - scale.low) / max(2, scale.width // 12)
    power = 10.0 ** math.floor(math.log10(wanted))
    steps = [m * power for m in (1, 2, 5, 10)]
    step = min(s for s in steps if s >= wanted)
    if math.ceil(scale.low / step) > math.floor(scale.high / step):  # step can be 1.25 times the range
        step = max(s for s in steps if s < wanted)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [n * step for n in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1)]
    return [(v, f"{v:,.{digits}f}") for v in values]

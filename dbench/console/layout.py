"""Boxes, tables and lines of labelled figures: everything a view is put together from.

A view is a list of `Text` lines; what does not fit is left out whole or ends in an ellipsis, never wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from dbench.console.look import Glyphs, pad, shorten

Lines = list[Text]
Cell = Text | Callable[[int], Text]
"""A table's cell; a function draws itself at the width that its column gets."""

GAP = 2
BORDER = "dim"
LABEL = "dim"


@dataclass(frozen=True, slots=True)
class Page:
    """The room that a view may fill."""

    width: int
    height: int
    glyphs: Glyphs

    @property
    def inner_width(self) -> int:
        """Columns between the walls of a box."""
        return max(0, self.width - 4)

    @property
    def is_wide(self) -> bool:
        return self.width >= 120

    def of_width(self, width: int) -> Page:
        return Page(width, self.height, self.glyphs)


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. Columns of the highest `rank` go first when the width is short; rank 0 stays."""

    title: str
    rank: int = 0
    right: bool = False
    min_width: int | None = None
    """Narrower than its widest cell only down to this, with an ellipsis; None: never, so a figure is never cut."""
    max_width: int | None = None
    """Grows up to this when there is room; None: no growth."""


def box(title: Text, body: Lines, page: Page, note: Text | None = None) -> Lines:
    """A frame of the page's width with a title in its upper edge; a note at the right of it, where it fits whole."""
    g = page.glyphs
    if page.width < 12:
        return [shorten(line, page.width, g) for line in (title, *body)]
    room = page.width - 6
    noted = note is not None and note.cell_len <= room - 12
    left = shorten(title, room - (note.cell_len + 4 if note and noted else 0), g)
    top = Text.assemble((f"{g.corners[0]}{g.across} ", BORDER), left, " ")
    fill = page.width - top.cell_len - 1 - (note.cell_len + 3 if note and noted else 0)
    top.append(g.across * fill, style=BORDER)
    if note and noted:
        top.append(" ").append_text(note).append(f" {g.across}", style=BORDER)
    top.append(g.corners[1], style=BORDER)
    bottom = Text(g.corners[2] + g.across * (page.width - 2) + g.corners[3], style=BORDER)
    return [top, *(_walled(line, page) for line in body), bottom]


def _walled(line: Text, page: Page) -> Text:
    wall = page.glyphs.down
    inner = pad(line, page.inner_width, page.glyphs)
    return Text.assemble((f"{wall} ", BORDER), inner, (f" {wall}", BORDER))


def beside(left: Lines, right: Lines) -> Lines:
    """Two boxes of equal height in one row."""
    return [Text.assemble(a, b) for a, b in zip(left, right, strict=True)]


def stack(boxes: Iterable[Lines], height: int) -> Lines:
    """Boxes on top of each other: those that fit `height` whole, in order; only a first one may be cut."""
    lines: Lines = []
    for own in boxes:
        if not lines or len(lines) + len(own) <= height:
            lines.extend(own)
    return lines[: max(0, height)]


def titled(name: str, detail: str = "") -> Text:
    text = Text(name, style="bold")
    return text.append(f" {detail}", style="bold cyan") if detail else text


def pairs(items: Sequence[tuple[str, str]], width: int, *, style: str = "") -> Text:
    """`label value` items in a line; those at the end that do not fit are left out."""
    return pair_lines(items, width, style=style)[0]


def pair_lines(items: Sequence[tuple[str, str]], width: int, *, style: str = "") -> Lines:
    """`label value` items, none broken, in as many lines as they need; at least one."""
    lines = [Text()]
    for label, value in items:
        item = Text.assemble((f"{label} ", LABEL), (value, style))
        if lines[-1].cell_len and lines[-1].cell_len + 3 + item.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1].cell_len else "").append_text(item)
    return lines


def ends(left: Text, right: Text, width: int, glyphs: Glyphs) -> Text:
    """`left` and `right` at the two ends of a line; `left` is shortened first."""
    tail = shorten(right, width, glyphs)
    return pad(left, max(0, width - tail.cell_len), glyphs).append_text(tail)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, glyphs: Glyphs) -> Lines:
    """Title line and one line per row, within `width`; drops columns by rank, then shortens."""
    kept = list(range(len(columns)))
    while _smallest(columns, rows, kept) > width:
        droppable = [i for i in kept if columns[i].rank > 0]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda i: (columns[i].rank, i)))
    widths = _widths(columns, rows, kept, width)
    titles: list[Cell] = [Text(c.title, style=LABEL) for c in columns]
    lines = []
    for row in (titles, *rows):
        line = Text()
        for i, size in zip(kept, widths, strict=True):
            cell = row[i]
            drawn = cell if isinstance(cell, Text) else cell(size)
            line.append(" " * GAP if line.cell_len else "")
            line.append_text(pad(drawn, size, glyphs, right=columns[i].right))
        line.rstrip()
        lines.append(shorten(line, width, glyphs))
    return lines


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> bool:
    """Whether every column has its place in `width`."""
    return _smallest(columns, rows, range(len(columns))) <= width


def _natural(column: Column, cells: Sequence[Cell]) -> int:
    return max([cell_len(column.title), *(c.cell_len for c in cells if isinstance(c, Text)), column.min_width or 0])


def _least(column: Column, cells: Sequence[Cell]) -> int:
    natural = _natural(column, cells)
    return natural if column.min_width is None else min(natural, max(column.min_width, cell_len(column.title)))


def _smallest(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], kept: Sequence[int]) -> int:
    return sum(_least(columns[i], [r[i] for r in rows]) for i in kept) + GAP * max(0, len(kept) - 1)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], kept: Sequence[int], width: int) -> list[int]:
    """Least widths, then what is left: first up to the natural widths, then to the largest."""
    sizes = [_least(columns[i], [r[i] for r in rows]) for i in kept]
    left = width - sum(sizes) - GAP * max(0, len(kept) - 1)
    for goal in (
        [_natural(columns[i], [r[i] for r in rows]) for i in kept],
        [columns[i].max_width or 0 for i in kept],
    ):
        for n, wanted in enumerate(goal):
            more = min(max(0, wanted - sizes[n]), max(0, left))
            sizes[n] += more
            left -= more
    return sizes

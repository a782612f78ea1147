"""Boxes on top of each other, within a height."""

from __future__ import annotations

from collections.abc import Iterable

from dbench.console.layout import Lines


def stack(boxes: Iterable[Lines], height: int) -> Lines:
    """The boxes that fit, in order; a box is shown whole or not at all, but for a first one that is too tall."""
    lines: Lines = []
    for box in boxes:
        if not lines or len(lines) + len(box) <= height:
            lines.extend(box)
    return lines[: max(0, height)]

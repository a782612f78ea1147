"""Reading events.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from dbench.events import Event, event_from_json, event_from_record

CHUNK_LINES = 100
"""Read at a time."""


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Events of a file; a torn last line, as a killed run leaves it, is passed over.

    Raises ValueError naming the line number for a bad line that is not the last.
    """
    source = iter(lines)
    num_read = 0
    while chunk := list(islice(source, CHUNK_LINES)):
        try:
            events = _events_of(chunk)
        except ValueError:
            yield from _read_line_by_line(chain(chunk, source), num_read)
            return
        yield from events
        num_read += len(chunk)


def _events_of(lines: list[str]) -> list[Event]:
    """All at once: the parser's start-up costs as much as a short line."""
    records = json.loads(f"[{','.join(lines)}]")
    if len(records) != len(lines):
        raise ValueError("a line that is no JSON object by itself")
    return [event_from_record(record) for record in records]


def _read_line_by_line(lines: Iterable[str], num_before: int) -> Iterator[Event]:
    torn: ValueError | None = None
    for number, line in enumerate(lines, num_before + 1):
        if torn is not None:
            raise torn
        if not line.strip():
            continue
        try:
            event = event_from_json(line)
        except ValueError as error:
            torn = ValueError(f"line {number}: {error}")
            continue
        yield event

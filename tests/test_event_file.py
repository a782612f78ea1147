"""Reading events.jsonl: whole, torn, and damaged files."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dbench.event_file import CHUNK_LINES, read_events
from dbench.events import event_to_json
from tests.event_builders import block, done, failed_block, sent, started

EVENTS = [
    started(3, float("inf")),
    block(scheduler=(0, 0, 1), worker=(0, 0, 1, 1, 1), steps=((1, 2),)),
    failed_block(scheduler=(0, 0, 1)),
    *(sent(f"r{i}", i, intended=float(i)) for i in range(2 * CHUNK_LINES)),
]
LINES = [event_to_json(event) + "\n" for event in EVENTS]


def test_a_written_file_reads_back_as_it_was() -> None:
    assert list(read_events(LINES)) == EVENTS


@pytest.mark.parametrize("length", [1, CHUNK_LINES, CHUNK_LINES + 1, 2 * CHUNK_LINES])
def test_a_torn_last_line_is_passed_over(length: int) -> None:
    assert list(read_events([*LINES[:length], LINES[length][:25]])) == EVENTS[:length]


@pytest.mark.parametrize("damaged", [0, CHUNK_LINES - 1, CHUNK_LINES + 7])
def test_a_torn_line_in_the_middle_is_named(damaged: int) -> None:
    lines = [*LINES[:damaged], LINES[damaged][:25] + "\n", *LINES[damaged + 1 :]]
    with pytest.raises(ValueError, match=f"line {damaged + 1}:"):
        list(read_events(lines))


def test_two_halves_of_one_line_are_no_event() -> None:
    halves = ['{"kind":"run_ended","at_s":1.0\n', '"source":"client","reason":"complete"}\n', LINES[0]]
    with pytest.raises(ValueError, match="line 1:"):
        list(read_events(halves))


def test_a_text_that_spells_a_number_stays_a_text() -> None:
    event = replace(done(), error="inf", status="nan")
    assert list(read_events([event_to_json(event)])) == [event]


@pytest.mark.parametrize("steps", ["null", "3"])
def test_a_value_that_is_no_list_where_one_belongs_is_named_with_its_line(steps: str) -> None:
    line = re.sub(r'"step_end_s":\[[^]]*\]', f'"step_end_s":{steps}', LINES[1])
    with pytest.raises(ValueError, match="line 2: event block_finished"):
        list(read_events([LINES[0], line, LINES[0]]))


def test_blank_lines_are_passed_over() -> None:
    assert list(read_events([LINES[0], "\n", LINES[1]])) == EVENTS[:2]


def test_an_unknown_kind_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2: unknown event kind 'launched'"):
        list(read_events([LINES[0], '{"kind":"launched"}\n', LINES[1]]))

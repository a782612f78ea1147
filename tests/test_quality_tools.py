"""The tools that write docs/quality.md and the model card."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from dbench.errors import UsageError
from dbench.load.tasks import TASKS
from dbench.measure.summary import RunSummary, Score, summarize
from dbench.models import embedded_directory
from dbench.serve.policy import SPANS
from dbench.unmasking_rules import UNMASKING_RULES
from tests.event_builders import ended, run_of, started
from tools import measure_quality, write_model_card
from tools.measure_quality import DOCUMENT, TABLE
from tools.quality.document import quality_table, read_section, replace_section
from tools.quality.rows import Count, Row, read_rows, row_of, with_row, write_rows
from tools.quality.settings import DEFAULT, SETTINGS


def run_with(num_right: int, tokens_per_pass: float, rate: float) -> RunSummary:
    return replace(
        summarize(run_of(started(), ended())),
        answers=Score(num_right, 70, num_right / 70),
        answers_by_task={task: Score(num_right // 7, 10, 0.5) for task in TASKS},
        tokens_per_forward_pass=tokens_per_pass,
        requests_per_sec=rate,
        tokens_per_sec=10 * rate,
    )


def some_row(model: str = "embedded") -> Row:
    return row_of(model, DEFAULT, [run_with(63, 2.5, 4.0), run_with(70, 2.75, 3.0)])


def test_several_runs_give_the_fewest_right_answers_and_the_rates_of_the_fastest() -> None:
    row = some_row()
    assert (row.answers, row.tokens_per_forward_pass) == (Count(63, 70), 2.5)
    assert (row.requests_per_sec, row.tokens_per_sec) == (4.0, 40.0)
    assert row.by_task == dict.fromkeys(TASKS, Count(9, 10))


def test_rows_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [some_row(), some_row("another")]
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv") == rows
    assert read_rows(tmp_path / "none.csv") == []


def test_a_row_takes_the_place_of_its_setting() -> None:
    first, last = (row_of("embedded", setting, [run_with(63, 2.5, 4.0)]) for setting in (SETTINGS[0], SETTINGS[-1]))
    rows = with_row(with_row(with_row([], last), some_row("another")), first)
    assert rows == [first, last, some_row("another")]
    again = row_of("embedded", SETTINGS[-1], [run_with(70, 2.5, 4.0)])
    assert with_row(rows, again) == [first, again, some_row("another")]


def test_the_table_marks_the_default() -> None:
    assert quality_table([some_row()])[-1] == "| **conf_threshold 0.9** (default) | 63 | 90.0% | 2.50 | 4.0 | 40 |"


def test_a_section_is_replaced_between_its_marks_and_nothing_else_is(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n")
    replace_section(document, "a", ["new", "lines"])
    wanted = "before\n<!-- a -->\n\nnew\nlines\n\n<!-- end of a -->\nafter\n"
    assert document.read_text() == wanted
    replace_section(document, "a", ["new", "lines"])
    assert document.read_text() == wanted
    with pytest.raises(UsageError, match="wanted the lines <!-- b --> and <!-- end of b -->"):
        replace_section(document, "b", [])


def test_every_rule_and_cache_mode_is_compared() -> None:
    rules = {setting.options.get("unmasking_strategy") for setting in SETTINGS} - {None}
    modes = {setting.options.get("cache_mode", "exact") for setting in SETTINGS}
    assert rules == UNMASKING_RULES.keys()
    assert modes == SPANS.keys()
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_every_setting_has_been_measured_on_the_embedded_model() -> None:
    measured = [row.setting for row in read_rows(TABLE) if row.model == "embedded"]
    assert measured == [setting.name for setting in SETTINGS]


def test_the_document_says_what_the_table_says() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = read_rows(TABLE)
    for model in {row.model for row in rows}:
        text = "\n".join(quality_table([row for row in rows if row.model == model]))
        assert f"<!-- measured: {model} -->\n\n{text}\n" in document, model


def test_the_document_tells_where_a_checkpoint_lay_of_no_model() -> None:
    given = argparse.Namespace(model="some/folder", name="embedded", problems=300, rounds=1, redraw=False)
    command = next(line for line in measure_quality.section(read_rows(TABLE), given) if line.startswith("- command"))
    assert "--model DIR " in command


def test_drawing_again_leaves_what_the_document_says() -> None:
    rows = read_rows(TABLE)
    for model in {row.model for row in rows}:
        given = argparse.Namespace(model="embedded", name=model, problems=7, rounds=1, redraw=True)
        assert measure_quality.section(rows, given) == read_section(DOCUMENT, f"measured: {model}")


def test_a_model_that_was_never_measured_is_refused_with_the_others() -> None:
    given = argparse.Namespace(model="embedded", name="nobody", problems=7, rounds=1, redraw=True)
    with pytest.raises(UsageError, match=r"no rows of the model 'nobody' \(it has: embedded, "):
        measure_quality.section(read_rows(TABLE), given)


def test_the_embedded_model_is_small_enough_to_come_with_the_package() -> None:
    files = [path for path in embedded_directory().parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_the_model_card_says_what_the_record_and_the_table_say() -> None:
    card = write_model_card.CARD.read_text(encoding="utf-8")
    for name, lines in write_model_card.sections(embedded_directory() / "training.json").items():
        text = "\n".join(lines)
        assert f"<!-- {name} -->\n\n{text}\n\n<!-- end of {name} -->" in card, name

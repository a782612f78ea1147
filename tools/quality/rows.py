"""Measured figures: one row per model and setting, and the CSV file that holds them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dbench.load.tasks import TASKS
from dbench.measure.summary import RunSummary, Score
from dbench.result_files import write_text
from tools.quality.settings import SETTINGS, Setting


@dataclass(frozen=True, slots=True)
class Count:
    """Right answers among problems."""

    num_right: int
    num_asked: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked


@dataclass(frozen=True, slots=True)
class Row:
    """What one model did under one setting."""

    model: str
    group: str
    setting: str
    answers: Count
    tokens_per_forward_pass: float
    requests_per_sec: float
    tokens_per_sec: float
    by_task: Mapping[str, Count]


def row_of(model: str, setting: Setting, runs: Sequence[RunSummary]) -> Row:
    """Runs of the same problems as one row: the fewest right answers, and the rates of the fastest run.

    What else a machine does can only slow a run down.
    """
    return Row(
        model=model,
        group=setting.group,
        setting=setting.name,
        answers=_fewest([run.answers for run in runs if run.answers is not None]),
        tokens_per_forward_pass=min(run.tokens_per_forward_pass or 0.0 for run in runs),
        requests_per_sec=max(run.requests_per_sec or 0.0 for run in runs),
        tokens_per_sec=max(run.tokens_per_sec or 0.0 for run in runs),
        by_task={task: _fewest([run.answers_by_task[task] for run in runs]) for task in TASKS},
    )


def with_row(rows: Iterable[Row], new: Row) -> list[Row]:
    """The rows with one added or replaced: models in the order they came, the settings of each in their own."""
    kept = [row for row in rows if (row.model, row.setting) != (new.model, new.setting)]
    models = list(dict.fromkeys(row.model for row in (*kept, new)))
    places = {setting.name: number for number, setting in enumerate(SETTINGS)}
    return sorted((*kept, new), key=lambda row: (models.index(row.model), places[row.setting]))


def _fewest(scores: Sequence[Score]) -> Count:
    return Count(min(score.num_right for score in scores), scores[0].num_asked)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Rates and shares to four decimals."""
    text = io.StringIO()
    table = [_cells(row) for row in rows]
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_text(path, text.getvalue())


def read_rows(path: Path) -> list[Row]:
    """None of a file that is not there."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _cells(row: Row) -> dict[str, object]:
    cells: dict[str, object] = {
        "model": row.model,
        "group": row.group,
        "setting": row.setting,
        "num_asked": row.answers.num_asked,
        "num_right": row.answers.num_right,
        "accuracy": f"{row.answers.accuracy:.4f}",
        "tokens_per_forward_pass": f"{row.tokens_per_forward_pass:.4f}",
        "requests_per_sec": f"{row.requests_per_sec:.4f}",
        "tokens_per_sec": f"{row.tokens_per_sec:.4f}",
    }
    for task, count in row.by_task.items():
        cells |= {f"{task}_asked": count.num_asked, f"{task}_right": count.num_right}
    return cells


def _row(cells: Mapping[str, str]) -> Row:
    def count(prefix: str, right: str, asked: str) -> Count:
        return Count(int(cells[prefix + right]), int(cells[prefix + asked]))

    return Row(
        model=cells["model"],
        group=cells["group"],
        setting=cells["setting"],
        answers=count("num_", "right", "asked"),
        tokens_per_forward_pass=float(cells["tokens_per_forward_pass"]),
        requests_per_sec=float(cells["requests_per_sec"]),
        tokens_per_sec=float(cells["tokens_per_sec"]),
        by_task={task: count(f"{task}_", "right", "asked") for task in TASKS},
    )

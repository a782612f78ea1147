"""Checked answers in a run's figures: tables, summary, and what an SLA rule is judged on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dbench.commands.summary import summary_lines
from dbench.errors import RunError, SlaError
from dbench.events import Event
from dbench.measure.summary import Score, summarize
from dbench.metrics import accuracy, request_table
from dbench.progress import Verdict
from dbench.report import write_report
from dbench.search.plan import plan_search
from dbench.search.sla import parse_rules
from dbench.search.verdict import TrialEnd, judge
from tests.event_builders import done, drawn, ended, run_of, sent, started, write_run


def asked(answers: str, *, task: str = "sort", first: int = 0) -> list[Event]:
    """One request a second: r right, w wrong, f failed, u unfinished."""
    events: list[Event] = []
    for index, answer in enumerate(answers, first):
        name = f"{task}-{index}"
        events.append(replace(sent(name, index, intended=float(index)), task=task))
        if answer != "u":
            end = done(name, index + 0.5, status="ERROR" if answer == "f" else "COMPLETED")
            events.append(replace(end, answer_is_right=answer == "r", answer_text="4" if answer == "w" else ""))
    return events


def checked_run(*events: Event, num_requests: int) -> list[Event]:
    return [replace(drawn(), checks_answers=True), started(num_requests), *events, ended(at=100.0)]


def test_failed_and_unfinished_requests_count_as_wrong_answers() -> None:
    summary = summarize(run_of(*checked_run(*asked("rrrwfu"), num_requests=6)))
    assert summary.answers == Score(3, 6, 0.5)


def test_every_task_has_its_own_score() -> None:
    events = [*asked("rrw", task="sort"), *asked("rf", task="copy", first=3)]
    summary = summarize(run_of(*checked_run(*events, num_requests=5)))
    assert summary.answers == Score(3, 5, 0.6)
    assert summary.answers_by_task == {"copy": Score(1, 2, 0.5), "sort": Score(2, 3, 2 / 3)}


def test_a_run_that_checks_nothing_has_no_score() -> None:
    summary = summarize(run_of(drawn(), started(1), sent("a"), done("a"), ended()))
    assert (summary.answers, summary.answers_by_task) == (None, {})
    assert not any(line.startswith("answers") for line in summary_lines(summary, Path("x")))


def test_the_printed_summary_counts_right_answers_and_says_what_failures_are() -> None:
    events = [*asked("rrw", task="sort"), *asked("r", task="copy", first=3)]
    (line,) = (
        line
        for line in summary_lines(summarize(run_of(*checked_run(*events, num_requests=4))), Path("x"))
        if line.startswith("answers")
    )
    assert line == "answers     75.0% right (3 of 4): copy 1/1, sort 2/3"
    failed = summarize(run_of(*checked_run(*asked("rf"), num_requests=2)))
    (line,) = (line for line in summary_lines(failed, Path("x")) if line.startswith("answers"))
    assert line == "answers     50.0% right (1 of 2, failed ones count as wrong): sort 1/2"


def test_the_tables_say_of_each_request_what_it_asked_and_whether_that_was_right(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", checked_run(*asked("rwfu"), num_requests=4))
    write_report(run_dir)
    table = pd.read_csv(run_dir / "request_metrics.csv", dtype=str, keep_default_na=False)
    assert table["task"].tolist() == ["sort"] * 4
    assert table["answer_is_right"].tolist() == ["True", "False", "False", ""]
    results = json.loads((run_dir / "benchmark_results.json").read_text())
    assert [request["answer_is_right"] for request in results["requests"]] == [True, False, False, None]
    assert results["summary"]["answers"] == {"num_right": 1, "num_asked": 4, "accuracy": 0.25}
    assert results["summary"]["answers_by_task"] == {"sort": {"num_right": 1, "num_asked": 4, "accuracy": 0.25}}


def test_requests_that_ask_nothing_have_empty_cells() -> None:
    row = request_table(run_of(started(1), sent("a"), done("a"))).iloc[0]
    assert row["task"] is None
    assert row["answer_is_right"] is pd.NA


def test_the_accuracy_of_a_rule_leaves_out_the_warm_up() -> None:
    assert accuracy(run_of(*checked_run(*asked("wwrrrrrrwf"), num_requests=10))) == 0.75


def test_without_checked_answers_the_accuracy_is_unknown() -> None:
    with pytest.raises(RunError, match=r"accuracy is unknown.*--check-answers"):
        accuracy(run_of(drawn(), started(1), sent("a"), done("a"), ended()))


@pytest.mark.parametrize(("limit", "verdict"), [("accuracy>=0.75", Verdict.PASS), ("accuracy>0.75", Verdict.FAIL)])
def test_a_trial_can_fail_by_its_answers(limit: str, verdict: Verdict) -> None:
    data = run_of(*checked_run(*asked("wwrrrrrrww"), num_requests=10))
    assert judge(TrialEnd.COMPLETE, "", data, parse_rules([limit])).verdict is verdict


@pytest.mark.parametrize(("answers", "hopeless"), [("wwrrrrrrww", True), ("wwrrrrrrff", False)])
def test_no_lower_rate_can_mend_wrong_answers_but_it_may_mend_failures(answers: str, hopeless: bool) -> None:
    data = run_of(*checked_run(*asked(answers), num_requests=10))
    judgement = judge(TrialEnd.COMPLETE, "", data, parse_rules(["accuracy>=0.9", "error_rate<=1"]))
    assert (judgement.verdict, judgement.hopeless) == (Verdict.FAIL, hopeless)


def test_a_search_refuses_a_rule_on_answers_that_nobody_checks(tmp_path: Path) -> None:
    flags = {"output_dir": str(tmp_path), "sla": ["accuracy>=0.9"], "trace": "tasks"}
    with pytest.raises(SlaError, match=r"accuracy is known only where answers are checked.*--check-answers"):
        plan_search(flags, config_path=None, environment={})
    plan = plan_search({**flags, "check_answers": "true"}, config_path=None, environment={})
    assert [rule.text for rule in plan.jobs[0].rules] == ["accuracy>=0.9", "error_rate<=0.01"]

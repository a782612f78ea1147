"""What a search leaves behind: printed lines, figures, and folders that can be judged again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from dbench.errors import UsageError
from dbench.search.capacity import StopReason
from dbench.search.files import write_job_plots
from dbench.search.reevaluate import reevaluate
from dbench.search.results import ERROR, INTERRUPTED, REEVALUATED, RUNNING, SearchResults
from dbench.search.sla import parse_rules
from dbench.search.stored import pinned
from dbench.search.summary import REASONS, result_lines, result_text
from dbench.search.verdict import STOPPED_NOTE
from tests.search.builders import Requests, ScriptedRunner, only_job, plan, rates, search, sustains


def finished(tmp_path: Path, **flags: object) -> SearchResults:
    return search(plan(tmp_path, min_search_granularity_pct=50, **flags), ScriptedRunner(sustains(3.5)))


def test_the_printed_result_names_capacity_bracket_rule_and_reason(tmp_path: Path) -> None:
    text = "\n".join(result_lines(finished(tmp_path, name="mine")))
    assert "job         mine" in text
    assert "capacity    2.82843 QPS (20 requests per trial)" in text
    assert "bracket     highest pass 2.82843 QPS, lowest fail 4 QPS (+41.4%)" in text
    assert "limited by  request_e2e_time:p90<=1s" in text
    assert "stopped     the bracket is as narrow as asked for" in text
    assert "p90 rests on 16 judged requests" in text
    assert "\x1b" not in text


def test_every_trial_has_a_line_with_values_and_margins(tmp_path: Path) -> None:
    lines = [line.split() for line in result_lines(finished(tmp_path))]
    assert ["2", "pass", "0.5", "+50.0%", "0", "+100.0%"] in lines
    assert ["4", "fail", "4", "-300.0%", "0", "+100.0%"] in lines


def test_the_coloured_result_says_the_same(tmp_path: Path) -> None:
    results = finished(tmp_path)
    assert result_text(results).plain == "\n".join(result_lines(results))


def test_an_answer_from_the_store_is_called_one(tmp_path: Path) -> None:
    finished(tmp_path)
    assert any("all stored, nothing was run" in line for line in result_lines(finished(tmp_path)))


def test_a_job_with_an_error_shows_it(tmp_path: Path) -> None:
    results = search(plan(tmp_path), ScriptedRunner(sustains(1), endings={1.0: ["error"]}))
    assert any("no worker became ready" in line for line in result_lines(results))


def test_every_reason_has_words() -> None:
    assert {*StopReason, ERROR, INTERRUPTED, RUNNING, REEVALUATED} == set(REASONS)


def test_the_figures_show_each_rule_and_both_sides_of_the_capacity(tmp_path: Path) -> None:
    results = finished(tmp_path)
    write_job_plots(results, only_job(results))
    plots = results.folder / "jobs" / only_job(results).folder_name / "plots"
    assert {p.name for p in plots.iterdir()} == {
        f"{stem}.{kind}"
        for stem in ("request_e2e_time_p90_vs_qps", "error_rate_vs_qps", "latency_cdfs")
        for kind in ("csv", "png")
    }
    assert "last pass, 2.82843 QPS" in (plots / "latency_cdfs.csv").read_text()
    assert "first fail, 4 QPS" in (plots / "latency_cdfs.csv").read_text()


def test_figures_of_another_sla_are_replaced(tmp_path: Path) -> None:
    first = finished(tmp_path)
    write_job_plots(first, only_job(first))
    second = finished(tmp_path, sla=["request_e2e_time:p50<=1s"])
    write_job_plots(second, only_job(second))
    plots = second.folder / "jobs" / only_job(second).folder_name / "plots"
    assert not list(plots.glob("*p90*"))
    assert len(list(plots.glob("*p50*"))) == 2


def test_a_list_without_an_sla_compares_the_latencies_of_all_rates(tmp_path: Path) -> None:
    results = search(plan(tmp_path, start_qps=None, qps_list="1,8", sla=None), ScriptedRunner(sustains(3.5)))
    write_job_plots(results, only_job(results))
    table = next(results.folder.glob("jobs/*/plots/latency_cdfs.csv")).read_text()
    assert "1 QPS" in table
    assert "8 QPS" in table


def test_stored_trials_are_judged_by_other_limits_without_running_or_writing(tmp_path: Path) -> None:
    first = search(plan(tmp_path), ScriptedRunner(lambda qps: Requests(0.2 * qps)))
    before = (first.folder / "capacity_search_results.json").read_bytes()
    job = only_job(reevaluate(first.folder, parse_rules(["request_e2e_time:p90<=0.5s"])))
    assert rates(job) == rates(only_job(first))
    assert (job.bracket.highest_pass, job.bracket.lowest_fail) == (2, 4)
    assert (job.capacity, job.reason) == (2, "reevaluated")
    assert job.binding_rule == "request_e2e_time:p90<=0.5s"
    assert (first.folder / "capacity_search_results.json").read_bytes() == before


def test_judging_again_by_the_same_limits_gives_the_same_result(tmp_path: Path) -> None:
    first = finished(tmp_path)
    again = only_job(reevaluate(first.folder, parse_rules(["request_e2e_time:p90<=1s"])))
    assert (again.capacity, again.reason) == (only_job(first).capacity, "bracket_closed")


@pytest.mark.parametrize(("sla", "said"), [((), "no limit to judge by"), (("error_rate<=1",), "holds no search")])
def test_what_cannot_be_judged_again_is_refused(tmp_path: Path, sla: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        reevaluate(tmp_path, parse_rules(sla))


def test_a_stopped_trial_shows_what_its_value_is_at_least(tmp_path: Path) -> None:
    # at 4 QPS one of the three judged requests has taken its 2 s, the others are 1.75 and 1.5 s old
    runner = ScriptedRunner(lambda qps: Requests(0.5 if qps < 4 else 2.0), endings={4.0: ["stopped"]})
    results = search(plan(tmp_path, min_search_granularity_pct=50), runner)
    lines = result_lines(results)
    assert ["4", "fail", "1.75", "-75.0%", "-", "-", "stopped", "early"] in [line.split() for line in lines]
    assert any(STOPPED_NOTE in line for line in lines)
    write_job_plots(results, only_job(results))
    (plots,) = results.folder.glob("jobs/*/plots")
    with (plots / "error_rate_vs_qps.csv").open(newline="") as file:
        assert [row["qps"] for row in csv.DictReader(file)] == ["1", "2", "2.82843"]
    with (plots / "request_e2e_time_p90_vs_qps.csv").open(newline="") as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["pass", "pass", "pass", "fail_stopped_early"]
    assert "first fail, 4 QPS (stopped early)" in (plots / "latency_cdfs.csv").read_text()


def test_judged_again_a_stopped_trial_is_undecided_where_its_part_does_not_decide(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5), endings={4.0: ["stopped"]})
    first = search(plan(tmp_path, min_search_granularity_pct=50), runner)
    job = only_job(reevaluate(first.folder, parse_rules(["request_e2e_time:p90<=5s"])))
    assert [(t.qps, str(t.verdict)) for t in job.trials] == [
        (1, "pass"),
        (2, "pass"),
        (4, "undecided"),
        (2.82843, "pass"),
    ]
    assert (job.capacity, job.bracket.lowest_fail, job.reason) == (2.82843, None, "reevaluated")
    assert any("undecided" in line for line in result_lines(SearchResults("x", first.folder, (job,))))


BROKEN = {
    "runs/1/trial_result.json": "remove its folder, and the rate is run again",
    "job_summary.json": "the command of the search writes it again",
}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"qps": "fast"}', "\udc80"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_a_search_is_one_line_with_what_to_do(tmp_path: Path, name: str, content: str) -> None:
    folder = finished(tmp_path).folder
    path = next(folder.glob(f"jobs/*/{name}"))
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError) as caught:
        reevaluate(folder, parse_rules(["error_rate<=1"]))
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be read (")
    assert message.endswith(BROKEN[name])
    assert "\n" not in message


def test_a_broken_trial_is_an_error_of_the_job_that_needs_it(tmp_path: Path) -> None:
    folder = finished(tmp_path).folder
    next(folder.glob("jobs/*/runs/1/trial_result.json")).write_text("{")
    job = only_job(finished(tmp_path, sla=["request_e2e_time:p50<=1s"]))
    assert job.reason == ERROR
    assert "runs/1/trial_result.json: cannot be read" in job.error


def test_a_broken_record_of_values_of_the_moment_says_what_to_remove(tmp_path: Path) -> None:
    next(finished(tmp_path).folder.glob("jobs/*/job.json")).write_text("[]")
    with pytest.raises(UsageError, match=r"job\.json: cannot be read .* remove the job's folder"):
        finished(tmp_path)


def test_values_of_the_moment_stay_those_of_the_first_command(tmp_path: Path) -> None:
    job = plan(tmp_path).jobs[0]
    pages = job.options.value("kv_max_pages")
    assert pinned(job.options, tmp_path / "job").value("kv_max_pages") == pages
    with_less_memory = job.options.replace("kv_max_pages", 5, "auto: less memory")
    assert pinned(with_less_memory, tmp_path / "job").value("kv_max_pages") == pages


def test_values_that_were_given_are_not_pinned(tmp_path: Path) -> None:
    job = plan(tmp_path, kv_max_pages=5000).jobs[0]
    assert pinned(job.options, tmp_path / "job").value("kv_max_pages") == 5000
    assert json.loads((tmp_path / "job" / "job.json").read_text())["filled_in"] == {}

"""Whole searches over scripted systems."""

from __future__ import annotations

import csv
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dbench.progress import SearchProgress, Verdict
from dbench.search.keys import digest
from dbench.search.objective import PROBE_CONCURRENCY
from dbench.search.plan import Job, SearchPlan, plan_search
from dbench.search.results import INTERRUPTED
from dbench.search.store import Claim, TrialStore
from dbench.search.study import Tools, run_search
from tests.search.builders import SLOW_S, Requests, ScriptedRunner, only_job, plan, rates, search, sustains


def test_a_search_finds_the_capacity_and_names_what_limits_it(tmp_path: Path) -> None:
    results = search(plan(tmp_path, min_search_granularity_pct=10), ScriptedRunner(sustains(3.5)))
    job = only_job(results)
    assert rates(job) == [1, 2, 4, 2.82843, 3.36359, 3.66802]
    assert (job.capacity, job.bracket.lowest_fail, job.reason) == (3.36359, 3.66802, "bracket_closed")
    assert job.binding_rule == "request_e2e_time:p90<=1s"
    assert results.exit_code == 0


def test_the_server_is_kept_for_the_job_and_given_back_after_it(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5))
    search(plan(tmp_path), runner)
    assert len(runner.ran) > 5
    assert runner.num_closed == 1


def test_a_finished_search_is_answered_from_its_trials(tmp_path: Path) -> None:
    first = search(plan(tmp_path), ScriptedRunner(sustains(3.5)))
    runner = ScriptedRunner(sustains(9))
    second = search(plan(tmp_path), runner)
    assert runner.ran == []
    assert second.folder == first.folder
    assert only_job(second).trials == only_job(first).trials
    assert only_job(second).answered_from_store
    assert not only_job(first).answered_from_store


def test_a_finer_granularity_goes_on_from_the_stored_trials(tmp_path: Path) -> None:
    coarse = search(plan(tmp_path, min_search_granularity_pct=50), ScriptedRunner(sustains(3.5)))
    runner = ScriptedRunner(sustains(3.5))
    fine = search(plan(tmp_path, min_search_granularity_pct=10), runner)
    assert rates(only_job(fine)) == [*rates(only_job(coarse)), *runner.ran]
    assert runner.ran == [3.36359, 3.66802]


def test_another_sla_is_judged_from_the_stored_runs(tmp_path: Path) -> None:
    search(plan(tmp_path), ScriptedRunner(sustains(3.5)))
    runner = ScriptedRunner(sustains(3.5))
    lax = search(plan(tmp_path, sla=["request_e2e_time:p90<=5s"], max_qps_cap=4), runner)
    job = only_job(lax)
    assert runner.ran == []
    assert (job.capacity, job.reason) == (4, "cap_reached")
    assert all(trial.cached for trial in job.trials)


def test_another_load_is_another_search(tmp_path: Path) -> None:
    first = plan(tmp_path)
    assert plan(tmp_path).folder == first.folder
    assert plan(tmp_path, num_requests=21).folder != first.folder
    assert plan(tmp_path, block_length=16).folder != first.folder
    assert plan(tmp_path, seed=1).folder != first.folder
    assert plan(tmp_path, sla=["error_rate<=0.5"], max_iterations=3).folder == first.folder


def test_a_pass_at_the_cap_ends_the_search_there(tmp_path: Path) -> None:
    job = only_job(search(plan(tmp_path, max_qps_cap=5), ScriptedRunner(sustains(100))))
    assert rates(job) == [1, 2, 4, 5]
    assert (job.capacity, job.reason) == (5, "cap_reached")


def test_a_limit_that_no_request_can_meet_has_no_capacity(tmp_path: Path) -> None:
    results = search(plan(tmp_path), ScriptedRunner(lambda qps: Requests(SLOW_S)))
    job = only_job(results)
    assert rates(job) == [1, 0.5, 0.25]  # at 0.25 QPS every request of 4 s has the server to itself
    assert (job.capacity, job.reason, results.exit_code) == (None, "no_pass_in_range", 1)


def test_a_timeout_is_a_fail_with_its_reason(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5), endings={2.0: ["timeout"]})
    job = only_job(search(plan(tmp_path, min_search_granularity_pct=50), runner))
    timed_out = job.trials[1]
    assert (timed_out.qps, timed_out.verdict, timed_out.timed_out) == (2, Verdict.FAIL, True)
    assert "timeout" in timed_out.reason
    assert job.binding_rule == "timeout"
    assert job.capacity == 1.41421


def test_a_crash_under_load_is_tried_once_more(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5), endings={2.0: ["server_lost"]})
    job = only_job(search(plan(tmp_path, min_search_granularity_pct=50), runner))
    assert runner.ran[:4] == [1, 2, 2, 4]
    assert job.trials[1].verdict is Verdict.PASS
    assert job.trials[1].run_dir.endswith("runs/2-2")


def test_a_second_crash_is_a_fail(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5), endings={2.0: ["server_lost", "server_lost"]})
    job = only_job(search(plan(tmp_path, min_search_granularity_pct=50), runner))
    assert runner.ran == [1, 2, 2, 1.41421]
    assert job.trials[1].verdict is Verdict.FAIL
    assert job.trials[1].reason.startswith("crash")
    assert (job.capacity, job.binding_rule) == (1.41421, "crash")


def test_invalid_trials_are_repeated_twice_and_then_end_the_search(tmp_path: Path) -> None:
    late = ScriptedRunner(lambda qps: Requests(lag_s=0.5 if qps == 2 else 0.0))
    results = search(plan(tmp_path), late)
    job = only_job(results)
    assert late.ran == [1, 2, 2, 2]
    assert [t.verdict for t in job.trials[1:]] == [Verdict.INVALID] * 3
    assert (job.capacity, job.reason, results.exit_code) == (None, "invalid_trials", 1)


def test_the_next_call_tries_invalid_trials_again(tmp_path: Path) -> None:
    search(plan(tmp_path), ScriptedRunner(lambda qps: Requests(lag_s=0.5 if qps == 2 else 0.0)))
    runner = ScriptedRunner(sustains(3.5))
    job = only_job(search(plan(tmp_path), runner))
    assert runner.ran[:2] == [2, 4]
    assert job.reason == "bracket_closed"


def test_a_list_of_rates_is_run_in_its_order(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5))
    job = only_job(search(plan(tmp_path, start_qps=None, qps_list="4,1,2"), runner))
    assert runner.ran == [4, 1, 2]
    assert (job.capacity, job.reason) == (2, "list_done")


def test_a_list_without_an_sla_is_run_and_not_judged(tmp_path: Path) -> None:
    results = search(plan(tmp_path, start_qps=None, qps_list="1,8", sla=None), ScriptedRunner(sustains(3.5)))
    job = only_job(results)
    assert [t.verdict for t in job.trials] == [Verdict.UNJUDGED] * 2
    assert (job.capacity, results.exit_code) == (None, 0)


def test_the_first_rate_is_half_the_throughput_of_a_probe(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5))
    job = only_job(search(plan(tmp_path, start_qps=None), runner))
    throughput = 20 / (19 * 0.05 + 0.5)
    assert PROBE_CONCURRENCY == 10
    assert runner.ran[0] == 0
    assert rates(job)[0] == pytest.approx(throughput / 2, rel=0.01)


def test_the_probe_is_made_once(tmp_path: Path) -> None:
    first = search(plan(tmp_path, start_qps=None, max_iterations=2), ScriptedRunner(sustains(3.5)))
    runner = ScriptedRunner(lambda qps: Requests(0.01))
    second = search(plan(tmp_path, start_qps=None, max_iterations=3), runner)
    assert 0 not in runner.ran
    assert only_job(second).settings.start_qps == only_job(first).settings.start_qps


def test_another_sla_starts_at_the_same_rate_and_shares_the_runs(tmp_path: Path) -> None:
    search(plan(tmp_path, start_qps=None), ScriptedRunner(sustains(9)))
    runner = ScriptedRunner(sustains(9))
    job = only_job(search(plan(tmp_path, start_qps=None, sla=["request_e2e_time:p50<=1s"]), runner))
    assert runner.ran == []
    assert job.reason == "bracket_closed"


def test_a_probe_that_loses_its_server_is_made_once_more(tmp_path: Path) -> None:
    runner = ScriptedRunner(sustains(3.5), endings={0.0: ["server_lost"]})
    assert only_job(search(plan(tmp_path, start_qps=None), runner)).reason == "bracket_closed"
    assert runner.ran[:2] == [0, 0]


def test_a_probe_that_fails_is_an_error_of_the_job(tmp_path: Path) -> None:
    results = search(plan(tmp_path, start_qps=None), ScriptedRunner(sustains(1), endings={0.0: ["timeout"]}))
    assert "probe" in only_job(results).error
    assert results.exit_code == 1


def test_a_server_that_never_becomes_ready_is_an_error_of_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        results = search(plan(tmp_path), ScriptedRunner(sustains(1), endings={1.0: ["error"]}))
    job = only_job(results)
    assert (job.error, job.reason, job.capacity) == ("no worker became ready", "error", None)
    assert results.exit_code == 1
    assert "no worker became ready" in caplog.text


def test_a_search_that_failed_to_start_goes_on_with_the_next_call(tmp_path: Path) -> None:
    search(plan(tmp_path), ScriptedRunner(sustains(3.5), endings={2.0: ["error"]}))
    runner = ScriptedRunner(sustains(3.5))
    assert only_job(search(plan(tmp_path), runner)).reason == "bracket_closed"
    assert runner.ran[0] == 2


def test_an_interrupted_trial_is_run_again_and_the_finished_ones_are_kept(tmp_path: Path) -> None:
    results = search(plan(tmp_path), ScriptedRunner(sustains(3.5), endings={4.0: ["interrupted"]}))
    job = only_job(results)
    assert rates(job) == [1, 2]
    assert (job.reason, results.exit_code) == (INTERRUPTED, 130)
    written = json.loads((results.folder / "capacity_search_results.json").read_text())
    assert [t["qps"] for t in written["jobs"][0]["search_trace"]] == [1, 2]
    runner = ScriptedRunner(sustains(3.5))
    search(plan(tmp_path), runner)
    assert runner.ran[0] == 4


def test_the_files_hold_what_was_found(tmp_path: Path) -> None:
    results = search(plan(tmp_path, min_search_granularity_pct=50, name="mine"), ScriptedRunner(sustains(3.5)))
    job = only_job(results)
    record = json.loads((results.folder / "capacity_search_results.json").read_text())
    assert record["schema_version"] == 1
    (entry,) = record["jobs"]
    assert (entry["job_name"], entry["max_qps_under_sla"], entry["num_trials"]) == ("mine", 2.82843, 4)
    trace = entry["search_trace"]
    assert [t["passed"] for t in trace] == [True, True, False, True]
    assert trace[2]["metric_values"] == {"request_e2e_time:p90": pytest.approx(4.0), "error_rate": 0.0}
    assert trace[2]["reason"] == "request_e2e_time:p90 = 4s, wanted <=1s"
    assert all((results.folder / t["run_dir"] / "trial_result.json").is_file() for t in trace)
    assert not any(t["cached"] or t["timed_out"] for t in trace)
    summary = json.loads((results.folder / "jobs" / job.folder_name / "job_summary.json").read_text())
    assert {**summary, "schema_version": 1} == {**entry, "schema_version": 1}
    with (results.folder / "capacity_search_results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["job_name"], row["max_qps_under_sla"], row["num_trials"]) == ("mine", "2.82843", "4")
    assert (row["error"], row["schema_version"]) == ("", "1")


def test_small_capacities_keep_their_digits(tmp_path: Path) -> None:
    results = search(plan(tmp_path, start_qps=0.001), ScriptedRunner(sustains(0.00123)))
    with (results.folder / "capacity_search_results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0.0012 <= float(row["max_qps_under_sla"]) <= 0.00123 < float(row["lowest_fail"]) < 0.00127


def test_progress_shows_trials_bracket_and_the_running_one(tmp_path: Path) -> None:
    seen: list[SearchProgress] = []
    search(plan(tmp_path, min_search_granularity_pct=50), ScriptedRunner(sustains(3.5)), seen.append)
    last = seen[-1]
    assert [t.verdict for t in last.trials] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert (last.highest_pass, last.lowest_fail) == (2.82843, 4)
    assert last.rules == ("request_e2e_time:p90<=1s", "error_rate<=0.01")
    assert last.trials[0].rules[0].value == pytest.approx(0.5)
    running = [p for p in seen if p.running is not None]
    assert [p.trials[-1].qps for p in running] == [1, 2, 4, 2.82843]
    assert all(p.trials[-1].verdict is Verdict.RUNNING for p in running)


# ---- what the answer does not rest on ----


def fail(*_: object) -> None:
    raise ZeroDivisionError("a bug in a figure")


def test_figures_that_cannot_be_made_hide_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = jobs_plan(tmp_path)
    with caplog.at_level(logging.ERROR):
        results = run_search(plan, tools=Tools(lambda job, folder: ScriptedRunner(sustains(3.5)), fail, fail))
    assert [job.capacity for job in results.jobs] == [2.82843] * 3
    assert results.exit_code == 0
    assert "job fast: its figures are not complete" in caplog.text
    assert "runs/1: its report is not complete" in caplog.text


def test_a_finished_search_answers_without_the_folder_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = search(plan(tmp_path), ScriptedRunner(sustains(3.5)))
    for bound in (only_job(first).bracket.highest_pass, only_job(first).bracket.lowest_fail):
        shutil.rmtree(next(first.folder.glob(f"jobs/*/runs/{bound:g}")))
    runner = ScriptedRunner(sustains(3.5))
    with caplog.at_level(logging.ERROR):
        tools = Tools(lambda job, folder: runner, lambda run_dir: None)
        second = run_search(plan(tmp_path), tools=tools)
    assert runner.ran == []
    assert (only_job(second).capacity, second.exit_code) == (only_job(first).capacity, 0)
    assert "its figures are not complete" in caplog.text


# ---- several jobs ----

JOBS = """
sla: ["request_e2e_time:p90<=1s"]
benchmark_base: {num_requests: 20}
search: {min_search_granularity_pct: 50}
jobs:
  - {name: slow, start_qps: 1}
  - {name: broken, start_qps: 1, benchmark_overrides: {block_length: 16}}
  - {name: fast, start_qps: 1, benchmark_overrides: {max_batch_size: 64}}
"""


def jobs_plan(tmp_path: Path) -> SearchPlan:
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS)
    return plan_search({"output_dir": str(tmp_path)}, config_path=path, environment={})


def three_systems(ran: list[str]) -> Callable[[Job], ScriptedRunner]:
    def runner(job: Job) -> ScriptedRunner:
        ran.append(job.name)
        endings = {1.0: ["error"]} if job.name == "broken" else {}
        return ScriptedRunner(sustains({"slow": 3.5, "broken": 0, "fast": 9}[job.name]), endings=endings)

    return runner


def test_a_job_that_raises_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    results = search(jobs_plan(tmp_path), three_systems([]))
    slow, broken, fast = results.jobs
    assert (slow.capacity, fast.capacity) == (2.82843, 8)
    assert (broken.capacity, broken.error) == (None, "no worker became ready")
    assert results.exit_code == 1
    with (results.folder / "capacity_search_results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["job_name"], r["error"]) for r in rows] == [
        ("slow", ""),
        ("broken", "no worker became ready"),
        ("fast", ""),
    ]


def test_ctrl_c_keeps_what_other_jobs_had_found(tmp_path: Path) -> None:
    search(jobs_plan(tmp_path), three_systems([]))
    interrupted = ScriptedRunner(sustains(3.5), endings={1.0: ["interrupted"]})
    results = search(jobs_plan(tmp_path), interrupted)
    assert results.exit_code == 130
    written = json.loads((results.folder / "capacity_search_results.json").read_text())
    assert [(j["reason"], j["num_trials"]) for j in written["jobs"]] == [
        ("bracket_closed", 4),
        ("interrupted", 0),
        ("bracket_closed", 6),
    ]


def test_a_job_that_another_process_works_on_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = jobs_plan(tmp_path)
    slow = plan.jobs[0]
    other = TrialStore(plan.folder, slow.folder_name, digest(slow.sla_text), slow.settings)
    other.open()
    claim = other.claim()
    assert isinstance(claim, Claim)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        if seconds:
            naps.append(seconds)
            other.abandon(claim)

    monkeypatch.setattr(time, "sleep", nap)
    order: list[str] = []
    finished: list[str] = []
    search(plan, three_systems(order), lambda p: finished.append(p.job) if p.job not in finished else None)
    assert finished == ["broken", "fast", "slow"]
    assert len(naps) == 1

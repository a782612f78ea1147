"""A search whose trials stop early."""

from __future__ import annotations

import json
from pathlib import Path

from dbench.progress import Verdict
from dbench.search.results import SearchResults
from tests.search.builders import ScriptedRunner, only_job, plan, search, sustains


def with_a_stop_at_4(tmp_path: Path) -> SearchResults:
    """Passes at 1 and 2, and a trial at 4 that was left after 7 of 20 requests: 4 warm up, and 3 of 16 are slow."""
    runner = ScriptedRunner(sustains(3.5), endings={4.0: ["stopped"]})
    return search(plan(tmp_path, min_search_granularity_pct=50), runner)


def test_a_trial_that_was_stopped_early_is_a_fail_and_says_so(tmp_path: Path) -> None:
    results = with_a_stop_at_4(tmp_path)
    stopped = only_job(results).trials[2]
    assert (stopped.qps, stopped.verdict, stopped.stopped_early) == (4, Verdict.FAIL, True)
    assert (only_job(results).capacity, only_job(results).binding_rule) == (2.82843, "request_e2e_time:p90<=1s")
    record = json.loads((results.folder / "capacity_search_results.json").read_text())
    assert [t["stopped_early"] for t in record["jobs"][0]["search_trace"]] == [False, False, True, False]
    assert json.loads((results.folder / stopped.run_dir / "trial_result.json").read_text())["outcome"] == "stopped"


def test_a_stopped_trial_answers_another_sla_that_its_part_breaks(tmp_path: Path) -> None:
    with_a_stop_at_4(tmp_path)
    runner = ScriptedRunner(sustains(9))
    flags = {"sla": ["request_e2e_time:p90<=1.5s"], "min_search_granularity_pct": 50}
    job = only_job(search(plan(tmp_path, **flags), runner))
    assert runner.ran == []
    assert job.capacity == 2.82843


def test_a_stopped_trial_that_does_not_decide_is_run_again(tmp_path: Path) -> None:
    with_a_stop_at_4(tmp_path)
    runner = ScriptedRunner(sustains(9))
    job = only_job(search(plan(tmp_path, sla=["request_e2e_time:p90<=5s"], max_qps_cap=4), runner))
    assert runner.ran == [4]
    assert (job.capacity, job.reason) == (4, "cap_reached")
    assert job.trials[-1].run_dir.endswith("runs/4-2")

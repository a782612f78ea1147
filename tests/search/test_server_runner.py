"""A search against a real server, with the embedded model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from dbench.config import resolve
from dbench.events import Event
from dbench.options import COMMAND_SECTIONS
from dbench.progress import RunPhase, SearchProgress, Verdict
from dbench.report import write_report
from dbench.search.results import SearchResults
from dbench.search.server_runner import ServerRunner, lost_worker
from dbench.search.study import Tools, run_search
from dbench.serve import launch, local_workers
from tests.event_builders import started, worker_lost, worker_up, write_run
from tests.search.builders import only_job, plan


class Killer:
    """Kills a process of the server at a moment of the search, once."""

    def __init__(self, module: str, moment: Callable[[SearchProgress], bool]) -> None:
        self._module = module
        self._moment = moment
        self.victims: list[int] = []

    def __call__(self, progress: SearchProgress) -> None:
        if not self.victims and self._moment(progress):
            children = psutil.Process().children(recursive=True)
            self.victims = [child.pid for child in children if self._module in child.cmdline()][:1]
            for pid in self.victims:
                os.kill(pid, signal.SIGKILL)


def is_measuring(progress: SearchProgress) -> bool:
    return progress.running is not None and progress.running.phase is RunPhase.MEASURING


def searched(tmp_path: Path, killer: Killer, **flags: object) -> SearchResults:
    fixed = {"prompt_tokens": 16, "gen_tokens": 32, "num_requests": 6, "max_batch_size": 8}
    sla = ["error_rate<=0.0", "request_e2e_time:p90<=100s"]  # so slack that a busy machine's send lag is no matter
    tools = Tools(partial(ServerRunner, workers_patience_s=0.5), write_report)  # no waiting for a dead worker
    return run_search(plan(tmp_path, sla=sla, start_qps=None, **{**fixed, **flags}), tools=tools, on_progress=killer)


def has_children() -> bool:
    return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


def test_a_server_that_dies_under_load_is_started_again_and_none_is_left(tmp_path: Path) -> None:
    killer = Killer(launch.MODULE, is_measuring)
    results = searched(tmp_path, killer, qps_list="20")
    job = only_job(results)
    assert killer.victims
    assert (job.error, [t.verdict for t in job.trials]) == ("", [Verdict.PASS])
    assert job.capacity == 20
    run_dir = results.folder / job.trials[0].run_dir
    assert run_dir.name == "20-2"
    repeated = resolve(COMMAND_SECTIONS["run"], {}, yaml_path=run_dir / "config.yaml", environment={})
    assert repeated.value("qps") == 20
    for name in ("events.jsonl", "request_metrics.csv", "environment.json", "trial_result.json"):
        assert (run_dir / name).is_file()
    assert (run_dir.parent.parent / "server.log").is_file()
    assert not has_children()


def test_a_trial_that_loses_a_worker_is_run_once_more_with_all_workers(tmp_path: Path) -> None:
    killer = Killer(local_workers.MODULE, is_measuring)
    results = searched(tmp_path, killer, qps_list="20", num_requests=20, gpus="cpu,cpu")
    (trial,) = only_job(results).trials
    assert killer.victims
    assert trial.verdict is Verdict.PASS
    run_dir = results.folder / trial.run_dir
    assert run_dir.name == "20-2"
    assert lost_worker(run_dir.with_name("20"), 2).startswith("worker ")
    assert lost_worker(run_dir, 2) == ""
    assert not (run_dir.with_name("20") / "trial_result.json").exists()
    assert not has_children()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([worker_up(), started()], "1 of 2 workers were ready when the load began"),
        ([worker_up(), started(), worker_up(3.0, 1)], "1 of 2 workers were ready when the load began"),
        ([worker_up(), worker_up(-1.0, 1), started()], ""),
        ([worker_up(), worker_up(-1.0, 1), started(), worker_lost(3.0, 1)], "worker 1 was lost: its stream ended"),
        (
            [worker_up(), worker_up(-1.0, 1), started(), worker_lost(3.0, 1), worker_up(5.0, 1)],
            "worker 1 was lost: its stream ended",
        ),
    ],
)
def test_a_worker_that_was_away_is_seen_in_the_events(tmp_path: Path, events: list[Event], said: str) -> None:
    assert lost_worker(write_run(tmp_path, events), 2) == said

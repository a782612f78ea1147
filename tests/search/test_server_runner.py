"""A search against a real server, with the embedded model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from dbench.config import resolve
from dbench.options import COMMAND_SECTIONS
from dbench.progress import RunPhase, SearchProgress, Verdict
from dbench.search.study import run_search
from tests.search.builders import only_job, plan


class ServerKiller:
    """Kills the first server that is under load."""

    def __init__(self) -> None:
        self.victims: list[int] = []

    def __call__(self, progress: SearchProgress) -> None:
        is_measuring = progress.running is not None and progress.running.phase is RunPhase.MEASURING
        if is_measuring and not self.victims:
            self.victims = [child.pid for child in psutil.Process().children()]
            for pid in self.victims:
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_dies_under_load_is_started_again_and_none_is_left(tmp_path: Path) -> None:
    killer = ServerKiller()
    fixed = {"prompt_tokens": 16, "gen_tokens": 32, "num_requests": 6, "max_batch_size": 8}
    sla = ["error_rate<=0.0", "request_e2e_time:p90<=100s"]  # so slack that a busy machine's send lag is no matter
    results = run_search(plan(tmp_path, sla=sla, start_qps=None, qps_list="20", **fixed), on_progress=killer)
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
    assert [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE] == []

"""One trial: run a rate, or find the run that is already there, and judge it.

A trial's folder is a full run directory. Its trial_result.json is written last, so a folder without one is
a run that something cut short, and is never taken for a trial.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dbench.errors import RunError
from dbench.load.driver import RunResult
from dbench.metrics import load_run
from dbench.options import LoadOptions
from dbench.progress import RunProgress, Verdict
from dbench.result_files import write_json
from dbench.search.files import JOBS
from dbench.search.keys import trial_key
from dbench.search.plan import Job
from dbench.search.results import rule_to_json
from dbench.search.sla import Rule, RuleResult
from dbench.search.space import qps_name, rounded
from dbench.search.store import Claim, RuleValue, StoredTrial
from dbench.search.verdict import TrialEnd, judge

logger = logging.getLogger(__name__)

TRIAL_FILE = "trial_result.json"
RUNS = "runs"

MAX_CRASHES = 2
"""Runs of one trial that may lose their server; the last makes it a fail."""

PROBE_NAME = "probe"
PROBE_REQUESTS = 20
PROBE_CONCURRENCY = 10
"""Half of the requests: the server batches as under load, and the end of the run, when slots stay empty, is short."""

ENDS = {"complete": TrialEnd.COMPLETE, "timeout": TrialEnd.TIMEOUT}
"""Reason of a run -> how its trial ended; the other reasons end no trial."""

OnRun = Callable[[RunProgress], None]


class TrialRunner(Protocol):
    """Something that can be put under load again and again: a server that is kept from trial to trial."""

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun) -> RunResult:
        """Offer the load and leave a run directory; the reason tells how it ended.

        Starts what it needs. After `server_lost` the next call starts it afresh. Raises ServerStartError if
        it does not become ready.
        """

    def close(self) -> None:
        """Give everything back; a later `run` starts afresh."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The run of a trial, to be judged now or by other rules later."""

    qps: float
    key: str
    end: TrialEnd
    detail: str
    """The one line that came with the end."""
    run_dir: Path


class Interrupted(Exception):
    """Ctrl-C or SIGTERM ended a run."""


class Objective:
    """The trials of one job."""

    def __init__(self, job: Job, folder: Path, runner: TrialRunner, report: Callable[[Path], object]) -> None:
        """`folder` is the search's; `report` makes the tables and figures of a run directory."""
        self._job = job
        self._folder = folder
        self._runner = runner
        self._report = report

    @property
    def runs_dir(self) -> Path:
        return self._folder / JOBS / self._job.folder_name / RUNS

    @property
    def num_requests(self) -> int:
        """Measured requests of every trial."""
        return self._load().num_requests

    def measure(self, claim: Claim, on_progress: OnRun) -> StoredTrial:
        """Run and judge the claimed rate, or judge a stored run of it. Raises Interrupted."""
        key = trial_key(self._job.key, claim.qps)
        stored = self._judge_stored(claim, key)
        if stored is not None:
            return stored
        run = self._run_until_it_counts(claim.qps, key, on_progress)
        self._report(run.run_dir)
        trial = judged(claim.number, run, self._job.rules, self._folder)
        _write_trial(run, trial)
        return trial

    def probe(self, on_progress: OnRun) -> float:
        """The first rate to try: half the throughput of a short closed loop. Raises Interrupted, RunError."""
        load = replace(
            self._load(), qps=1.0, concurrency=PROBE_CONCURRENCY, num_requests=PROBE_REQUESTS, name=PROBE_NAME
        )
        run_dir = self._new_dir(PROBE_NAME)
        result = self._run(load, run_dir, on_progress)
        self._report(run_dir)
        requests = load_run(run_dir).requests
        completed = requests[requests["status"] == "COMPLETED"]
        if result.reason != "complete" or len(completed) < PROBE_REQUESTS:
            raise RunError(
                f"{run_dir}: the probe for a first rate ended as {result.reason} with {len(completed)} of "
                f"{PROBE_REQUESTS} requests completed; mend that, or give --start-qps"
            )
        wall_s = float(completed["done_s"].max() - completed["intended_s"].min())
        return rounded(float(f"{len(completed) / wall_s / 2:.3g}"))

    def close(self) -> None:
        """Give the runner's server back."""
        self._runner.close()

    def _load(self) -> LoadOptions:
        return self._job.options.section(LoadOptions)

    def _judge_stored(self, claim: Claim, key: str) -> StoredTrial | None:
        """The claimed trial, judged from a run that is already there; an invalid run stands for nothing."""
        for run in stored_runs(self.runs_dir):
            if run.key == key:
                trial = judged(claim.number, run, self._job.rules, self._folder)
                if trial.verdict is not Verdict.INVALID:
                    return replace(trial, cached=True)
        return None

    def _run_until_it_counts(self, qps: float, key: str, on_progress: OnRun) -> FinishedRun:
        """Run the rate; once more if the server is lost under it."""
        load = replace(self._load(), qps=qps, concurrency=None, name=f"{self._job.name} at {qps_name(qps)} QPS")
        for attempt in range(1, MAX_CRASHES + 1):
            run_dir = self._new_dir(qps_name(qps))
            result = self._run(load, run_dir, on_progress)
            if result.reason in ENDS:
                return FinishedRun(qps, key, ENDS[result.reason], result.detail, run_dir)
            logger.warning(
                "%s QPS: %s (%s), attempt %d of %d", qps_name(qps), result.reason, result.detail, attempt, MAX_CRASHES
            )
        return FinishedRun(qps, key, TrialEnd.CRASHED, result.detail, run_dir)

    def _run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun) -> RunResult:
        result = self._runner.run(load, run_dir, on_progress)
        if result.reason == "interrupted":
            raise Interrupted(result.detail)
        return result

    def _new_dir(self, name: str) -> Path:
        """A folder that no run has had: name, name-2, name-3 and so on."""
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        for path in _numbered(self.runs_dir / name):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
        raise AssertionError("there is always another number")


def stored_runs(runs_dir: Path) -> list[FinishedRun]:
    """The runs of a job's trials, in the order they ended."""
    found = [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in runs_dir.glob(f"*/{TRIAL_FILE}")]
    found.sort(key=lambda pair: (pair[1]["ended_unix_s"], pair[0].name))
    return [
        FinishedRun(record["qps"], record["key"], TrialEnd(record["outcome"]), record["detail"], run_dir)
        for run_dir, record in found
    ]


def judged(number: int, run: FinishedRun, rules: Sequence[Rule], folder: Path) -> StoredTrial:
    """The trial as these rules see it; `folder` is the search's."""
    judgement = judge(run.end, run.detail, load_run(run.run_dir), rules)
    return StoredTrial(
        number=number,
        qps=run.qps,
        verdict=judgement.verdict,
        reason=judgement.reason,
        rules=tuple(_rule_value(result) for result in judgement.rules),
        hopeless=judgement.hopeless,
        timed_out=run.end is TrialEnd.TIMEOUT,
        cached=False,
        run_dir=run.run_dir.relative_to(folder).as_posix(),
        key=run.key,
    )


def _rule_value(result: RuleResult) -> RuleValue:
    rule = result.rule
    return RuleValue(rule.text, rule.subject, result.value, rule.threshold, result.passed, result.margin, result.note)


def _write_trial(run: FinishedRun, trial: StoredTrial) -> None:
    write_json(
        run.run_dir / TRIAL_FILE,
        {
            "qps": run.qps,
            "key": run.key,
            "outcome": str(run.end),
            "detail": run.detail,
            "ended_unix_s": time.time(),
            "verdict": str(trial.verdict),
            "reason": trial.reason,
            "hopeless": trial.hopeless,
            "rules": [rule_to_json(rule) for rule in trial.rules],
        },
    )


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1

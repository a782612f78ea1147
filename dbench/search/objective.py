"""One trial: run a rate, or find the run that is already there, and judge it.

A trial's folder is a full run directory; see `stored.py` for what makes it a trial.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dbench.errors import DbenchError, RunError
from dbench.load.driver import RunResult
from dbench.load.stop import StopRule
from dbench.metrics import load_run
from dbench.options import LoadOptions
from dbench.progress import RunProgress, Verdict
from dbench.result_files import write_json
from dbench.search.capacity import ANSWERS
from dbench.search.early_stop import LostRuleStop
from dbench.search.files import JOBS
from dbench.search.keys import trial_key
from dbench.search.plan import Job
from dbench.search.results import rule_to_json
from dbench.search.sla import Rule, RuleResult
from dbench.search.space import qps_name, rounded
from dbench.search.store import Claim, RuleValue, StoredTrial
from dbench.search.stored import RUNS, TRIAL_FILE, StoredRun, stored_runs
from dbench.search.verdict import TrialEnd, judge
from dbench.serve.sequence import Status

logger = logging.getLogger(__name__)

MAX_CRASHES = 2
"""Runs of one trial that may lose their server or one of its workers; the last makes it a fail."""

PROBE_NAME = "probe"
PROBE_REQUESTS = 20
PROBE_CONCURRENCY = 10
"""Half of the requests: the server batches as under load, and the end of the run, when slots stay empty, is short."""

ENDS = {"complete": TrialEnd.COMPLETE, "timeout": TrialEnd.TIMEOUT, "stopped": TrialEnd.STOPPED}
"""Reason of a run -> how its trial ended; the other reasons end no trial."""

OnRun = Callable[[RunProgress], None]


class TrialRunner(Protocol):
    """Something that can be put under load again and again: a server that is kept from trial to trial."""

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun, stop: StopRule) -> RunResult:
        """Offer the load until `stop` ends it, and leave a run directory; the reason tells how it ended.

        Starts what it needs, and every run begins with all workers ready. The reason is `server_lost` also when
        only one of the workers was lost. Raises ServerStartError if a server does not become ready.
        """

    def close(self) -> None:
        """Give everything back; a later `run` starts afresh."""


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
    def job_folder(self) -> Path:
        return self._folder / JOBS / self._job.folder_name

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
        run = self._run_trial(claim.qps, key, on_progress)
        with going_on(f"{run.run_dir}: its report is not complete"):
            self._report(run.run_dir)
        trial = judged(claim.number, run, self._job.rules, self._folder)
        assert trial.verdict is not Verdict.UNDECIDED, f"{run.run_dir}: stopped by a rule that it does not break"
        _write_trial(run, trial)
        return trial

    def probe(self, on_progress: OnRun) -> float:
        """The first rate to try: half the throughput of a short closed loop. Raises Interrupted, RunError."""
        load = replace(
            self._load(), qps=1.0, concurrency=PROBE_CONCURRENCY, num_requests=PROBE_REQUESTS, name=PROBE_NAME
        )
        result = self._run_until_it_counts(load, PROBE_NAME, (), on_progress)
        with going_on(f"{result.run_dir}: its report is not complete"):
            self._report(result.run_dir)
        requests = load_run(result.run_dir).requests
        completed = requests[requests["status"] == Status.COMPLETED]
        if result.reason != "complete" or len(completed) < PROBE_REQUESTS:
            raise RunError(
                f"{result.run_dir}: the probe for a first rate ended as {result.reason} with {len(completed)} of "
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
        """The claimed trial, judged from a run that is already there and answers under this SLA."""
        for run in stored_runs(self.job_folder):
            if run.key == key:
                trial = judged(claim.number, run, self._job.rules, self._folder)
                if trial.verdict in ANSWERS:
                    return replace(trial, cached=True)
        return None

    def _run_trial(self, qps: float, key: str, on_progress: OnRun) -> StoredRun:
        load = replace(self._load(), qps=qps, concurrency=None, name=f"{self._job.name} at {qps_name(qps)} QPS")
        result = self._run_until_it_counts(load, qps_name(qps), self._job.rules, on_progress)
        end = ENDS.get(result.reason, TrialEnd.CRASHED)
        return StoredRun(qps, key, end, result.detail, time.time(), result.run_dir)

    def _run_until_it_counts(
        self, load: LoadOptions, name: str, rules: Sequence[Rule], on_progress: OnRun
    ) -> RunResult:
        """Run the load; once more if the server or a worker is lost under it. Raises Interrupted."""
        for attempt in range(1, MAX_CRASHES + 1):
            stop = LostRuleStop(rules, load.num_requests)
            result = self._runner.run(load, self._new_dir(name), on_progress, stop)
            if result.reason == "interrupted":
                raise Interrupted(result.detail)
            if result.reason in ENDS:
                break
            logger.warning("%s: %s (%s), attempt %d of %d", name, result.reason, result.detail, attempt, MAX_CRASHES)
        return result

    def _new_dir(self, name: str) -> Path:
        """A folder that no run has had: name, name-2, name-3 and so on."""
        runs_dir = self.job_folder / RUNS
        runs_dir.mkdir(parents=True, exist_ok=True)
        for path in _numbered(runs_dir / name):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
        raise AssertionError("there is always another number")


@contextmanager
def going_on(consequence: str) -> Iterator[None]:
    """Log an error of work that no verdict rests on, with what follows from it, and go on."""
    try:
        yield
    except DbenchError as error:
        logger.error("%s: %s", consequence, error)
    except Exception:  # a bug in a figure must not hide the answer
        logger.exception("%s: an error of dbench itself", consequence)


def judged(number: int, run: StoredRun, rules: Sequence[Rule], folder: Path) -> StoredTrial:
    """The trial as these rules see it; `folder` is the search's."""
    judgement = judge(run.end, run.detail, load_run(run.run_dir), rules)
    return StoredTrial(
        number=number,
        qps=run.qps,
        verdict=judgement.verdict,
        reason=judgement.reason,
        rules=tuple(_rule_value(result) for result in judgement.rules),
        hopeless=judgement.hopeless,
        end=run.end,
        cached=False,
        run_dir=run.run_dir.relative_to(folder).as_posix(),
        key=run.key,
    )


def _rule_value(result: RuleResult) -> RuleValue:
    rule = result.rule
    return RuleValue(
        rule=rule.text,
        metric=rule.subject,
        value=result.value,
        threshold=rule.threshold,
        unit=rule.unit,
        passed=result.passed,
        margin=result.margin,
        note=result.note,
    )


def _write_trial(run: StoredRun, trial: StoredTrial) -> None:
    verdict = {"verdict": str(trial.verdict), "reason": trial.reason, "hopeless": trial.hopeless}
    write_json(run.run_dir / TRIAL_FILE, {**run.to_json(), **verdict, "rules": [rule_to_json(r) for r in trial.rules]})


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1

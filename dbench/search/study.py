"""The capacity search: jobs one after the other, each a study of trials, with results on disk after every trial.

Several processes may run the same command: each takes jobs that nobody works on, and waits for the others' in
the end, so all of them answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dbench.errors import DbenchError
from dbench.progress import RuleProgress, RunProgress, SearchProgress, TrialProgress, Verdict
from dbench.search.capacity import Stop, Wait, bracket_of, in_range, next_step
from dbench.search.files import JOBS, write_job_plots, write_results
from dbench.search.keys import digest
from dbench.search.objective import Interrupted, Objective, TrialRunner, going_on
from dbench.search.plan import Job, SearchPlan
from dbench.search.results import ERROR, INTERRUPTED, RUNNING, JobResult, SearchResults
from dbench.search.store import Claim, RuleValue, StoredTrial, TrialStore
from dbench.search.stored import pinned

logger = logging.getLogger(__name__)

WAIT_S = 0.5
"""Between looks at a search that another process works on."""

OnProgress = Callable[[SearchProgress], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a search works with; tests put their own in."""

    runner: Callable[[Job, Path], TrialRunner]
    """A runner for a job, given the job's folder; it starts nothing before its first run."""
    report: Callable[[Path], object]
    """Makes the tables and figures of a run directory."""
    plots: Callable[[SearchResults, JobResult], None] = write_job_plots


def server_tools() -> Tools:
    """Trials against a server that the search starts, with full reports."""
    from dbench.report import write_report
    from dbench.search.server_runner import ServerRunner

    return Tools(ServerRunner, write_report)


def run_search(plan: SearchPlan, *, tools: Tools | None = None, on_progress: OnProgress | None = None) -> SearchResults:
    """Run what is missing of the plan and answer with all of it; `on_progress` must return at once.

    A job that raises is recorded with its error, and the others run. Ctrl-C ends the search after the files
    are written; the trial that it cut short is run again by the next call.
    """
    return _Search(plan, tools or server_tools(), on_progress or _show_nothing).run()


class _Search:
    """The state of one call of run_search."""

    def __init__(self, plan: SearchPlan, tools: Tools, on_progress: OnProgress) -> None:
        self._plan = plan
        self._tools = tools
        self._on_progress = on_progress
        self._results: dict[str, JobResult] = {}

    def run(self) -> SearchResults:
        """All jobs, those that other processes work on last."""
        waiting = deque(self._job_search(job) for job in self._plan.jobs)
        for search in waiting:
            search.open()
            self._results[search.job.name] = search.standing(RUNNING)
        try:
            num_blocked = 0
            while waiting:
                search = waiting.popleft()
                if self._run_job(search):
                    num_blocked = 0
                    continue
                waiting.append(search)
                num_blocked += 1
                if num_blocked >= len(waiting):
                    time.sleep(WAIT_S)
        except (KeyboardInterrupt, Interrupted):
            for search in waiting:
                self._keep(search.standing(INTERRUPTED))
            return self._write(interrupted=True)
        return self._write()

    def _job_search(self, job: Job) -> _JobSearch:
        options = pinned(job.options, self._plan.folder / JOBS / job.folder_name)
        return _JobSearch(replace(job, options=options), self._plan, self._tools, self._on_progress, self._keep)

    def _run_job(self, search: _JobSearch) -> bool:
        """Whether the job is over; False while another process runs a trial of it."""
        try:
            result = search.run()
        except (KeyboardInterrupt, Interrupted):
            self._keep(search.result(INTERRUPTED))
            raise
        except DbenchError as error:
            logger.error("job %s: %s", search.job.name, error)
            result = search.result(ERROR, error)
        except Exception as error:  # a bug must not take the other jobs with it
            logger.exception("job %s: an error of dbench itself", search.job.name)
            result = search.result(ERROR, error)
        if result is None:
            return False
        self._keep(result)
        with going_on(f"job {search.job.name}: its figures are not complete"):
            self._tools.plots(self._write(), result)
        return True

    def _keep(self, result: JobResult) -> None:
        self._results[result.name] = result
        self._write()

    def _write(self, *, interrupted: bool = False) -> SearchResults:
        jobs = tuple(self._results[job.name] for job in self._plan.jobs)
        results = SearchResults(self._plan.name, self._plan.folder, jobs, interrupted)
        write_results(results)
        return results


class _JobSearch:
    """One job: its study, and the trials that this process adds to it."""

    def __init__(
        self, job: Job, plan: SearchPlan, tools: Tools, on_progress: OnProgress, keep: Callable[[JobResult], None]
    ) -> None:
        self.job = job
        self._store = TrialStore(plan.folder, job.folder_name, digest(job.sla_text), job.settings)
        self._objective = Objective(
            job, plan.folder, tools.runner(job, plan.folder / JOBS / job.folder_name), tools.report
        )
        self._on_progress = on_progress
        self._keep = keep
        self._started_s = time.monotonic()
        self._trials: tuple[StoredTrial, ...] = ()
        self._num_run = 0
        self._stored_numbers: frozenset[int] = frozenset()

    def open(self) -> None:
        """Read what is stored."""
        self._store.open()
        self._trials = self._store.trials()
        self._stored_numbers = frozenset(trial.number for trial in self._trials)

    def run(self) -> JobResult | None:
        """Trials until the search stops; None when another process has the next one."""
        try:
            if not self._know_the_start():
                return None
            if self._num_run == 0:
                self._store.forgive_invalid()
            while isinstance(claim := self._store.claim(), Claim):
                self._run_trial(claim)
            self._trials = self._store.trials()
            return None if isinstance(claim, Wait) else self.result(claim.reason)
        finally:
            self._objective.close()

    def result(self, reason: str, error: Exception | None = None) -> JobResult:
        """What the job has found so far."""
        return JobResult(
            name=self.job.name,
            key=self.job.key,
            folder_name=self.job.folder_name,
            rules=tuple(rule.text for rule in self.job.rules),
            settings=self._store.settings,
            num_requests=self._objective.num_requests,
            trials=self._trials,
            reason=str(reason),
            error="" if error is None else str(error) or type(error).__name__,
            error_code=0 if error is None else error.exit_code if isinstance(error, DbenchError) else 1,
            answered_from_store=self._num_run == 0 and bool(self._trials),
        )

    def standing(self, otherwise: str) -> JobResult:
        """What is stored: the end of the search if it is over, with the reason `otherwise` if not."""
        if all(t.verdict is Verdict.INVALID for t in self._trials):
            return self.result(otherwise)
        step = next_step([t.tried() for t in self._trials], self._store.settings)
        return self.result(step.reason if isinstance(step, Stop) else otherwise)

    def _know_the_start(self) -> bool:
        """Find the first rate where none was given and none is stored; False while another process does."""
        if self.job.settings.start_qps is not None or self.job.settings.qps_list:
            return True
        start = self._store.start_qps()
        if start is None and all(t.verdict is Verdict.INVALID for t in self._trials):
            if not self._store.claim_start():
                return False
            with self._store.renewing_start():
                start = self._objective.probe(lambda running: self._show(None, running))
            self._store.set_start(start)
            logger.info("job %s: the probe suggests to start at %g QPS", self.job.name, start)
        self._store.use(replace(self.job.settings, start_qps=start))
        return True

    def _run_trial(self, claim: Claim) -> None:
        self._trials = self._store.trials()
        self._show(claim, None)
        try:
            with self._store.renewing(claim):
                trial = self._objective.measure(claim, lambda running: self._show(claim, running))
        except BaseException:
            self._store.abandon(claim)
            raise
        self._store.finish(claim, trial)
        self._num_run += not trial.cached
        self._trials = self._store.trials()
        self._keep(self.result(RUNNING))
        self._show(None, None)

    def _show(self, claim: Claim | None, running: RunProgress | None) -> None:
        settings = self._store.settings
        bracket = bracket_of(in_range([t.tried() for t in self._trials], settings))
        rows = [self._row(trial) for trial in self._trials]
        if claim is not None:
            rows.append(TrialProgress(claim.number, claim.qps, Verdict.RUNNING, (), "", False))
        self._on_progress(
            SearchProgress(
                job=self.job.name,
                rules=tuple(rule.text for rule in self.job.rules),
                elapsed_s=time.monotonic() - self._started_s,
                max_iterations=len(settings.qps_list) or settings.max_iterations,
                trials=tuple(rows),
                highest_pass=bracket.highest_pass,
                lowest_fail=bracket.lowest_fail,
                running=running,
            )
        )

    def _row(self, trial: StoredTrial) -> TrialProgress:
        return TrialProgress(
            number=trial.number,
            qps=trial.qps,
            verdict=trial.verdict,
            rules=tuple(_rule_progress(rule) for rule in trial.rules),
            reason=trial.reason,
            cached=trial.cached or trial.number in self._stored_numbers,
        )


def _rule_progress(rule: RuleValue) -> RuleProgress:
    return RuleProgress(
        rule=rule.rule,
        value=rule.value,
        threshold=rule.threshold,
        unit=rule.unit,
        passed=rule.passed,
        margin=rule.margin,
    )


def _show_nothing(progress: SearchProgress) -> None:
    """For a search without a view."""

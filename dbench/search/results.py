"""What a search has found, as records and as JSON; readers of the files need nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbench import __version__
from dbench.errors import EXIT_INTERRUPTED
from dbench.events import SCHEMA_VERSION
from dbench.json_values import finite_or_text
from dbench.progress import Verdict
from dbench.search.capacity import Bracket, SearchSettings, StopReason, bracket_of, capacity_of, in_range
from dbench.search.store import RuleValue, StoredTrial

ERROR = "error"
INTERRUPTED = "interrupted"
RUNNING = "running"
REEVALUATED = "reevaluated"
"""Reasons of a job beside those of StopReason: it raised, Ctrl-C ended it, it is not over, or its stored trials
were judged by other limits, which leave a wider bracket than was asked for."""

PASSED = {Verdict.PASS: True, Verdict.FAIL: False}
"""Verdict -> passed; null for the others."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """One job, finished or not."""

    name: str
    key: str
    folder_name: str
    rules: tuple[str, ...]
    settings: SearchSettings
    num_requests: int
    """Measured requests of each trial."""
    trials: tuple[StoredTrial, ...]
    reason: str
    """A StopReason, or ERROR, INTERRUPTED or RUNNING."""
    error: str = ""
    error_code: int = 0
    answered_from_store: bool = False
    """No trial was run by this command."""

    @property
    def capacity(self) -> float | None:
        """The highest rate that meets the SLA; None where the search ended without one."""
        if self.reason == REEVALUATED:
            return self.bracket.highest_pass
        if self.reason not in set(StopReason):
            return None
        return capacity_of([t.tried() for t in self.trials], self.settings, StopReason(self.reason))

    @property
    def bracket(self) -> Bracket:
        """What the trials that the search rests on leave open."""
        return bracket_of(in_range([t.tried() for t in self.trials], self.settings))

    @property
    def is_valid(self) -> bool:
        """It answers what was asked: a capacity, or a list that was run without an SLA."""
        return self.capacity is not None or (self.reason == StopReason.LIST_DONE and not self.rules)

    @property
    def exit_code(self) -> int:
        return self.error_code or (0 if self.is_valid else 1)

    @property
    def binding_rule(self) -> str:
        """What keeps the capacity from being higher: the rule furthest beyond its limit in the lowest fail, or why
        that failed without figures; where nothing failed, the rule nearest to its limit in the highest pass."""
        bracket = self.bracket
        limiting = self.trial_at(bracket.lowest_fail, Verdict.FAIL) or self.trial_at(bracket.highest_pass, Verdict.PASS)
        if limiting is None:
            return ""
        rules = limiting.rules
        if limiting.verdict is Verdict.FAIL:
            broken = [r for r in rules if not r.passed]
            if limiting.timed_out or not broken:
                return limiting.reason.partition(":")[0]
            rules = tuple(broken)
        return min(rules, key=lambda r: r.margin).rule if rules else ""

    def trial_at(self, qps: float | None, verdict: Verdict) -> StoredTrial | None:
        """The trial at this rate with this verdict."""
        return next((t for t in self.trials if t.qps == qps and t.verdict is verdict), None)


@dataclass(frozen=True, slots=True)
class SearchResults:
    """All jobs of a search."""

    name: str
    folder: Path
    jobs: tuple[JobResult, ...]
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; else that of the first job without a valid result."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return next((job.exit_code for job in self.jobs if job.exit_code), 0)

    def to_json(self) -> dict[str, Any]:
        """The content of capacity_search_results.json, and of --json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "dbench_version": __version__,
            "name": self.name,
            "folder": str(self.folder),
            "interrupted": self.interrupted,
            "jobs": [job_to_json(job) for job in self.jobs],
        }


def job_to_json(job: JobResult) -> dict[str, Any]:
    """One entry of `jobs`."""
    return {
        "job_name": job.name,
        "job_key": job.key,
        "max_qps_under_sla": job.capacity,
        "reason": job.reason,
        "highest_pass": job.bracket.highest_pass,
        "lowest_fail": job.bracket.lowest_fail,
        "not_monotone": job.bracket.not_monotone,
        "binding_rule": job.binding_rule,
        "sla": list(job.rules),
        "start_qps": job.settings.start_qps,
        "qps_list": list(job.settings.qps_list),
        "max_iterations": job.settings.max_iterations,
        "min_search_granularity_pct": job.settings.granularity_pct,
        "max_qps_cap": job.settings.max_qps_cap,
        "num_requests_per_trial": job.num_requests,
        "num_trials": len(job.trials),
        "answered_from_store": job.answered_from_store,
        "error": job.error,
        "search_trace": [trial_to_json(trial) for trial in job.trials],
    }


def trial_to_json(trial: StoredTrial) -> dict[str, Any]:
    """One entry of search_trace."""
    return {
        "number": trial.number,
        "qps": trial.qps,
        "passed": PASSED.get(trial.verdict),
        "verdict": str(trial.verdict),
        "reason": trial.reason,
        "metric_values": {rule.metric: finite_or_text(rule.value) for rule in trial.rules},
        "rules": [rule_to_json(rule) for rule in trial.rules],
        "run_dir": trial.run_dir,
        "cached": trial.cached,
        "timed_out": trial.timed_out,
        "stopped_early": trial.stopped_early,
    }


def rule_to_json(rule: RuleValue) -> dict[str, Any]:
    return {
        "rule": rule.rule,
        "value": finite_or_text(rule.value),
        "threshold": rule.threshold,
        "unit": rule.unit,
        "passed": rule.passed,
        "margin": finite_or_text(rule.margin),
        "note": rule.note,
    }

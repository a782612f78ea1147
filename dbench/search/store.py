"""The trials of one job on disk: who runs which rate, and what the finished ones found.

Every decision (what next, whose lease is over) is made while one lock is held, so processes that share a
search never run one rate twice at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from dbench.progress import Verdict
from dbench.search.capacity import SearchSettings, Step, Stop, StopReason, Tried, Try, Wait, next_step
from dbench.search.lease import LEASE_S, RENEW_S, Lease, Owner, this_process
from dbench.search.storage import (
    FORGIVEN,
    LEASE,
    QPS,
    QPS_AXIS,
    RESULT,
    VERDICT,
    CapacitySampler,
    FileLock,
    has_verdict,
    held,
    open_journal,
    running_rates,
    tried,
)
from dbench.search.verdict import TrialEnd

logger = logging.getLogger(__name__)

START_QPS = "start_qps"
"""User attribute of a study: the first rate, once it is known. It holds for every SLA of the job, so that their
searches try the same rates and can share the runs."""

START_LEASE = "start_lease"
"""User attribute of a study: who is finding the first rate."""


@dataclass(frozen=True, slots=True)
class RuleValue:
    """One rule of a stored trial."""

    rule: str
    metric: str
    value: float
    threshold: float
    unit: str
    """'s' for a time, else nothing."""
    passed: bool
    margin: float
    note: str


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A finished trial."""

    number: int
    qps: float
    verdict: Verdict
    reason: str
    """Why it failed or was invalid; empty for a pass."""
    rules: tuple[RuleValue, ...]
    hopeless: bool
    end: TrialEnd
    cached: bool
    """Judged from a run that was there already."""
    run_dir: str
    """Relative to the search's folder."""
    key: str

    @property
    def timed_out(self) -> bool:
        return self.end is TrialEnd.TIMEOUT

    @property
    def stopped_early(self) -> bool:
        """Its values are lower bounds; a rule without one was not decided."""
        return self.end is TrialEnd.STOPPED

    def tried(self) -> Tried:
        return Tried(self.qps, self.verdict, self.hopeless)


@dataclass(frozen=True, slots=True)
class Claim:
    """A rate that this process runs now."""

    number: int
    qps: float
    trial: optuna.Trial = field(repr=False, compare=False)
    """For the store alone."""


class TrialStore:
    """One Optuna study: the trials of one job under one SLA."""

    def __init__(self, folder: Path, job_name: str, sla_key: str, settings: SearchSettings) -> None:
        """`job_name` is one of the search's own folder names, `sla_key` tells the SLAs of the job apart."""
        self._folder = folder
        self._prefix = f"{job_name}/"
        self._study_name = self._prefix + sla_key
        self._settings = settings
        self._lock = FileLock(folder / "study.lock")
        self._owner: Owner | None = None
        self._storage: JournalStorage | None = None
        self._study: optuna.Study | None = None

    @property
    def settings(self) -> SearchSettings:
        return self._settings

    def open(self) -> None:
        """Make or open the study. Raises UsageError when its file cannot be read."""
        self._storage = open_journal(self._folder / "study.journal")
        self._owner = this_process()
        with held(self._lock):
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=self._study_name,
                direction="maximize",
                sampler=CapacitySampler(self._settings),
                load_if_exists=True,
            )

    def trials(self) -> tuple[StoredTrial, ...]:
        """The finished trials in the order of their numbers, forgiven ones left out."""
        study = self._opened()
        forgiven = study.user_attrs.get(FORGIVEN, [])
        found = [t for t in study.get_trials(deepcopy=False) if has_verdict(t) and t.number not in forgiven]
        return tuple(_stored(t) for t in found)

    def forgive_invalid(self) -> None:
        """Let a search that ended with invalid trials try them again."""
        study = self._opened()
        with held(self._lock):
            step = self._next_step(study)
            if step == Stop(StopReason.INVALID_TRIALS):
                invalid = [t.number for t in self.trials() if t.verdict is Verdict.INVALID]
                study.set_user_attr(FORGIVEN, [*study.user_attrs.get(FORGIVEN, []), *invalid])

    def claim(self) -> Claim | Wait | Stop:
        """Take the next rate for this process, if there is one."""
        study = self._opened()
        with held(self._lock):
            self._settle_lost_trials(study)
            step = self._next_step(study)
            if not isinstance(step, Try):
                return step
            trial = study.ask({QPS: QPS_AXIS})
            trial.set_user_attr(LEASE, self._new_lease())
            return Claim(trial.number, trial.params[QPS], trial)

    @contextmanager
    def renewing(self, claim: Claim) -> Iterator[None]:
        """Keep the claim's lease alive, from a thread, while the trial runs."""
        with _repeating(lambda: claim.trial.set_user_attr(LEASE, self._new_lease())):
            yield

    def finish(self, claim: Claim, trial: StoredTrial) -> None:
        """Store what the trial found. A trial whose lease was lost meanwhile is left to its new owner."""
        study = self._opened()
        with held(self._lock):
            try:
                claim.trial.set_user_attr(RESULT, _to_json(trial))
            except UpdateFinishedTrialError:
                logger.warning(
                    "trial %d at %g QPS: another process took it over; its result counts", claim.number, claim.qps
                )
                return
            claim.trial.set_user_attr(VERDICT, str(trial.verdict))
            _close(study, claim.number, trial.verdict, trial.qps)

    def abandon(self, claim: Claim) -> None:
        """Give the claim back: its rate will be run again. Nothing happens where it was taken over meanwhile."""
        study = self._opened()
        with held(self._lock):
            study.tell(claim.number, state=TrialState.FAIL, skip_if_finished=True)

    def start_qps(self) -> float | None:
        """The first rate, if it is known."""
        assert self._storage is not None, "the store is not open"
        studies = optuna.get_all_study_summaries(self._storage, include_best_trial=False)
        known = (s.user_attrs.get(START_QPS) for s in studies if s.study_name.startswith(self._prefix))
        return next((qps for qps in known if qps is not None), None)

    def claim_start(self) -> bool:
        """Whether this process shall find the first rate; False while another one does, or has done."""
        study = self._opened()
        with held(self._lock):
            record = study.user_attrs.get(START_LEASE)
            lease = None if record is None else Lease.from_json(record)
            is_others = lease is not None and lease.owner != self._owner and not lease.is_over(time.time())
            if is_others or self.start_qps() is not None:
                return False
            study.set_user_attr(START_LEASE, self._new_lease())
            return True

    @contextmanager
    def renewing_start(self) -> Iterator[None]:
        """Keep the lease of claim_start alive."""
        study = self._opened()
        with _repeating(lambda: study.set_user_attr(START_LEASE, self._new_lease())):
            yield

    def set_start(self, qps: float) -> None:
        """Store the first rate, for every later command."""
        self._opened().set_user_attr(START_QPS, qps)

    def use(self, settings: SearchSettings) -> None:
        """Go on with these settings."""
        self._settings = settings
        self._opened().sampler = CapacitySampler(settings)

    def _next_step(self, study: optuna.Study) -> Step:
        trials = study.get_trials(deepcopy=False)
        return next_step(tried(study, trials), self._settings, running_rates(trials))

    def _settle_lost_trials(self, study: optuna.Study) -> None:
        """Close what dead processes left running: with its verdict where they had stored one, else as failed."""
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            lease = trial.user_attrs.get(LEASE)
            if lease is not None and not Lease.from_json(lease).is_over(time.time()):
                continue  # without a lease its owner died between two lines of claim(), for we hold the lock
            if VERDICT in trial.user_attrs:
                _close(study, trial.number, Verdict(trial.user_attrs[VERDICT]), trial.params[QPS])
            else:
                study.tell(trial.number, state=TrialState.FAIL)

    def _new_lease(self) -> dict[str, Any]:
        assert self._owner is not None, "the store is not open"
        return Lease(self._owner, time.time() + LEASE_S).to_json()

    def _opened(self) -> optuna.Study:
        assert self._study is not None, "the store is not open"
        return self._study


@contextmanager
def _repeating(renew: Callable[[], None]) -> Iterator[None]:
    """Call `renew` every RENEW_S in a thread; a lost trial ends it."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(RENEW_S):
            try:
                renew()
            except UpdateFinishedTrialError:
                return

    thread = threading.Thread(target=work, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _close(study: optuna.Study, number: int, verdict: Verdict, qps: float) -> None:
    """Give a trial that has a verdict its final state; the objective is the rate that it proved."""
    if verdict is Verdict.INVALID:
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, qps if verdict is Verdict.PASS else 0.0, state=TrialState.COMPLETE)


def _stored(trial: FrozenTrial) -> StoredTrial:
    record = dict(trial.user_attrs[RESULT])
    end = TrialEnd(record.pop("end"))
    rules = tuple(
        RuleValue(**{**r, "value": float(r["value"]), "margin": float(r["margin"])}) for r in record.pop("rules")
    )
    verdict = Verdict(trial.user_attrs[VERDICT])
    return StoredTrial(number=trial.number, qps=trial.params[QPS], verdict=verdict, rules=rules, end=end, **record)


def _to_json(trial: StoredTrial) -> dict[str, Any]:
    """Everything that the study does not know itself; infinities as text."""
    kept = {name: value for name, value in asdict(trial).items() if name not in ("number", "qps", "verdict")}
    rules = [{**asdict(r), "value": str(r.value), "margin": str(r.margin)} for r in trial.rules]
    return {**kept, "rules": rules}

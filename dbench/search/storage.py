"""The search as Optuna sees it: a journal file that survives kill -9, and a sampler that asks `capacity.py`.

This module and `store.py` are the only ones that import optuna, and they use its public interface alone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from dbench.errors import RunError, UsageError, one_line
from dbench.progress import Verdict
from dbench.search.capacity import SearchSettings, Tried, Try, next_step
from dbench.search.space import HIGHEST_QPS, LOWEST_QPS

logger = logging.getLogger(__name__)

QPS = "qps"
QPS_AXIS = FloatDistribution(LOWEST_QPS, HIGHEST_QPS, log=True)

VERDICT = "verdict"
RESULT = "result"
LEASE = "lease"
"""User attributes of a trial. A trial has a verdict only if it was finished."""

FORGIVEN = "forgiven"
"""User attribute of a study: numbers of invalid trials that a later command started afresh."""


class FileLock:
    """An exclusive lock that the kernel takes back when its holder dies, however it dies.

    Not for two threads of one process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(descriptor)
            raise RunError(
                f"{self._path}: this file system has no locks ({error.strerror}); use another --output-dir"
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        assert self._descriptor is not None, "released without being held"
        os.close(self._descriptor)
        self._descriptor = None


class JournalLock(JournalFileOpenLock):
    """The lock of a journal; taking it cuts off a line that a dying writer left unfinished.

    Optuna's own lock is the existence of a file: a process killed while it writes leaves it behind, and everyone
    else waits for half a minute.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._kernel_lock = FileLock(journal.with_name(journal.name + ".lock"))
        self._journal = journal

    def acquire(self) -> bool:
        self._kernel_lock.acquire()
        cut_unfinished_line(self._journal)
        return True

    def release(self) -> None:
        self._kernel_lock.release()


def cut_unfinished_line(path: Path) -> None:
    """Cut the file after its last newline: whoever wrote the rest is dead, and a line after it would be unreadable."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size == 0 or file.read(1) == b"\n":
            return
        file.seek(0)
        kept = file.read().rfind(b"\n") + 1
        file.truncate(kept)
    logger.warning("%s: cut off %d bytes that a killed process had not finished writing", path, size - kept)


def check_lines(path: Path) -> None:
    """Every line of the journal is a JSON object. Raises UsageError naming the first that is not."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            is_operation = isinstance(json.loads(line), dict)
        except ValueError:
            is_operation = False
        if not is_operation:
            raise UsageError(_unreadable(path, f"line {number} is no operation of a study"))


def _unreadable(path: Path, reason: str) -> str:
    return (
        f"{path}: the journal of the search cannot be read ({reason}); move it away and repeat the command: its "
        "finished runs stand in jobs/ and are judged again"
    )


@contextmanager
def held(lock: FileLock | JournalLock) -> Iterator[None]:
    """Hold the lock for a while."""
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def open_journal(path: Path) -> JournalStorage:
    """The storage in this file, made if it is not there. Raises UsageError when the file is something else."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    lock = JournalLock(path)
    with held(lock):
        check_lines(path)  # after an unfinished one was cut off
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (ValueError, LookupError, TypeError) as error:  # operations that do not fit each other
        raise UsageError(_unreadable(path, one_line(error))) from None


class CapacitySampler(BaseSampler):
    """Proposes the next rate as a pure function of the study's trials."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {QPS: QPS_AXIS}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        step = next_step(tried(study, others), self._settings, running_rates(others))
        assert isinstance(step, Try), "asked for a trial of a search that has none to run"
        return {QPS: step.qps}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError(f"a capacity search has the one parameter {QPS}, not {param_name}")


def tried(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[Tried]:
    """What the finished trials found; invalid ones that were forgiven are left out."""
    forgiven = study.user_attrs.get(FORGIVEN, [])
    return [
        Tried(t.params[QPS], Verdict(t.user_attrs[VERDICT]), t.user_attrs[RESULT]["hopeless"])
        for t in trials
        if has_verdict(t) and t.number not in forgiven
    ]


def has_verdict(trial: FrozenTrial) -> bool:
    """It was finished: an abandoned trial and one that still runs have no verdict."""
    return trial.state.is_finished() and VERDICT in trial.user_attrs


def running_rates(trials: Sequence[FrozenTrial]) -> list[float]:
    """Rates of the trials that somebody runs now."""
    return [t.params[QPS] for t in trials if t.state is TrialState.RUNNING and QPS in t.params]

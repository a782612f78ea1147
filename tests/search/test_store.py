"""Searches that are killed, interrupted, or shared by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import optuna
import pytest

from dbench.errors import UsageError
from dbench.load.driver import RunResult
from dbench.load.stop import StopRule
from dbench.options import LoadOptions
from dbench.progress import Verdict
from dbench.search.capacity import SearchSettings, Stop, StopReason, Wait
from dbench.search.lease import LEASE_S, Lease, Owner, this_process
from dbench.search.objective import OnRun
from dbench.search.results import JobResult
from dbench.search.storage import LEASE, CapacitySampler, cut_unfinished_line, open_journal
from dbench.search.store import Claim, RuleValue, StoredTrial, TrialStore
from dbench.search.verdict import TrialEnd
from tests.search.builders import ScriptedRunner, only_job, plan, rates, search, sustains

CAPACITY = 3.5
FORK = multiprocessing.get_context("fork")


def open_store(folder: Path, settings: SearchSettings | None = None) -> TrialStore:
    store = TrialStore(folder, "job", "sla", settings or SearchSettings(start_qps=1.0))
    store.open()
    return store


def claimed(store: TrialStore) -> Claim:
    claim = store.claim()
    assert isinstance(claim, Claim)
    return claim


def outcome(claim: Claim, verdict: Verdict) -> StoredTrial:
    rule = RuleValue(
        rule="request_e2e_time:p90<=1s",
        metric="request_e2e_time:p90",
        value=float("inf"),
        threshold=1.0,
        unit="s",
        passed=False,
        margin=float("-inf"),
        note="",
    )
    return StoredTrial(
        number=claim.number,
        qps=claim.qps,
        verdict=verdict,
        reason="why",
        rules=(rule,),
        hopeless=False,
        end=TrialEnd.TIMEOUT,
        cached=False,
        run_dir="runs/1",
        key="k",
    )


def test_a_trial_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    claim = claimed(store)
    store.finish(claim, outcome(claim, Verdict.FAIL))
    assert open_store(tmp_path).trials() == (outcome(claim, Verdict.FAIL),)


def test_one_rate_is_not_taken_twice(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    claim = claimed(first)
    assert second.claim() == Wait()
    first.finish(claim, outcome(claim, Verdict.PASS))
    assert claimed(second).qps == 2


def test_an_abandoned_rate_is_taken_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.abandon(claimed(store))
    assert claimed(store).qps == 1
    assert store.trials() == ()


def test_the_trial_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    in_child(lambda: claimed(open_store(tmp_path)))
    assert claimed(open_store(tmp_path)).qps == 1


def test_an_expired_lease_is_taken_over_and_its_late_result_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = open_store(tmp_path), open_store(tmp_path)
    late = claimed(slow)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LEASE_S + 1)
    again = claimed(other)
    assert (again.qps, again.number) == (1, 1)
    slow.finish(late, outcome(late, Verdict.FAIL))
    other.finish(again, outcome(again, Verdict.PASS))
    assert [t.verdict for t in other.trials()] == [Verdict.PASS]


def test_a_lease_is_over_when_it_ran_out_or_its_process_is_gone() -> None:
    here, now = this_process(), time.time()
    assert not Lease(here, now + 1).is_over(now)
    assert Lease(here, now - 1).is_over(now)
    assert Lease(Owner(here.host, here.pid, here.started_unix_s - 60), now + 1).is_over(now)
    assert not Lease(Owner("elsewhere", here.pid, 0.0), now + 1).is_over(now)
    assert Lease.from_json(Lease(here, now).to_json()) == Lease(here, now)


def test_a_trial_stores_its_owner_and_lease(tmp_path: Path) -> None:
    claimed(open_store(tmp_path))
    study = optuna.load_study(study_name="job/sla", storage=open_journal(tmp_path / "study.journal"))
    lease = Lease.from_json(study.trials[0].user_attrs[LEASE])
    assert (lease.owner.host, lease.owner.pid) == (socket.gethostname(), os.getpid())


def test_the_sampler_proposes_what_the_search_would_try(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for verdict in (Verdict.PASS, Verdict.FAIL):
        claim = claimed(store)
        store.finish(claim, outcome(claim, verdict))
    study = optuna.load_study(
        study_name="job/sla",
        storage=open_journal(tmp_path / "study.journal"),
        sampler=CapacitySampler(SearchSettings(start_qps=1.0)),
    )
    assert study.ask({"qps": study.trials[0].distributions["qps"]}).params == {"qps": 1.41421}
    assert study.best_value == 1


def test_invalid_trials_are_forgiven_only_where_they_ended_the_search(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(3):
        claim = claimed(store)
        store.finish(claim, outcome(claim, Verdict.INVALID))
        if number == 0:
            store.forgive_invalid()
            assert len(store.trials()) == 1
    assert store.claim() == Stop(StopReason.INVALID_TRIALS)
    store.forgive_invalid()
    assert store.trials() == ()
    assert claimed(store).qps == 1


def test_an_unfinished_line_is_cut_off(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    claim = claimed(store)
    store.finish(claim, outcome(claim, Verdict.PASS))
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "study')
    assert claimed(open_store(tmp_path)).qps == 2
    assert claimed_rates(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not JSON\n", "line 1 is no operation of a study"),
        (b'{"op_code": 4}\n[1]\n', "line 2 is no operation of a study"),
        (b"\xff\xfe\n", "line 1 is no operation of a study"),
        (b'{"some": "thing"}\n', "op_code"),
        (b'{"op_code": 4, "worker_id": "w", "trial_id": 7}\n', ""),
    ],
)
def test_a_broken_journal_is_one_line_that_says_what_to_do(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "study.journal").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        open_store(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'study.journal'}: the journal of the search cannot be read (")
    assert reason in message
    assert "move it away and repeat the command" in message
    assert "\n" not in message


def test_without_its_journal_a_search_judges_its_finished_runs_again(tmp_path: Path) -> None:
    first = only_job(search(plan(tmp_path), ScriptedRunner(sustains(CAPACITY))))
    (plan(tmp_path).folder / "study.journal").unlink()
    runner = ScriptedRunner(sustains(CAPACITY))
    again = only_job(search(plan(tmp_path), runner))
    assert runner.ran == []
    assert (rates(again), again.capacity) == (rates(first), first.capacity)


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"a\n", b"a\n"), (b"a\nbc", b"a\n"), (b"abc", b"")])
def test_a_file_is_cut_after_its_last_newline(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(before)
    cut_unfinished_line(path)
    assert path.read_bytes() == after


def claimed_rates(folder: Path) -> list[float]:
    study = optuna.load_study(study_name="job/sla", storage=open_journal(folder / "study.journal"))
    return [trial.params["qps"] for trial in study.trials]


# ---- killed searches ----


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; returns its exit code, negative for a signal."""
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingRunner(ScriptedRunner):
    """Kills its own process in the middle of its n-th run."""

    deadly_run = 3

    def run(self, load: LoadOptions, run_dir: Path, on_progress: OnRun, stop: StopRule) -> RunResult:
        if len(self.ran) + 1 == self.deadly_run:
            (run_dir / "events.jsonl").write_text('{"kind":"request_se')
            die()
        return super().run(load, run_dir, on_progress, stop)


def killed_in_a_run(folder: Path) -> None:
    search(plan(folder), DyingRunner(sustains(CAPACITY), log=folder / "log"))


def killed_at(owner: type, method: str, call: int, *, after: bool) -> Callable[[Path], None]:
    """A search that dies when `method` is called for the n-th time, before or after it has done its work."""

    def work(folder: Path) -> None:
        original, calls = getattr(owner, method), count(1)

        def deadly(self: object, *arguments: object, **named: object) -> object:
            is_last = next(calls) == call
            if is_last and not after:
                die()
            result = original(self, *arguments, **named)
            if is_last:
                die()
            return result

        setattr(owner, method, deadly)
        search(plan(folder), ScriptedRunner(sustains(CAPACITY), log=folder / "log"))

    return work


STORAGE = optuna.storages.JournalStorage

DEATHS: dict[str, Callable[[Path], None]] = {
    "in a run": killed_in_a_run,
    "between ask and lease": killed_at(optuna.Study, "ask", 3, after=True),
    "after the run, before its verdict is stored": killed_at(TrialStore, "finish", 3, after=False),
    "between result and verdict": killed_at(STORAGE, "set_trial_user_attr", 8, after=True),
    "between verdict and state": killed_at(STORAGE, "set_trial_state_values", 3, after=False),
    "after the verdict is stored": killed_at(TrialStore, "finish", 3, after=True),
    "while the results are written": killed_at(Path, "replace", 20, after=False),
}


def without_folder(job: JobResult) -> list[tuple[float, Verdict, float]]:
    return [(t.qps, t.verdict, t.rules[0].value) for t in job.trials]


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_search_goes_on_as_if_nothing_had_happened(tmp_path: Path, death: str) -> None:
    whole = only_job(search(plan(tmp_path / "whole"), ScriptedRunner(sustains(CAPACITY))))
    killed = tmp_path / "killed"
    killed.mkdir()
    assert in_child(lambda: DEATHS[death](killed)) == -signal.SIGKILL
    folder = plan(killed).folder
    finished = {path.parent.name for path in folder.glob("jobs/*/runs/*/trial_result.json")}
    runner = ScriptedRunner(sustains(CAPACITY))
    job = only_job(search(plan(killed), runner))
    assert without_folder(job) == without_folder(whole)
    assert (job.capacity, job.reason) == (whole.capacity, whole.reason)
    assert len(runner.ran) < len(whole.trials)
    assert not finished & {f"{qps:.12g}" for qps in runner.ran}


# ---- shared searches ----


def run_shared(folder: Path, results: multiprocessing.Queue[list[float]]) -> None:
    runner = ScriptedRunner(sustains(CAPACITY), log=folder / "log", delay_s=0.05)
    results.put(rates(only_job(search(plan(folder), runner))))


def test_processes_that_share_a_search_run_no_rate_twice_and_agree(tmp_path: Path) -> None:
    queue = FORK.Queue()
    processes = [FORK.Process(target=run_shared, args=(tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    alone = only_job(search(plan(tmp_path / "alone"), ScriptedRunner(sustains(CAPACITY))))
    assert answers == [rates(alone)] * 2
    ran = [float(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()]
    assert ran == rates(alone)


def test_processes_that_share_a_list_share_the_work(tmp_path: Path) -> None:
    settings = SearchSettings(start_qps=None, qps_list=(1, 2, 4))
    first, second = open_store(tmp_path, settings), open_store(tmp_path, settings)
    assert [claimed(first).qps, claimed(second).qps, claimed(first).qps] == [1, 2, 4]
    assert second.claim() == Wait()

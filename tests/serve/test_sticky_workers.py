"""Requests that stay on the worker of their first block, and what they charge there."""

from __future__ import annotations

from dbench.serve.routes import WorkerLoad
from dbench.serve.sequence import Fault
from tests.serve.scheduler_builders import BLOCK, Rig, failed


def sticky_rig(num_workers: int = 2) -> Rig:
    return Rig(num_workers, policy="least_outstanding_prefill_tokens", sticky=True)


def load(rig: Rig, worker_id: int) -> tuple[int, int, int]:
    load: WorkerLoad = rig.fleet[worker_id].load()
    return load.outstanding_prefill_tokens, load.num_requests, load.length_sum


def test_all_blocks_go_to_the_worker_of_the_first() -> None:
    rig = sticky_rig()
    rig.submit((1,) * 3, 3 * BLOCK)
    for _ in range(3):
        rig.submit((1,) * 9, BLOCK)
    first_id = next(rig.tasks())[0]
    for _ in range(3):
        worker_id, task = [(w, t) for w, t in rig.tasks() if t.key.request_id == "r0"][-1]
        assert worker_id == first_id
        rig.answer(worker_id, task)


def test_a_request_charges_a_refresh_per_block_until_it_ends() -> None:
    rig = sticky_rig(num_workers=1)
    rig.submit((1,) * 3, 3 * BLOCK)
    for _ in range(3):
        assert load(rig, 0) == (3 * 15, 1, 15)
        rig.finish_block()
    assert load(rig, 0) == (0, 0, 0)


def test_a_cancelled_request_takes_its_charge_along() -> None:
    rig = sticky_rig(num_workers=1)
    rig.submit((1,) * 3, 3 * BLOCK)
    rig.cancel("r0")
    assert load(rig, 0) == (0, 0, 0)


def test_a_lost_worker_loses_pin_and_charge_to_another() -> None:
    rig = sticky_rig()
    tracked = rig.submit((1,) * 3, 3 * BLOCK)
    rig.finish_block()
    first_id = tracked.worker_id
    assert first_id is not None
    rig.lose(first_id)
    assert tracked.worker_id == 1 - first_id
    assert load(rig, first_id) == (0, 0, 0)
    assert load(rig, 1 - first_id) == (45, 1, 15)
    rig.finish_block()
    assert tracked.worker_id == 1 - first_id


def test_a_failed_batch_is_no_reason_to_move() -> None:
    rig = sticky_rig()
    tracked = rig.submit((1,) * 3, BLOCK)
    worker_id, task = rig.last_task()
    rig.progress(worker_id, failed(task, fault=Fault.BATCH))
    assert tracked.worker_id == worker_id
    assert load(rig, worker_id) == (7, 1, 7)

"""Failures through a scheduler and real engines: who ends, who is tried again, and that nobody innocent pays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.events import BlockRouted
from dbench.serve.fake_runner import FakeScript, one_to_four
from dbench.serve.sequence import Status
from dbench.serve.tracking import TrackedRequest
from dbench.serve.wire_link import CancelBlock, RunBlock
from tests.serve.engine_builders import make_rig
from tests.serve.scheduler_builders import BLOCK, MASK_ID, Rig, rules

NUM_REQUESTS = 10
MAX_STEPS = 5000


class Cluster:
    """A scheduler and the engines of its workers, stepped in the order that `draw` gives."""

    def __init__(self, script: FakeScript, *, num_workers: int = 2, retries: int = 2, overlap: bool = True) -> None:
        self.rig = Rig(num_workers, rules(retries=retries), ready=False)
        self.engines = [make_rig(script, overlap=overlap, max_batch_size=8).engine for _ in range(num_workers)]
        self._num_sent = 0

    def run(self, draw: random.Random, num_requests: int = NUM_REQUESTS) -> list[TrackedRequest]:
        """Submit requests of one to three blocks, all at once, and step until all have ended."""
        prompts = random.Random(5)
        tracked = [
            self.rig.submit(tuple(prompts.randrange(90) for _ in range(1 + i)), BLOCK * (1 + i % 3))
            for i in range(num_requests)
        ]
        for worker_id in range(len(self.engines)):
            self.rig.ready(worker_id)
        for _ in range(MAX_STEPS):
            if not self.rig.scheduler.num_in_server:
                return tracked
            self._send()
            worker_id = draw.randrange(len(self.engines))
            report = self.engines[worker_id].step()
            if report is not None:
                self.rig.progress(worker_id, *report.ended, refreshed=report.refreshed)
        raise AssertionError(f"{self.rig.scheduler.num_in_server} requests never ended")

    def _send(self) -> None:
        for worker_id, command in self.rig.commands[self._num_sent :]:
            match command:
                case RunBlock(task):
                    self.engines[worker_id].submit(task)
                case CancelBlock(key):
                    self.engines[worker_id].cancel(key)
        self._num_sent = len(self.rig.commands)


def calm() -> list[tuple[int, ...]]:
    """The ids of every request where nothing fails."""
    tracked = Cluster(FakeScript(num_unmasked=one_to_four)).run(random.Random(0))
    return [request.poll_state(MASK_ID).generated_token_ids for request in tracked]


@settings(max_examples=40, deadline=None)
@given(
    st.frozensets(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_poisonous_request_ends_alone_and_its_neighbours_complete(
    poisonous: frozenset[int], retries: int, num_workers: int, overlap: bool, seed: int
) -> None:
    script = FakeScript(num_unmasked=one_to_four, poisonous=frozenset(f"r{number}" for number in poisonous))
    cluster = Cluster(script, num_workers=num_workers, retries=retries, overlap=overlap)
    tracked, wanted = cluster.run(random.Random(seed)), calm()
    for number, request in enumerate(tracked):
        if number in poisonous:
            assert request.status is Status.ERROR
            times = "once" if retries == 0 else f"{retries + 1} times"
            assert f"block 0 failed {times}, last on worker" in request.error
            assert "batch failed: RuntimeError: scripted failure" in request.error
        else:
            assert request.status is Status.COMPLETED, request.error
            assert request.poll_state(MASK_ID).generated_token_ids == wanted[number]


def test_a_request_with_bad_logits_ends_at_once_and_its_neighbours_are_not_disturbed() -> None:
    cluster = Cluster(FakeScript(non_finite=frozenset({("r4", 1, 1)})))
    tracked = cluster.run(random.Random(1))
    assert tracked[4].status is Status.ERROR
    assert tracked[4].error == "block 1, step 1: non-finite logits (scripted)"
    assert {request.status for number, request in enumerate(tracked) if number != 4} == {Status.COMPLETED}
    assert {event.attempt for event in cluster.rig.of(BlockRouted)} == {0}


@pytest.mark.parametrize(
    "script",
    [
        FakeScript(failing_launches=frozenset({1, 4, 9, 16, 17})),
        FakeScript(failing_collects=frozenset({1, 4, 9, 16, 17})),
    ],
    ids=["launches", "collects"],
)
def test_a_device_that_fails_now_and_then_costs_nobody_a_request(script: FakeScript) -> None:
    script = replace(script, num_unmasked=one_to_four)
    tracked = Cluster(script, retries=2).run(random.Random(2))
    assert [request.poll_state(MASK_ID).generated_token_ids for request in tracked] == calm()

"""Links that break while nothing goes over them: the block that finds out has lost none of its retries."""

from __future__ import annotations

import pytest

from dbench.events import BlockFinished
from dbench.serve.fake_runner import FakeScript
from dbench.serve.wire import Submission
from tests.serve.engine_builders import EOS, quota
from tests.serve.hybrid_world import World
from tests.serve.scheduler_builders import BLOCK, Hybrid


def world_without_retries(num_colocated: int) -> World:
    hybrid = Hybrid(num_prefill=1, num_colocated=num_colocated, decode_policy="round_robin", overflow=False)
    return World(hybrid, FakeScript(eos_token_ids=(EOS,)), overlap=True, retries=0)


@pytest.mark.parametrize("num_colocated", [1, 3])
def test_a_request_completes_whose_links_have_all_broken_before(num_colocated: int) -> None:
    world = world_without_retries(num_colocated)
    for receiver_id in range(1, num_colocated + 1):
        world.break_link(0, receiver_id)
    tracked = world.submit(Submission((1, 2), 2 * BLOCK, quota(1), 0, ignore_eos=True))
    world.settle()
    world.check_rest()
    assert (tracked.status.value, tracked.error) == ("COMPLETED", "")
    assert any(isinstance(event, BlockFinished) and "the link is broken" in event.error for event in world.rig.events)

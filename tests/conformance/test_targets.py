"""What every target promises the load generator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import ServerUnavailable
from dbench.events import BlockFinished, Event, RequestArrived, RequestDone, RequestFinished, RequestSent
from dbench.load.driver import run_load
from dbench.load.fake_target import InProcessTarget, Script
from dbench.load.target import GrpcTarget, Outcome, Target
from dbench.options import SamplingOptions
from dbench.serve.fake_runner import FakeScript
from tests.load.builders import events_of, one_request, small_load
from tests.serve.server_builders import ServerInThisProcess

SLOWLY_S = 0.3


@dataclass(frozen=True, slots=True)
class Setting:
    """A target under test, and how to make it go away."""

    target: Target
    lose: Callable[[], Awaitable[None]]


@asynccontextmanager
async def in_process(slow: bool) -> AsyncIterator[Setting]:
    async with aclosing(InProcessTarget(Script(lambda request: SLOWLY_S if slow else 0.0, num_servers=2))) as target:
        await target.info()

        async def lose() -> None:
            target.lose()

        yield Setting(target, lose)


@asynccontextmanager
async def grpc(slow: bool) -> AsyncIterator[Setting]:
    async with (
        ServerInThisProcess(block_length=32, max_model_len=1024) as server,
        aclosing(GrpcTarget(server.endpoint.address)) as target,
    ):
        await server.open(FakeScript(lag_s=0.01 if slow else 0.0))
        await target.info()
        yield Setting(target, lambda: server.endpoint.stop(0))


Make = Callable[[bool], AbstractAsyncContextManager[Setting]]
TARGETS: dict[str, Make] = {"in-process": in_process, "grpc": grpc}
every_target = pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)


def run(make: Make, behaviour: Callable[[Setting], Coroutine[Any, Any, None]], *, slow: bool = False) -> None:
    async def main() -> None:
        async with make(slow) as setting:
            await behaviour(setting)

    asyncio.run(main())


async def one(target: Target, index: int = 0, gen_length: int = 64) -> Outcome:
    return await target.generate(one_request(index, gen_length), lambda request_id: None)


async def exported(target: Target) -> list[Event]:
    return [event async for event in target.export_events()]


@every_target
def test_it_describes_itself_well_enough_to_draw_requests(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        info = await setting.target.info()
        assert info.block_length >= 1
        assert info.max_model_len >= 2
        assert info.num_workers >= 1
        assert set(range(info.vocabulary_size)) - info.reserved_token_ids
        assert info.model

    run(make, behaviour)


@every_target
def test_a_request_completes_with_as_many_ids_as_were_asked_for(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        start_s = time.monotonic()
        outcome = await one(setting.target)
        assert outcome.completed
        assert len(outcome.token_ids) == 64
        assert outcome.num_forward_passes >= 2
        assert outcome.error == ""
        assert outcome.first_block_s is not None
        assert start_s <= outcome.first_block_s <= time.monotonic()

    run(make, behaviour)


@every_target
def test_it_names_a_request_once_and_before_its_end(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        named: list[str] = []
        task = asyncio.create_task(setting.target.generate(one_request(), named.append))
        while not named:
            await asyncio.sleep(0.001)
        assert not task.done()
        assert named == [(await task).request_id]

    run(make, behaviour, slow=True)


@every_target
def test_every_request_has_a_name_of_its_own(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        outcomes = await asyncio.gather(*(one(setting.target, index) for index in range(20)))
        assert len({outcome.request_id for outcome in outcomes}) == 20
        assert all(outcome.completed for outcome in outcomes)

    run(make, behaviour)


@every_target
def test_equal_requests_get_equal_ids(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        request = one_request()
        other = replace(request, request_seed=request.request_seed + 1)
        first, again, changed = [
            await setting.target.generate(r, lambda request_id: None) for r in (request, request, other)
        ]
        assert first.token_ids == again.token_ids
        assert first.token_ids != changed.token_ids

    run(make, behaviour)


@every_target
def test_a_refused_request_is_an_outcome_and_no_exception(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        outcome = await one(setting.target, gen_length=33)
        assert outcome.status == "ERROR"
        assert "33" in outcome.error
        assert outcome.token_ids == ()
        assert (await one(setting.target)).completed

    run(make, behaviour)


@every_target
def test_a_cancelled_call_cancels_the_request(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        named: list[str] = []
        task = asyncio.create_task(setting.target.generate(one_request(), named.append))
        while not named:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not (ends := [e for e in await exported(setting.target) if isinstance(e, RequestFinished)]):
            await asyncio.sleep(0.01)
        assert [(end.request_id, end.status) for end in ends] == [(named[0], "CANCELLED")]

    run(make, behaviour, slow=True)


@every_target
def test_its_events_tell_of_every_request_since_the_reset_and_of_no_other(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        await one(setting.target)
        await setting.target.reset_metrics()
        wanted = {(await one(setting.target, index)).request_id for index in range(3)}
        events = await exported(setting.target)
        for kind in (RequestArrived, RequestFinished, BlockFinished):
            assert {event.request_id for event in events if isinstance(event, kind)} == wanted

    run(make, behaviour)


@every_target
def test_its_events_are_on_the_clock_of_the_caller(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        await setting.target.reset_metrics()
        start_s = time.monotonic()
        outcome = await one(setting.target)
        end_s = time.monotonic()
        blocks = [e for e in await exported(setting.target) if isinstance(e, BlockFinished)]
        assert [block.block_index for block in blocks] == [0, 1]
        moments = [t for b in blocks for t in (b.ready_s, b.routed_s, b.refresh_start_s, b.refresh_end_s, b.end_s)]
        assert all(moment is not None and start_s <= moment <= end_s for moment in moments)
        assert sum(sum(block.step_num_unmasked) for block in blocks) == len(outcome.token_ids)
        assert sum(len(block.step_end_s) for block in blocks) == outcome.num_forward_passes

    run(make, behaviour)


@every_target
def test_its_workers_are_numbered_and_have_a_state(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        workers = await setting.target.workers()
        assert [worker.worker_id for worker in workers] == [0, 1]
        assert all(worker.state for worker in workers)

    run(make, behaviour)


@every_target
def test_a_request_in_flight_notices_that_the_target_has_gone(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        named: list[str] = []
        task = asyncio.create_task(setting.target.generate(one_request(), named.append))
        while not named:
            await asyncio.sleep(0.001)
        await setting.lose()
        with pytest.raises(ServerUnavailable):
            await task

    run(make, behaviour, slow=True)


@every_target
def test_a_target_that_has_gone_answers_nothing(make: Make) -> None:
    async def behaviour(setting: Setting) -> None:
        await setting.lose()
        target = setting.target
        for call in (target.info, target.workers, target.reset_metrics, lambda: one(target), lambda: exported(target)):
            with pytest.raises(ServerUnavailable):
                await call()

    run(make, behaviour)


@every_target
def test_a_load_runs_against_it(make: Make, tmp_path: Path) -> None:
    async def behaviour(setting: Setting) -> None:
        load = small_load(num_warmup_requests=None, num_requests=20)
        result = await run_load(setting.target, load, SamplingOptions(), tmp_path)
        assert result.reason == "complete"

    run(make, behaviour)
    events = events_of(tmp_path)
    measured = {e.request_id for e in events if isinstance(e, RequestSent) and e.role == "measured"}
    assert len(measured) == 20
    assert {e.status for e in events if isinstance(e, RequestDone) and e.request_id in measured} == {"COMPLETED"}
    assert measured <= {e.request_id for e in events if isinstance(e, RequestFinished)}

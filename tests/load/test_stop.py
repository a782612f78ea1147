"""Signals become a cancellation, once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dbench.load.stop import cancel_on_signals, run_cancellable


async def wait_with_signals() -> str:
    with cancel_on_signals():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "cancelled"
    return "not cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_cancels_and_the_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def main() -> str:
        task = asyncio.create_task(wait_with_signals())
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        return await task

    assert asyncio.run(main()) == "cancelled"
    assert signal.getsignal(number) == before


def test_the_second_signal_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    async def main() -> str:
        task = asyncio.create_task(wait_with_signals())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        result = await task
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    try:
        assert asyncio.run(main()) == "cancelled"
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_signal_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        with cancel_on_signals():
            await asyncio.sleep(0)

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before


def test_work_that_a_signal_ends_is_a_keyboard_interrupt() -> None:
    async def never() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_cancellable(never)


def test_work_that_survives_its_cancellation_has_a_result() -> None:
    async def tidy() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "tidied"
        return "not cancelled"

    assert run_cancellable(tidy) == "tidied"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_moment_of_the_work_is_not_lost(number: signal.Signals) -> None:
    async def ends_before_the_loop_can_tell_it() -> str:
        os.kill(os.getpid(), number)
        return "done"

    with pytest.raises(KeyboardInterrupt):
        run_cancellable(ends_before_the_loop_can_tell_it)

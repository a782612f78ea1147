"""Completion times of a device, and what its errors become; events are scripted, so no device is needed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from dbench.errors import DeviceLost
from dbench.serve.device_clock import DeviceClock, device_lost_if_it_fails

CPU = torch.device("cpu")


@dataclass
class Completion:
    """An event as torch.cuda has it, recorded at a time of the device's own clock."""

    at_ms: float | None
    was_late: bool = True

    def query(self) -> bool:
        return self.was_late

    def synchronize(self) -> None:
        assert self.at_ms is not None

    def elapsed_time(self, other: Completion) -> float:
        if self.at_ms is None or other.at_ms is None:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return other.at_ms - self.at_ms


def wait(clock: DeviceClock, event: Completion) -> float:
    return clock.wait(cast(torch.cuda.Event, event))


def test_a_completion_that_the_host_reads_late_is_timed_from_the_one_before() -> None:
    clock = DeviceClock()
    first_s = wait(clock, Completion(100.0, was_late=False))
    time.sleep(0.02)
    assert wait(clock, Completion(105.0)) == pytest.approx(first_s + 0.005)


def test_a_completion_that_the_host_waited_for_is_timed_by_the_host() -> None:
    clock = DeviceClock()
    wait(clock, Completion(100.0))
    before_s = time.monotonic()
    assert wait(clock, Completion(100.1, was_late=False)) >= before_s


def test_an_event_that_is_recorded_anew_is_no_longer_timed_from() -> None:
    clock, used_again = DeviceClock(), Completion(100.0)
    wait(clock, used_again)
    clock.forget(cast(torch.cuda.Event, Completion(90.0)))
    clock.forget(cast(torch.cuda.Event, used_again))
    used_again.at_ms = None  # under way
    before_s = time.monotonic()
    assert wait(clock, Completion(120.0)) >= before_s


def test_an_error_of_the_device_ends_its_worker_and_one_of_the_batch_does_not() -> None:
    with pytest.raises(DeviceLost, match="cpu: an illegal memory access"), device_lost_if_it_fails(CPU):
        raise torch.AcceleratorError("an illegal memory access")
    with pytest.raises(torch.OutOfMemoryError), device_lost_if_it_fails(CPU):
        raise torch.OutOfMemoryError("out of memory")

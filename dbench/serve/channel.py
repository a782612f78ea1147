"""One way for bytes between two processes: a torch.distributed process group of two, met at a store.

There is no default group. Every wait has a deadline of its own, and a peer that dies or stops ends the channel, never
this process. Small messages go over gloo; bulk data does too between CPUs, and over NCCL between GPUs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from dbench.errors import ChannelBroken, one_line

dist: Any = torch.distributed
"""Without types: what is used of it here has none."""

SENDER, RECEIVER = 0, 1
"""Ranks."""
NCCL_POLL_S = 0.0002
STORE_POLL_S = 0.002
IDLE_POLL_S = 0.05
"""The same while nothing is to come."""
SENDER_IS_HERE = "sender is here"
MAX_REASON = 200
"""Characters."""


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """Where a channel's ends meet, and which of them this is."""

    store: Any
    """Of this channel alone."""
    rank: int
    timeout_s: float
    """Of the meeting, and of every message once it is due."""
    own_address: str
    device: torch.device


class Bulk(Protocol):
    """Carries tensors of bytes that lie on the channel's device. All methods raise ChannelBroken."""

    def stream(self) -> AbstractContextManager[object]:
        """In it, work on the device joins the queue that `send` and `receive` join."""

    def send(self, data: Tensor) -> None:
        """Return when the peer has it, or at least this side needs it no more."""

    def receive(self, into: Tensor) -> None:
        """Return when it is all there, for work in `stream`."""

    def finish(self) -> None:
        """Return when all work in `stream` is done."""

    def close(self) -> None:
        """Hang up; the peer notices."""


class GlooBulk:
    """Between CPUs: every call waits for itself."""

    def __init__(self, spec: ChannelSpec) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=spec.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=spec.own_address)]
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._peer = 1 - spec.rank
        self._group = _guarded(lambda: dist.ProcessGroupGloo(spec.store, spec.rank, 2, options))

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, data: Tensor) -> None:
        _guarded(lambda: self._group.send([data], self._peer, 0).wait(self._timeout))

    def receive(self, into: Tensor) -> None:
        _guarded(lambda: self._group.recv([into], self._peer, 0).wait(self._timeout))

    def finish(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        self._group = None


class NcclBulk:
    """Between GPUs: a stream beside the engine's; the host waits for it with a deadline and ends a group that hangs."""

    def __init__(self, spec: ChannelSpec) -> None:
        for guard in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ[guard] = "0"  # either ends this process when the peer dies or hangs
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # many lines on stderr about a peer that is gone
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=spec.timeout_s)
        self._timeout_s = spec.timeout_s
        self._peer = 1 - spec.rank
        self._stream = torch.cuda.Stream(spec.device)
        self._group = _guarded(lambda: dist.ProcessGroupNCCL(spec.store, spec.rank, 2, options))

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def send(self, data: Tensor) -> None:
        with self.stream():
            _guarded(lambda: self._group.send([data], self._peer, 0).wait())
        self.finish()

    def receive(self, into: Tensor) -> None:
        with self.stream():
            _guarded(lambda: self._group.recv([into], self._peer, 0).wait())

    def finish(self) -> None:
        event = self._stream.record_event()
        late_s = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > late_s:
                self.close()
                raise ChannelBroken(f"nothing moved for {self._timeout_s:g} s")
            time.sleep(NCCL_POLL_S)

    def close(self) -> None:
        group, self._group = self._group, None
        with suppress(ChannelBroken):  # it is given up in any case
            if group is not None:
                _guarded(group.abort)


BULKS: dict[str, Callable[[ChannelSpec], Bulk]] = {"cpu": GlooBulk, "cuda": NcclBulk}
"""Type of device -> what carries bulk data between two of them."""


class Channel:
    """Messages in order, each a header (plain JSON values) and, for some, bulk data after it."""

    def __init__(self, spec: ChannelSpec) -> None:
        """Wait for the other end. Raises ChannelBroken."""
        self._small = GlooBulk(spec)
        self.bulk: Bulk = self._small
        if spec.device.type != "cpu":
            self.bulk = BULKS[spec.device.type](replace(spec, store=dist.PrefixStore("bulk", spec.store)))

    def send(self, header: dict[str, Any]) -> None:
        encoded = bytearray(json.dumps(header).encode())
        self._small.send(torch.tensor([len(encoded)]))
        self._small.send(torch.frombuffer(encoded, dtype=torch.uint8))

    def receive(self) -> dict[str, Any]:
        """The next header; the peer sends one at least every `timeout_s`, or is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        self._small.receive(length)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        self._small.receive(encoded)
        header: dict[str, Any] = json.loads(encoded.numpy().tobytes())
        return header

    def close(self) -> None:
        """Hang up; a second call does nothing."""
        self.bulk.close()
        self._small.close()


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where two workers meet, as one of them sees it."""

    address: str
    """host:port of the store."""
    timeout_s: float
    device: torch.device


def meet(meeting: MeetingPoint, name: str, rank: int, is_wanted: Callable[[], bool] = lambda: True) -> Channel:
    """The channel of this name; waits until both its ends have come. Raises ChannelBroken, or what `is_wanted` does.

    A receiver waits for its sender without a limit while `is_wanted` says that nothing is to come.
    """
    timeout_s = meeting.timeout_s
    host, _, port = meeting.address.rpartition(":")
    host, timeout = host.strip("[]"), timedelta(seconds=timeout_s)
    everybody = _guarded(lambda: dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False))
    store = dist.PrefixStore(name, everybody)
    if rank == SENDER:
        _guarded(lambda: store.set(SENDER_IS_HERE, ""))
    else:
        _await_sender(store, timeout_s, is_wanted)
    return Channel(ChannelSpec(store, rank, timeout_s, _own_address(host, int(port)), meeting.device))


def _await_sender(store: Any, timeout_s: float, is_wanted: Callable[[], bool]) -> None:
    """Its address would be out of date if a receiver that was given up on had left its own first."""
    late_s = time.monotonic() + timeout_s
    while not _guarded(lambda: store.check([SENDER_IS_HERE])):
        now_s = time.monotonic()
        wanted = is_wanted()
        if not wanted:
            late_s = now_s + timeout_s
        elif now_s > late_s:
            raise ChannelBroken(f"it did not come within {timeout_s:g} s")
        time.sleep(STORE_POLL_S if wanted else IDLE_POLL_S)


def _own_address(host: str, port: int) -> str:
    """Of this host, as seen from there: what its peers reach it at."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _guarded(call: Callable[[], Any]) -> Any:
    """The call's result; torch's many errors become one of ours."""
    try:
        return call()
    except (RuntimeError, OSError) as error:
        raise ChannelBroken(_reason(one_line(error))) from None


def _reason(text: str) -> str:
    """What happened; gloo names its source files before it and gives advice after it."""
    return re.sub(r"^\[\S+:\d+\] ", "", text).partition(". ")[0][:MAX_REASON]

"""A hybrid server without a worker of its own, and one `dbench worker` process of each kind."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dbench.events import Event
from tests.serve.process_builders import answer, server_child
from tests.serve.remote_builders import ENVIRONMENT, WorkerProcess, address_of, at_free_port, worker_process
from tests.serve.server_builders import WORKER_KEY, run
from tests.serve.test_hybrid_served import HYBRID, served

Environment = Mapping[str, str]

PREFILL_ID, DECODE_ID = 0, 1
PREFILL = ("--worker-type", "prefill")
REMOTE_HYBRID: dict[str, object] = {
    **HYBRID,
    "model": "embedded",
    "num_remote_workers": 1,
    "num_remote_prefill_workers": 1,
    "worker_key": WORKER_KEY,
    "master_port": 0,
}


@dataclass(frozen=True)
class RemoteHybrid:
    address: str
    prefill: WorkerProcess
    decoder: WorkerProcess


@contextmanager
def remote_hybrid(
    folder: Path, *arguments: str, environments: tuple[Environment, Environment] = ({}, {}), **given: object
) -> Iterator[RemoteHybrid]:
    """Ready; `arguments` are for both workers, `environments` for the prefill worker and for the other one.

    They load one after the other: on one CUDA device each would count what the other takes meanwhile.
    """
    wanted = {**REMOTE_HYBRID, **given}
    service = at_free_port(**wanted)
    address = address_of(service)
    of_prefill, of_decoder = ({**ENVIRONMENT, **own} for own in environments)
    with (
        server_child(service, **wanted) as server,
        worker_process(address, folder, *PREFILL, *arguments, environment=of_prefill) as prefill,
    ):
        assert prefill.wait_until_ready() == f"ready as worker {PREFILL_ID} of {address}", prefill.log.read_text()
        with worker_process(address, folder, *arguments, environment=of_decoder) as decoder:
            assert decoder.wait_until_ready() == f"ready as worker {DECODE_ID} of {address}", decoder.log.read_text()
            assert answer(server) == {"address": address}
            yield RemoteHybrid(address, prefill, decoder)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def served_by_remote_workers(
    folder: Path, *arguments: str, environments: tuple[Environment, Environment] = ({}, {}), **given: object
) -> tuple[list[tuple[int, ...]], list[Event]]:
    """The ids of all jobs and what happened; the workers end well when they are told to."""
    with remote_hybrid(folder, *arguments, environments=environments, **given) as hybrid:
        found = run(served(hybrid.address))
        for worker in (hybrid.decoder, hybrid.prefill):
            worker.process.send_signal(signal.SIGTERM)
        assert [worker.exit_code() for worker in (hybrid.decoder, hybrid.prefill)] == [0, 0]
    return found

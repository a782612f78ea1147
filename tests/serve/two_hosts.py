"""A server and a worker in two network namespaces with a cable between them, which is pulled and plugged in again.

`unshare --user --map-root-user --net python -m tests.serve.two_hosts CASE FOLDER`: everything that is set up here goes
with the namespaces, and those with the last process in them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dbench.events import BlockFinished, WorkerLost
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import SamplingParameters
from dbench.serve.wire import Submission
from tests.serve.process_builders import assert_all_end, family_of, launch, wait_for
from tests.serve.remote_builders import WorkerProcess, worker_process
from tests.serve.server_builders import WORKER_KEY, events_of, eventually, run

SERVER, WORKER = "10.77.0.1", "10.77.0.2"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
SLOW = SamplingParameters("conf_quota", fixed_unmask_quota=1)
WANTS = [Submission(tuple(range(1, 30 + i)), 64, SLOW, request_seed=i, ignore_eos=True) for i in range(6)]


HYBRID: Mapping[str, object] = {
    "mode": "hybrid",
    "prefill_gpus": "cpu",
    "hybrid_colocated_gpus": "cpu",
    "prefill_scheduler_policy": "round_robin",
    "decode_scheduler_policy": "round_robin",
    "enable_hybrid_prefill_overflow": False,
    "master_addr": SERVER,
    "master_port": 0,
    "kv_transfer_timeout_s": 2.0,
}
"""With a worker of each kind on the server's host."""


@dataclass(frozen=True)
class Case:
    """A server, and the worker on the other host."""

    options: Mapping[str, object]
    kind: str
    worker_id: int
    pairs: Set[tuple[int, int]]
    """Senders and receivers of KV, where the worker is one of them."""


CASES = {
    "colocated": Case({}, "colocated", 1, set()),
    "refreshes for a hybrid server": Case(HYBRID, "prefill", 2, {(2, 1)}),
    "decodes for a hybrid server": Case(HYBRID, "colocated", 2, {(0, 2)}),
}


def ip(*arguments: str, prefix: tuple[str, ...] = ()) -> None:
    subprocess.run([*prefix, "ip", *arguments], check=True)


@contextmanager
def other_host() -> Iterator[tuple[str, ...]]:
    """A namespace at the other end of a cable; gives what goes before a command to run it there."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    prefix = ("nsenter", "--target", str(holder.pid), "--net")
    own = Path("/proc/self/ns/net").readlink()
    try:
        wait_for(lambda: Path(f"/proc/{holder.pid}/ns/net").readlink() != own)
        ip("link", "set", "lo", "up")
        ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(holder.pid))
        ip("addr", "add", f"{SERVER}/24", "dev", "cable")
        ip("link", "set", "cable", "up")
        ip("addr", "add", f"{WORKER}/24", "dev", "cable", prefix=prefix)
        ip("link", "set", "cable", "up", prefix=prefix)
        yield prefix
    finally:
        holder.kill()
        holder.wait()


async def results_of(client: Client) -> list[tuple[int, ...]]:
    results = await asyncio.gather(*(submit_and_wait(client, want) for want in WANTS))
    assert [result.status for result in results] == ["COMPLETED"] * len(WANTS)
    return [result.token_ids for result in results]


async def results_at(address: str) -> list[tuple[int, ...]]:
    async with Client(address) as client:
        return await results_of(client)


async def scenario(case: Case, address: str, worker: WorkerProcess, wanted: list[tuple[int, ...]]) -> None:
    async with Client(address) as client:

        async def has_state(*states: str) -> None:
            async def is_there() -> bool:
                return (await client.status()).workers[case.worker_id].state in states

            await eventually(is_there)

        async def pages_are_back() -> bool:
            return all(w.pages_used == 0 for w in (await client.status()).workers)

        assert await results_of(client) == wanted
        assert await pairs_with(client, case.worker_id) == case.pairs
        running = asyncio.ensure_future(results_of(client))
        await has_state("busy")
        ip("link", "set", "cable", "down")
        assert await running == wanted
        await has_state("awaited")
        reasons = [e.reason for e in await events_of(client) if isinstance(e, WorkerLost)]
        assert [reason.startswith("nothing was heard of it") for reason in reasons] == [True]
        ip("link", "set", "cable", "up")
        assert await asyncio.to_thread(worker.wait_until_ready) == f"ready as worker {case.worker_id} of {address}"
        await client.reset_metrics()
        assert await results_of(client) == wanted
        assert await pairs_with(client, case.worker_id) == case.pairs
        await eventually(pages_are_back)


async def pairs_with(client: Client, worker_id: int) -> set[tuple[int, int]]:
    """The workers that refreshed a block and those that decoded it, where this one was one of two."""
    found = [e for e in await events_of(client) if isinstance(e, BlockFinished)]
    pairs = {(e.prefill_worker_id, e.worker_id) for e in found if e.prefill_worker_id is not None}
    return {pair for pair in pairs if worker_id in pair}


def main(case: Case, folder: Path) -> None:
    given = {"host": SERVER, "allow_insecure_bind": True, "worker_key": WORKER_KEY, "worker_timeout_s": 3.0}
    with other_host() as prefix:
        with launch(folder / "colocated.log") as colocated:
            wanted = run(results_at(colocated.address))
        with (
            launch(folder / "server.log", **given, **case.options) as server,
            worker_process(server.address, folder, "--worker-type", case.kind, prefix=prefix) as worker,
        ):
            family = family_of(server.pid)
            assert worker.wait_until_ready() == f"ready as worker {case.worker_id} of {server.address}"
            run(scenario(case, server.address, worker, wanted))
            worker.process.terminate()
            assert worker.exit_code() == 0
        assert_all_end(family)


if __name__ == "__main__":
    main(CASES[sys.argv[1]], Path(sys.argv[2]))

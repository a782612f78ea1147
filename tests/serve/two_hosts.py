"""A server and a worker in two network namespaces with a cable between them, which is pulled and plugged in again.

`unshare --user --map-root-user --net python -m tests.serve.two_hosts FOLDER`: everything that is set up here goes
with the namespaces, and those with the last process in them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dbench.events import WorkerLost
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


async def scenario(address: str, worker: WorkerProcess) -> None:
    async with Client(address) as client:

        async def has_state(*states: str) -> None:
            async def is_there() -> bool:
                return (await client.status()).workers[1].state in states

            await eventually(is_there)

        wanted = await results_of(client)
        running = asyncio.ensure_future(results_of(client))
        await has_state("busy")
        ip("link", "set", "cable", "down")
        assert await running == wanted
        await has_state("awaited")
        reasons = [e.reason for e in await events_of(client) if isinstance(e, WorkerLost)]
        assert [reason.startswith("nothing was heard of it") for reason in reasons] == [True]
        ip("link", "set", "cable", "up")
        assert await asyncio.to_thread(worker.wait_until_ready) == f"ready as worker 1 of {address}"
        assert await results_of(client) == wanted
        assert [w.pages_used for w in (await client.status()).workers] == [0, 0]


def main(folder: Path) -> None:
    given = {"host": SERVER, "allow_insecure_bind": True, "worker_key": WORKER_KEY, "worker_timeout_s": 3.0}
    with (
        other_host() as prefix,
        launch(folder / "server.log", **given) as server,
        worker_process(server.address, folder, prefix=prefix) as worker,
    ):
        family = family_of(server.pid)
        assert worker.wait_until_ready() == f"ready as worker 1 of {server.address}"
        run(scenario(server.address, worker))
        worker.process.terminate()
        assert worker.exit_code() == 0
    assert_all_end(family)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

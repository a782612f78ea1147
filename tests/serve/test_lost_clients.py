"""A client process that is killed: its request ends, and what it held is free for others."""

from __future__ import annotations

import subprocess
import sys

from dbench.events import RequestFinished
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.wire import Submission
from tests.serve.process_builders import launch
from tests.serve.remote_builders import ENVIRONMENT
from tests.serve.server_builders import events_of, eventually, run

LONG = ("--gen-length", "2048", "--unmasking-strategy", "conf_quota", "--fixed-unmask-quota", "1", "--ignore-eos")


def test_the_request_of_a_killed_client_is_cancelled_and_its_pages_come_back() -> None:
    async def scenario(address: str) -> None:
        async with Client(address) as client:

            async def is_running() -> bool:
                return (await client.status()).workers[0].pages_used > 0

            async def is_free() -> bool:
                return (await client.status()).workers[0].pages_used == 0

            command = (sys.executable, "-m", "dbench", "submit", "--server", address, "--prompt-ids", "1,2,3")
            process = subprocess.Popen((*command, *LONG), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            try:
                await eventually(is_running)
            finally:
                process.kill()
                process.wait()
            await eventually(is_free)
            assert (await client.status()).num_requests_in_server == 0
            (end,) = [event for event in await events_of(client) if isinstance(event, RequestFinished)]
            assert (end.status, end.error) == ("CANCELLED", "the client went away or its deadline passed")
            assert (await submit_and_wait(client, Submission((1, 2, 3), 4))).status == "COMPLETED"

    with launch(max_model_len=4096, kv_max_pages=256) as server:
        run(scenario(server.address))

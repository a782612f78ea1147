"""A proxy for web pages is no way to a server or a worker."""

from __future__ import annotations

import pytest

from dbench.serve.client import submit_and_wait
from dbench.serve.wire import Submission
from tests.serve.server_builders import ServerInThisProcess, run


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_in_the_environment_is_not_asked(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")

    async def scenario() -> None:
        async with ServerInThisProcess(gpus="cpu") as server, server.client() as client:
            await server.open()
            assert (await submit_and_wait(client, Submission((1, 2, 3), 4))).status == "COMPLETED"

    run(scenario())

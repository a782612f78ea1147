"""Many requests while workers die and stand still: each has its one right end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.serve.chaos import MODES, WORKER_TIMEOUT_S, Chaos, Mode, RemoteWorkers
from tests.serve.leftovers import Household
from tests.serve.process_builders import launch, wait_for
from tests.serve.remote_builders import is_bindable, names


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_request_has_its_right_end_while_workers_die(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    folders = [tmp_path / name for name in ("temporary", "metrics")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders[0]))
    server = launch(
        tmp_path / "server.log",
        block_length=8,
        worker_timeout_s=WORKER_TIMEOUT_S,
        metrics_output_dir=str(folders[1]),
        **mode.options,
    )

    draw = random.Random(pytestconfig.getoption("chaos_seed"))
    household = Household(folders[0])
    with server, RemoteWorkers(server.address, tmp_path, mode.num_remote, folders[0]) as remote:
        chaos = Chaos(server, mode, remote, draw, household)
        asyncio.run(chaos.run(pytestconfig.getoption("chaos_requests")))
        own = household.addresses[psutil.Process(server.pid)]
    # where workers exchange KV, the server has the port at which they meet; local workers show their figures
    assert server.address in own
    assert len(own) == 1 + mode.has_kv_links
    others = [addresses for process, addresses in household.addresses.items() if process.pid != server.pid]
    assert sum(bool(addresses) for addresses in others) >= mode.num_local
    assert len(others) > mode.num_local + mode.num_remote  # others have come in the place of those that were killed
    with suppress(AssertionError):  # what is left says more than that
        wait_for(lambda: not household.left())
    assert household.left() == []
    assert is_bindable(server.address)
    assert names(list(folders[1].iterdir())) == ["events.jsonl"]

"""Many requests while workers die and stand still: each has its one right end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.serve.chaos import MODES, WORKER_TIMEOUT_S, Chaos, Mode, RemoteWorkers
from tests.serve.process_builders import assert_all_end, family_of, launch
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
    with server, RemoteWorkers(server.address, tmp_path, mode.num_remote) as remote:
        family = family_of(server.pid)
        chaos = Chaos(server, mode, remote, draw)
        asyncio.run(chaos.run(pytestconfig.getoption("chaos_requests")))
    assert_all_end([*family, *chaos.outcome.processes])
    assert len(chaos.outcome.addresses) > mode.num_local  # that of the server, and one of each of its workers at least
    assert {address for address in chaos.outcome.addresses if not is_bindable(address)} == set()
    assert [names(list(folder.iterdir())) for folder in folders] == [[], ["events.jsonl"]]

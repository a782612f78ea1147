"""What a remote worker has in memory between two servers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from dbench.serve import remote_worker
from dbench.serve.deployment import Deployment, deployment_of
from dbench.serve.kv import KvPool
from dbench.serve.remote_worker import RemoteWorker, RemoteWorkerConfig
from dbench.serve.wire_link import Hello, Welcome
from dbench.serve.worker import load_runner, new_engine, new_transfer
from dbench.serve.worker_stream import WorkerStream
from tests.serve.server_builders import options

CONFIG = RemoteWorkerConfig("127.0.0.1:1", "key", "cpu", None, 1, 30.0, 60.0)


def welcome(kind: str, block_length: int) -> Welcome:
    """To a hybrid server, nobody of which is ever met."""
    hybrid = {"mode": "hybrid", "gpus": None, "prefill_gpus": "cpu", "hybrid_colocated_gpus": "cpu", "master_port": 0}
    engine, _, _ = options(**hybrid, block_length=block_length)
    deployment = deployment_of(engine)
    return Welcome(0, deployment.options, deployment.model_fingerprint(), kind, "127.0.0.1:1")


@pytest.mark.parametrize("kind", ["prefill", "colocated"])
def test_one_model_is_out_of_memory_before_the_next_is_loaded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[KvPool]] = []

    def load(*given: Any, **named: Any) -> tuple[Any, Deployment]:
        assert [pool() for pool in pools] == [None] * len(pools)
        runner, deployment = load_runner(*given, **named)
        assert isinstance(runner.kv, KvPool)
        pools.append(weakref.ref(runner.kv))
        return runner, deployment

    def serve(told: Welcome) -> None:
        """As a dial does, up to the blocks."""
        loaded = worker._load(told)
        stream = WorkerStream(CONFIG.scheduler, Hello("key", None, "cpu", 1))
        transfer = new_transfer(told, loaded.deployment, loaded.runner, stream)
        new_engine(told, loaded.deployment, loaded.runner, transfer)
        assert transfer is not None
        transfer.close()

    monkeypatch.setattr(remote_worker, "load_runner", load)
    worker = RemoteWorker(CONFIG, lambda worker_id: None)
    for block_length in (8, 8, 16):
        serve(welcome(kind, block_length))
    assert len(pools) == 2
    worker._unload()
    assert [pool() for pool in pools] == [None, None]

"""Hybrid mode on CUDA devices: a block goes on in another runner, and KV goes from one device to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dbench.models import embedded_directory
from dbench.serve.families import read_model_config
from dbench.serve.kv import KvRunner
from dbench.serve.policy import SPANS
from dbench.serve.runner import Phase, Span
from dbench.serve.sequence import BlockTask, SamplingParameters
from tests.serve.decoding import NUM_PAGES, PAGE_SIZE, Job, task_of
from tests.serve.remote_hybrid import DECODE_ID, PREFILL_ID, served_by_remote_workers
from tests.serve.server_builders import run
from tests.serve.test_hybrid_served import hybrid_server, served, transferred
from tests.serve.test_same_tokens import BLOCK_LENGTH, decode, different_jobs, engine
from tests.serve.test_same_tokens_served import NUM_JOBS

pytestmark = pytest.mark.gpu

TWO_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""With different NCCL_HOSTIDs: NCCL refuses two ranks of one host on one device, and would not use sockets there."""
HERE, THERE = (4, 9, 2, 7, 30, 31, 32, 33), (600, 3, 77, 5, 12, 13, 14, 15)
"""Pages on either runner."""


def cuda_runner() -> KvRunner:
    from dbench.serve.cuda_build import CudaSettings, build_cuda_runner
    from dbench.serve.torch_runner import RunnerConfig

    config = read_model_config(embedded_directory())
    assert config.mask_token_id is not None
    return build_cuda_runner(
        RunnerConfig(
            model_dir=embedded_directory(),
            load_format="auto",
            dtype="float32",
            device="cuda",
            seed=0,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_slots=4,
            block_length=BLOCK_LENGTH,
            mask_token_id=config.mask_token_id,
            num_threads=1,
        ),
        CudaSettings(
            max_model_len=512,
            max_tokens_per_iteration=512,
            cache_mode="exact",
            attention_backend="sdpa",
            gpu_memory_utilization=0.3,
            graph_batch_sizes=(1, 2),
            measured_layer=None,
        ),
    )


def span(task: BlockTask, phase: Phase, slot: int) -> Span:
    rows = SPANS["exact"][phase](task, 0)
    return Span(slot, phase, rows.start, rows.num_rows, rows.written_from)


@dataclass
class Copies:
    """Copies each layer on a stream of its own, as soon as it may."""

    runner: KvRunner
    layers: list[torch.Tensor] = field(default_factory=list)
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)

    def layer_written(self, slots: tuple[int, ...], layer: int, wait: Callable[[], None]) -> None:
        assert (slots, layer) == ((0,), len(self.layers))
        with torch.cuda.stream(self.stream):
            wait()
            self.layers.append(self.runner.kv.read_pages(layer, HERE))


@pytest.mark.parametrize("rule", [SamplingParameters(), SamplingParameters("conf_quota", fixed_unmask_quota=1)])
def test_a_block_goes_on_in_another_runner_with_the_layers_that_were_copied_during_its_refresh(
    rule: SamplingParameters,
) -> None:
    task = task_of(Job(list(b"fourty-two is the answer"), 2 * BLOCK_LENGTH, rule, seed=5), BLOCK_LENGTH)
    sender, receiver = cuda_runner(), cuda_runner()
    copies = Copies(sender)
    sender.watch_layers(copies)
    sender.attach(0, task, HERE)
    (refreshed,) = sender.collect(sender.launch((span(task, Phase.REFRESH, 0),))).spans
    copies.stream.synchronize()
    assert len(copies.layers) == sender.kv.num_layers
    for layer, data in enumerate(copies.layers):
        receiver.kv.write_pages(layer, THERE, data)
    fixed = dict(zip(refreshed.positions, refreshed.token_ids, strict=True))
    if refreshed.done:
        pytest.skip("the refresh has fixed the whole block")
    receiver.attach(1, task, THERE, fixed)
    ends = []
    for runner, slot in ((receiver, 1), (sender, 0)):
        known, is_done = dict(fixed), False
        while not is_done:
            (got,) = runner.collect(runner.launch((span(task, Phase.DECODE, slot),))).spans
            known |= dict(zip(got.positions, got.token_ids, strict=True))
            is_done = got.done
        ends.append(known)
        runner.detach(slot)
        runner.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("overflow", [True, False])
def test_hybrid_on_two_devices_gives_the_tokens_of_the_cpu(overflow: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with engine(overlap=False) as on_cpu:
        wanted = [tuple(ids) for ids in decode(on_cpu, different_jobs(NUM_JOBS))]
    with hybrid_server(
        model="embedded",
        prefill_gpus="0",
        hybrid_colocated_gpus="1",
        enable_hybrid_prefill_overflow=overflow,
        prefill_overload_threshold=400,
    ) as server:
        token_ids, events = run(served(server.address))
    assert token_ids == wanted
    assert {(block.prefill_worker_id, block.worker_id) for block in transferred(events)} == {(0, 1)}


@pytest.mark.parametrize("overflow", [True, False])
def test_hybrid_between_two_processes_on_one_device_gives_the_tokens_of_the_cpu(overflow: bool, tmp_path: Path) -> None:
    with engine(overlap=False) as on_cpu:
        wanted = [tuple(ids) for ids in decode(on_cpu, different_jobs(NUM_JOBS))]
    token_ids, events = served_by_remote_workers(
        tmp_path,
        "--gpu",
        "0",
        environments=({**TWO_HOSTS, "NCCL_HOSTID": "one"}, {**TWO_HOSTS, "NCCL_HOSTID": "another"}),
        gpu_memory_utilization=0.3,
        enable_hybrid_prefill_overflow=overflow,
        prefill_overload_threshold=400,
    )
    assert token_ids == wanted
    assert {(block.prefill_worker_id, block.worker_id) for block in transferred(events)} == {(PREFILL_ID, DECODE_ID)}

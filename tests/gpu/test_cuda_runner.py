"""The CUDA runner under a real engine: the tokens of the CPU, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dbench.load.tasks import held_out
from dbench.models import embedded_directory
from dbench.serve.chat import Message
from dbench.serve.engine import Engine
from dbench.serve.families import read_model_config
from dbench.serve.pages import PagePool
from dbench.serve.sequence import SamplingParameters
from dbench.serve.tokenizer import load_tokenizer
from tests.serve.decoding import NUM_PAGES, PAGE_SIZE, Job, decode_all, engine_on, limits_for
from tests.serve.test_same_tokens import BLOCK_LENGTH, decode, different_jobs, engine

pytestmark = pytest.mark.gpu


@contextmanager
def cuda_engine(
    directory: Path,
    *,
    dtype: str = "float32",
    overlap: bool = True,
    graphs: bool = True,
    backend: str = "auto",
    measured_layer: int | None = None,
) -> Iterator[Engine]:
    from dbench.serve.cuda_build import CudaSettings, build_cuda_runner
    from dbench.serve.torch_runner import RunnerConfig

    config = read_model_config(directory)
    assert config.mask_token_id is not None
    limits = limits_for(directory, BLOCK_LENGTH, overlap=overlap)
    runner = build_cuda_runner(
        RunnerConfig(
            model_dir=directory,
            load_format="auto",
            dtype=dtype,
            device="cuda",
            seed=0,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_slots=limits.max_batch_size,
            block_length=BLOCK_LENGTH,
            mask_token_id=config.mask_token_id,
            num_threads=1,
        ),
        CudaSettings(
            max_model_len=limits.max_model_len,
            max_tokens_per_iteration=limits.max_tokens_per_iteration,
            cache_mode="exact",
            attention_backend=backend,
            gpu_memory_utilization=0.5,
            graph_batch_sizes=(1, 2, 4, 8, 16) if graphs else (),
            measured_layer=measured_layer,
        ),
    )
    with engine_on(runner, limits, PagePool(NUM_PAGES, PAGE_SIZE)) as made:
        yield made


@pytest.fixture(scope="module")
def cpu_tokens() -> list[list[int]]:
    with engine(overlap=False) as on_cpu:
        return decode(on_cpu, different_jobs(16))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_cuda_device_gives_the_tokens_of_the_cpu(cpu_tokens: list[list[int]], overlap: bool, graphs: bool) -> None:
    with cuda_engine(embedded_directory(), overlap=overlap, graphs=graphs) as on_gpu:
        assert decode(on_gpu, different_jobs(16)) == cpu_tokens


def test_the_plain_runner_gives_them_too(cpu_tokens: list[list[int]]) -> None:
    with engine(overlap=True, device="cuda") as on_gpu:
        assert decode(on_gpu, different_jobs(16)) == cpu_tokens


def test_random_mixed_workloads_leave_all_pages_free() -> None:
    draw = random.Random(5)
    rules = (
        SamplingParameters("conf_threshold", confidence_threshold=0.3),
        SamplingParameters("conf_quota", fixed_unmask_quota=5, temperature=0.7),
        SamplingParameters("random", temperature=1.2),
        SamplingParameters("conf_dynamic", dynamic_unmask_factor=1.0),
        SamplingParameters("entropy", entropy_threshold=0.5),
        SamplingParameters("margin", margin_threshold=0.5),
    )
    with cuda_engine(embedded_directory(), dtype="bfloat16", backend="sdpa") as on_gpu:
        for _ in range(200):
            jobs = [
                Job(
                    prompt=[draw.randrange(256) for _ in range(draw.randint(1, 120))],
                    gen_length=BLOCK_LENGTH * draw.randint(1, 3),
                    sampling=draw.choice(rules),
                    seed=draw.getrandbits(60),
                    ignore_eos=draw.random() < 0.5,
                )
                for _ in range(draw.randint(1, 24))
            ]
            decode_all(on_gpu, jobs, BLOCK_LENGTH)  # the engine checks its pages when it goes idle
            assert not any(job.error for job in jobs)


def test_the_embedded_model_answers_as_well_as_on_the_cpu() -> None:
    tokenizer = load_tokenizer(embedded_directory())
    problems = held_out(42, 70)
    rule = SamplingParameters("conf_threshold", confidence_threshold=0.9)
    jobs = [
        Job(tokenizer.encode_chat([Message("user", problem.prompt)]), 64, rule, ignore_eos=False)
        for problem in problems
    ]
    with cuda_engine(embedded_directory(), dtype="bfloat16", backend="sdpa") as on_gpu:
        decode_all(on_gpu, jobs, BLOCK_LENGTH)
    answers = [tokenizer.decode(job.ids).strip() for job in jobs]
    assert sum(given == problem.answer for given, problem in zip(answers, problems, strict=True)) >= 63


def test_a_batch_without_memory_fails_alone(cpu_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dbench.serve.cuda_model import CudaModel

    with cuda_engine(embedded_directory(), graphs=False) as on_gpu:

        def no_memory(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(CudaModel, "forward", no_memory)
            failed = different_jobs(2)
            decode_all(on_gpu, failed, BLOCK_LENGTH)
        assert all("batch failed: OutOfMemoryError" in job.error for job in failed)
        assert decode(on_gpu, different_jobs(16)) == cpu_tokens


def test_one_launch_in_sixteen_is_measured_by_operation() -> None:
    from dbench.events import BatchExecuted

    with cuda_engine(embedded_directory(), measured_layer=2) as on_gpu:
        decode_all(on_gpu, different_jobs(16), BLOCK_LENGTH)
        batches = [event for event in on_gpu.take_events() if isinstance(event, BatchExecuted)]
    measured = [batch for batch in batches if batch.batch_op_attn_time is not None]
    assert len(batches) / 16 - 2 <= len(measured) <= len(batches) / 16 + 2
    for batch in measured:
        parts = (batch.batch_op_attn_time, batch.batch_op_mlp_time, batch.batch_op_qkv_time)
        assert all(part is not None and 0 < part < 1 for part in parts)

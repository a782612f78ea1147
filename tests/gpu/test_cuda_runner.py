"""The CUDA runner under a real engine: the tokens of the CPU, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dbench.models import embedded_directory
from dbench.serve.engine import Engine
from dbench.serve.families import read_model_config
from dbench.serve.pages import PagePool
from dbench.serve.sequence import SamplingParameters
from tests.serve.decoding import NUM_PAGES, PAGE_SIZE, Job, decode_all, engine_on, limits_for
from tests.serve.test_same_tokens import BLOCK_LENGTH, decode, different_jobs, engine

pytestmark = pytest.mark.gpu


@contextmanager
def cuda_engine(
    directory: Path, *, dtype: str = "float32", overlap: bool = True, graphs: bool = True, backend: str = "auto"
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
            measured_layer=None,
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

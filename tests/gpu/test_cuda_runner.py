"""The runner computes on a CUDA device what it computes on the CPU."""

from __future__ import annotations

import pytest

from tests.serve.test_same_tokens import decode, different_jobs, engine


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cuda_device_gives_the_tokens_of_the_cpu(overlap: bool) -> None:
    with engine(overlap=False) as on_cpu:
        expected = decode(on_cpu, different_jobs(16))
    with engine(overlap=overlap, device="cuda") as on_gpu:
        assert decode(on_gpu, different_jobs(16)) == expected

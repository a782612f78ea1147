"""One thread per test process, and no tests marked gpu where there is no CUDA device."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("dbench", deadline=None)  # a time limit says how busy the machine is
settings.load_profile("dbench")

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: threads that spin for each other make tiny tensors many times slower on busy cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-requests", type=int, default=200, help="Requests of the tests in which workers die.")
    group.addoption("--chaos-seed", type=int, default=1, help="Seed of those tests.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))

"""What keeps a CUDA worker from starting is one line that says what to do.

No device is touched: TRITON_INTERPRET=1 pytest tests/gpu/test_cuda_build.py
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dbench.errors import OptionError
from dbench.models import embedded_directory
from dbench.serve import cuda_build
from dbench.serve.cuda_build import CudaSettings, build_cuda_runner
from dbench.serve.torch_runner import RunnerConfig

pytestmark = pytest.mark.gpu


def test_a_device_too_small_for_the_weights_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(cuda_build, "load_weights", no_memory)
    config = RunnerConfig(
        model_dir=embedded_directory(), load_format="auto", dtype="bfloat16", device="cuda:0", seed=0, num_pages=None,
        page_size=16, num_slots=4, block_length=32, mask_token_id=1, num_threads=1,
    )  # fmt: skip
    settings = CudaSettings(
        max_model_len=1024, max_tokens_per_iteration=512, cache_mode="exact", attention_backend="sdpa",
        gpu_memory_utilization=0.9, graph_batch_sizes=(), measured_layer=None,
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"^cuda:0: not enough memory for the weights, a pass of 1664 rows"):
        build_cuda_runner(config, settings)

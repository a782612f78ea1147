"""The CUDA forward pass computes what the plain one computes, from pages and among packed rows alike.

Also runs in Triton's interpreter, without a GPU: TRITON_INTERPRET=1 pytest tests/gpu/test_cuda_model.py
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dbench.models import size_directory
from dbench.serve.families import read_model_config
from dbench.serve.weights import WeightSource, load_weights
from tests.gpu.paths import DEVICE, BothPaths, Sizes

pytestmark = pytest.mark.gpu

SIZES = Sizes(block=8, page=4, longest=64, prompts=(3, 17, 30, 41))


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_refreshes_decodes_and_mixed_batches_give_the_logits_and_pages_of_the_plain_model(name: str) -> None:
    config = read_model_config(size_directory(name))
    weights = load_weights(config, WeightSource(size_directory(name), "random", torch.float32, DEVICE, 3))
    for layer in weights.layers:
        if layer.qkv_bias_F is not None:
            layer.qkv_bias_F.normal_(0, 0.5)
    both = BothPaths(config, weights, SIZES)
    refreshes = [both.refresh_span(0), both.refresh_span(2)]
    torch.testing.assert_close(*both.logits(refreshes), rtol=1e-4, atol=1e-4)
    both.fix(0, 3, 5)
    both.fix(2, 0, 9)
    mixed = [both.decode_span(2), both.decode_span(0), both.refresh_span(3), both.refresh_span(1)]
    torch.testing.assert_close(*both.logits(mixed), rtol=1e-4, atol=1e-4)
    decodes = [both.decode_span(slot) for slot in (1, 3, 0, 2)]
    torch.testing.assert_close(*both.logits(decodes), rtol=1e-4, atol=1e-4)
    for number in range(config.n_layers):
        plain, fast = both.plain.kv.layer(number)[:, :-1], both.fast.kv.layer(number)[:, :-1]
        torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-4)

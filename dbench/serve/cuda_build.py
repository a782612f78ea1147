"""How a CUDA worker gets its runner: what is reserved, in which order, and how many pages are left for K and V.

Weights first, then the room of the largest pass and of its logits, then a reserve for captured graphs and libraries;
the pages get what remains of the device's share. After that the largest pass runs and the graphs are captured, and
what they took is held against the reserve.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch

from dbench.errors import ModelError, OptionError, ServerStartError
from dbench.serve.batch import SlotSizes, SlotTable
from dbench.serve.cuda_batch import PassSizes
from dbench.serve.cuda_memory import DeviceMemory, PagesWanted, gib, pages_that_fit
from dbench.serve.cuda_model import CudaModel
from dbench.serve.cuda_runner import CudaRunner, DecodingFacts, LogitRoom
from dbench.serve.families import FAMILIES, ModelConfig, read_model_config
from dbench.serve.kv import KvPool
from dbench.serve.refresh_attention import REFRESH_BACKENDS, choose_backend
from dbench.serve.torch_runner import DTYPES, RunnerConfig
from dbench.serve.warm_up import warm_up
from dbench.serve.weights import WeightSource, load_weights

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30
"""For graphs of passes and of stretches, library handles and kernels."""


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """What a CUDA worker is told beside its RunnerConfig."""

    max_model_len: int
    max_tokens_per_iteration: int
    cache_mode: str
    attention_backend: str
    """A key of REFRESH_BACKENDS, or 'auto'."""
    gpu_memory_utilization: float
    graph_batch_sizes: tuple[int, ...]
    """Empty: no graphs."""
    measured_layer: int | None
    """The layer whose operations are measured; None: no measuring."""


def build_cuda_runner(config: RunnerConfig, settings: CudaSettings) -> CudaRunner:
    """Load, reserve, capture and warm up. Raises ModelError, OptionError or ServerStartError for what cannot be."""
    device = torch.device("cuda", torch.device(config.device).index or 0)
    torch.cuda.set_device(device)
    model_config = read_model_config(config.model_dir)
    _check_shapes(model_config)
    sizes = _pass_sizes(model_config, config, settings)
    try:
        runner = _reserve(model_config, config, settings, sizes, device)
        _prepare(runner, settings, sizes, device)
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"{config.device}: not enough memory for the weights, a pass of {sizes.num_rows} rows and the KV pages; "
            "lower --max-batch-size, --max-tokens-per-iteration, --max-model-len or --kv-max-pages, or free the device"
        ) from error
    return runner


def _reserve(
    model_config: ModelConfig, config: RunnerConfig, settings: CudaSettings, sizes: PassSizes, device: torch.device
) -> CudaRunner:
    """Weights, room and pages, in the order of this module's first lines."""
    dtype = DTYPES[config.dtype]
    backend = choose_backend(settings.attention_backend, model_config, dtype, device)
    weights = load_weights(model_config, WeightSource(config.model_dir, config.load_format, dtype, device, config.seed))
    facts = DecodingFacts(
        d_model=model_config.d_model,
        n_layers=model_config.n_layers,
        vocab_size=model_config.vocab_size,
        logit_shift=FAMILIES[model_config.family].logit_shift,
        eos_token_ids=model_config.eos_token_ids,
    )
    slots = SlotTable(
        SlotSizes(
            num_slots=config.num_slots + 1,
            max_canvas=max(settings.max_model_len, sizes.short_rows),
            block_length=config.block_length,
            page_size=config.page_size,
            mask_token_id=config.mask_token_id,
            device=device,
        )
    )
    refresh = REFRESH_BACKENDS[backend](model_config, dtype, device)
    model = CudaModel(model_config, weights, refresh, sizes)
    runner = CudaRunner(model, refresh, slots, LogitRoom(facts, sizes, dtype, device), sizes, facts)
    num_pages = config.num_pages or pages_that_fit(
        _memory(config, settings), _pages_wanted(model_config, config, settings)
    )
    runner.take_pages(KvPool(model_config, num_pages=num_pages, page_size=config.page_size, like=weights.embedding_VE))
    return runner


def _prepare(runner: CudaRunner, settings: CudaSettings, sizes: PassSizes, device: torch.device) -> None:
    """Run and capture everything once. Raises ServerStartError where that takes more than the reserve."""
    decode_a_token = partial(
        warm_up,
        runner,
        block_length=sizes.block_length,
        page_size=sizes.page_size,
        logit_shift=sizes.short_rows - sizes.block_length,
    )
    free_before, _ = torch.cuda.mem_get_info(device)
    runner.run_largest()
    runner.compile()
    decode_a_token()
    if settings.graph_batch_sizes:
        runner.capture(settings.graph_batch_sizes)
    if settings.measured_layer is not None:
        runner.measure_operations(settings.measured_layer, settings.graph_batch_sizes)
    decode_a_token()
    torch.cuda.synchronize(device)
    free_after, _ = torch.cuda.mem_get_info(device)
    taken = free_before - free_after
    logger.info("%d KV pages; graphs and libraries took %s", runner.num_pages, gib(taken))
    if taken > RESERVE_BYTES:
        raise ServerStartError(
            f"{device}: the first passes, graphs and libraries took {gib(taken)}, more than the "
            f"{gib(RESERVE_BYTES)} kept for them; give fewer --cuda-graph-batch-sizes, a shorter --max-model-len, "
            "or --no-enable-cuda-graphs"
        )


def _memory(config: RunnerConfig, settings: CudaSettings) -> DeviceMemory:
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(config.device, free, total, settings.gpu_memory_utilization, RESERVE_BYTES)


def _pages_wanted(model: ModelConfig, config: RunnerConfig, settings: CudaSettings) -> PagesWanted:
    page_bytes = model.kv_bytes_per_token(DTYPES[config.dtype].itemsize) * config.page_size
    return PagesWanted(page_bytes, config.page_size, settings.max_model_len, config.num_slots)


def _pass_sizes(model: ModelConfig, config: RunnerConfig, settings: CudaSettings) -> PassSizes:
    """The largest pass that the token budget allows: every decode span, the budget, and the longest canvas."""
    short_rows = config.block_length + FAMILIES[model.family].logit_shift
    decode_rows = config.num_slots * (short_rows if settings.cache_mode == "exact" else settings.max_model_len)
    return PassSizes(
        num_rows=decode_rows + settings.max_tokens_per_iteration + settings.max_model_len,
        num_spans=config.num_slots,
        block_length=config.block_length,
        short_rows=short_rows,
        longest_canvas=max(settings.max_model_len, short_rows),
        page_size=config.page_size,
    )


def _check_shapes(model: ModelConfig) -> None:
    if model.head_dim < 16 or model.head_dim & (model.head_dim - 1):
        raise ModelError(
            f"a head dim of {model.head_dim}: the CUDA kernels want a power of two from 16 on; serve it with --gpus cpu"
        )

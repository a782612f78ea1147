"""The options of workers and of who gives them work; `options.py` names this section beside all others."""

from __future__ import annotations

from dataclasses import dataclass

from dbench.option_fields import option

COLOCATED = "colocated"
HYBRID = "hybrid"
MODES = (COLOCATED, HYBRID)
PREFILL = "prefill"
"""The kind of a worker that only refreshes, in hybrid mode; all others are COLOCATED: they do both."""
WORKER_KINDS = (COLOCATED, PREFILL)
DEVICE_OPTIONS = {COLOCATED: ("gpus",), HYBRID: ("prefill_gpus", "hybrid_colocated_gpus")}
"""mode -> the options that name its workers' devices, in the order of the workers' numbers."""
NO_DEVICE = "none"
"""The value of a list of devices where all workers of that kind come from elsewhere."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the workers decode, on which devices, and how they batch it."""

    model: str | None = option(
        None,
        "Model directory in Hugging Face layout, or 'embedded' (the small model that comes with dbench).",
        panel="Core",
        auto="GSAI-ML/LLaDA-8B-Instruct on CUDA devices, else embedded",
    )
    mode: str = option(
        COLOCATED,
        "colocated: every worker refreshes and decodes; hybrid: some only refresh, and send their KV to those that "
        "decode.",
        panel="Core",
        choices=MODES,
    )
    gpus: str | None = option(
        None,
        "Devices of this machine, one worker each: CUDA devices '0,1', or 'cpu,cpu'; 'none': all workers come from "
        "elsewhere.",
        panel="Core",
        auto="all CUDA devices, else cpu",
        mode=COLOCATED,
    )
    prefill_gpus: str | None = option(
        None,
        "Devices of the workers that only refresh, as in gpus.",
        panel="Core",
        auto="none, with num_remote_prefill_workers",
        mode=HYBRID,
    )
    hybrid_colocated_gpus: str | None = option(
        None,
        "Devices of the workers that decode, as in gpus.",
        panel="Core",
        auto="none, with num_remote_workers",
        mode=HYBRID,
    )
    max_batch_size: int = option(128, "Sequences that one worker decodes at a time.", panel="Core", minimum=1)
    block_length: int = option(32, "Consecutive positions decoded together.", panel="Core", minimum=1, maximum=1024)
    max_gen_len: int | None = option(
        None,
        "Masks that every canvas carries, whatever its gen_length; a multiple of block_length.",
        panel="Core",
        minimum=1,
        auto="each request's gen_length",
    )
    mask_id: int | None = option(
        None, "Token id of the mask.", panel="Core", minimum=0, auto="mask_token_id of config.json"
    )
    max_tokens_per_iteration: int = option(
        4096,
        "Token budget of one engine iteration; unused budget is saved up for long refreshes.",
        panel="Scheduling",
        minimum=1,
    )
    max_prefill_tokens_per_batch: int = option(
        4096,
        "Token budget of one batch of a worker that only refreshes; a longer canvas goes alone.",
        panel="Scheduling",
        minimum=1,
        mode=HYBRID,
    )
    prefill_scheduler_policy: str = option(
        "least_outstanding_prefill_tokens",
        "How a block finds the worker that refreshes it; hybrid mode has the first two.",
        panel="Scheduling",
        choices=(
            "least_outstanding_prefill_tokens",
            "round_robin",
            "least_outstanding_requests",
            "least_request_length_sum",
            "balanced_length_clustering",
        ),
    )
    decode_scheduler_policy: str = option(
        "max_free_memory",
        "How a block finds the worker that decodes it, among those with pages for it.",
        panel="Scheduling",
        choices=("max_free_memory", "round_robin", "balanced_length_clustering", "topology_guarded_memory"),
        mode=HYBRID,
    )
    decode_grouping_slack_ratio: float = option(
        0.10,
        "balanced_length_clustering: how far above the smallest sum of lengths a worker may be.",
        panel="Scheduling",
        minimum=0,
    )
    kv_fast_pairs: str = option(
        "0-1,2-3,4-5,6-7",
        "topology_guarded_memory: pairs of devices with a fast link; a CPU worker goes by its number.",
        panel="Scheduling",
        mode=HYBRID,
    )
    kv_topology_alpha: float = option(
        0.0,
        "topology_guarded_memory: share of the roomiest worker's free pages that one with a fast link needs.",
        panel="Scheduling",
        minimum=0,
        maximum=1,
        mode=HYBRID,
    )
    enable_hybrid_prefill_overflow: bool = option(
        True,
        "Let workers that decode refresh too while all prefill workers are overloaded.",
        panel="Scheduling",
        mode=HYBRID,
    )
    prefill_overload_threshold: int = option(
        16384,
        "Outstanding prefill tokens from which on a worker gets no further refresh.",
        panel="Scheduling",
        minimum=1,
        mode=HYBRID,
    )
    colocated_sticky_worker: bool = option(
        False, "Keep all blocks of a request on its first worker.", panel="Scheduling", mode=COLOCATED
    )
    prefill_queue_policy: str = option(
        "arrival_order",
        "Order of the refreshes that wait in a worker; fewest_remaining_blocks can starve long requests.",
        panel="Scheduling",
        choices=("arrival_order", "fewest_remaining_blocks"),
    )
    max_block_retries: int = option(
        2, "Times a block is restarted after its worker was lost or it failed alone.", panel="Scheduling", minimum=0
    )
    cache_mode: str = option(
        "exact",
        "exact: a block's steps keep K and V of all other positions; none: full recomputation, to compare quality.",
        panel="Scheduling",
        choices=("exact", "none"),
    )
    enable_overlap: bool = option(True, "Plan and launch the next batch while the last one runs.", panel="Scheduling")
    kv_page_size: int = option(16, "Tokens of KV per page.", panel="KV", minimum=1, maximum=1024)
    kv_transfer_timeout_s: float = option(
        30.0,
        "Longest silence of a worker in the middle of sending KV; then the block is restarted.",
        panel="KV",
        minimum=0.5,
        mode=HYBRID,
    )
    kv_max_pages: int | None = option(
        None,
        "KV pages per worker.",
        panel="KV",
        minimum=1,
        auto="on CUDA what is free of the share; on CPUs enough for max_batch_size canvases of the context limit, "
        "within a quarter of the free memory",
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a CUDA device's memory that a worker may take.", panel="KV", above=0, maximum=1
    )
    enable_cuda_graphs: bool = option(
        True, "Capture decode steps and short passes once and replay them.", panel="CUDA graphs"
    )
    cuda_graph_batch_sizes: str = option(
        "1,2,4,8,16,24,32,40,48,56,64",
        "Numbers of decoding sequences that are captured; a batch is padded to the next one. Those above "
        "max_batch_size are lowered to it.",
        panel="CUDA graphs",
    )
    load_format: str = option(
        "auto",
        "auto: weights from the model directory; random: seeded random weights in its shapes, also for a size "
        "without files (llada-8b, dream-7b, llada-tiny, dream-tiny).",
        panel="Model",
        choices=("auto", "random"),
    )
    dtype: str = option(
        "auto",
        "Number format of weights and KV; auto: bfloat16 on CUDA, float32 on CPU.",
        panel="Model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    attention_backend: str = option(
        "auto",
        "Attention of refreshes on CUDA; auto: flashinfer where it can serve, else sdpa.",
        panel="Model",
        choices=("auto", "flashinfer", "sdpa"),
    )
    max_model_len: int | None = option(
        None, "Longest canvas, in tokens.", panel="Model", minimum=1, auto="what the model's authors vouch for"
    )
    tokenizer: str | None = option(
        None, "Directory that holds the tokenizer's files, or 'embedded'.", panel="Model", auto="the value of model"
    )
    served_model_name: str | None = option(
        None, "Name of the model in status and reports.", panel="Model", auto="the value of model"
    )
    server_seed: int = option(0, "Seed of random weights and of the scheduler's tie-breaks.", panel="Model", minimum=0)
    enable_operation_metrics: bool = option(
        False, "On CUDA, sample the time of attention, MLP and QKV projection in one layer.", panel="Metrics"
    )
    op_metrics_layer_id: int | None = option(
        None, "The layer that is sampled, from 0.", panel="Metrics", minimum=0, auto="the middle one"
    )
    profile_dir: str | None = option(
        None,
        "Folder for a trace of some of each worker's batches, to be opened in Perfetto.",
        panel="Metrics",
        auto="no trace",
    )

    @property
    def num_workers(self) -> int:
        """Of this machine, once the devices are resolved."""
        lists = (self.prefill_gpus, self.hybrid_colocated_gpus) if self.mode == HYBRID else (self.gpus,)
        return sum(len(devices.split(",")) for devices in lists if devices not in (None, NO_DEVICE))

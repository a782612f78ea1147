"""What is served: resolved engine options with nothing left open, and the model that they name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dbench.engine_options import NO_DEVICE
from dbench.errors import OptionError
from dbench.options import HYBRID, EngineOptions
from dbench.serve.engine_state import EngineLimits
from dbench.serve.families import FAMILIES, ModelConfig, find_model, read_model_config
from dbench.serve.validation import RequestLimits

FINGERPRINT_BYTES = 1 << 20
"""Of the end of each file of weights: other weights of the same shapes differ there."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model on one or more workers of the same size."""

    options: EngineOptions
    model_dir: Path
    model: ModelConfig
    devices: tuple[str, ...]
    """Of this machine, one worker each; its place is its worker id."""
    num_prefill: int
    """So many of them, from the first, only refresh."""
    max_model_len: int
    max_gen_len: int | None
    kv_max_pages: int | None
    """None: each worker finds out for itself."""
    mask_token_id: int
    tokenizer: str
    served_model_name: str

    def request_limits(self) -> RequestLimits:
        return RequestLimits(
            block_length=self.options.block_length,
            max_gen_len=self.max_gen_len,
            max_model_len=self.max_model_len,
            vocabulary_size=self.model.vocab_size,
            kv_max_pages=self.kv_max_pages,
            kv_page_size=self.options.kv_page_size,
        )

    def engine_limits(self, *, refresh_only: bool = False) -> EngineLimits:
        """For a worker that does everything, or only refreshes."""
        return EngineLimits(
            max_batch_size=self.options.max_batch_size,
            max_tokens_per_iteration=self.options.max_tokens_per_iteration,
            block_length=self.options.block_length,
            max_model_len=self.max_model_len,
            queue_policy=self.options.prefill_queue_policy,
            overlap=self.options.enable_overlap,
            eos_token_ids=self.model.eos_token_ids,
            cache_mode=self.options.cache_mode,
            logit_shift=self.logit_shift,
            refresh_only=refresh_only,
            max_prefill_tokens_per_batch=self.options.max_prefill_tokens_per_batch,
        )

    @property
    def logit_shift(self) -> int:
        return FAMILIES[self.model.family].logit_shift

    @property
    def most_refresh_tokens(self) -> int:
        """Of a batch on any worker, but for a longer canvas."""
        options = self.options
        of_prefill = options.max_prefill_tokens_per_batch if options.mode == HYBRID else 0
        return max(options.max_tokens_per_iteration, of_prefill)

    def graph_batch_sizes(self, *, refresh_only: bool = False) -> tuple[int, ...]:
        """Sizes to capture, ascending: those given, none larger than the largest batch.

        There is nothing to capture without a cache, where every step computes whole canvases, and on a worker that only
        refreshes, whose layers are sent while they are computed.
        """
        if not self.options.enable_cuda_graphs or self.options.cache_mode != "exact" or refresh_only:
            return ()
        sizes = {int(size) for size in self.options.cuda_graph_batch_sizes.split(",")}
        return tuple(sorted({min(size, self.options.max_batch_size) for size in sizes}))

    def measured_layer(self) -> int | None:
        """The layer whose operations are measured, never the last one, which computes fewer rows; None: not wanted."""
        if not self.options.enable_operation_metrics:
            return None
        if self.options.op_metrics_layer_id is not None:
            return self.options.op_metrics_layer_id
        return min(self.model.n_layers // 2, self.model.n_layers - 2)

    def model_fingerprint(self) -> str:
        """Equal on two hosts with one configuration and, as far as a look at the files tells, one content."""
        digest = hashlib.sha256(repr(self.model).encode())
        if self.options.load_format == "auto":
            for path in sorted(self.model_dir.glob("*.safetensors")):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - FINGERPRINT_BYTES))
                    digest.update(file.read())
        return digest.hexdigest()


def deployment_of(options: EngineOptions) -> Deployment:
    """Read the model's config.json. Raises OptionError for an option that is still open, and ModelError."""
    model_dir = find_model(_resolved(options.model, "model"))
    prefill, devices = _devices(options)
    return Deployment(
        options=options,
        model_dir=model_dir,
        model=read_model_config(model_dir),
        devices=(*prefill, *devices),
        num_prefill=len(prefill),
        max_model_len=_resolved(options.max_model_len, "max_model_len"),
        max_gen_len=options.max_gen_len,
        kv_max_pages=options.kv_max_pages,
        mask_token_id=_resolved(options.mask_id, "mask_id"),
        tokenizer=_resolved(options.tokenizer, "tokenizer"),
        served_model_name=_resolved(options.served_model_name, "served_model_name"),
    )


def _devices(options: EngineOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of workers that only refresh, and those of the others."""
    if options.mode == HYBRID:
        decoding = _resolved(options.hybrid_colocated_gpus, "hybrid_colocated_gpus")
        return _names(_resolved(options.prefill_gpus, "prefill_gpus")), _names(decoding)
    return (), _names(_resolved(options.gpus, "gpus"))


def _names(devices: str) -> tuple[str, ...]:
    return () if devices == NO_DEVICE else tuple(device_name(gpu) for gpu in devices.split(","))


def device_name(gpu: str) -> str:
    """As torch names it: 'cpu' stays, '0' is 'cuda:0'."""
    name = gpu.strip()
    return f"cuda:{name}" if name.isdecimal() else name


def _resolved(value: V | None, name: str) -> V:
    if value is None:
        raise OptionError(f"{name}: has no value; a server wants options in which everything is resolved")
    return value

"""What a server needs and nobody gave: filled in stage by stage, before anything is started.

mode -> basics -> devices -> memory_and_budget -> kernels_and_graphs -> network -> validate; each takes and returns a
ServePlan and raises OptionError or ModelError. No torch, but to count CUDA devices where a driver is loaded: all
answers come from config.json and from the system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dbench.config import AUTO_PREFIX, Resolved
from dbench.engine_options import DEVICE_OPTIONS, NO_DEVICE
from dbench.errors import ModelError, OptionError
from dbench.option_conflicts import refuse_foreign, refuse_useless
from dbench.options import HYBRID, EngineOptions, SamplingOptions, ServiceOptions
from dbench.serve.address import address_fault, meeting_fault, worker_ports_fault
from dbench.serve.families import (
    EMBEDDED,
    ModelConfig,
    directory_of,
    find_model,
    is_built_in,
    is_named_size,
    read_model_config,
)
from dbench.serve.routes import HYBRID_PREFILL_ROUTES, read_fast_pairs
from dbench.serve.sequence import SamplingParameters
from dbench.serve.tls import tls_fault
from dbench.serve.tokenizer_files import WANTED_FILES, has_tokenizer

logger = logging.getLogger(__name__)

CPU = "cpu"
RANDOM = "random"
LARGE_MODEL = "GSAI-ML/LLaDA-8B-Instruct"

PORTS = ("scheduler_port", "master_port", "base_worker_port")

MEMORY_SHARE = 4
"""The KV of all workers together takes at most one part in this many of the available memory."""

ELEMENT_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype -> bytes per element."""

CPU_DTYPES = ("float32", "bfloat16")
"""What the CPU kernels decode with; float16 has no matrix products of useful speed or range there."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The options so far, and the model they name once that is known."""

    resolved: Resolved
    available_bytes: Callable[[], int]
    num_cuda_devices: int
    directory: Path | None = None
    model: ModelConfig | None = None

    @property
    def engine(self) -> EngineOptions:
        return self.resolved.section(EngineOptions)

    @property
    def service(self) -> ServiceOptions:
        return self.resolved.section(ServiceOptions)

    @property
    def known_model(self) -> ModelConfig:
        assert self.model is not None, "the stage basics has run"
        return self.model

    def auto(self, name: str, value: object, why: str) -> ServePlan:
        return replace(self, resolved=self.resolved.replace(name, value, f"{AUTO_PREFIX}{why}"))

    def normalised(self, name: str, value: object) -> ServePlan:
        """The same value in its one canonical spelling; the origin stays."""
        return replace(self, resolved=self.resolved.replace(name, value, self.resolved.origins[name]))

    def refused(self, name: str, got: object, wanted: str) -> OptionError:
        return OptionError(f"{self.resolved.place(name)}: got {got}, wanted {wanted}")


def available_memory() -> int:
    """Bytes that processes can take without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def count_cuda_devices() -> int:
    """CUDA devices that torch can use here. It is asked only where a driver is loaded: importing it takes seconds."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def resolve_serve(
    resolved: Resolved,
    *,
    available_bytes: Callable[[], int] = available_memory,
    num_cuda_devices: Callable[[], int] = count_cuda_devices,
) -> Resolved:
    """Every option of a server filled in and checked; raises OptionError or ModelError."""
    plan = ServePlan(resolved, available_bytes, num_cuda_devices())
    for stage in STAGES:
        plan = stage(plan)
    return plan.resolved


def resolve_own_server(resolved: Resolved) -> Resolved:
    """The same for a server that a command starts for itself, at any free ports."""
    for name in PORTS:
        resolved = resolved.replace(name, 0, f"{AUTO_PREFIX}any free port")
    return resolve_serve(resolved)


def mode(plan: ServePlan) -> ServePlan:
    """No option and no policy of the other mode, and none that would do nothing."""
    engine, resolved = plan.engine, plan.resolved
    refuse_foreign(resolved)
    if engine.mode == HYBRID:
        if engine.prefill_scheduler_policy not in HYBRID_PREFILL_ROUTES:
            known = ", ".join(HYBRID_PREFILL_ROUTES)
            raise plan.refused(
                "prefill_scheduler_policy", repr(engine.prefill_scheduler_policy), f"one of {known} in mode {HYBRID}"
            )
        if engine.cache_mode != "exact":
            raise plan.refused(
                "cache_mode", repr(engine.cache_mode), f"'exact' in mode {HYBRID}, which sends the cache"
            )
        try:
            read_fast_pairs(engine.kv_fast_pairs)
        except ValueError as error:
            got = f"{engine.kv_fast_pairs!r}, where {error}"
            raise plan.refused("kv_fast_pairs", got, "pairs of different devices such as 0-1,2-3") from None
    refuse_useless(resolved)
    return plan


def basics(plan: ServePlan) -> ServePlan:
    """The model, its tokenizer and names, and the lengths that follow from it."""
    if plan.engine.model is None and plan.num_cuda_devices and _wants_cuda(plan):
        plan = plan.auto("model", LARGE_MODEL, "no model was given, and there is a CUDA device")
    elif plan.engine.model is None:
        plan = plan.auto("model", EMBEDDED, "no model was given")
    name = plan.engine.model or EMBEDDED
    directory = find_model(name)
    if plan.engine.served_model_name is None:
        plan = plan.auto("served_model_name", name, "the value of model")
    if not is_built_in(name):
        plan = plan.normalised("model", str(directory.resolve()))
    elif is_named_size(name) and plan.engine.load_format != RANDOM:
        raise plan.refused(
            "model", f"the size {name!r}, which has no weights", f"--load-format {RANDOM} with it, or a model directory"
        )
    plan = replace(plan, directory=directory, model=read_model_config(directory))
    plan = _tokenizer(plan)
    return _mask_id(_max_model_len(plan))


def devices(plan: ServePlan) -> ServePlan:
    """Which device each worker owns, and the number format there."""
    count = plan.num_cuda_devices
    if plan.engine.mode != HYBRID and plan.engine.gpus is None and count:
        plan = plan.auto("gpus", ",".join(map(str, range(count))), f"all {count} CUDA device(s)")
    elif plan.engine.mode != HYBRID and plan.engine.gpus is None:
        plan = plan.auto("gpus", CPU, "one CPU worker")
    numbers: list[int] = []
    for option in DEVICE_OPTIONS[plan.engine.mode]:
        plan, own = _device_list(plan, option)
        twice = sorted({number for number in own if [*numbers, *own].count(number) > 1})
        if twice:
            raise plan.refused(option, f"CUDA device {twice[0]} twice", "every CUDA device at most once")
        numbers += own
    if numbers and len(numbers) < plan.engine.num_workers:
        option = DEVICE_OPTIONS[plan.engine.mode][-1]
        raise plan.refused(option, repr(plan.resolved.value(option)), "either CUDA devices or 'cpu', not both")
    if numbers:
        return plan.auto("dtype", "bfloat16", "the devices are GPUs") if plan.engine.dtype == "auto" else plan
    if plan.engine.dtype == "auto" and not plan.engine.num_workers:
        return plan.auto("dtype", "float32", "the devices of remote workers are not known; bfloat16 suits GPUs")
    if plan.engine.dtype == "auto":
        return plan.auto("dtype", "float32", "the devices are CPUs")
    if plan.engine.num_workers and plan.engine.dtype not in CPU_DTYPES:
        raise plan.refused("dtype", repr(plan.engine.dtype), f"one of {', '.join(CPU_DTYPES)} on CPUs")
    return plan


def _wants_cuda(plan: ServePlan) -> bool:
    """The workers are to be on CUDA devices, as far as the options say."""
    lists = [plan.resolved.value(option) for option in DEVICE_OPTIONS[plan.engine.mode]]
    if lists == [None]:
        return plan.num_cuda_devices > 0
    return any(name.strip().isdecimal() for names in lists if names is not None for name in names.split(","))


def _device_list(plan: ServePlan, option: str) -> tuple[ServePlan, list[int]]:
    """The option in its canonical spelling, and the numbers of its CUDA devices."""
    given, count = plan.resolved.value(option), plan.num_cuda_devices
    num_remote, remote_flag = _remote(plan.service, option)
    if given is None and num_remote:
        return plan.auto(option, NO_DEVICE, "these workers come from elsewhere"), []
    if given is None:
        wanted = f"devices such as 'cpu', or {remote_flag}: mode {HYBRID} needs both kinds of workers"
        raise plan.refused(option, "nothing", wanted)
    if given.strip() == NO_DEVICE and num_remote:
        return plan.normalised(option, NO_DEVICE), []
    if given.strip() == NO_DEVICE:
        raise plan.refused(option, repr(NO_DEVICE), f"a device, or of 'dbench serve' also {remote_flag}")
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name != CPU and not (name.isdecimal() and int(name) < count):
            there = f"CUDA devices 0 to {count - 1}" if count else "no CUDA device is there"
            raise plan.refused(option, repr(name), f"'cpu', or the number of a CUDA device ({there})")
    plan = plan.normalised(option, ",".join(str(int(name)) if name.isdecimal() else name for name in names))
    return plan, [int(name) for name in names if name != CPU]


def _remote(service: ServiceOptions, option: str) -> tuple[int, str]:
    """How many workers of the kind of a list of devices come from elsewhere, and the flag that says so."""
    if option == "prefill_gpus":
        return service.num_remote_prefill_workers, "--num-remote-prefill-workers"
    return service.num_remote_workers, "--num-remote-workers"


def memory_and_budget(plan: ServePlan) -> ServePlan:
    """How many KV pages each worker gets."""
    longest = _pages_of(plan, plan.engine.max_model_len or 0)
    if plan.engine.kv_max_pages is not None or _wants_cuda(plan):
        return plan  # a CUDA worker counts what is free on its device
    num_workers = max(1, plan.engine.num_workers)
    page_bytes = plan.known_model.kv_bytes_per_token(ELEMENT_SIZE[plan.engine.dtype]) * plan.engine.kv_page_size
    available = plan.available_bytes()
    if longest * page_bytes * num_workers > available:
        raise OptionError(
            f"kv_max_pages: one canvas of max_model_len {plan.engine.max_model_len} on each of {num_workers} "
            f"workers needs {_gib(longest * page_bytes * num_workers)} of KV, {_gib(available)} are available; "
            "lower --max-model-len or use fewer workers"
        )
    within_share = available // MEMORY_SHARE // num_workers // page_bytes
    full_batch = plan.engine.max_batch_size * longest
    if full_batch <= within_share:
        return plan.auto("kv_max_pages", full_batch, "max_batch_size canvases of max_model_len")
    why = f"a quarter of {_gib(available)} available memory, shared by {num_workers} worker(s)"
    if within_share < longest:
        why = "one canvas of max_model_len"
    return plan.auto("kv_max_pages", max(longest, within_share), why)


def kernels_and_graphs(plan: ServePlan) -> ServePlan:
    """How CUDA workers compute; what only they can do is refused elsewhere."""
    engine = plan.engine
    sizes = engine.cuda_graph_batch_sizes.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise plan.refused("cuda_graph_batch_sizes", repr(engine.cuda_graph_batch_sizes), "numbers such as 1,2,4,8")
    layer, num_layers = engine.op_metrics_layer_id, plan.known_model.n_layers
    if layer is not None and layer >= num_layers - 1:
        raise plan.refused("op_metrics_layer_id", layer, f"0 to {num_layers - 2}: the last layer computes fewer rows")
    if engine.enable_operation_metrics and num_layers < 2:
        raise plan.refused("enable_operation_metrics", True, "false for a model of one layer: the last is not measured")
    if _wants_cuda(plan) or not engine.num_workers:
        return plan
    if engine.enable_operation_metrics:
        raise plan.refused("enable_operation_metrics", True, "false on CPUs: operations are measured on CUDA only")
    if engine.attention_backend == "flashinfer":
        raise plan.refused("attention_backend", "'flashinfer'", "auto or sdpa on CPUs")
    return plan


def network(plan: ServePlan) -> ServePlan:
    """An address that may be bound, a port that is free, and a key for those who join from elsewhere."""
    service = plan.service
    remote = (("num_remote_workers", service.num_remote_workers),)
    for name, number in (*remote, ("num_remote_prefill_workers", service.num_remote_prefill_workers)):
        if number and service.worker_key is None:
            wanted = "0, or a --worker-key with which they join (better as the variable DBENCH_WORKER_KEY)"
            raise plan.refused(name, number, wanted)
    fault = tls_fault(service) or address_fault(service)
    if fault is None and plan.engine.mode == HYBRID:
        fault = meeting_fault(service)
    fault = fault or worker_ports_fault(service, plan.engine.num_workers, is_hybrid=plan.engine.mode == HYBRID)
    if fault is not None:
        raise plan.refused(fault.option, fault.got, fault.wanted)
    return plan


def validate(plan: ServePlan) -> ServePlan:
    """What several options say together."""
    engine = plan.engine
    assert engine.max_model_len is not None
    if engine.max_model_len <= engine.block_length:
        raise OptionError(
            f"{plan.resolved.place('block_length')}: got {engine.block_length}, wanted less than max_model_len "
            f"{engine.max_model_len}, so that a canvas holds a prompt and a block"
        )
    if engine.max_gen_len is not None:
        if engine.max_gen_len % engine.block_length:
            raise plan.refused(
                "max_gen_len", engine.max_gen_len, f"a multiple of block_length, which is {engine.block_length}"
            )
        if engine.max_gen_len >= engine.max_model_len:
            raise plan.refused(
                "max_gen_len", engine.max_gen_len, f"less than max_model_len, which is {engine.max_model_len}"
            )
    longest = _pages_of(plan, engine.max_model_len)
    if engine.kv_max_pages is not None and engine.kv_max_pages < longest:
        raise plan.refused(
            "kv_max_pages",
            engine.kv_max_pages,
            f"at least {longest}: one canvas of max_model_len {engine.max_model_len} "
            f"in pages of kv_page_size {engine.kv_page_size}",
        )
    return plan


STAGES: tuple[Callable[[ServePlan], ServePlan], ...] = (
    mode,
    basics,
    devices,
    memory_and_budget,
    kernels_and_graphs,
    network,
    validate,
)


def check_sampling(resolved: Resolved) -> None:
    """The unmasking rule has its own parameter, in range, and no foreign one; raises OptionError."""
    fault = SamplingParameters(**asdict(resolved.section(SamplingOptions))).fault(resolved.place)
    if fault:
        raise OptionError(fault)


def _tokenizer(plan: ServePlan) -> ServePlan:
    if plan.engine.tokenizer is None:
        return plan.auto("tokenizer", plan.engine.model, "the value of model")
    name = plan.engine.tokenizer
    if not has_tokenizer(directory_of(name)):
        raise ModelError(
            f"{plan.resolved.place('tokenizer')}: got {name!r}, wanted a directory that holds {WANTED_FILES}"
        )
    return plan if is_built_in(name) else plan.normalised("tokenizer", str(directory_of(name).resolve()))


def _max_model_len(plan: ServePlan) -> ServePlan:
    limit, usable = plan.known_model.max_sequence_length, plan.known_model.usable_length
    if plan.engine.max_model_len is None:
        why = "the model's context limit" if usable == limit else "the length that the model's authors vouch for"
        return plan.auto("max_model_len", usable, why)
    if plan.engine.max_model_len > limit:
        raise plan.refused(
            "max_model_len", plan.engine.max_model_len, f"at most {limit}, the context limit in config.json"
        )
    if plan.engine.max_model_len > usable:
        place, got = plan.resolved.place("max_model_len"), plan.engine.max_model_len
        logger.warning(
            "%s: got %d, but the model's authors vouch for %d tokens; answers on longer canvases may be poor",
            place,
            got,
            usable,
        )
    return plan


def _mask_id(plan: ServePlan) -> ServePlan:
    model = plan.known_model
    if plan.engine.mask_id is None:
        if model.mask_token_id is None:
            raise OptionError(
                f"--mask-id: not given, and config.json in {plan.directory} has no mask_token_id; give the mask's id"
            )
        return plan.auto("mask_id", model.mask_token_id, "mask_token_id of config.json")
    if plan.engine.mask_id >= model.vocab_size:
        raise plan.refused("mask_id", plan.engine.mask_id, f"an id below the vocabulary size {model.vocab_size}")
    return plan


def _pages_of(plan: ServePlan, num_tokens: int) -> int:
    return -(-num_tokens // plan.engine.kv_page_size)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""Every option of dbench, once.

One dataclass field per option. From its declaration come the flag, the help panel, the range check,
the YAML key, the environment variable and the line of the resolved configuration (see `config.py`).
A command is a tuple of sections; sections are composed, never inherited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from dbench.engine_options import COLOCATED as COLOCATED
from dbench.engine_options import HYBRID as HYBRID
from dbench.engine_options import PREFILL as PREFILL
from dbench.engine_options import WORKER_KINDS as WORKER_KINDS
from dbench.engine_options import EngineOptions as EngineOptions
from dbench.option_fields import OptionSpec, option, rule_option, tls_ca_option
from dbench.unmasking_rules import DEFAULT_RULE, MAX_TEMPERATURE, UNMASKING_RULES

VARIABLE_PREFIX = "DBENCH_"
"""Of the environment variables of all options."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option as the command line, YAML and the environment see it."""

    name: str  # field name = YAML key = name in config.yaml
    section: str
    type: type  # bool, int, float or str; for a list option the type of its items
    default: Any  # None: unset
    spec: OptionSpec

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment_variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Where and how the server is reached, and what it writes."""

    host: str = option("127.0.0.1", "Address that the server binds.", panel="Service", serve_only=True)
    scheduler_port: int = option(
        50051,
        "Port for clients and workers; 0: any free one.",
        panel="Service",
        minimum=0,
        maximum=65535,
        serve_only=True,
    )
    master_addr: str = option(
        "localhost", "Address at which workers that exchange KV meet.", panel="Service", serve_only=True, mode=HYBRID
    )
    master_port: int = option(
        29500,
        "Its port; 0: any free one.",
        panel="Service",
        minimum=0,
        maximum=65535,
        serve_only=True,
        mode=HYBRID,
    )
    base_worker_port: int = option(
        20100,
        "Port of the first worker's health and metrics (HTTP); the others have those after it. 0: any free ones.",
        panel="Service",
        minimum=0,
        maximum=65535,
        serve_only=True,
    )
    api_key: str | None = option(
        None, "Key that clients must send (authorization: Bearer KEY).", panel="Service", secret=True, auto="no key"
    )
    tls_cert: str | None = option(
        None,
        "File with the server's certificate, and those that vouch for it, in PEM; with tls_key the port speaks TLS.",
        panel="Service",
        auto="no TLS",
        serve_only=True,
    )
    tls_key: str | None = option(
        None, "File with the certificate's private key in PEM.", panel="Service", auto="no TLS", serve_only=True
    )
    allow_insecure_bind: bool = option(
        False, "Allow an address other than loopback without TLS.", panel="Service", serve_only=True
    )
    worker_key: str | None = option(
        None,
        "Key with which workers of other hosts may join, by 'dbench worker'.",
        panel="Workers of other hosts",
        secret=True,
        auto="none may join",
        serve_only=True,
    )
    num_remote_workers: int = option(
        0,
        "Workers of other hosts that the server waits for; more may join at any time.",
        panel="Workers of other hosts",
        minimum=0,
        serve_only=True,
    )
    num_remote_prefill_workers: int = option(
        0,
        "The same for workers that only refresh, by 'dbench worker --worker-type prefill'.",
        panel="Workers of other hosts",
        minimum=0,
        serve_only=True,
        mode=HYBRID,
    )
    max_queued_requests: int = option(
        10000, "Requests in the server at a time; further ones get RESOURCE_EXHAUSTED.", panel="Service", minimum=1
    )
    startup_timeout_s: float = option(300.0, "Time for all workers to become ready.", panel="Service", above=0)
    worker_timeout_s: float = option(
        30.0, "Longest iteration or silence of a worker; then it is started again.", panel="Service", minimum=2
    )
    drain_timeout_s: float = option(
        30.0, "Time for running requests to end after Ctrl-C or SIGTERM.", panel="Service", minimum=0
    )
    log_requests: bool = option(False, "Log every request as it ends.", panel="Service")
    metrics_output_dir: str | None = option(
        None,
        "Folder for the server's events, and for tables and plots of them whenever metrics are exported.",
        panel="Metrics",
        auto="reports/<time>-serve",
        serve_only=True,
    )
    enable_individual_batch_metrics: bool = option(
        False, "Write worker_batch_metrics.csv, a row per batch.", panel="Metrics"
    )
    export_partial_metrics: bool = option(
        False, "Write tables and plots at shutdown, unless an export has.", panel="Metrics", serve_only=True
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The unmasking rule of every request that is sent."""

    temperature: float = option(
        0.0, "0: argmax; above: Gumbel sampling.", panel="Sampling", minimum=0, maximum=MAX_TEMPERATURE
    )
    unmasking_strategy: str = option(
        DEFAULT_RULE,
        "Which masked positions are fixed in a step.",
        panel="Sampling",
        choices=tuple(UNMASKING_RULES),
    )
    confidence_threshold: float | None = rule_option("confidence_threshold")
    fixed_unmask_quota: int | None = rule_option("fixed_unmask_quota")
    dynamic_unmask_factor: float | None = rule_option("dynamic_unmask_factor")
    entropy_threshold: float | None = rule_option("entropy_threshold")
    margin_threshold: float | None = rule_option("margin_threshold")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which requests are sent, when, and where the results go."""

    server: str | None = option(
        None, "Attach to a running server at host:port.", panel="Target", auto="start one with the serve options"
    )
    tls_ca: str | None = tls_ca_option("Target")
    qps: float = option(
        1.0, "Requests per second offered; inf: all at once.", panel="Load", above=0, allow_infinity=True
    )
    num_requests: int = option(100, "Measured requests.", panel="Load", minimum=1)
    concurrency: int | None = option(
        None, "Closed loop: this many requests in flight, instead of --qps.", panel="Load", minimum=1, auto="open loop"
    )
    seed: int = option(42, "Seed of arrivals, lengths, prompts and request seeds.", panel="Load", minimum=0)
    interval_type: str = option("poisson", "Arrival process.", panel="Load", choices=("poisson", "gamma", "static"))
    cv: float = option(0.5, "gamma: coefficient of variation of the gaps (1: poisson).", panel="Load", above=0)
    num_warmup_requests: int | None = option(
        None, "Requests sent and finished before the clock starts.", panel="Load", minimum=0, auto="one per worker"
    )
    benchmark_timeout: float = option(
        900.0, "Seconds from the last scheduled arrival to the end of the drain; 0: none.", panel="Load", minimum=0
    )
    length_type: str | None = option(
        None,
        "Where the lengths come from.",
        panel="Lengths",
        choices=("trace", "fixed"),
        auto="trace with --trace, else fixed",
    )
    trace: str | None = option(
        None, "Trace name (see 'dbench trace show') or CSV file with prompt_len,gen_len.", panel="Lengths", auto="none"
    )
    prompt_tokens: int = option(512, "fixed: prompt length.", panel="Lengths", minimum=1)
    gen_tokens: int = option(128, "fixed: generated length.", panel="Lengths", minimum=1)
    length_scale: float = option(1.0, "Factor on prompt and generated lengths of a trace.", panel="Lengths", above=0)
    prompt_scale: float | None = option(
        None, "Factor on prompt lengths alone.", panel="Lengths", above=0, auto="length_scale"
    )
    gen_scale: float | None = option(
        None, "Factor on generated lengths alone.", panel="Lengths", above=0, auto="length_scale"
    )
    max_total_tokens: int | None = option(
        None,
        "Longest prompt + generation; a longer prompt is cut, and the report counts it.",
        panel="Lengths",
        minimum=2,
        auto="the server's context limit",
    )
    check_answers: bool = option(
        False, "Report the share of right answers; with trace tasks, whose problems have one each.", panel="Lengths"
    )
    shuffle: bool = option(True, "Take the trace's rows in seeded random order.", panel="Lengths")
    ignore_eos: bool | None = option(
        None,
        "Decode the whole gen_length, past any end-of-text id.",
        panel="Sampling",
        auto="false with trace tasks, else true",
    )
    output_dir: str = option("reports", "Folder that receives the run's folder.", panel="Output")
    name: str | None = option(None, "Name of the run.", panel="Output", auto="the command's name")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is searched, and when the search stops."""

    sla: tuple[str, ...] = option(
        (),
        "Rule such as 'request_e2e_time:p90<=8s'; repeatable, all must hold.",
        panel="Search",
        is_list=True,
    )
    start_qps: float | None = option(
        None, "First rate tried.", panel="Search", above=0, auto="half the throughput of a short closed-loop probe"
    )
    qps_list: str | None = option(None, "Rates to run, instead of a search: 1,2,4.", panel="Search", auto="search")
    max_iterations: int = option(20, "Trials at most, per job.", panel="Search", minimum=1)
    min_search_granularity_pct: float = option(
        2.5, "Stop when lowest fail and highest pass are this close, in percent.", panel="Search", above=0
    )
    max_qps_cap: float | None = option(None, "Highest rate tried.", panel="Search", above=0, auto="none")
    reevaluate: str | None = option(
        None,
        "Judge the stored trials of this search folder by the given --sla; runs nothing.",
        panel="Search",
        auto="off",
    )


@dataclass(frozen=True, slots=True)
class TerminalOptions:
    """How the program speaks."""

    log_level: str = option(
        "info", "Least severe message shown.", panel="Terminal", choices=("debug", "info", "warning", "error")
    )
    dashboard: bool = option(True, "Live view on a terminal.", panel="Terminal")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """One request of `dbench submit`."""

    server: str = option("127.0.0.1:50051", "Server at host:port.", panel="Target")
    tls_ca: str | None = tls_ca_option("Target")
    api_key: str | None = option(None, "Key that the server wants.", panel="Target", secret=True, auto="no key")
    prompt: str | None = option(None, "Prompt as text.", panel="Request", auto="none")
    chat: str | None = option(None, "Prompt as a user's message in a chat.", panel="Request", auto="none")
    prompt_ids: str | None = option(None, "Prompt as token ids: 1,2,3.", panel="Request", auto="none")
    gen_length: int | None = option(
        None,
        "Tokens to generate, a multiple of the server's block length.",
        panel="Request",
        minimum=1,
        auto="one block",
    )
    request_seed: int | None = option(
        None,
        "Seed of the request's randomness.",
        panel="Request",
        minimum=-(2**63),
        maximum=2**63 - 1,
        auto="made from the request, so that equal requests get equal randomness",
    )
    ignore_eos: bool = option(False, "Decode the whole gen_length, past any end-of-text id.", panel="Request")
    tokenizer: str | None = option(
        None, "Directory that holds the tokenizer's files, or 'embedded'.", panel="Request", auto="the server's own"
    )
    stream: bool = option(
        False, "Print each block as it comes; with --json a line for each, the result last.", panel="Request"
    )


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A worker that joins a running server."""

    scheduler: str = option("127.0.0.1:50051", "The server to work for, at host:port.", panel="Server")
    tls_ca: str | None = tls_ca_option("Server")
    worker_key: str | None = option(
        None, "Key that the server was started with.", panel="Server", secret=True, auto="none; it must be given"
    )
    reconnect_timeout_s: float = option(
        600.0, "Time without a server after which the worker ends; 0: it tries for ever.", panel="Server", minimum=0
    )
    worker_type: str = option(
        COLOCATED,
        "colocated: it refreshes and decodes; prefill: it only refreshes, for a server in hybrid mode.",
        panel="Worker",
        choices=WORKER_KINDS,
    )
    gpu: str = option("cpu", "Device of the worker: 'cpu', or the number of a CUDA device.", panel="Worker")
    model: str | None = option(None, "Model directory on this host.", panel="Worker", auto="where the server has it")
    num_threads: int | None = option(
        None, "Threads that compute on the CPU.", panel="Worker", minimum=1, auto="one per core"
    )
    worker_port: int | None = option(
        None,
        "Port of its health and metrics (HTTP), at 127.0.0.1; 0: any free one.",
        panel="Worker",
        minimum=0,
        maximum=65535,
        auto="none",
    )
    drain_timeout_s: float = option(
        30.0,
        "Time for running blocks to end after Ctrl-C or SIGTERM; then they are handed back.",
        panel="Worker",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What `dbench trace make` draws from a length profile."""

    num_requests: int = option(1000, "Rows to draw.", panel="Trace", minimum=1)
    seed: int = option(42, "Seed of the draws.", panel="Trace", minimum=0)


COMMAND_SECTIONS: dict[str, tuple[type, ...]] = {
    "serve": (EngineOptions, ServiceOptions, TerminalOptions),
    "run": (LoadOptions, SamplingOptions, EngineOptions, ServiceOptions, TerminalOptions),
    "search-capacity": (
        SearchOptions,
        LoadOptions,
        SamplingOptions,
        EngineOptions,
        ServiceOptions,
        TerminalOptions,
    ),
    "worker": (WorkerOptions, TerminalOptions),
    "submit": (ClientOptions, SamplingOptions, TerminalOptions),
    "report": (TerminalOptions,),
    "trace show": (TerminalOptions,),
    "trace make": (ProfileOptions, TerminalOptions),
}
"""Command -> the sections that it takes. No name stands twice in one command."""


def options_taken(sections: Iterable[type]) -> Iterator[Option]:
    """The options that a command with these sections takes, in their order.

    A command that sends load starts a server of its own, for which the serve-only options mean nothing.
    """
    kinds = tuple(sections)
    has_own_server = LoadOptions in kinds
    for section in kinds:
        yield from (option for option in options_of(section) if not (has_own_server and option.spec.serve_only))


def options_of(section: type) -> Iterator[Option]:
    """The options that a section declares, in their order."""
    hints = get_type_hints(section)
    for f in fields(section):
        spec: OptionSpec = f.metadata["option"]
        yield Option(f.name, section.__name__, _scalar_type(hints[f.name]), f.default, spec)


def _scalar_type(hint: Any) -> type:
    """int for `int | None`, str for `tuple[str, ...]`."""
    arguments = [a for a in getattr(hint, "__args__", ()) if a is not type(None) and a is not Ellipsis]
    scalar: type = arguments[0] if arguments else hint
    return scalar

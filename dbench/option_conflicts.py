"""Options that do nothing where they stand: those of the other mode, and those without another that they need.

Only what was given counts, and only where it is not the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dbench.config import Resolved
from dbench.errors import OptionError
from dbench.options import HYBRID, EngineOptions, LoadOptions, Option, ServiceOptions, options_of

TOPOLOGY = "topology_guarded_memory"
BALANCED = "balanced_length_clustering"
OWN_LENGTHS = ("prompt_tokens", "gen_tokens")
"""Of a load without a trace."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """An option that does something only beside another one."""

    option: str
    is_used: Callable[[EngineOptions], bool]
    beside: str
    """The other one, as it is to be given."""


DEPENDENCES = (
    Dependence("kv_fast_pairs", lambda e: e.decode_scheduler_policy == TOPOLOGY, f"decode_scheduler_policy {TOPOLOGY}"),
    Dependence(
        "kv_topology_alpha", lambda e: e.decode_scheduler_policy == TOPOLOGY, f"decode_scheduler_policy {TOPOLOGY}"
    ),
    Dependence(
        "decode_grouping_slack_ratio",
        lambda e: BALANCED in (e.prefill_scheduler_policy, e.decode_scheduler_policy),
        f"{BALANCED} as prefill_scheduler_policy, or in mode {HYBRID} as decode_scheduler_policy",
    ),
    Dependence("op_metrics_layer_id", lambda e: e.enable_operation_metrics, "enable_operation_metrics"),
    Dependence(
        "cuda_graph_batch_sizes",
        lambda e: e.enable_cuda_graphs and e.cache_mode == "exact",
        "enable_cuda_graphs and cache_mode exact",
    ),
)


def refuse_foreign(resolved: Resolved) -> None:
    """Raises OptionError for an option of the other mode."""
    mode = resolved.section(EngineOptions).mode
    for option in (*options_of(EngineOptions), *options_of(ServiceOptions)):
        if option.spec.mode not in ("", mode) and _is_given(resolved, option):
            raise OptionError(
                f"{resolved.place(option.name)}: belongs to mode {option.spec.mode}, and the mode is {mode}; "
                f"leave it out, or give --mode {option.spec.mode}"
            )


def refuse_useless(resolved: Resolved) -> None:
    """Raises OptionError for an option that needs another one."""
    engine, options = resolved.section(EngineOptions), {option.name: option for option in options_of(EngineOptions)}
    for known in DEPENDENCES:
        if not known.is_used(engine) and _is_given(resolved, options[known.option]):
            place = resolved.place(known.option)
            raise OptionError(f"{place}: does nothing but beside {known.beside}; leave it out, or give that too")


def refuse_lengths_beside_a_trace(resolved: Resolved) -> None:
    """Raises OptionError for lengths that a trace brings itself."""
    trace = resolved.section(LoadOptions).trace
    for option in options_of(LoadOptions):
        if trace is not None and option.name in OWN_LENGTHS and _is_given(resolved, option):
            raise OptionError(
                f"{resolved.place(option.name)}: does nothing beside trace {trace}, which has its own lengths; "
                "leave it out, or scale those with --length-scale, --prompt-scale or --gen-scale"
            )


def _is_given(resolved: Resolved, option: Option) -> bool:
    return resolved.is_explicit(option.name) and resolved.value(option.name) != option.default

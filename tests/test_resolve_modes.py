"""Options of the two serving modes: what each needs, and what is refused by name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbench.config import Resolved, resolve
from dbench.engine_options import DEVICE_OPTIONS, MODES
from dbench.errors import OptionError
from dbench.options import COMMAND_SECTIONS, EngineOptions, ServiceOptions, options_of
from dbench.resolve import resolve_serve
from dbench.serve.deployment import deployment_of

GIB = 2**30
HYBRID = {"mode": "hybrid", "prefill_gpus": "cpu", "hybrid_colocated_gpus": "cpu,cpu"}


def given(**flags: object) -> Resolved:
    return resolve(
        COMMAND_SECTIONS["serve"],
        {"scheduler_port": 0, "max_model_len": 256, **flags},
        yaml_path=None,
        environment={},
    )


def resolved(**flags: object) -> Resolved:
    return resolve_serve(given(**flags), available_bytes=lambda: 64 * GIB)


def hybrid(**flags: object) -> Resolved:
    return resolved(**{"master_port": 0, **HYBRID, **flags})


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_hybrid_mode_has_two_lists_of_devices_and_no_gpus() -> None:
    engine = hybrid(prefill_gpus="cpu, cpu").section(EngineOptions)
    assert (engine.gpus, engine.prefill_gpus, engine.hybrid_colocated_gpus) == (None, "cpu,cpu", "cpu,cpu")
    assert engine.num_workers == 4


def test_all_workers_of_both_kinds_share_the_memory() -> None:
    pages = [
        resolve_serve(given(max_batch_size=10**6, **setup), available_bytes=lambda: GIB)
        .section(EngineOptions)
        .kv_max_pages
        for setup in ({**HYBRID, "master_port": 0}, {"gpus": "cpu,cpu,cpu"})
    ]
    assert pages[0] == pages[1]


@pytest.mark.parametrize("missing", DEVICE_OPTIONS["hybrid"])
def test_hybrid_mode_needs_both_kinds_of_workers(missing: str) -> None:
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(OptionError, match=f"{flag}: got nothing, wanted devices .*mode hybrid needs both kinds"):
        hybrid(**{missing: None})


@pytest.mark.parametrize(
    ("flags", "lists", "num_workers"),
    [
        ({"num_remote_prefill_workers": 2, "prefill_gpus": None}, ("none", "cpu,cpu"), 2),
        ({"num_remote_workers": 1, "hybrid_colocated_gpus": "none"}, ("cpu", "none"), 1),
        (
            {**dict.fromkeys(DEVICE_OPTIONS["hybrid"]), "num_remote_workers": 1, "num_remote_prefill_workers": 1},
            ("none", "none"),
            0,
        ),
        ({"num_remote_prefill_workers": 1}, ("cpu", "cpu,cpu"), 3),
    ],
)
def test_workers_of_either_kind_may_all_come_from_elsewhere(
    flags: dict[str, object], lists: tuple[str, str], num_workers: int
) -> None:
    engine = hybrid(worker_key="sesame", **flags).section(EngineOptions)
    assert (engine.prefill_gpus, engine.hybrid_colocated_gpus) == lists
    assert (engine.num_workers, engine.dtype) == (num_workers, "float32")
    assert deployment_of(engine).num_prefill == (lists[0] != "none")


def test_the_number_format_is_free_where_no_worker_is_here() -> None:
    remote = {"num_remote_workers": 1, "num_remote_prefill_workers": 1, "worker_key": "sesame"}
    engine = hybrid(**dict.fromkeys(DEVICE_OPTIONS["hybrid"]), **remote, dtype="float16").section(EngineOptions)
    assert engine.dtype == "float16"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"prefill_gpus": "none"},
            "--prefill-gpus: got 'none', wanted a device, or of 'dbench serve' also --num-remote-",
        ),
        ({"prefill_gpus": "none", "num_remote_workers": 1}, "also --num-remote-prefill-workers"),
        ({"hybrid_colocated_gpus": "none", "num_remote_prefill_workers": 1}, "also --num-remote-workers"),
        ({"num_remote_prefill_workers": 1, "worker_key": None}, "--num-remote-prefill-workers: got 1, wanted 0, or a"),
    ],
)
def test_a_kind_of_which_no_worker_can_come_is_refused(flags: dict[str, object], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        hybrid(**{"worker_key": "sesame", **flags})
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "flag", "value"),
    [
        ("colocated", "prefill_gpus", "cpu"),
        ("colocated", "num_remote_prefill_workers", "1"),
        ("colocated", "decode_scheduler_policy", "round_robin"),
        ("colocated", "kv_topology_alpha", "0.5"),
        ("colocated", "enable_hybrid_prefill_overflow", "false"),
        ("colocated", "master_port", "1"),
        ("hybrid", "gpus", "cpu"),
        ("hybrid", "colocated_sticky_worker", "true"),
    ],
)
def test_options_of_the_other_mode_are_refused_by_name(mode: str, flag: str, value: str) -> None:
    other = next(name for name in MODES if name != mode)
    wanted = f"--{flag.replace('_', '-')}: belongs to mode {other}, and the mode is {mode}"
    with pytest.raises(OptionError, match=wanted):
        (hybrid if mode == "hybrid" else resolved)(**{flag: value})


def test_a_default_that_is_spelled_out_is_no_option_of_the_other_mode(tmp_path: Path) -> None:
    for first in (resolved(), hybrid()):
        path = tmp_path / "config.yaml"
        path.write_text(first.to_yaml())
        again = resolve(COMMAND_SECTIONS["serve"], {}, yaml_path=path, environment={})
        assert resolve_serve(again, available_bytes=lambda: GIB).sections == first.sections


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"prefill_scheduler_policy": "least_outstanding_requests"}, "in mode hybrid"),
        ({"cache_mode": "none"}, "wanted 'exact' in mode hybrid"),
        ({"kv_fast_pairs": "0-0"}, "--kv-fast-pairs: got '0-0', where '0-0' pairs a device with itself"),
        ({"kv_fast_pairs": ","}, "it names no pair"),
        ({"kv_fast_pairs": "0-1-2"}, "'0-1-2' is no pair of device numbers"),
        ({"prefill_gpus": "cpu,tpu"}, "--prefill-gpus: got 'tpu'"),
        ({"hybrid_colocated_gpus": "tpu"}, "--hybrid-colocated-gpus: got 'tpu'"),
    ],
)
def test_what_hybrid_mode_cannot_do_is_refused(flags: dict[str, object], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        hybrid(**flags)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_meeting_port_must_be_free_and_another_one(busy_port: int) -> None:
    with pytest.raises(OptionError, match=f"--master-port: got {busy_port}, which is in use on localhost"):
        hybrid(master_port=busy_port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with pytest.raises(OptionError, match=f"--master-port: got {free}, which is scheduler_port too"):
        hybrid(master_port=free, scheduler_port=free)


def test_workers_meet_on_loopback_unless_allowed() -> None:
    with pytest.raises(OptionError, match=r"--master-addr: got '0\.0\.0\.0', wanted a loopback address"):
        hybrid(master_addr="0.0.0.0")
    assert hybrid(master_addr="0.0.0.0", allow_insecure_bind=True).section(ServiceOptions).master_addr == "0.0.0.0"


@pytest.mark.parametrize("master_addr", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_workers_of_other_hosts_must_reach_the_meeting(master_addr: str) -> None:
    open_to_others = {"host": "0.0.0.0", "allow_insecure_bind": True, "worker_key": "sesame"}
    with pytest.raises(OptionError, match=f"--master-addr: got '{master_addr}', wanted the address at which"):
        hybrid(master_addr=master_addr, **open_to_others)
    hybrid(master_addr=master_addr, **{**open_to_others, "worker_key": None})
    hybrid(master_addr=master_addr, **{**open_to_others, "host": "127.0.0.1"})


def test_every_option_of_one_mode_names_a_mode() -> None:
    modes = {option.spec.mode for kind in (EngineOptions, ServiceOptions) for option in options_of(kind)}
    assert modes == {"", *MODES}


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        ({"decode_grouping_slack_ratio": 0.2}, "balanced_length_clustering as prefill_scheduler_policy"),
        ({**HYBRID, "kv_fast_pairs": "0-1"}, "decode_scheduler_policy topology_guarded_memory"),
        ({**HYBRID, "kv_topology_alpha": 0.5}, "decode_scheduler_policy topology_guarded_memory"),
        ({"op_metrics_layer_id": 1}, "enable_operation_metrics"),
        ({"cuda_graph_batch_sizes": "1,2", "enable_cuda_graphs": False}, "enable_cuda_graphs"),
        ({"cuda_graph_batch_sizes": "1,2", "cache_mode": "none"}, "enable_cuda_graphs and cache_mode exact"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_by_name(flags: dict[str, object], beside: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^--[a-z-]+: does nothing but beside {beside}.*; leave it out, or give that"
    ):
        resolved(**{"master_port": 0, **flags} if "mode" in flags else flags)


def test_it_is_taken_beside_the_other_one_and_at_its_default() -> None:
    assert resolved(decode_grouping_slack_ratio=0.2, prefill_scheduler_policy="balanced_length_clustering")
    assert hybrid(decode_grouping_slack_ratio=0.2, decode_scheduler_policy="balanced_length_clustering")
    assert hybrid(kv_topology_alpha=0.5, kv_fast_pairs="0-1", decode_scheduler_policy="topology_guarded_memory")
    assert resolved(decode_grouping_slack_ratio=0.1, cuda_graph_batch_sizes="1,2")

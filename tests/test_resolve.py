"""What a server's unset options become, and which combinations are refused before anything starts."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbench.config import Resolved, resolve
from dbench.errors import DbenchError, ModelError, OptionError
from dbench.models import embedded_directory
from dbench.options import COMMAND_SECTIONS, EngineOptions
from dbench.resolve import available_memory, check_sampling, resolve_serve

GIB = 2**30
EMBEDDED_CONTEXT = 4096
EMBEDDED_PAGE_BYTES = 2 * 6 * 4 * 64 * 4 * 16  # K and V, layers, heads, head size, float32, tokens


def given(**flags: object) -> Resolved:
    """The options of `serve` on any free port, as flags."""
    return resolve(COMMAND_SECTIONS["serve"], {"scheduler_port": 0, **flags}, yaml_path=None, environment={})


def resolved(*, free: int = 64 * GIB, num_gpus: int = 0, **flags: object) -> Resolved:
    return resolve_serve(given(**flags), available_bytes=lambda: free, num_cuda_devices=lambda: num_gpus)


def refusal(*, num_gpus: int = 0, **flags: Any) -> str:
    with pytest.raises(DbenchError) as caught:
        resolved(num_gpus=num_gpus, **flags)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_directory(), tmp_path / "model"))


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_everything_a_server_needs_is_filled_in_with_a_reason() -> None:
    result = resolved()
    engine = result.section(EngineOptions)
    assert (engine.model, engine.served_model_name, engine.gpus, engine.dtype) == (
        "embedded",
        "embedded",
        "cpu",
        "float32",
    )
    assert (engine.mask_id, engine.max_model_len) == (258, EMBEDDED_CONTEXT)
    assert engine.tokenizer == "embedded"
    assert engine.kv_max_pages is not None
    assert engine.max_gen_len is None
    filled = ("model", "served_model_name", "gpus", "dtype", "mask_id", "max_model_len", "tokenizer", "kv_max_pages")
    assert {result.origins[name].startswith("auto: ") for name in filled} == {True}


def test_given_values_keep_their_origin(model_directory: Path) -> None:
    result = resolved(model=str(model_directory), gpus="cpu, cpu", dtype="bfloat16", mask_id="7", max_model_len="512")
    engine = result.section(EngineOptions)
    assert (engine.model, engine.served_model_name) == (str(model_directory), str(model_directory))
    assert (engine.gpus, engine.dtype, engine.mask_id, engine.max_model_len) == ("cpu,cpu", "bfloat16", 7, 512)
    assert {result.origins[n] for n in ("model", "gpus", "dtype", "mask_id", "max_model_len")} == {"flag"}


def test_a_resolved_configuration_resolves_to_itself(tmp_path: Path) -> None:
    first = resolved(gpus="cpu,cpu", max_gen_len="64")
    path = tmp_path / "config.yaml"
    path.write_text(first.to_yaml())
    again = resolve(COMMAND_SECTIONS["serve"], {}, yaml_path=path, environment={})
    assert resolve_serve(again, available_bytes=lambda: GIB, num_cuda_devices=lambda: 0).sections == first.sections


def test_kv_pages_hold_a_full_batch_of_longest_canvases_where_memory_allows() -> None:
    engine = resolved(max_batch_size="2", max_model_len="100").section(EngineOptions)
    assert engine.kv_max_pages == 2 * 7


@pytest.mark.parametrize("gpus", ["cpu", "cpu,cpu", "cpu,cpu,cpu"])
def test_kv_of_all_workers_together_takes_at_most_a_quarter_of_the_memory(gpus: str) -> None:
    free = 8 * GIB
    engine = resolved(free=free, gpus=gpus).section(EngineOptions)
    assert engine.kv_max_pages is not None
    num_workers = len(gpus.split(","))
    assert engine.kv_max_pages * EMBEDDED_PAGE_BYTES * num_workers <= free / 4
    assert (engine.kv_max_pages + 1) * EMBEDDED_PAGE_BYTES * num_workers > free / 4


def test_kv_pages_hold_one_longest_canvas_even_beyond_the_quarter() -> None:
    longest = EMBEDDED_CONTEXT // 16
    result = resolved(free=2 * longest * EMBEDDED_PAGE_BYTES)
    assert result.section(EngineOptions).kv_max_pages == longest
    assert result.origins["kv_max_pages"] == "auto: one canvas of max_model_len"


def test_too_little_memory_for_one_canvas_is_refused_with_both_sizes() -> None:
    line = refusal(free=GIB // 64)
    assert "0.05 GiB" in line
    assert "0.02 GiB are available" in line


def test_explicit_kv_pages_below_one_canvas_are_refused_with_both_numbers() -> None:
    assert resolved(kv_max_pages="256").section(EngineOptions).kv_max_pages == 256
    assert refusal(kv_max_pages="255").startswith("--kv-max-pages: got 255, wanted at least 256")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"gpus": "cuda:0"}, "--gpus: got 'cuda:0', wanted 'cpu'"),
        ({"gpus": "cpu,"}, "--gpus: got '', wanted 'cpu'"),
        ({"dtype": "float16"}, "--dtype: got 'float16', wanted one of float32, bfloat16 on CPUs"),
        ({"max_model_len": "5000"}, "--max-model-len: got 5000, wanted at most 4096"),
        ({"max_model_len": "32"}, "--block-length: got 32, wanted less than max_model_len 32"),
        ({"mask_id": "264"}, "--mask-id: got 264, wanted an id below the vocabulary size 264"),
        ({"max_gen_len": "48"}, "--max-gen-len: got 48, wanted a multiple of block_length, which is 32"),
        ({"max_gen_len": "4096"}, "--max-gen-len: got 4096, wanted less than max_model_len, which is 4096"),
        ({"tokenizer": "/no/such/folder"}, "--tokenizer: got '/no/such/folder', wanted a directory that holds"),
        ({"host": "0.0.0.0"}, "--host: got '0.0.0.0', wanted a loopback address"),
        ({"host": "203.0.113.1", "allow_insecure_bind": True}, "--host: got '203.0.113.1' ("),
        ({"host": "no.such.host.invalid", "allow_insecure_bind": True}, "--host: got 'no.such.host.invalid' ("),
    ],
)
def test_impossible_value_is_refused_with_what_is_possible(flags: dict[str, Any], line: str) -> None:
    assert refusal(**flags).startswith(line)


def test_refusal_names_the_source_of_the_value(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max_gen_len: 48\nscheduler_port: 0\n")
    serve = COMMAND_SECTIONS["serve"]
    with pytest.raises(OptionError, match=r"serve\.yaml: max_gen_len: got 48"):
        resolve_serve(resolve(serve, {}, yaml_path=path, environment={}))
    with pytest.raises(OptionError, match=r"^DBENCH_MAX_GEN_LEN: got 40"):
        resolve_serve(resolve(serve, {}, yaml_path=path, environment={"DBENCH_MAX_GEN_LEN": "40"}))


def test_busy_port_is_refused_by_number(busy_port: int) -> None:
    assert refusal(scheduler_port=str(busy_port)).startswith(
        f"--scheduler-port: got {busy_port}, which is in use on 127.0.0.1, wanted a free port, or 0"
    )


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_loopback_needs_no_permission(host: str) -> None:
    assert resolved(host=host).value("host") == host


def test_missing_model_directory_is_refused() -> None:
    assert "/no/such/model" in refusal(model="/no/such/model")


def test_model_without_a_mask_id_wants_the_flag(model_directory: Path) -> None:
    config = json.loads((model_directory / "config.json").read_text())
    del config["mask_token_id"]
    (model_directory / "config.json").write_text(json.dumps(config))
    assert refusal(model=str(model_directory)).startswith("--mask-id: not given")
    assert resolved(model=str(model_directory), mask_id="3").value("mask_id") == 3


def test_odd_model_config_is_refused_as_the_model_s_fault(model_directory: Path) -> None:
    change_config(model_directory, n_layers="six")
    with pytest.raises(ModelError, match="n_layers"):
        resolved(model=str(model_directory))


def test_available_memory_is_a_plausible_number_of_bytes() -> None:
    assert 2**20 < available_memory() < 2**50


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"fixed_unmask_quota": "2"},
            "--fixed-unmask-quota 2 does not belong to conf_threshold, which takes --confidence-threshold only",
        ),
        (
            {"unmasking_strategy": "conf_quota"},
            "--unmasking-strategy conf_quota needs --fixed-unmask-quota, at least 1",
        ),
        (
            {"unmasking_strategy": "random", "confidence_threshold": "0.5"},
            "--confidence-threshold 0.5 does not belong to random, which takes no parameter",
        ),
    ],
)
def test_unmasking_rule_with_a_missing_or_foreign_parameter_is_refused(flags: dict[str, object], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_sampling(resolve(COMMAND_SECTIONS["submit"], flags, yaml_path=None, environment={}))
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    "flags", [{}, {"confidence_threshold": "0.5"}, {"unmasking_strategy": "conf_quota", "fixed_unmask_quota": "2"}]
)
def test_unmasking_rule_with_its_own_parameter_passes(flags: dict[str, object]) -> None:
    check_sampling(resolve(COMMAND_SECTIONS["submit"], flags, yaml_path=None, environment={}))


# ---- named sizes, and models whose context is longer than their authors vouch for -----------------


def test_a_named_size_is_served_with_random_weights_and_without_files() -> None:
    engine = resolved(model="dream-tiny", load_format="random").section(EngineOptions)
    assert (engine.model, engine.served_model_name, engine.tokenizer) == ("dream-tiny",) * 3
    assert (engine.mask_id, engine.max_model_len) == (1018, 2048)


def test_a_named_size_without_random_weights_is_refused() -> None:
    assert refusal(model="llada-8b") == (
        "--model: got the size 'llada-8b', which has no weights, wanted --load-format random with it, "
        "or a model directory"
    )


def test_a_named_size_is_no_tokenizer() -> None:
    assert "--tokenizer: got 'llada-8b', wanted a directory that holds tokenizer.json" in refusal(tokenizer="llada-8b")


def test_the_longest_canvas_is_what_the_authors_vouch_for(caplog: pytest.LogCaptureFixture) -> None:
    result = resolved(model="dream-7b", load_format="random", gpus="cpu")
    assert result.value("max_model_len") == 2048
    assert result.origins["max_model_len"] == "auto: the length that the model's authors vouch for"
    assert not caplog.records


@pytest.mark.parametrize(("length", "warns"), [("2048", False), ("2049", True)])
def test_a_longer_canvas_is_warned_of(length: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(model="dream-7b", load_format="random", max_model_len=length).value("max_model_len") == int(length)
    line = (
        "--max-model-len: got 2049, but the model's authors vouch for 2048 tokens; "
        "answers on longer canvases may be poor"
    )
    assert [record.getMessage() for record in caplog.records] == [line] * warns


def test_a_server_whose_workers_all_come_from_elsewhere_is_sized_by_its_own_memory_for_one() -> None:
    remote: dict[str, Any] = {"gpus": "none", "num_remote_workers": 2, "worker_key": "sesame", "free": 4 * GIB}
    assert resolved(**remote).value("kv_max_pages") == resolved(gpus="cpu", free=4 * GIB).value("kv_max_pages")
    assert resolved(**remote).value("dtype") == "float32"
    assert resolved(**remote, dtype="float16").value("dtype") == "float16"


def test_workers_from_elsewhere_need_a_key() -> None:
    assert refusal(num_remote_workers=1) == (
        "--num-remote-workers: got 1, wanted 0, or a --worker-key with which they join "
        "(better as the variable DBENCH_WORKER_KEY)"
    )


def test_cuda_devices_are_taken_where_there_are_any() -> None:
    engine = resolved(num_gpus=2, model="embedded").section(EngineOptions)
    assert (engine.gpus, engine.dtype, engine.kv_max_pages) == ("0,1", "bfloat16", None)
    engine = resolved(num_gpus=2, model="embedded", gpus=" 1", dtype="float16").section(EngineOptions)
    assert (engine.gpus, engine.dtype) == ("1", "float16")
    assert resolved(num_gpus=2, gpus="cpu").section(EngineOptions).model == "embedded"


def test_a_server_on_cuda_devices_wants_the_large_model_when_none_is_named() -> None:
    assert "GSAI-ML/LLaDA-8B-Instruct" in refusal(num_gpus=1)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"gpus": "2", "num_gpus": 2}, "CUDA devices 0 to 1"),
        ({"gpus": "0"}, "no CUDA device is there"),
        ({"gpus": "0", "model": None}, "no CUDA device is there"),
        ({"gpus": "²", "num_gpus": 3}, "CUDA devices 0 to 2"),
        ({"gpus": "0,cpu", "num_gpus": 1}, "not both"),
        ({"gpus": "0,0", "num_gpus": 1}, "at most once"),
        ({"gpus": "0", "num_gpus": 1, "cuda_graph_batch_sizes": "1,two"}, "numbers such as"),
        ({"gpus": "0", "num_gpus": 1, "enable_operation_metrics": True, "op_metrics_layer_id": 5}, "0 to 4"),
        ({"enable_operation_metrics": True}, "on CUDA only"),
        ({"attention_backend": "flashinfer"}, "auto or sdpa"),
    ],
)
def test_what_devices_cannot_do_is_refused(flags: dict[str, Any], wanted: str) -> None:
    assert wanted in refusal(**{"model": "embedded", **flags})


def test_operations_of_a_model_of_one_layer_are_not_measured(model_directory: Path) -> None:
    change_config(model_directory, n_layers=1)
    given: dict[str, Any] = {"model": str(model_directory), "num_gpus": 1, "enable_operation_metrics": True}
    assert "a model of one layer" in refusal(**given)

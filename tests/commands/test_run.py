"""Which options a run takes, and what its config.yaml keeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dbench.commands.run import config_text, exit_code, one_kind_of_loop, refuse_server_options, with_own_server
from dbench.config import Resolved, resolve
from dbench.errors import OptionError
from dbench.load.driver import EXIT_CODES, RunResult
from dbench.measure.summary import summarize
from dbench.options import COMMAND_SECTIONS, EngineOptions, LoadOptions, Option, ServiceOptions, options_of
from tests.event_builders import run_of, simple_requests

RUN = COMMAND_SECTIONS["run"]
SERVER_OPTIONS = [*options_of(EngineOptions), *options_of(ServiceOptions)]


def given(text: str = "", tmp_path: Path | None = None, **flags: object) -> Resolved:
    path = None
    if tmp_path is not None:
        path = tmp_path / "run.yaml"
        path.write_text(text)
    return resolve(RUN, flags, yaml_path=path, environment={})


def test_rate_flag_goes_before_concurrency_of_a_file(tmp_path: Path) -> None:
    load = one_kind_of_loop(given("concurrency: 4\n", tmp_path, qps="2")).section(LoadOptions)
    assert (load.qps, load.concurrency) == (2.0, None)


def test_concurrency_holds_beside_the_rate_that_a_saved_configuration_names(tmp_path: Path) -> None:
    saved = given(concurrency="4").to_yaml()
    assert one_kind_of_loop(given(saved, tmp_path)).section(LoadOptions).concurrency == 4


@pytest.mark.parametrize("option", SERVER_OPTIONS, ids=lambda option: str(option.name))
def test_attached_run_refuses_every_option_of_a_server(option: Option) -> None:
    name = option.name
    resolved = given(server="127.0.0.1:1").replace(name, None, "flag")
    if name in ("api_key", "enable_individual_batch_metrics", "tokenizer"):
        refuse_server_options(resolved)
    else:
        with pytest.raises(OptionError, match=f"^--{name.replace('_', '-')} configures a server"):
            refuse_server_options(resolved)


@pytest.mark.parametrize(
    ("latencies", "reason", "code"),
    [([1.0, None], "complete", 0), ([None, None], "complete", 1), ([1.0], "timeout", 1), ([None], "interrupted", 130)],
)
def test_exit_code_is_that_of_the_end_and_1_when_nothing_completed(
    latencies: list[float | None], reason: str, code: int
) -> None:
    summary = summarize(run_of(*simple_requests(latencies)))
    assert exit_code(RunResult(Path("run"), reason, EXIT_CODES[reason]), summary) == code


@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_first_request_does_not_wait_for_the_packages_of_the_report(command: str) -> None:
    code = f"import sys, dbench.commands.{command}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()}.isdisjoint({"pandas", "matplotlib", "torch", "optuna"})


def test_own_server_takes_any_free_ports() -> None:
    resolved = with_own_server(given())
    for name in ("scheduler_port", "master_port", "base_worker_port"):
        assert (resolved.value(name), resolved.origins[name]) == (0, "auto: any free port")


def test_configuration_of_an_attached_run_attaches_again(tmp_path: Path) -> None:
    first = given(server="127.0.0.1:1", qps="3", enable_individual_batch_metrics=True)
    again = given(config_text(first), tmp_path)
    refuse_server_options(given(config_text(first), tmp_path).replace("server", "127.0.0.1:1", "flag"))
    assert again.section(LoadOptions) == first.section(LoadOptions)
    assert again.section(ServiceOptions).enable_individual_batch_metrics


def test_configuration_of_an_own_run_holds_the_server_as_it_was(tmp_path: Path) -> None:
    resolved = with_own_server(given(block_length="16"))
    saved = yaml.safe_load(config_text(resolved))
    assert (saved["block_length"], saved["dtype"], saved["max_model_len"]) == (16, "float32", 4096)
    again = with_own_server(given(config_text(resolved), tmp_path))
    assert again.sections == resolved.sections

"""The edge of the program: what is parsed, what is refused, and in how many lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import dbench
from dbench import cli
from dbench.cli import COMMANDS, main
from dbench.cli_options import Invocation
from dbench.errors import RunError, ServerUnavailable
from dbench.options import COMMAND_SECTIONS, Option, options_of, options_taken
from dbench.search.plan import SET_BY_THE_SEARCH
from tools import write_option_docs

HEAVY = ("torch", "optuna", "pandas", "matplotlib", "transformers", "grpc", "numpy", "rich")


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line on stderr of a command line that fails."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dbench: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("dbench: error: ").rstrip("\n")


def with_handler(monkeypatch: pytest.MonkeyPatch, command: str, handler: Callable[[Invocation], int]) -> None:
    """Let a command call `handler` instead of its own code."""
    found = next(c for c in COMMANDS if c.name == command)
    changed = replace(found, handler=handler)
    monkeypatch.setattr(cli, "COMMANDS", tuple(changed if c is found else c for c in COMMANDS))


def parsed(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> Invocation:
    """What a command gets to see."""
    seen: list[Invocation] = []

    def handler(invocation: Invocation) -> int:
        seen.append(invocation)
        return 0

    with_handler(monkeypatch, command, handler)
    assert main([*command.split(), *arguments]) == 0
    return seen[0]


def test_every_command_has_its_sections() -> None:
    assert {command.name for command in COMMANDS} == set(COMMAND_SECTIONS)


def shown_flag(option: Option) -> str:
    """As the help names it."""
    return option.flag.replace("--", "--[no-]", 1) if option.type is bool else option.flag


def test_hidden_options_of_the_search_are_those_that_it_refuses() -> None:
    assert set(next(c.hidden for c in COMMANDS if c.name == "search-capacity")) == set(SET_BY_THE_SEARCH)


@pytest.mark.parametrize("command", ["run", "search-capacity"])
@pytest.mark.parametrize(
    "name",
    [
        "host",
        "allow_insecure_bind",
        "scheduler_port",
        "metrics_output_dir",
        "export_partial_metrics",
        "num_remote_workers",
        "num_remote_prefill_workers",
    ],
)
def test_serve_only_option_is_refused_by_name_where_dbench_starts_the_server(
    command: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--" + name.replace("_", "-")
    assert error_line(capsys, command, flag) == (
        f"dbench {command} has no option {flag}; it belongs to serve (see dbench {command} --help)"
    )
    path = tmp_path / "options.yaml"
    path.write_text(f"{name}: 1\n")
    line = error_line(capsys, command, "--config", str(path))
    assert line == f"{path} line 1: {name}: not an option of this command, only of serve"


@pytest.mark.parametrize("command", COMMAND_SECTIONS)
def test_help_lists_every_option_under_its_panel(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    hidden = next(c.hidden for c in COMMANDS if c.name == command)
    offered = [option for option in options_taken(COMMAND_SECTIONS[command]) if option.name not in hidden]
    for option in offered:
        panel = text.split(f"\n{option.spec.panel}:\n")[1].split("\n\n")[0]
        assert re.search(rf"^ *{re.escape(shown_flag(option))}[ ,\n]", panel + "\n", re.MULTILINE)
    others = {shown_flag(o) for s in COMMAND_SECTIONS[command] for o in options_of(s)} - set(map(shown_flag, offered))
    assert not others & set(text.split())
    assert "--config FILE" in text


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {command.name.split()[0]} " in listed for command in COMMANDS)
    assert "..." not in listed.split("Commands:")[1]


@pytest.mark.parametrize("arguments", [[], ["trace"]])
def test_program_without_a_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dbench {dbench.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["search-capacity", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from dbench.cli import main; main({arguments}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: dbench" in done.stdout
    assert {name.split(".")[0] for name in done.stderr.split()}.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--qsp", "2"], "dbench run has no option --qsp; did you mean --qps? (see dbench run --help)"),
        (["run", "--no-shufle"], "dbench run has no option --no-shufle; did you mean --no-shuffle?"),
        (["run", "--bogus"], "dbench run has no option --bogus (see dbench run --help)"),
        (["serve", "--port", "1"], "dbench serve has no option --port (see dbench serve --help)"),
        (["serve", "--qps", "2"], "dbench serve has no option --qps; it belongs to run, search-capacity"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["trace", "shwo"], "No such command 'shwo'. Did you mean 'show'?"),
        (["run", "--qps"], "Option '--qps' requires an argument"),
        (["run", "now"], "Got unexpected extra argument(s) (now)"),
        (["report"], "Missing argument 'DIRECTORY'"),
        (["run", "--qps", "fast"], "--qps: got 'fast', wanted a number above 0"),
        (["run", "--config", "/no/such/file.yaml"], "/no/such/file.yaml: cannot be read: No such file"),
        (["run", "--trace", "nope"], "unknown trace 'nope'"),
        (["run", "--model", "/no/such/model"], "/no/such/model"),
        (["run", "--gpus", "cuda:0"], "--gpus: got 'cuda:0', wanted 'cpu'"),
        (["run", "--max-gen-len", "33"], "--max-gen-len: got 33, wanted a multiple of block_length, which is 32"),
        (["run", "--unmasking-strategy", "conf_quota"], "--unmasking-strategy conf_quota needs --fixed-unmask-quota"),
        (["run", "--qps", "2", "--concurrency", "3"], "--concurrency: given together with --qps"),
        (["run", "--name", "a/b"], "--name: got 'a/b', wanted a name without slashes"),
        (
            ["run", "--server", "127.0.0.1:1", "--block-length", "16"],
            "--block-length configures a server that dbench starts; with --server it is set there",
        ),
        (
            ["search-capacity", "--server", "127.0.0.1:1"],
            "--server: got 127.0.0.1:1, but a search starts its own servers",
        ),
        (["search-capacity", "--sla", "request_e2e_tim:p90<=8s"], "request_e2e_time"),
        (["serve", "embedded", "--model", "embedded"], "--model: given twice"),
        (["serve", "--host", "0.0.0.0"], "--host: got '0.0.0.0', wanted a loopback address"),
        (["serve", "--num-remote-workers", "2"], "--num-remote-workers: got 2, wanted 0, or a --worker-key"),
        (["serve", "--gpus", "none"], "--gpus: got 'none', wanted a device, or of 'dbench serve' also --num-remote"),
        (["run", "--gpus", "none"], "--gpus: got 'none', wanted a device"),
        (["worker"], "--worker-key: not given; set DBENCH_WORKER_KEY to the key"),
        (["worker", "--worker-key", "k", "--scheduler", "node-1"], "--scheduler: got 'node-1', wanted HOST:PORT"),
        (["submit", "--server", "127.0.0.1", "--chat", "hi"], "--server: got '127.0.0.1', wanted HOST:PORT"),
        (["run", "--server", ":50051"], "--server: got ':50051', wanted HOST:PORT"),
        (["run", "--server", "localhost:70000"], "--server: got 'localhost:70000', wanted HOST:PORT"),
        (["run", "--trace", "arxiv", "--prompt-tokens", "20"], "--prompt-tokens: does nothing beside trace arxiv"),
        (["worker", "--worker-key", "k", "--gpu", "x"], "--gpu: got 'x', wanted 'cpu' or the number of a CUDA device"),
        (["submit"], "give one prompt, as --prompt TEXT, --chat TEXT or --prompt-ids 1,2,3"),
        (
            ["submit", "--prompt", "a", "--prompt-ids", "1"],
            "give one prompt, as --prompt TEXT, --chat TEXT or --prompt-ids 1,2,3",
        ),
        (["submit", "--prompt-ids", "1,x"], "--prompt-ids: got '1,x', wanted token ids such as 1,2,3"),
        (["report", "/no/such/folder"], "/no/such/folder: no events.jsonl here"),
        (["trace", "show", "nope"], "unknown trace 'nope'"),
        (["trace", "make", "arxiv", "/no/such/folder/x.csv"], "/no/such/folder/x.csv: cannot be written"),
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in error_line(capsys, *arguments)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_yaml_key_of_another_command_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("block_length: 16\nqps: 2\n")
    line = error_line(capsys, "serve", "--config", str(path))
    assert line == f"{path} line 2: qps: not an option of this command, only of run, search-capacity"


def test_attaching_refuses_serve_options_from_yaml_but_passes_over_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("kv_page_size: 8\n")
    line = error_line(capsys, "run", "--server", "127.0.0.1:1", "--config", str(path))
    assert line.startswith(f"{path}: kv_page_size configures a server that dbench starts")
    monkeypatch.setenv("DBENCH_KV_PAGE_SIZE", "8")
    assert main(["run", "--server", "127.0.0.1:1", "--no-dashboard"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [path]


def test_busy_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert "which is in use on 127.0.0.1" in error_line(capsys, "serve", "--scheduler-port", str(port))


def test_unknown_variable_is_a_warning_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DBENCH_QPSS", "3")
    assert main(["trace", "show"]) == 0
    assert ["DBENCH_QPSS" in record.getMessage() for record in caplog.records] == [True]


def test_flags_reach_the_command_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    invocation = parsed(
        monkeypatch, "search-capacity", "--qps", "fast", "--sla", "a", "--sla=b", "--no-shuffle", "--json"
    )
    given = {name: value for name, value in invocation.flags.items() if value is not None}
    assert given == {"qps": "fast", "sla": ["a", "b"], "shuffle": False}
    assert invocation.json
    assert invocation.config is None


def test_serve_takes_the_model_as_an_argument_and_seed_as_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    invocation = parsed(monkeypatch, "serve", "embedded", "--seed", "7")
    assert invocation.arguments == {"model": "embedded"}
    assert invocation.flags["server_seed"] == "7"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ServerUnavailable("nobody answers at x:1"), 1, "nobody answers at x:1"),
        (RunError("two\nlines"), 1, "two lines"),
    ],
)
def test_failure_is_one_line_with_the_exit_code_of_its_class(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def handler(invocation: Invocation) -> int:
        raise error

    with_handler(monkeypatch, "run", handler)
    assert error_line(capsys, "run", code=code) == line


def test_bug_is_one_line_that_says_where_the_traceback_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def handler(invocation: Invocation) -> int:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with_handler(monkeypatch, "run", handler)
    line = error_line(capsys, "run", code=1)
    assert line.startswith("internal error: ZeroDivisionError: oh no (a bug in dbench; traceback in ")
    (written,) = tmp_path.glob("dbench-*.traceback")
    assert "ZeroDivisionError" in written.read_text()
    assert str(written) in line


def test_interrupt_is_quiet_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def handler(invocation: Invocation) -> int:
        raise KeyboardInterrupt

    with_handler(monkeypatch, "run", handler)
    assert main(["run"]) == 130
    assert capsys.readouterr() == ("", "")


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def handler(invocation: Invocation) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with_handler(monkeypatch, "run", handler)
    assert main(["run"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_closed_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "dbench", "trace", "show"], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["trace", "show"], ["--help"]])
def test_full_disk_under_the_results_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dbench", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "dbench: error: standard output: cannot be written (No space left on device)\n"


def test_trace_show_prints_the_statistics_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.csv"
    path.write_text("prompt_len,gen_len\n100,10\n300,30\n")
    assert main(["trace", "show", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_pairs"] == 2
    assert record["columns"]["prompt_len"] == {
        "mean": 200.0,
        "std": 100.0,
        "min": 100.0,
        "p10": 100.0,
        "p50": 100.0,
        "p90": 300.0,
        "p99": 300.0,
        "max": 300.0,
    }
    assert main(["trace", "show", str(path)]) == 0
    assert "2 rows, in tokens" in capsys.readouterr().out


def test_trace_make_writes_what_its_seed_draws_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (str(tmp_path / name) for name in ("1.csv", "2.csv", "3.csv"))
    assert main(["trace", "make", "arxiv", first, "--num-requests", "7", "--seed", "1"]) == 0
    assert main(["trace", "make", "arxiv", second, "--num-requests", "7", "--seed", "1"]) == 0
    assert main(["trace", "make", "arxiv", third, "--num-requests", "7", "--seed", "2"]) == 0
    assert Path(first).read_text().count("\n") == 8
    assert Path(first).read_text() == Path(second).read_text() != Path(third).read_text()
    capsys.readouterr()
    assert "exists already" in error_line(capsys, "trace", "make", "arxiv", first)


def test_option_tables_of_the_documentation_are_current() -> None:
    text = write_option_docs.DOCUMENT.read_text(encoding="utf-8")
    assert write_option_docs.with_tables(text) == text

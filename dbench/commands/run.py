"""`dbench run`: one load against a server of its own or one that runs already, and its report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dbench import __version__
from dbench.cli_options import Invocation
from dbench.commands.common import check_host_port, new_folder, open_view
from dbench.config import AUTO_PREFIX, ENVIRONMENT_PREFIX, FLAG, Resolved, option_table
from dbench.errors import EXIT_FAILED, EXIT_OK, OptionError, RunCutShort, RunError, ServerError
from dbench.load.driver import RunResult, run_load
from dbench.load.lengths import length_source
from dbench.load.stop import run_cancellable
from dbench.load.target import GrpcTarget, TargetInfo
from dbench.option_conflicts import refuse_lengths_beside_a_trace
from dbench.options import EngineOptions, LoadOptions, SamplingOptions, ServiceOptions, TerminalOptions, options_of
from dbench.progress import RunProgress
from dbench.resolve import check_sampling, resolve_own_server
from dbench.result_files import write_json
from dbench.run_folder import SERVER_LOG_FILE, write_origin
from dbench.serve.launch import ServerProcess

if TYPE_CHECKING:
    from dbench.measure.summary import RunSummary

logger = logging.getLogger(__name__)

SERVER_CONFIG_FILE = "server_config.json"
SERVER_ENVIRONMENT_FILE = "server_environment.json"

DEFAULT_NAME = "run"
CLIENT_SECTIONS = (LoadOptions, SamplingOptions, TerminalOptions)
CLIENT_OPTIONS = ("api_key", "enable_individual_batch_metrics", "tokenizer")
"""Server options that mean something to a client of a running server: the key it sends, a table it writes, and how
it turns problems into tokens and answers into text."""


def run_command(invocation: Invocation) -> int:
    """Run the load, write the report, print the summary; see `exit_code`."""
    resolved = one_kind_of_loop(invocation.resolve())
    view = open_view(resolved)
    check_sampling(resolved)
    check_host_port(resolved, "server")
    refuse_lengths_beside_a_trace(resolved)
    load = resolved.section(LoadOptions)
    length_source(load)
    if load.server is not None:
        refuse_server_options(resolved)
    else:
        resolved = with_own_server(resolved)
    try:
        with view:
            result = _run_attached(resolved, view.update) if load.server else _run_own_server(resolved, view.update)
    except RunCutShort as error:
        with suppress(RunError):  # the report may well meet the same full disk; the first error says it all
            _report(error.run_dir, as_json=invocation.json)
        raise
    return exit_code(result, _report(result.run_dir, as_json=invocation.json))


def _report(run_dir: Path, *, as_json: bool) -> RunSummary:
    from dbench.commands.summary import report_run  # pandas takes half a second that the first request need not wait

    return report_run(run_dir, as_json=as_json)


def exit_code(result: RunResult, summary: RunSummary) -> int:
    """That of a bad end; 1 for a run that is invalid or in which nothing completed; else 0."""
    if result.exit_code != EXIT_OK:
        return result.exit_code
    return EXIT_OK if summary.valid and summary.num_successful > 0 else EXIT_FAILED


def new_run_folder(resolved: Resolved) -> Path:
    """A new folder that holds what the run will be: its configuration and this machine."""
    load = resolved.section(LoadOptions)
    folder = new_folder(load.output_dir, load.name or DEFAULT_NAME, place=resolved.place("name"))
    write_origin(folder, config_text(resolved))
    return folder


def one_kind_of_loop(resolved: Resolved) -> Resolved:
    """Open loop or closed loop, whichever flag was given; both flags are refused."""
    flags = [name for name in ("qps", "concurrency") if resolved.origins[name] == FLAG]
    if len(flags) == 2:
        raise OptionError("--concurrency: given together with --qps; a closed loop has no rate, leave one of them out")
    if flags == ["qps"] and resolved.section(LoadOptions).concurrency is not None:
        return resolved.replace("concurrency", None, f"{AUTO_PREFIX}--qps was given")
    return resolved


def refuse_server_options(resolved: Resolved) -> None:
    """With --server, options that configure a server are refused by name; variables are passed over."""
    for option in (*options_of(EngineOptions), *options_of(ServiceOptions)):
        if option.name in CLIENT_OPTIONS or not resolved.is_explicit(option.name):
            continue
        if resolved.origins[option.name].startswith(ENVIRONMENT_PREFIX):
            logger.info("%s is passed over: with --server it is set there", option.environment_variable)
            continue
        raise OptionError(
            f"{resolved.place(option.name)} configures a server that dbench starts; with --server it is set there"
        )


def config_text(resolved: Resolved) -> str:
    """config.yaml: everything that the run had a say in."""
    if resolved.section(LoadOptions).server is None:
        return resolved.to_yaml()
    return resolved.to_yaml({*option_table(CLIENT_SECTIONS), *CLIENT_OPTIONS})


def with_own_server(resolved: Resolved) -> Resolved:
    """Every server option filled in, on any free port. Raises OptionError for what only an attached server has."""
    if resolved.is_explicit("tls_ca"):
        if not resolved.origins["tls_ca"].startswith(ENVIRONMENT_PREFIX):
            raise OptionError(f"{resolved.place('tls_ca')}: given without --server; a server of its own has no TLS")
        resolved = resolved.replace("tls_ca", None, f"{AUTO_PREFIX}a server of its own has no TLS")
    return resolve_own_server(resolved)


def _run_attached(resolved: Resolved, on_progress: Callable[[RunProgress], None]) -> RunResult:
    address = resolved.section(LoadOptions).server
    assert address is not None, "there is a server to attach to"
    return _run(address, resolved, None, on_progress)


def _run_own_server(resolved: Resolved, on_progress: Callable[[RunProgress], None]) -> RunResult:
    folder = new_run_folder(resolved)
    engine, service = resolved.section(EngineOptions), resolved.section(ServiceOptions)
    log_path = folder / SERVER_LOG_FILE
    logger.info("starting a server (%s)", log_path)
    with ServerProcess(engine, service, log_path=log_path, config_json=resolved.to_json()) as server:
        return _run(server.address, resolved, folder, on_progress)


def _run(
    address: str, resolved: Resolved, folder: Path | None, on_progress: Callable[[RunProgress], None]
) -> RunResult:
    """Run against the server at an address; without a folder, one is made as soon as the server answers.

    The first Ctrl-C or SIGTERM ends the run and keeps what it measured, the second ends dbench.
    """
    load, sampling = resolved.section(LoadOptions), resolved.section(SamplingOptions)
    key, tokenizer = resolved.section(ServiceOptions).api_key, resolved.section(EngineOptions).tokenizer

    async def run() -> RunResult:
        async with aclosing(GrpcTarget(address, key, tokenizer=tokenizer, tls_ca=load.tls_ca)) as target:
            run_dir = folder or _attached_folder(resolved, await target.info())
            return await run_load(target, load, sampling, run_dir, on_progress=on_progress)

    return run_cancellable(run)


def _attached_folder(resolved: Resolved, server: TargetInfo) -> Path:
    """A run's folder with what the server says of itself."""
    try:
        config, environment = json.loads(server.resolved_config_json), json.loads(server.environment_json)
    except ValueError:
        raise ServerError(
            f"the server (dbench {server.version}) describes its options in a way that this dbench {__version__} "
            "cannot read; use one version on both sides"
        ) from None
    folder = new_run_folder(resolved)
    write_json(folder / SERVER_CONFIG_FILE, config)
    write_json(folder / SERVER_ENVIRONMENT_FILE, environment)
    return folder

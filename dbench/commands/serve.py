"""`dbench serve`: a server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dbench.cli_options import Invocation
from dbench.commands.common import new_folder, open_view
from dbench.config import AUTO_PREFIX, Resolved
from dbench.console import View
from dbench.errors import OptionError, RunError
from dbench.options import EngineOptions, ServiceOptions
from dbench.resolve import resolve_serve
from dbench.run_folder import write_origin
from dbench.serve import child
from dbench.serve.server import serve

REPORTS = "reports"
NAME = "serve"
TABLES_NICENESS = 19
"""Tables can wait; the requests that the server runs meanwhile cannot."""


def serve_command(invocation: Invocation) -> int:
    """Fill in the options, print them, serve; returns the server's exit code."""
    given = _with_argument(invocation).resolve()
    view = open_view(given)
    resolved = _with_metrics_folder(resolve_serve(given))
    service = resolved.section(ServiceOptions)
    assert service.metrics_output_dir is not None
    folder = Path(service.metrics_output_dir)
    write_origin(folder, resolved.to_yaml())
    for line in resolved.lines():
        view.print(f"{line.name} = {line.value_text} ({line.origin})")
    tables = TableProcess(folder)
    with view:
        code = serve(
            resolved.section(EngineOptions),
            service,
            config_json=resolved.to_json(),
            on_progress=view.update,
            on_ready=lambda address: _announce(view, address),
            on_export=tables.write,
        )
    if service.export_partial_metrics and not tables.num_written:
        from dbench.commands.summary import report_run  # pandas: half a second, 45 MB, that a server does without

        report_run(folder, as_json=False)
    return code


class TableProcess:
    """Makes the tables and plots of a server's folder in a process of its own: pandas would stop the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_written = 0
        """Times that they were made."""

    async def write(self) -> None:
        """As `dbench report`. Raises RunError; cancelling it ends the process."""
        try:
            process = await asyncio.create_subprocess_exec(
                *child.command("dbench"),
                "report",
                str(self._folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the server
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise RunError(f"{self._folder}: the tables cannot be written: {error}") from error
        try:
            with suppress(ProcessLookupError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, TABLES_NICENESS)
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last_line = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise RunError(f"{self._folder}: the tables could not be written: {last_line}")
        self.num_written += 1


def _with_argument(invocation: Invocation) -> Invocation:
    model = invocation.arguments["model"]
    if model is None:
        return invocation
    if invocation.flags["model"] is not None:
        raise OptionError(f"--model: given twice, as an argument ({model}) too; leave one of them out")
    return replace(invocation, flags={**invocation.flags, "model": model})


def _with_metrics_folder(resolved: Resolved) -> Resolved:
    given = resolved.section(ServiceOptions).metrics_output_dir
    if given is None:
        folder = new_folder(REPORTS, NAME, place="metrics_output_dir")
        return resolved.replace("metrics_output_dir", str(folder), f"{AUTO_PREFIX}a new folder per server")
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = resolved.place("metrics_output_dir")
        raise OptionError(f"{place}: cannot make the folder {given}: {error.strerror or error}") from None
    return resolved


def _announce(view: View, address: str) -> None:
    """The address is a result: on stdout for a program that waits for it, else above the live region."""
    if sys.stdout.isatty():
        view.print(f"ready at {address}")
    else:
        print(f"ready at {address}", flush=True)

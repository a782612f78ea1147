"""`dbench report`: every file of a run again, from its events."""

from __future__ import annotations

from pathlib import Path

from dbench.cli_options import Invocation
from dbench.commands.common import open_view
from dbench.commands.summary import report_run
from dbench.errors import EXIT_OK


def report_command(invocation: Invocation) -> int:
    """Write the report and print the summary."""
    open_view(invocation.resolve())
    directory = invocation.arguments["directory"]
    assert directory is not None
    report_run(Path(directory), as_json=invocation.json)
    return EXIT_OK

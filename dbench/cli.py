"""The terminal program: parse, one call, print.

What a command does is in `commands/`, imported when it is called, so that --help stays fast.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from dbench import __version__
from dbench.cli_options import Argument, Command, Invocation, PanelCommand, typer_function
from dbench.config import commands_with, unknown_variables
from dbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, DbenchError
from dbench.values import nearest

logger = logging.getLogger(__name__)

PROGRAM = "dbench"
EXIT_BROKEN_PIPE = 141
"""What a shell reports for a program that wrote into a closed pipe."""

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What a system answers that has no room, or no disk, for what it was given."""

TYPER_USAGE_ERROR: Any = typer.BadParameter.__base__
"""The root of everything that Typer says about a wrong command line; its own name is not public."""


def _serve(invocation: Invocation) -> int:
    from dbench.commands.serve import serve_command

    return serve_command(invocation)


def _run(invocation: Invocation) -> int:
    from dbench.commands.run import run_command

    return run_command(invocation)


def _search(invocation: Invocation) -> int:
    from dbench.commands.search import search_command

    return search_command(invocation)


def _submit(invocation: Invocation) -> int:
    from dbench.commands.submit import submit_command

    return submit_command(invocation)


def _worker(invocation: Invocation) -> int:
    from dbench.commands.worker import worker_command

    return worker_command(invocation)


def _report(invocation: Invocation) -> int:
    from dbench.commands.report import report_command

    return report_command(invocation)


def _trace_show(invocation: Invocation) -> int:
    from dbench.commands.trace import trace_show_command

    return trace_show_command(invocation)


def _trace_make(invocation: Invocation) -> int:
    from dbench.commands.trace import trace_make_command

    return trace_make_command(invocation)


NO_VIEW = ("dashboard",)
"""What a command that is over at once has no use for."""

COMMANDS: tuple[Command, ...] = (
    Command(
        "serve",
        "Serve a model until Ctrl-C or SIGTERM.",
        _serve,
        arguments=(Argument("model", "The same as --model.", required=False),),
        aliases={"server_seed": ("--seed",)},
    ),
    Command("run", "Send a load and report latency and throughput.", _run, has_json=True),
    Command(
        "search-capacity",
        "Find the highest load that meets latency limits.",
        _search,
        has_json=True,
        hidden=("server", "tls_ca", "qps", "concurrency"),
    ),
    Command("worker", "Join a running server as one of its workers.", _worker, hidden=NO_VIEW),
    Command("submit", "Send one request to a server and print its answer.", _submit, has_json=True, hidden=NO_VIEW),
    Command(
        "report",
        "Rebuild a run's tables and plots from its events.",
        _report,
        arguments=(Argument("directory", "Folder of the run."),),
        has_json=True,
        hidden=NO_VIEW,
    ),
    Command(
        "trace show",
        "List the traces, or print the statistics of one.",
        _trace_show,
        arguments=(Argument("trace", "Trace name or CSV file.", required=False),),
        has_json=True,
        hidden=NO_VIEW,
    ),
    Command(
        "trace make",
        "Write a CSV of request lengths drawn from a trace's length profile.",
        _trace_make,
        arguments=(Argument("profile", "Name of the profile."), Argument("output", "CSV file to write.")),
        hidden=NO_VIEW,
    ),
)

GROUP_HELP = {"trace": "Look at traces of request lengths, or make one."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; every error ends here as one line on stderr."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes to stderr by itself; its errors are told as ours
    try:
        code = _call(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except DbenchError as error:
        return _fail(str(error), error.exit_code)
    except TYPER_USAGE_ERROR as error:
        return _fail(_usage_line(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:  # the process's edge: a bug still ends readably
        return _fail(_system_line(error) or _bug_line(error), EXIT_FAILED)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def build_app() -> typer.Typer:
    """The Typer application of COMMANDS."""
    root = _new_group("dbench serves masked-diffusion language models and finds the load that they sustain.")
    root.callback(invoke_without_command=True)(_root)
    groups: dict[str, typer.Typer] = {}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            groups[group] = _new_group(GROUP_HELP[group])
            groups[group].callback(invoke_without_command=True)(_group)
            root.add_typer(groups[group], name=group)
        (groups[group] if group else root).command(name, cls=PanelCommand)(typer_function(command))
    return root


def _call(arguments: list[str]) -> int:
    """Parse, then run outside of Typer, which has its own ideas about Ctrl-C and closed pipes."""
    program = typer.main.get_command(build_app())
    parsed = program.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    if isinstance(parsed, Invocation):
        for line in unknown_variables(os.environ):
            logger.warning("%s", line)
        return parsed.command.handler(parsed)
    return int(parsed or EXIT_OK)


def _new_group(help: str) -> typer.Typer:
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit()
    _group(context)


def _group(context: typer.Context) -> None:
    """A group without a command explains itself."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does, so that its context managers run and no child is left."""
    raise KeyboardInterrupt


def _fail(line: str, code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"{PROGRAM}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return code


def _usage_line(error: Any) -> str:
    """One line for a wrong command line, with the nearest flag or the commands that have it."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else PROGRAM
    flag = str(getattr(error, "option_name", ""))
    if context is None or not flag.startswith("--") or "no such option" not in error.message.lower():
        return f"{error.format_message().rstrip('.')} (see {path} --help)"
    known = [name for p in context.command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]
    elsewhere = commands_with(flag.removeprefix("--").replace("-", "_"))
    hint = f"; it belongs to {', '.join(elsewhere)}" if elsewhere else nearest(flag, known, "--")
    return f"{path} has no option {flag}{hint} (see {path} --help)"


def _bug_line(error: Exception) -> str:
    logger.debug("internal error", exc_info=error)
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"{PROGRAM}-", suffix=".traceback", delete=False) as file:
            file.write(text)
        where = f"traceback in {file.name}"
    except OSError:
        where = "no place to write the traceback to; --log-level debug shows it"
    return f"internal error: {type(error).__name__}: {' '.join(str(error).split())} (a bug in {PROGRAM}; {where})"


def _system_line(error: Exception) -> str:
    """What to say of a full or broken disk where nobody has named the file: then it was standard output."""
    if not isinstance(error, OSError) or error.errno not in CANNOT_WRITE:
        return ""
    if error.filename is None:
        _silence_stdout()
    return f"{error.filename or 'standard output'}: cannot be written ({error.strerror})"


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

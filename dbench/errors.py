"""Every exception that dbench raises on purpose.

    DbenchError
    |-- UsageError            exit code 2: the user can mend it
    |   |-- OptionError       a flag, an environment variable or a YAML key
    |   |-- ModelError        a model directory, its config, tensors or tokenizer
    |   |-- TraceError        a trace name or file
    |   |-- SlaError          an --sla rule
    |   |-- WorkerRefused     a worker that its server does not take in
    |   `-- RequestError      a request that the server refuses (INVALID_ARGUMENT)
    |-- ServerError           exit code 1: the server side failed
    |   |-- ServerStartError  a server or a worker did not become ready
    |   |-- ServerUnavailable nobody answers, or the server went away
    |   |-- ChannelBroken     a way between two workers is no more; their scheduler hears of it
    |   |-- DeviceLost        a device that computes nothing any more; its worker ends
    |   `-- QueueFullError    max_queued_requests reached (RESOURCE_EXHAUSTED)
    `-- RunError              exit code 1: a run or search without a valid result
        `-- RunCutShort       a run that could not go on; its folder holds what was measured until then

A message is one line: what, where, what came, what was wanted, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""


class DbenchError(Exception):
    """The root: `str()` is the one line a user sees."""

    exit_code = EXIT_FAILED


class UsageError(DbenchError):
    """Something the user can mend."""

    exit_code = EXIT_USAGE


class OptionError(UsageError):
    """A flag, an environment variable or a YAML key that cannot be used."""


class ModelError(UsageError):
    """A model directory, its config, its tensors or its tokenizer cannot be used."""


class TraceError(UsageError):
    """A trace name or trace file cannot be used."""


class SlaError(UsageError):
    """An SLA rule that cannot be read."""


class WorkerRefused(UsageError):
    """A server does not take a worker in, and would not later either."""


class RequestError(UsageError):
    """A request that the server refuses."""


class ServerError(DbenchError):
    """The server side failed."""


class ServerStartError(ServerError):
    """A server or a worker did not become ready."""


class ServerUnavailable(ServerError):
    """Nobody answers at the address, or the server went away."""


class ChannelBroken(ServerError):
    """Nothing more can be sent to a worker, or received from it."""


class DeviceLost(ServerError):
    """A device failed in a way that only a new process mends."""


class QueueFullError(ServerError):
    """The server holds as many requests as it may."""


class RunError(DbenchError):
    """A run or a search that gave no valid result."""


class RunCutShort(RunError):
    """A run that could not go on; `run_dir` holds what it measured until then."""

    def __init__(self, message: str, run_dir: Path) -> None:
        super().__init__(message)
        self.run_dir = run_dir


LIKE = 0.6
VERY_LIKE = 0.8
"""Shares of the letters that two names have in common, in order."""


def near_name(got: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one very like it, or else one like it that begins alike.

    Short names share many letters by chance: `bogus` is as like `gpus` as `qpz` is like `qps`.
    """
    names = sorted(known)
    begin_alike = [name for name in names if name[:1] == got[:1]]
    near = get_close_matches(got, names, n=1, cutoff=VERY_LIKE) or get_close_matches(got, begin_alike, n=1, cutoff=LIKE)
    return near[0] if near else None


def unknown_name(kind: str, got: str, known: Iterable[str]) -> str:
    """One line for a name that no table holds: the one that was probably meant, then all of them."""
    names = sorted(known)
    near = near_name(got, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"unknown {kind} {got!r}{hint} (known: {', '.join(names)})"


def one_line(error: BaseException | str) -> str:
    """The message of a foreign error on one line; its type's name where it has none."""
    text = " ".join(str(error).split())
    return text or type(error).__name__

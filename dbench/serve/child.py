"""What the child processes of dbench share: their configuration, and the end of their parent.

A parent writes one line of JSON to its child's standard input and then keeps the pipe open for as long
as it lives. The kernel closes the pipe whatever the parent dies of, so its end is the parent's end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import threading
from typing import NamedTuple, NoReturn

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) \S+: (.*)")
"""A line of LOG_FORMAT: its level's name, and its message."""
PARENT_GONE_EXIT_CODE = 1
PR_SET_PDEATHSIG = 1

_STDIN = 0


def command(module: str) -> list[str]:
    """The command line of a child; -P keeps files of the working directory from shadowing modules."""
    return [sys.executable, "-P", "-m", module]


def read_config_line() -> str:
    """The first line of standard input; empty when the parent closed it. Reads no further than the line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(_STDIN, 1)
        if not byte:
            break
        line += byte
    return line.decode()


def end_with_parent() -> None:
    """Start a thread that ends this process, without cleaning up, as soon as standard input ends."""

    def watch() -> None:
        while os.read(_STDIN, 4096):
            pass
        os._exit(PARENT_GONE_EXIT_CODE)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def die_with_parent_thread() -> None:
    """Linux: let the kernel kill this process when the thread that started it ends; elsewhere nothing.

    A second guard beside `end_with_parent`, only for children whose parent starts them from a thread that
    lives as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(exit_code: int) -> NoReturn:
    """End this process at once, whatever its threads do; what it has logged is out."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


class LogLine(NamedTuple):
    """What a child wrote on standard error."""

    level: int | None
    """None: it did not come through logging, as a line of a traceback."""
    message: str


def read_log_line(text: str) -> LogLine:
    """A line without the time, level and logger that `log_to_stderr` puts before the message."""
    match = _LOG_LINE.fullmatch(text)
    if match is None:
        return LogLine(None, text)
    return LogLine(logging.getLevelNamesMapping().get(match[1]), match[2])

"""What several commands do alike: the terminal, folders for results, JSON on stdout."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from dbench.config import Resolved
from dbench.console import View, install_logging, make_view
from dbench.errors import OptionError
from dbench.json_values import strict
from dbench.options import TerminalOptions
from dbench.serve.address import is_host_port

TIME_FORMAT = "%Y%m%d-%H%M%S"
MAX_NAME = 100
"""Characters of a folder name; file systems stop at 255 bytes."""


def open_view(resolved: Resolved) -> View:
    """The command's view, with log messages going through it; enter it to show progress."""
    terminal = resolved.section(TerminalOptions)
    view = make_view(dashboard=terminal.dashboard)
    install_logging(view, terminal.log_level)
    return view


def check_host_port(resolved: Resolved, name: str) -> None:
    """Raises OptionError for an option that names no server; nothing for one that is not set."""
    value = resolved.value(name)
    if value is not None and not is_host_port(value):
        raise OptionError(f"{resolved.place(name)}: got {value!r}, wanted HOST:PORT such as 127.0.0.1:50051")


def new_folder(parent: str, name: str, *, place: str) -> Path:
    """Make and return parent/<time>-<name>, with a number behind it when that is taken; never an existing folder.

    `place` names the option behind `name` in the OptionError for one that is no folder name.
    """
    if name in (".", "..") or not set(name).isdisjoint("/\\\0\n") or len(name) > MAX_NAME:
        raise OptionError(f"{place}: got {name!r}, wanted a name without slashes, at most {MAX_NAME} characters long")
    stem = f"{time.strftime(TIME_FORMAT)}-{name}"
    number = 1
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        while True:
            folder = Path(parent) / (stem if number == 1 else f"{stem}-{number}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise OptionError(f"--output-dir: cannot make a folder in {parent}: {error.strerror or error}") from None


def check_writable(folder: Path, *, place: str) -> None:
    """Make the folder if it is not there, and see that files can be made in it.

    `place` names the option behind it in the OptionError for one that cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"{place}: cannot make files in {folder}: {error.strerror or error}; choose another output_dir"
        ) from None


def print_json(record: Any, *, in_one_line: bool = False) -> None:
    """One JSON document on stdout; as in every file, nan becomes null and infinities the texts "inf" and "-inf"."""
    print(json.dumps(strict(record), indent=None if in_one_line else 2, allow_nan=False), flush=True)

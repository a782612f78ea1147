"""Log messages in the terminal: one line each, above the live region."""

from __future__ import annotations

import logging

from dbench.console.view import View

_STYLES = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "bold red"}
PROGRAM = "dbench"


class ViewHandler(logging.Handler):
    """Prints records through a view: `12:03:05 warning worker 1 was lost`; a traceback follows on its own lines."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(min(record.levelno, logging.ERROR), "")
            self._view.print(_text(record, self.formatter or logging.Formatter()), style)
        except Exception:  # edge: as in every handler, a message that cannot be written must not end the work
            self.handleError(record)


def install_logging(view: View, level: str) -> ViewHandler:
    """Send messages of dbench from `level` up, and warnings of libraries, through the view.

    `level` is a choice of the option log_level. Takes the place of a handler installed earlier.
    """
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, ViewHandler)]:
        root.removeHandler(old)
    handler = ViewHandler(view)
    root.addHandler(handler)
    severity = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(severity, logging.WARNING))
    logging.getLogger(PROGRAM).setLevel(severity)
    return handler


def _text(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    message = " ".join(record.getMessage().splitlines())
    text = f"{formatter.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {message}"
    if record.exc_info:
        trace = formatter.formatException(record.exc_info).splitlines()
        text += "".join(f"\n  {line}" for line in trace)
    return text

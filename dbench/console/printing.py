"""Text that stays: log lines and the lines of the plain view."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from dbench.console.look import Glyphs, printable


class PatientConsole(Console):
    """A console whose reader may go away: rich would end the program then, and take stdout with it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def print_lines(console: Console, text: str, style: str, glyphs: Glyphs) -> None:
    """Print `text` without control characters; the terminal wraps what is too long."""
    lines = [printable(line, glyphs) for line in text.splitlines()]
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)

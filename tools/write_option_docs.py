"""Write the option tables of docs/configuration.md from dbench/options.py.

python tools/write_option_docs.py           write them
python tools/write_option_docs.py --check   exit 1 if the file is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from dbench.cli import COMMANDS
from dbench.cli_options import Command
from dbench.config import option_table
from dbench.options import COMMAND_SECTIONS, Option, options_of
from dbench.values import default_text, wanted

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN = "<!-- options: made by tools/write_option_docs.py -->"
END = "<!-- end of options -->"


def tables() -> str:
    """One heading and table per section, in the order of their first use."""
    sections = list(dict.fromkeys(s for sections in COMMAND_SECTIONS.values() for s in sections))
    return "\n".join(part for section in sections for part in _section(section))


def with_tables(document: str) -> str:
    """The document with the text between its two marks replaced."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT}: wanted the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _section(section: type) -> list[str]:
    commands = [f"`{command}`" for command, sections in COMMAND_SECTIONS.items() if section in sections]
    title = (section.__doc__ or "").strip().rstrip(".")
    return [
        f"### {title}",
        "",
        f"Commands: {', '.join(commands)}",
        "",
        "| option | takes | default | meaning |",
        "|---|---|---|---|",
        *(_row(option) for option in options_of(section)),
        "",
    ]


def _row(option: Option) -> str:
    notes = [option.spec.help]
    if option.spec.secret:
        notes.append("Never printed or saved.")
    without = [f"`{command.name}`" for command in COMMANDS if _is_left_out(option, command)]
    if without:
        notes.append(f"Not of {', '.join(without)}.")
    takes = wanted(option) + (", repeatable" if option.spec.is_list else "")
    cells = (f"`{option.name}`", takes, default_text(option), " ".join(notes))
    return f"| {' | '.join(cell.replace('|', '&#124;').replace('<', '&lt;') for cell in cells)} |"


def _is_left_out(option: Option, command: Command) -> bool:
    sections = COMMAND_SECTIONS[command.name]
    is_there = option.section in [section.__name__ for section in sections]
    return is_there and (option.name not in option_table(sections) or option.name in command.hidden)


def main() -> int:
    current = DOCUMENT.read_text(encoding="utf-8")
    wanted_text = with_tables(current)
    if "--check" in sys.argv[1:]:
        if current != wanted_text:
            print(f"{DOCUMENT} is stale; run: python tools/write_option_docs.py", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(wanted_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

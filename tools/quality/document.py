"""Tables in Markdown documents, between marks that say who writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dbench.errors import UsageError
from dbench.result_files import write_text
from tools.quality.rows import Row
from tools.quality.settings import DEFAULT


def replace_section(document: Path, name: str, lines: Iterable[str]) -> None:
    """Put the lines between `<!-- NAME -->` and `<!-- end of NAME -->`. Raises UsageError without such marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, after = _around(document, begin, end)
    inner = "\n".join(lines)
    write_text(document, f"{before}{begin}\n\n{inner}\n\n{end}{after}")


def read_section(document: Path, name: str) -> list[str]:
    """The lines between the same marks. Raises UsageError without them."""
    _, inner, _ = _around(document, f"<!-- {name} -->", f"<!-- end of {name} -->")
    return inner.strip().splitlines()


def _around(document: Path, begin: str, end: str) -> tuple[str, str, str]:
    """The text before, between and after two marks."""
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    inner, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise UsageError(f"{document}: wanted the lines {begin} and {end}")
    return before, inner, after


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The first column on the left, the others on the right."""
    rule = "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|"
    return [f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def quality_table(rows: Sequence[Row]) -> list[str]:
    """One model's rows, in the order that they have."""
    asked = rows[0].answers.num_asked
    header = ("setting", f"right of {asked}", "accuracy", "tokens per forward pass", "requests/s", "tokens/s")
    return markdown_table(header, (_quality_cells(row) for row in rows))


def _quality_cells(row: Row) -> list[str]:
    name = f"**{row.setting}** (default)" if row.setting == DEFAULT.name else row.setting
    return [
        name,
        str(row.answers.num_right),
        f"{row.answers.accuracy:.1%}",
        f"{row.tokens_per_forward_pass:.2f}",
        f"{row.requests_per_sec:.1f}",
        f"{row.tokens_per_sec:.0f}",
    ]


def measured_with(environment: dict[str, Any], command: str, num_rounds: int) -> list[str]:
    """Which command, versions and machine the figures come from."""
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "numpy", "tokenizers") if name in packages)
    gib = environment["memory_bytes"] / 2**30
    rounds = f"{num_rounds} runs of each, the rates of the fastest" if num_rounds > 1 else "one run of each"
    return [
        f"- command: `{command}` ({rounds})",
        f"- versions: dbench {environment['dbench_version']}, {environment['python']}, {versions}",
        f"- machine: {environment['num_usable_cpus']} cores of {environment['cpu_model']}, {gib:.0f} GiB, no GPU",
    ]

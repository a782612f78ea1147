"""Traces: where pairs of prompt and generated length come from.

A named trace is a profile: two columns of marginal quantiles in `traces/NAME.quantiles.csv`, joined by a
Gaussian copula; or `tasks`, problems whose answers can be checked. A file is taken row by row. Each is an endless
stream, so that arrivals can go on after the last measured request.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dbench.errors import TraceError, unknown_name
from dbench.load.tasks import TASKS, Problem, all_held_out

log = logging.getLogger(__name__)

COLUMNS = ("prompt_len", "gen_len")
DRAWS_PER_CHUNK = 256
"""Part of what a seed means: another size gives other pairs after the first rejected one."""


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Tokens of one request as the trace has them."""

    prompt_len: int
    gen_len: int


class Trace(Protocol):
    """A source of pairs."""

    @property
    def name(self) -> str:
        """As the user gave it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that a report on this trace must show."""

    @property
    def num_rows(self) -> int | None:
        """Rows before the first is used again; None where there is no such row."""

    def pairs(self, generator: np.random.Generator, *, shuffle: bool) -> Iterator[LengthPair]:
        """Pairs without an end; the same generator state gives the same pairs."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a named trace needs beside its quantiles."""

    spearman: float
    """Rank correlation of prompt and generated length in the source."""
    max_gen_len: int | None
    max_total: int | None
    source: str


OTHER_TOKENIZER = "lengths count another model's tokens"

PROFILES: dict[str, Profile] = {
    "arxiv": Profile(0.02, 512, 4096, "arXiv-summarization lengths, as processed for the Vidur simulator"),
    "sharegpt": Profile(0.08, 512, 4096, "ShareGPT lengths, as processed for Sarathi-Serve"),
    "azure-conv": Profile(0.07, None, None, "Azure LLM inference trace 2023, conversation (CC BY 4.0)"),
    "azure-code": Profile(-0.02, None, None, "Azure LLM inference trace 2023, code (CC BY 4.0)"),
    "bwb": Profile(0.81, None, None, "BWB web-book translation lengths, as processed for Etalon"),
}


TASKS_TRACE = "tasks"

NAMED: dict[str, str] = {
    **{name: profile.source for name, profile in PROFILES.items()},
    TASKS_TRACE: f"held-out problems with checkable answers: {', '.join(TASKS)}",
}
"""Named trace -> where its requests come from."""


def traces_dir() -> Path:
    """The folder of the profiles: inside an installed package, or at the root of the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_traces"
    return installed if installed.is_dir() else package.parent / "traces"


def open_trace(name_or_file: str) -> Trace:
    """The named trace, or the CSV file at that path. Raises TraceError."""
    if name_or_file == TASKS_TRACE:
        return TaskTrace()
    if name_or_file in PROFILES:
        return read_profile(name_or_file, traces_dir() / f"{name_or_file}.quantiles.csv")
    path = Path(name_or_file)
    if path.is_file():
        return read_csv_trace(path)
    raise TraceError(f"{unknown_name('trace', name_or_file, NAMED)}, and no file of that name")


@dataclass(frozen=True, slots=True)
class ProfileTrace:
    """Pairs drawn from marginal quantiles."""

    name: str
    profile: Profile
    prompt_quantiles: NDArray[np.float64]
    gen_quantiles: NDArray[np.float64]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"trace {self.name}: {self.profile.source}; {OTHER_TOKENIZER}",)

    @property
    def num_rows(self) -> int | None:
        return None

    def pairs(self, generator: np.random.Generator, *, shuffle: bool) -> Iterator[LengthPair]:
        """Draws are independent, so `shuffle` has nothing to do; pairs outside the profile's limit are drawn again."""
        while True:
            prompt_lens, gen_lens = self._draw(generator)
            for prompt_len, gen_len in zip(prompt_lens, gen_lens, strict=True):
                if self._within_limit(prompt_len, gen_len):
                    yield LengthPair(prompt_len, gen_len)

    def _draw(self, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        """One chunk from the Gaussian copula with the profile's rank correlation.

        A bivariate normal of correlation r has Spearman correlation (6/pi) asin(r/2).
        """
        r = 2.0 * math.sin(math.pi / 6.0 * self.profile.spearman)
        first, second = generator.standard_normal((2, DRAWS_PER_CHUNK))
        second = r * first + math.sqrt(1.0 - r * r) * second
        return _from_quantiles(first, self.prompt_quantiles), _from_quantiles(second, self.gen_quantiles)

    def _within_limit(self, prompt_len: int, gen_len: int) -> bool:
        max_gen_len, max_total = self.profile.max_gen_len, self.profile.max_total
        return (max_gen_len is None or gen_len <= max_gen_len) and (
            max_total is None or prompt_len + gen_len <= max_total
        )


@dataclass(frozen=True, slots=True)
class RowTrace:
    """The rows of a file, again from the start when they run out."""

    name: str
    rows: tuple[LengthPair, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"trace {self.name}: {len(self.rows)} rows",)

    @property
    def num_rows(self) -> int | None:
        return len(self.rows)

    def pairs(self, generator: np.random.Generator, *, shuffle: bool) -> Iterator[LengthPair]:
        """In file order or, with `shuffle`, in a new order on every pass."""
        while True:
            order = generator.permutation(len(self.rows)).tolist() if shuffle else range(len(self.rows))
            yield from (self.rows[i] for i in order)


@dataclass(frozen=True, slots=True)
class TaskTrace:
    """Held-out problems, tasks taking turns."""

    @property
    def name(self) -> str:
        return TASKS_TRACE

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"trace {TASKS_TRACE}: {NAMED[TASKS_TRACE]}",)

    @property
    def num_rows(self) -> int | None:
        return None

    def problems(self, seed: int) -> Iterator[Problem]:
        """Different problems without an end."""
        return all_held_out(seed)

    def pairs(self, generator: np.random.Generator, *, shuffle: bool) -> Iterator[LengthPair]:
        """Bytes of problem and answer: how many tokens they make depends on the model that is asked."""
        for problem in self.problems(int(generator.integers(2**63))):
            yield LengthPair(len(problem.prompt), len(problem.answer))


def read_profile(name: str, path: Path) -> ProfileTrace:
    """The quantiles of a named trace: columns q, prompt_len, gen_len, with q evenly spaced from 0 to 1."""
    rows = [[_number(cell, column, where) for column, cell in cells] for where, cells in _read(path, ("q", *COLUMNS))]
    table = np.array(rows, dtype=np.float64)
    if not np.allclose(table[:, 0], np.linspace(0.0, 1.0, len(table))):
        raise TraceError(f"{path}: q must rise evenly from 0 to 1")
    return ProfileTrace(name, PROFILES[name], table[:, 1], table[:, 2])


def read_csv_trace(path: Path) -> RowTrace:
    """A file with the columns prompt_len and gen_len. Raises TraceError naming file and line."""
    rows = [
        LengthPair(*(_tokens(cell, column, where) for column, cell in cells)) for where, cells in _read(path, COLUMNS)
    ]
    return RowTrace(str(path), tuple(rows))


Cells = tuple[tuple[str, str], ...]


def _read(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Cells]]:
    """("FILE line N", the (column, cell) pairs of the wanted columns) for every row that is not blank."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [cell.strip() for cell in next(reader, [])]
            places = _places(path, header, wanted)
            num_rows = 0
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                where = f"{path} line {reader.line_num}"
                if len(cells) <= max(places):
                    raise TraceError(f"{where}: {len(cells)} cells, wanted {len(header)} ({', '.join(header)})")
                num_rows += 1
                yield where, tuple((header[i], cells[i].strip()) for i in places)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read as CSV ({error}); wanted columns {','.join(wanted)}") from None
    if num_rows == 0:
        raise TraceError(f"{path}: no rows under the header, wanted at least one of {','.join(wanted)}")


def _places(path: Path, header: list[str], wanted: Sequence[str]) -> list[int]:
    if not any(header):
        raise TraceError(f"{path}: no header in line 1, wanted a CSV file that begins with {','.join(wanted)}")
    missing = [column for column in wanted if column not in header]
    if missing:
        raise TraceError(f"{path} line 1: no column {', '.join(missing)}, got {','.join(header)}")
    ignored = [column for column in header if column not in wanted]
    if ignored:
        log.info("%s: columns not used: %s", path, ", ".join(ignored))
    return [header.index(column) for column in wanted]


def _tokens(cell: str, column: str, where: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and int(cell) > 0):
        raise TraceError(f"{where}: {column} is {cell!r}, wanted a whole number above 0")
    return int(cell)


def _number(cell: str, column: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise TraceError(f"{where}: {column} is {cell!r}, wanted a number")
    return number


def _from_quantiles(normals: NDArray[np.float64], quantiles: NDArray[np.float64]) -> list[int]:
    """Token counts at the ranks of standard normal draws, straight lines between the quantiles."""
    ranks = [_STANDARD_NORMAL.cdf(x) for x in normals.tolist()]
    lengths = np.interp(ranks, np.linspace(0.0, 1.0, len(quantiles)), quantiles)
    return [max(1, round(length)) for length in lengths.tolist()]


_STANDARD_NORMAL = NormalDist()

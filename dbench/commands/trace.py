"""`dbench trace show` and `dbench trace make`."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from dbench.cli_options import Invocation
from dbench.commands.common import open_view, print_json
from dbench.errors import EXIT_OK, TraceError
from dbench.load.traces import COLUMNS, NAMED, LengthPair, TaskTrace, Trace, open_trace
from dbench.options import ProfileOptions
from dbench.quantiles import quantiles

NUM_SHOWN_DRAWS = 10_000
SHOWN_SEED = 0
SHOWN_QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """One column of a trace, in tokens or, for problems, in bytes."""

    column: str
    mean: float
    std: float
    min: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


def trace_show_command(invocation: Invocation) -> int:
    """Print the names of all profiles, or the statistics of one trace."""
    open_view(invocation.resolve())
    name = invocation.arguments["trace"]
    if name is None:
        _show_names(as_json=invocation.json)
        return EXIT_OK
    trace = open_trace(name)
    pairs = _pairs(trace, trace.num_rows or NUM_SHOWN_DRAWS, SHOWN_SEED, shuffle=False)
    statistics = _statistics(pairs)
    unit = "bytes of problem and answer" if isinstance(trace, TaskTrace) else "tokens"
    if invocation.json:
        columns = {s.column: {k: v for k, v in asdict(s).items() if k != "column"} for s in statistics}
        head = {"trace": trace.name, "notes": trace.notes, "num_pairs": len(pairs), "unit": unit}
        print_json({**head, "columns": columns})
        return EXIT_OK
    for note in trace.notes:
        print(note)
    print(f"{len(pairs)} {'rows' if trace.num_rows else f'draws with seed {SHOWN_SEED}'}, in {unit}:")
    print()
    print("\n".join(_table(statistics)))
    return EXIT_OK


def trace_make_command(invocation: Invocation) -> int:
    """Draw pairs from a trace and write them as a CSV that --trace reads."""
    resolved = invocation.resolve()
    open_view(resolved)
    options = resolved.section(ProfileOptions)
    profile, output = invocation.arguments["profile"], invocation.arguments["output"]
    assert profile is not None
    assert output is not None
    pairs = _pairs(open_trace(profile), options.num_requests, options.seed, shuffle=True)
    try:
        with Path(output).open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows((pair.prompt_len, pair.gen_len) for pair in pairs)
    except FileExistsError:
        raise TraceError(f"{output}: exists already; choose another file, nothing is overwritten") from None
    except OSError as error:
        raise TraceError(f"{output}: cannot be written: {error.strerror or error}") from None
    print(f"wrote {len(pairs)} rows to {output}")
    return EXIT_OK


def _show_names(*, as_json: bool) -> None:
    if as_json:
        print_json(NAMED)
        return
    width = max(map(len, NAMED))
    for name, source in NAMED.items():
        print(f"{name:<{width}}  {source}")


def _pairs(trace: Trace, count: int, seed: int, *, shuffle: bool) -> list[LengthPair]:
    return list(islice(trace.pairs(np.random.default_rng(seed), shuffle=shuffle), count))


def _statistics(pairs: list[LengthPair]) -> list[LengthStatistics]:
    prompt = np.array([pair.prompt_len for pair in pairs], dtype=np.float64)
    gen = np.array([pair.gen_len for pair in pairs], dtype=np.float64)
    return [_column("prompt_len", prompt), _column("gen_len", gen), _column("total", prompt + gen)]


def _column(name: str, values: ArrayLike) -> LengthStatistics:
    array = np.asarray(values, dtype=np.float64)
    p10, p50, p90, p99 = quantiles(array, SHOWN_QUANTILES)
    return LengthStatistics(
        name, float(array.mean()), float(array.std()), float(array.min()), p10, p50, p90, p99, float(array.max())
    )


def _table(statistics: list[LengthStatistics]) -> list[str]:
    header = [name for name in asdict(statistics[0]) if name != "column"]
    lines = [f"{'':<12}" + "".join(f"{name:>10}" for name in header)]
    for row in statistics:
        values = asdict(row)
        lines.append(f"{row.column:<12}" + "".join(f"{values[name]:>10.0f}" for name in header))
    return lines

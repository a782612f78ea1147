"""Measures what settings cost in right answers and bring in speed, and writes docs/quality.md's tables and figure.

Every setting gets a server of its own and the same held-out problems. Rows of other models stay as they are in
docs/quality.csv. Run from the repository root, on a machine with nothing else to do:
    python tools/measure_quality.py --rounds 2
    python tools/measure_quality.py --model DIR --name "after 2,000 steps"
    python tools/measure_quality.py --only "no cache"
    python tools/measure_quality.py --redraw
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from dbench.commands.run import with_own_server
from dbench.config import Resolved, resolve
from dbench.environment import describe_environment
from dbench.errors import DbenchError, RunError, UsageError
from dbench.load.driver import RunResult, run_load
from dbench.load.stop import run_cancellable
from dbench.load.target import GrpcTarget
from dbench.metrics import RunSummary, load_run, summarize
from dbench.options import COMMAND_SECTIONS, EngineOptions, LoadOptions, SamplingOptions, ServiceOptions
from dbench.serve.launch import ServerProcess
from tools.quality.document import measured_with, quality_table, read_section, replace_section
from tools.quality.figure import draw_quality
from tools.quality.rows import Row, read_rows, row_of, with_row, write_rows
from tools.quality.settings import SETTINGS

logger = logging.getLogger("measure_quality")

DOCS = Path(__file__).parent.parent / "docs"
TABLE = DOCS / "quality.csv"
DOCUMENT = DOCS / "quality.md"
FIGURE = DOCS / "images" / "quality.png"

EMBEDDED = "embedded"
NUM_PROBLEMS = 300
LOG_TAIL = 4000
"""Characters of a server's log that are shown when something goes wrong."""
LOAD: dict[str, object] = {
    "trace": "tasks",
    "check_answers": True,
    "concurrency": 8,
    "seed": 42,
    "max_model_len": 512,
}
"""Options of every run; the shorter context leaves room for every problem and lets a server start faster."""


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    arguments = parse_arguments()
    try:
        if not arguments.redraw:
            measure(arguments)
        rows = read_rows(TABLE)
        replace_section(DOCUMENT, f"measured: {arguments.name}", section(rows, arguments))
        draw_quality(rows, FIGURE)
    except DbenchError as error:
        raise SystemExit(f"measure_quality: {error}") from error


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=EMBEDDED, help="as for dbench run; embedded unless given")
    parser.add_argument("--name", help="of the model in table and document; the value of --model unless given")
    parser.add_argument("--problems", type=int, default=NUM_PROBLEMS)
    parser.add_argument("--rounds", type=int, default=1, help="runs of every setting; the fastest gives the rates")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", action="append", choices=names, help="a setting to measure; repeatable")
    parser.add_argument("--redraw", action="store_true", help="measure nothing, show what the CSV holds")
    arguments = parser.parse_args()
    arguments.name = arguments.name or arguments.model
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """The settings one after the other; each is in the table as soon as it is measured."""
    for setting in SETTINGS:
        if arguments.only and setting.name not in arguments.only:
            continue
        options = {**LOAD, "model": arguments.model, "num_requests": arguments.problems, **setting.options}
        given = resolve(COMMAND_SECTIONS["run"], options, yaml_path=None, environment={})
        row = row_of(arguments.name, setting, runs_of(with_own_server(given), arguments.rounds))
        write_rows(TABLE, with_row(read_rows(TABLE), row))
        logger.info(
            "%s: %d of %d right, %.2f tokens/pass, %.1f requests/s",
            row.setting,
            row.answers.num_right,
            row.answers.num_asked,
            row.tokens_per_forward_pass,
            row.requests_per_sec,
        )


def runs_of(options: Resolved, num_rounds: int) -> list[RunSummary]:
    """The same requests to one server, as often as asked. Raises RunError when some of them do not complete."""
    engine, service = options.section(EngineOptions), options.section(ServiceOptions)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with ServerProcess(engine, service, log_path=log, config_json=options.to_json()) as server:
                return [run(server.address, options, Path(folder) / str(number)) for number in range(num_rounds)]
        except DbenchError:
            if log.is_file():
                logger.error("the server's last words:\n%s", log.read_text(encoding="utf-8")[-LOG_TAIL:])
            raise


def run(address: str, options: Resolved, run_dir: Path) -> RunSummary:
    load, sampling = options.section(LoadOptions), options.section(SamplingOptions)

    async def send() -> RunResult:
        async with aclosing(GrpcTarget(address)) as target:
            return await run_load(target, load, sampling, run_dir)

    result = run_cancellable(send)
    summary = summarize(load_run(run_dir))
    if summary.num_successful < load.num_requests:
        why = ": ".join(part for part in (result.reason, result.detail) if part)
        raise RunError(f"{summary.num_successful} of {load.num_requests} requests completed ({why})")
    if not summary.valid:
        logger.warning("%s", summary.invalid_reason)
    return summary


def section(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    """The table of one model and what it was measured with, the place of its checkpoint on this disk aside.

    Where nothing was measured, what the document says of that stays. Raises UsageError for a model without rows.
    """
    own = [row for row in rows if row.model == arguments.name]
    if not own:
        known = ", ".join(dict.fromkeys(row.model for row in rows))
        raise UsageError(f"{TABLE} has no rows of the model {arguments.name!r} (it has: {known}); measure it first")
    if arguments.redraw:
        old = read_section(DOCUMENT, f"measured: {arguments.name}")
        return [*quality_table(own), "", *(line for line in old if line.startswith("- "))]
    load = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in LOAD.items() if value is not True)
    model = EMBEDDED if arguments.model == EMBEDDED else "DIR"
    command = f"dbench run --model {model} --check-answers {load} --num-requests {arguments.problems}"
    return [
        *quality_table(own),
        "",
        *measured_with(describe_environment(), f"{command} SETTING", arguments.rounds),
    ]


if __name__ == "__main__":
    main()

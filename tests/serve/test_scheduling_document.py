"""The examples of docs/scheduling.md are what the code does."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from dbench.serve.fleet import Assignment, Fleet, FleetRules
from dbench.serve.placement import HybridPlacer, HybridRules
from dbench.serve.policy import QUEUE_ORDERS, Room, TokenBudget, admit
from dbench.serve.routes import DECODE_ROUTES, HYBRID_PREFILL_ROUTES, PREFILL_ROUTES, Route, RouteState, WorkerLoad
from dbench.serve.sequence import BlockKey, SamplingParameters
from dbench.serve.wire_link import Ready
from tests.serve.engine_builders import make_task
from tests.serve.scheduler_builders import make_tracked

DOCUMENT = Path(__file__).parents[2] / "docs" / "scheduling.md"
CHOICE = re.compile(
    r"(?:After worker (?P<last>\d+), |With (?:a slack|an alpha) of (?P<ratio>[\d.]+), )?"
    r"a canvas of (?P<canvas>\d+) tokens goes to worker (?P<worker>\d+)\.",
    re.IGNORECASE,
)
PLACEMENT = re.compile(
    r"(?:(?P<without>Without overflow), |(?P<waiting>While others wait), )?a canvas of (?P<canvas>\d+) tokens "
    r"(?:is refreshed(?: by worker (?P<refresher>\d+))?(?: and decoded by worker (?P<decoder>\d+))?|stays pending)\.",
    re.IGNORECASE,
)
Row = dict[str, str]


@dataclass(frozen=True)
class Section:
    """What stands under a heading, up to the next one."""

    heading: str
    text: str

    @property
    def rows(self) -> list[Row]:
        """Its one table."""
        lines = [line for line in self.text.splitlines() if line.startswith("|")]
        names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [dict(zip(names, row, strict=True)) for row in rows]


def sections() -> Iterator[Section]:
    text = DOCUMENT.read_text(encoding="utf-8")
    headings = [*re.finditer(r"^##+ (.+)$", text, re.MULTILINE)]
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=True):
        yield Section(heading[1], text[heading.end() : end])


BY_HEADING = {section.heading: section for section in sections()}
ROUTES = {f"`{name}`": route for name, route in {**DECODE_ROUTES, **PREFILL_ROUTES}.items()}
ROUTES |= {f"`{name}` (decode)": DECODE_ROUTES[name] for name in DECODE_ROUTES.keys() & PREFILL_ROUTES.keys()}


def load_of(row: Row) -> WorkerLoad:
    return WorkerLoad(
        worker_id=int(row["worker"]),
        outstanding_prefill_tokens=int(row.get("outstanding prefill tokens", "0")),
        num_requests=int(row["requests"]),
        length_sum=int(row["sum of lengths"]),
        num_free_pages=int(row.get("free pages", "0")),
        has_fast_link=row.get("fast link") == "yes",
    )


@pytest.mark.parametrize(("heading", "route"), ROUTES.items(), ids=list(ROUTES))
def test_every_route_has_an_example_that_holds(heading: str, route: Route) -> None:
    section = BY_HEADING[heading]
    loads = [load_of(row) for row in section.rows]
    choices = [*CHOICE.finditer(section.text)]
    assert choices, f"no example under {heading}"
    for choice in choices:
        state = RouteState(random.Random(0), last_worker_id=int(choice["last"] or -1))
        if choice["ratio"] is not None:
            state.slack_ratio = state.topology_alpha = float(choice["ratio"])
        assert route(loads, int(choice["canvas"]), state) == int(choice["worker"]), choice[0]


def test_the_queue_orders_sort_as_shown() -> None:
    section = BY_HEADING["`prefill_queue_policy`"]
    tasks = [
        make_task(row["request"], arrival_s=float(row["submitted at"]), num_remaining_blocks=int(row["blocks to go"]))
        for row in section.rows
    ]
    shown = dict(re.findall(r"^`(\w+)`: ([a-z ]+)$", section.text, re.MULTILINE))
    assert shown == {
        name: " ".join(task.key.request_id for task in sorted(tasks, key=order)) for name, order in QUEUE_ORDERS.items()
    }


def test_the_token_budget_works_as_shown() -> None:
    rows = BY_HEADING["The token budget"].rows
    for row in rows:
        budget = TokenBudget(4096, 32, int(row["deficit before"]), int(row["decode rows"]))
        canvases = [int(length) for length in row["waiting canvases"].split()]
        got = admit(canvases, budget, Room(int(row["free pages of 16"]), 16, 128))
        assert (got.num_admitted, got.deficit) == (int(row["admitted"]), int(row["deficit after"])), row
    assert any(after["deficit before"] == before["deficit after"] != "0" for before, after in pairwise(rows))


def hybrid_placer(rows: list[Row], *, overflow: bool) -> HybridPlacer:
    """A placer over workers that hold what the table says."""
    num_prefill = sum(row["kind"] == "prefill" for row in rows)
    fleet = Fleet(FleetRules(["cpu"] * len(rows), num_prefill=num_prefill))
    for row, worker in zip(rows, fleet.workers.values(), strict=True):
        assert (row["worker"], row["kind"]) == (str(worker.worker_id), worker.kind)
        worker.become_ready("cpu", 1, Ready(1000, 16, 100_000), 0.0)
        tokens = int(row["outstanding prefill tokens"])
        taken = 16 * (1000 - int(row["free pages"]))
        worker.assign(BlockKey("x", 0, 0), Assignment(taken, 0.0, 0.0, tokens))
    states = RouteState(random.Random(0)), RouteState(random.Random(0))
    rules = HybridRules(
        HYBRID_PREFILL_ROUTES["least_outstanding_prefill_tokens"],
        states[0],
        DECODE_ROUTES["max_free_memory"],
        states[1],
        overflow=overflow,
        overload_threshold=16384,
    )
    return HybridPlacer(fleet, rules)


def test_blocks_find_their_workers_in_hybrid_mode_as_shown() -> None:
    section = BY_HEADING["Hybrid mode"]
    shown = [*PLACEMENT.finditer(section.text)]
    assert len(shown) == 7
    for example in shown:
        placer = hybrid_placer(section.rows, overflow=not example["without"])
        tracked = make_tracked(int(example["canvas"]) - 32, 32, SamplingParameters())
        placement = placer.place(tracked, others_wait=bool(example["waiting"]))
        refresher = decoder = None
        if placement is not None:
            refresher = str(placement.refresher.worker_id)
            decoder = None if placement.decoder is None else str(placement.decoder.worker_id)
        assert (refresher, decoder) == (example["refresher"] or example["decoder"], example["decoder"]), example[0]

"""What a worker chooses by: which refreshes join a batch, and which rows a step computes. Pure functions only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, TypeVar

from dbench.errors import OptionError, unknown_name
from dbench.serve.sequence import BlockTask

Entry = TypeVar("Entry")


def choose(kind: str, table: Mapping[str, Entry], name: str) -> Entry:
    """The entry of a table. Raises OptionError listing the known names."""
    if name not in table:
        raise OptionError(unknown_name(kind, name, table))
    return table[name]


# ---- the order in which refreshes wait ----------------------------------------------------------


class QueueKey(NamedTuple):
    """What waiting blocks are sorted by; no two blocks compare equal."""

    rank: int
    arrival_s: float
    request_id: str
    block_index: int
    attempt: int


def arrival_order(task: BlockTask) -> QueueKey:
    """By submission time of the request."""
    return QueueKey(0, task.arrival_s, *_identity(task))


def fewest_remaining_blocks(task: BlockTask) -> QueueKey:
    """Requests nearest to their end first, then by submission time; can starve long requests."""
    return QueueKey(task.num_remaining_blocks, task.arrival_s, *_identity(task))


def _identity(task: BlockTask) -> tuple[str, int, int]:
    return task.key.request_id, task.key.block_index, task.key.attempt


QueueOrder = Callable[[BlockTask], QueueKey]

QUEUE_ORDERS: dict[str, QueueOrder] = {
    "arrival_order": arrival_order,
    "fewest_remaining_blocks": fewest_remaining_blocks,
}
"""prefill_queue_policy -> sort key of a waiting block, smallest first."""


# ---- the deficit token budget -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The tokens that one iteration may refresh; a refresh cannot be cut, so unused budget is saved up."""

    max_tokens_per_iteration: int
    block_length: int
    prior: int
    """The deficit that the iteration before left."""
    decode_tokens: int
    """Rows of this iteration's decode spans, those included that may turn out void."""

    @property
    def fresh(self) -> int:
        """At least one block, so that a deficit grows whatever is being decoded."""
        return max(self.block_length, self.max_tokens_per_iteration - self.decode_tokens)

    @property
    def available(self) -> int:
        return self.fresh + self.prior


@dataclass(frozen=True, slots=True)
class Room:
    """What a refresh needs beside tokens."""

    free_pages: int
    page_size: int
    free_slots: int


class Stop(StrEnum):
    """Why admission ended; a refresh that lacks several things is stopped by the first of them."""

    NOTHING_WAITING = "nothing waiting"
    TOKENS = "tokens"
    PAGES = "pages"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class Admission:
    """The first `num_admitted` waiting refreshes join this iteration."""

    num_admitted: int
    num_tokens: int
    stopped_by: Stop
    deficit: int
    """What the next iteration finds as `prior`; less than the longest canvas."""


def admit(canvas_lengths: Iterable[int], budget: TokenBudget, room: Room) -> Admission:
    """Admit waiting refreshes, given by canvas length in queue order, until the first that does not fit.

    Nothing overtakes that one. Without a decode span and with nothing admitted yet, a refresh larger than
    the budget goes alone. Reads no further than the refresh that does not fit.
    """
    count = tokens = pages = 0
    stopped_by = Stop.NOTHING_WAITING
    for canvas in canvas_lengths:
        canvas_pages = -(-canvas // room.page_size)
        may_go_alone = count == 0 and budget.decode_tokens == 0
        if tokens + canvas > budget.available and not may_go_alone:
            stopped_by = Stop.TOKENS
        elif pages + canvas_pages > room.free_pages:
            stopped_by = Stop.PAGES
        elif count >= room.free_slots:
            stopped_by = Stop.SLOTS
        else:
            count, tokens, pages = count + 1, tokens + canvas, pages + canvas_pages
            continue
        break
    return Admission(count, tokens, stopped_by, _deficit_after(budget, tokens, stopped_by))


def _deficit_after(budget: TokenBudget, admitted_tokens: int, stopped_by: Stop) -> int:
    """Budget is saved only for a refresh that waits for budget; waiting for room keeps what was saved before."""
    if stopped_by is Stop.NOTHING_WAITING:
        return 0
    if stopped_by is Stop.TOKENS:
        return max(0, budget.available - admitted_tokens)
    taken_from_savings = max(0, admitted_tokens - budget.fresh)
    return max(0, budget.prior - taken_from_savings)


def num_that_may_join(waiting: Iterable[BlockTask], running: Iterable[BlockTask], free_slots: int) -> int:
    """How many of the waiting blocks, from the front, may run beside those that run already and each other.

    An alone block joins nobody and nobody joins it; nothing overtakes it while it waits for the others to end.
    """
    companions = list(running)
    if any(task.alone for task in companions):
        return 0
    for number, task in enumerate(islice(waiting, free_slots)):
        if task.alone:
            return number if number or companions else 1
    return free_slots


# ---- which rows a step computes -----------------------------------------------------------------


class Rows(NamedTuple):
    """Consecutive canvas positions, and the first of them whose K and V are written."""

    start: int
    num_rows: int
    written_from: int


SpanRule = Callable[[BlockTask, int], Rows]


def whole_canvas(task: BlockTask, logit_shift: int) -> Rows:
    """Every position, whatever the shift."""
    return Rows(0, task.canvas_length, 0)


def active_block(task: BlockTask, logit_shift: int) -> Rows:
    """The block, and the `logit_shift` rows left of it from which its first positions are predicted.

    Those keep the K and V of the refresh.
    """
    return Rows(task.block_start - logit_shift, task.block_length + logit_shift, task.block_start)


SPANS: dict[str, dict[str, SpanRule]] = {
    "exact": {"refresh": whole_canvas, "decode": active_block},
    "none": {"refresh": whole_canvas, "decode": whole_canvas},
}
"""Cache mode -> phase -> rows of a block's step, from the task and the model's logit shift (LLaDA 0)."""

"""A request while a scheduler holds it: its tokens so far, the block it is at, and what its client may see."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from dbench.serve.sequence import BlockKey, BlockTask, Fault, Request, Status
from dbench.serve.wire import FinishedBlock, PollState


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How a request is cut into blocks."""

    num_prompt_tokens: int
    num_masks: int
    """Masks of its canvas; the part beyond gen_length is never decoded."""
    block_length: int
    num_blocks: int

    @property
    def canvas_length(self) -> int:
        return self.num_prompt_tokens + self.num_masks


@dataclass(slots=True)
class TrackedRequest:
    """The one mutable state of a request; only the scheduler writes it."""

    request: Request
    shape: RequestShape
    serial: int
    """Order of submission."""
    tokens: array[int]
    """Prompt and finished blocks."""
    ready_s: float
    """When its next block could first have been routed."""
    status: Status = Status.PENDING
    block_index: int = 0
    attempt: int = 0
    num_failures: int = 0
    """Of its block: those that can be its own."""
    alone: bool = False
    """Its block runs alone from now on: a batch that it was in has failed."""
    worker_id: int | None = None
    """Who decodes its block, or is to."""
    refresher_id: int | None = None
    """Hybrid mode: the prefill worker that refreshes its block, until that has handed it over."""
    pinned_to: int | None = None
    """The worker that all its blocks go to."""
    avoid_worker_id: int | None = None
    """Who failed its block last, or was lost when it was to decode it."""
    num_forgiven_losses: int = 0
    """Losses of workers that cannot have been its block's fault."""
    last_loss: str = ""
    """Of a worker that was to decode its block, in words."""
    block_ends: list[int] = field(default_factory=list)
    """Length of `tokens` after each finished block."""
    num_forward_passes: int = 0
    first_refresh_s: float | None = None
    completion_s: float | None = None
    error: str = ""

    @property
    def key(self) -> BlockKey:
        return BlockKey(self.request.request_id, self.block_index, self.attempt)

    @property
    def holder_ids(self) -> tuple[int, ...]:
        """The workers that hold its block."""
        return tuple(worker_id for worker_id in (self.worker_id, self.refresher_id) if worker_id is not None)

    @property
    def num_gen_tokens(self) -> int:
        return len(self.tokens) - self.shape.num_prompt_tokens

    def task(self) -> BlockTask:
        """The block that is next to run."""
        return BlockTask(
            key=self.key,
            token_ids=tuple(self.tokens),
            num_masks=self.shape.canvas_length - len(self.tokens),
            block_length=self.shape.block_length,
            sampling=self.request.sampling,
            request_seed=self.request.request_seed,
            ignore_eos=self.request.ignore_eos,
            arrival_s=self.request.arrival_s,
            num_remaining_blocks=self.shape.num_blocks - self.block_index,
            alone=self.alone,
        )

    def leave_workers(self) -> None:
        """No worker's word about its block counts any more."""
        self.worker_id = self.refresher_id = None

    def append_block(self, token_ids: tuple[int, ...], num_forward_passes: int) -> None:
        """Take in a finished block; the next one starts with attempt 0."""
        self.tokens.extend(token_ids)
        self.block_ends.append(len(self.tokens))
        self.num_forward_passes += num_forward_passes
        self.block_index += 1
        self.attempt = self.num_failures = self.num_forgiven_losses = 0
        self.alone = False
        self.avoid_worker_id = None

    def note_failure(self, worker_id: int, fault: Fault) -> None:
        """An attempt at its block has failed there; as part of a batch it counts only if the block was alone."""
        if fault in (Fault.WORKER, Fault.TRANSFER) or (fault is Fault.BATCH and self.alone):
            self.num_failures += 1
        self.alone = self.alone or fault is Fault.BATCH
        self.attempt += 1
        self.avoid_worker_id = worker_id

    def finish(self, status: Status, error: str, now_s: float) -> None:
        """Set the final status, once."""
        assert status.is_final, f"{self.request.request_id}: {status} is not final"
        assert not self.status.is_final, f"{self.request.request_id}: {self.status} -> {status}"
        self.status = status
        self.error = error
        self.completion_s = now_s
        self.leave_workers()

    def finished_blocks(self, start: int) -> tuple[FinishedBlock, ...]:
        """The finished blocks from index `start` on."""
        edges = [self.shape.num_prompt_tokens, *self.block_ends]
        return tuple(
            FinishedBlock(index, tuple(self.tokens[edges[index] : edges[index + 1]]))
            for index in range(start, len(self.block_ends))
        )

    def poll_state(self, mask_token_id: int) -> PollState:
        tokens = tuple(self.tokens)
        num_prompt = self.shape.num_prompt_tokens
        return PollState(
            status=self.status.value,
            sequence=tokens + (mask_token_id,) * (self.shape.canvas_length - len(tokens)),
            num_prompt_tokens=num_prompt,
            num_forward_passes=self.num_forward_passes,
            error_message=self.error,
            arrival_s=self.request.arrival_s,
            first_refresh_s=self.first_refresh_s,
            completion_s=self.completion_s,
            generated_token_ids=tokens[num_prompt:] if self.status is Status.COMPLETED else (),
        )

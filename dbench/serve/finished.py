"""Requests that have ended, kept for Poll: for a time, up to a number, and up to a number of token ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from dbench.serve.sequence import Status
from dbench.serve.wire import PollState

TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept; beyond it the oldest are forgotten."""

    seconds: float = 600.0
    num_requests: int = 10_000
    num_tokens: int = 1_000_000
    """Of prompts and finished blocks; 4 MB."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """About 450 bytes and four per token; a TrackedRequest takes about 950 besides its tokens."""

    state: PollState
    """Without its token ids."""
    tokens: bytes
    """Prompt and finished blocks."""
    num_masks: int
    """Behind them."""


@dataclass(slots=True)
class FinishedRequests:
    """What Poll says of requests with a final status, oldest first."""

    retention: Retention
    mask_token_id: int
    _kept: OrderedDict[str, _Finished] = field(default_factory=OrderedDict)
    _num_tokens: int = 0

    def add(self, request_id: str, state: PollState, tokens: array[int]) -> None:
        """Keep a request's last state and its tokens, prompt and finished blocks; they are copied."""
        assert state.completion_s is not None, f"request {request_id} is finished but has no time of it"
        small = replace(state, sequence=(), generated_token_ids=())
        self._kept[request_id] = _Finished(small, tokens.tobytes(), len(state.sequence) - len(tokens))
        self._num_tokens += len(tokens)

    def status(self, request_id: str) -> str | None:
        """None for a request that is not here."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.state.status

    def poll(self, request_id: str) -> PollState | None:
        """What was added; None for a request that is not here."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        tokens = array("i", kept.tokens).tolist()
        is_complete = kept.state.status == Status.COMPLETED
        return replace(
            kept.state,
            sequence=(*tokens, *(self.mask_token_id,) * kept.num_masks),
            generated_token_ids=tuple(tokens[kept.state.num_prompt_tokens :]) if is_complete else (),
        )

    def forget_old(self, now_s: float) -> None:
        """Let go of those beyond the retention; the last one stays however long it is."""
        while self._kept:
            request_id, oldest = next(iter(self._kept.items()))
            if not self._is_too_much(oldest, now_s):
                return
            del self._kept[request_id]
            self._num_tokens -= len(oldest.tokens) // TOKEN_BYTES

    def _is_too_much(self, oldest: _Finished, now_s: float) -> bool:
        assert oldest.state.completion_s is not None, "checked when it was added"
        if now_s - oldest.state.completion_s > self.retention.seconds:
            return True
        num_kept = len(self._kept)
        return num_kept > self.retention.num_requests or (num_kept > 1 and self._num_tokens > self.retention.num_tokens)

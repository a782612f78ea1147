"""What the load generator talks to: the protocol, and its implementations.

The only module through which load reaches serve.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from dbench.events import Event
from dbench.progress import WorkerProgress
from dbench.serve.sequence import SamplingParameters as SamplingParameters
from dbench.serve.sequence import Status

COMPLETED, ERROR, CANCELLED = str(Status.COMPLETED), str(Status.ERROR), str(Status.CANCELLED)
"""How a request can end."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request as it will be sent; drawn before the run starts."""

    index: int
    prompt_token_ids: tuple[int, ...]
    gen_length: int
    """A multiple of the server's block length."""
    sampling: SamplingParameters
    request_seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as the client saw it."""

    request_id: str
    status: str
    token_ids: tuple[int, ...]
    """Generated ids; empty unless COMPLETED."""
    num_forward_passes: int
    first_block_s: float | None
    """The client's monotonic clock."""
    error: str

    @property
    def completed(self) -> bool:
        return self.status == COMPLETED


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a run must know of its target before it draws requests."""

    model: str
    version: str
    block_length: int
    max_gen_len: int | None
    max_model_len: int
    vocabulary_size: int
    reserved_token_ids: frozenset[int]
    num_workers: int
    resolved_config_json: str
    environment_json: str


class Target(Protocol):
    """A server under load. Every method raises ServerUnavailable when nobody answers."""

    async def info(self) -> TargetInfo:
        """Wait until the target is ready for requests, then describe it; connects if need be."""

    async def workers(self) -> tuple[WorkerProgress, ...]:
        """Live figures; empty where the target has none."""

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        """Send one request and wait for its end; `accepted` gets the request id as soon as it is known.

        A request that the server refuses or fails is an Outcome with status ERROR, not an exception.
        Cancelling the coroutine cancels the request.
        """

    async def reset_metrics(self) -> None:
        """Let the target forget what it recorded so far."""

    def export_events(self) -> AsyncIterator[Event]:
        """What the target recorded since reset_metrics, on the caller's monotonic clock."""

    async def close(self) -> None:
        """Give the connection back."""

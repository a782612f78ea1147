"""What the load generator talks to: the protocol, and its implementations.

The only module through which load reaches serve.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

from dbench.errors import ModelError, RequestError, ServerError, ServerUnavailable
from dbench.events import Event, shifted
from dbench.load.tasks import Problem
from dbench.progress import WorkerProgress
from dbench.serve.chat import Message as Message
from dbench.serve.client import Client
from dbench.serve.families import find_tokenizer
from dbench.serve.sequence import SamplingParameters as SamplingParameters
from dbench.serve.sequence import Status
from dbench.serve.tokenizer import Tokenizer as Tokenizer
from dbench.serve.tokenizer import load_tokenizer
from dbench.serve.wire import Accepted, FinishedBlock, PollState, Submission, worker_progress

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
    problem: Problem | None = None
    """What its prompt asks, where it asks something."""


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
    tokenizer: str = ""
    """Directory of its tokenizer's files, or 'embedded'; empty where it names none."""


def open_tokenizer(info: TargetInfo) -> Tokenizer:
    """The target's tokenizer, from this machine's files. Raises ModelError."""
    if not info.tokenizer:
        raise ModelError(f"{info.model}: the target names no tokenizer; name a directory that holds it (--tokenizer)")
    return load_tokenizer(find_tokenizer(info.tokenizer))


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

    async def aclose(self) -> None:
        """Give the connection back; for `async with contextlib.aclosing(target)`."""


CLOCK_SAMPLES = 5
"""Round trips per comparison; the shortest of all is the best."""


@dataclass(slots=True)
class ClockOffset:
    """This process's monotonic clock less the server's, from the round trip with the least uncertainty."""

    round_trip_s: float = math.inf
    middle_s: float = 0.0

    def add(self, sent_s: float, server_s: float, back_s: float) -> None:
        """One round trip: the server's clock read `server_s` between `sent_s` and `back_s` of ours."""
        if back_s - sent_s < self.round_trip_s:
            self.round_trip_s = back_s - sent_s
            self.middle_s = (sent_s + back_s) / 2 - server_s

    @property
    def offset_s(self) -> float:
        """0 where that is possible: then both processes read one clock, as on one host they do."""
        return 0.0 if abs(self.middle_s) <= self.round_trip_s / 2 else self.middle_s


class GrpcTarget:
    """A dbench server at host:port; connects at the first call of `info`.

    `tokenizer` is where its tokenizer's files are on this machine, if not where the server says; `tls_ca` a file with
    the certificates to trust, for one that speaks TLS.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        ready_timeout_s: float = 300.0,
        tokenizer: str | None = None,
        tls_ca: str | None = None,
    ) -> None:
        self._address = address
        self._api_key = api_key
        self._ready_timeout_s = ready_timeout_s
        self._tokenizer = tokenizer
        self._tls_ca = tls_ca
        self._stack = AsyncExitStack()
        self._open_client: Client | None = None
        self._offset = ClockOffset()

    async def info(self) -> TargetInfo:
        """See Target; waits `ready_timeout_s` for a server that answers but is not ready. OptionError: the API key."""
        if self._open_client is None:
            client = Client(self._address, self._api_key, self._tls_ca)
            self._open_client = await self._stack.enter_async_context(client)
        status = await self._open_client.wait_until_ready(self._ready_timeout_s)
        return TargetInfo(
            model=status.model,
            version=status.version,
            block_length=status.block_length,
            max_gen_len=status.max_gen_len,
            max_model_len=status.max_model_len,
            vocabulary_size=status.vocabulary_size,
            reserved_token_ids=frozenset(status.reserved_token_ids),
            num_workers=len(status.workers),
            resolved_config_json=status.resolved_config_json,
            environment_json=status.environment_json,
            tokenizer=self._tokenizer or status.tokenizer,
        )

    async def workers(self) -> tuple[WorkerProgress, ...]:
        return tuple(worker_progress(worker) for worker in (await self._client.status()).workers)

    async def generate(self, request: LoadRequest, accepted: Callable[[str], None]) -> Outcome:
        submission = Submission(
            prompt_token_ids=request.prompt_token_ids,
            gen_length=request.gen_length,
            sampling=request.sampling,
            request_seed=request.request_seed,
            ignore_eos=request.ignore_eos,
        )
        request_id, first_block_s, result = "", None, None
        try:
            async with aclosing(self._client.generate(submission)) as replies:
                async for reply in replies:
                    match reply:
                        case Accepted():
                            request_id = reply.request_id
                            accepted(request_id)
                        case FinishedBlock():
                            first_block_s = first_block_s or time.monotonic()
                        case PollState():
                            result = reply
        except ServerUnavailable:
            raise
        except (RequestError, ServerError) as error:
            return Outcome(request_id, ERROR, (), 0, first_block_s, str(error))
        if result is None:
            return Outcome(request_id, ERROR, (), 0, first_block_s, "the server ended the stream without a result")
        return Outcome(
            request_id=request_id,
            status=result.status,
            token_ids=result.generated_token_ids,
            num_forward_passes=result.num_forward_passes,
            first_block_s=first_block_s,
            error=result.error_message,
        )

    async def reset_metrics(self) -> None:
        await self._compare_clocks()
        await self._client.reset_metrics()

    async def export_events(self) -> AsyncIterator[Event]:
        await self._compare_clocks()
        offset_s = self._offset.offset_s
        async with aclosing(self._client.export_events()) as events:
            async for event in events:
                yield shifted(event, offset_s) if offset_s else event

    async def aclose(self) -> None:
        await self._stack.aclose()
        self._open_client = None

    @property
    def _client(self) -> Client:
        assert self._open_client is not None, "info() comes first"
        return self._open_client

    async def _compare_clocks(self) -> None:
        for _ in range(CLOCK_SAMPLES):
            sent_s = time.monotonic()
            status = await self._client.status()
            self._offset.add(sent_s, status.now_s, time.monotonic())

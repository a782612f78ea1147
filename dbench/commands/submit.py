"""`dbench submit`: one request to a running server."""

from __future__ import annotations

import asyncio
import sys
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from dbench.cli_options import Invocation
from dbench.commands.common import EXIT_FAILED, EXIT_OK, open_view, print_json
from dbench.config import Resolved
from dbench.errors import ModelError, OptionError, ServerUnavailable
from dbench.load.schedule import sampling_parameters
from dbench.options import ClientOptions, SamplingOptions
from dbench.resolve import check_sampling
from dbench.serve.client import Client
from dbench.serve.sequence import Status
from dbench.serve.tokenizer import Tokenizer, load_tokenizer
from dbench.serve.wire import Accepted, FinishedBlock, PollState, ServerStatus, Submission

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    request_id: str
    state: PollState
    e2e_s: float
    first_block_s: float | None
    """Both from the send to the arrival here."""


def submit_command(invocation: Invocation) -> int:
    """Send, wait, print the answer; 1 when the request did not complete."""
    resolved = invocation.resolve()
    open_view(resolved)
    check_sampling(resolved)
    given_ids(resolved)
    return asyncio.run(_submit(resolved, as_json=invocation.json))


def given_ids(resolved: Resolved) -> tuple[int, ...] | None:
    """The given token ids, or None for a prompt that is text; exactly one of the two must be there."""
    options = resolved.section(ClientOptions)
    if (options.prompt is None) == (options.prompt_ids is None):
        raise OptionError("submit: give the prompt as --prompt TEXT or --prompt-ids 1,2,3")
    if options.prompt_ids is None:
        return None
    try:
        return tuple(int(part) for part in options.prompt_ids.split(","))
    except ValueError:
        place = resolved.place("prompt_ids")
        raise OptionError(f"{place}: got {options.prompt_ids!r}, wanted token ids such as 1,2,3") from None


async def _submit(resolved: Resolved, *, as_json: bool) -> int:
    options = resolved.section(ClientOptions)
    async with Client(options.server, options.api_key) as client:
        status = await client.status()
        tokenizer = _tokenizer(resolved, status)
        submission = Submission(
            prompt_token_ids=_prompt(resolved, tokenizer),
            gen_length=status.block_length if options.gen_length is None else options.gen_length,
            sampling=sampling_parameters(resolved.section(SamplingOptions)),
            request_seed=options.request_seed,
            ignore_eos=options.ignore_eos,
        )
        printer = BlockPrinter(tokenizer) if options.stream and not as_json else None
        answer = await _send(client, submission, printer)
    if as_json:
        print_json(_record(answer, tokenizer))
    else:
        _print(answer, tokenizer, printer)
    return EXIT_OK if answer.state.status == Status.COMPLETED else EXIT_FAILED


class BlockPrinter:
    """Prints each finished block as text, or as ids without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = 0

    def block(self, token_ids: tuple[int, ...]) -> None:
        self._ids += token_ids
        if self._tokenizer is None:
            print(*token_ids, flush=True)
        else:
            # a character may lie across two blocks: its half is decoded to the replacement character
            self._print_to(self._text().rstrip(REPLACEMENT))

    def finish(self) -> None:
        if self._tokenizer is not None:
            self._print_to(self._text())
            print()

    def _text(self) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(self._ids)

    def _print_to(self, text: str) -> None:
        if len(text) > self._printed:
            print(_printable(text[self._printed :]), end="", flush=True)
            self._printed = len(text)


def _tokenizer(resolved: Resolved, status: ServerStatus) -> Tokenizer | None:
    """The given one, or the server's if this machine has it; None only for a prompt that needs none."""
    options = resolved.section(ClientOptions)
    if options.tokenizer is not None:
        return load_tokenizer(Path(options.tokenizer).expanduser())
    try:
        return load_tokenizer(Path(status.tokenizer))
    except ModelError:
        if options.prompt is not None:
            raise
        return None


def _prompt(resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids = given_ids(resolved)
    if ids is not None:
        return ids
    assert tokenizer is not None, "a prompt that is text has a tokenizer"
    return tuple(tokenizer.encode(resolved.section(ClientOptions).prompt or ""))


async def _send(client: Client, submission: Submission, printer: BlockPrinter | None) -> Answer:
    start_s = time.monotonic()
    request_id, first_block_s = "", None
    async for reply in client.generate(submission):
        match reply:
            case Accepted():
                request_id = reply.request_id
            case FinishedBlock():
                first_block_s = time.monotonic() - start_s if first_block_s is None else first_block_s
                if printer is not None:
                    printer.block(reply.token_ids)
            case PollState():
                return Answer(request_id, reply, time.monotonic() - start_s, first_block_s)
    raise ServerUnavailable(f"request {request_id}: the server ended the stream without a result")


def _record(answer: Answer, tokenizer: Tokenizer | None) -> dict[str, object]:
    state = answer.state
    return {
        "request_id": answer.request_id,
        "status": state.status,
        "error_message": state.error_message,
        "token_ids": state.generated_token_ids,
        "text": None if tokenizer is None else tokenizer.decode(state.generated_token_ids),
        "num_prompt_tokens": state.num_prompt_tokens,
        "num_forward_passes": state.num_forward_passes,
        "timings": {
            "e2e_s": answer.e2e_s,
            "time_to_first_block_s": answer.first_block_s,
            "server_queue_s": _after(state.arrival_s, state.first_refresh_s),
            "server_s": _after(state.arrival_s, state.completion_s),
        },
    }


def _print(answer: Answer, tokenizer: Tokenizer | None, printer: BlockPrinter | None) -> None:
    """The answer on stdout, how it went on stderr."""
    state = answer.state
    ids = state.generated_token_ids
    if printer is not None:
        printer.finish()
    elif ids:
        print(" ".join(map(str, ids)) if tokenizer is None else _printable(tokenizer.decode(ids)))
    how = f"{len(ids)} tokens, {state.num_forward_passes} forward passes, {answer.e2e_s:.3f} s"
    print(f"{state.status}: {state.error_message or how} (request {answer.request_id})", file=sys.stderr)


def _printable(text: str) -> str:
    """A model may say anything; on a terminal, control characters could do anything."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else REPLACEMENT for c in text)


def _after(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s

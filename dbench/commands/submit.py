"""`dbench submit`: one request to a running server."""

from __future__ import annotations

import asyncio
import sys
import unicodedata

from dbench.cli_options import Invocation
from dbench.commands.common import check_host_port, open_view, print_json
from dbench.config import Resolved
from dbench.errors import EXIT_FAILED, EXIT_OK, ModelError, OptionError
from dbench.load.schedule import sampling_parameters
from dbench.options import ClientOptions, SamplingOptions
from dbench.resolve import check_sampling
from dbench.serve.chat import Message
from dbench.serve.client import Client, SubmitResult, submit_and_wait
from dbench.serve.families import find_tokenizer
from dbench.serve.sequence import Status
from dbench.serve.tokenizer import Tokenizer, load_tokenizer
from dbench.serve.wire import FinishedBlock, ServerStatus, Submission
from dbench.values import counted

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def submit_command(invocation: Invocation) -> int:
    """Send, wait, print the answer; 1 when the request did not complete."""
    resolved = invocation.resolve()
    open_view(resolved)
    check_sampling(resolved)
    check_host_port(resolved, "server")
    given_ids(resolved)
    return asyncio.run(_submit(resolved, as_json=invocation.json))


def given_ids(resolved: Resolved) -> tuple[int, ...] | None:
    """The given token ids, or None for a prompt that is text; exactly one kind of prompt must be there."""
    options = resolved.section(ClientOptions)
    if sum(given is not None for given in (options.prompt, options.chat, options.prompt_ids)) != 1:
        raise OptionError("submit: give one prompt, as --prompt TEXT, --chat TEXT or --prompt-ids 1,2,3")
    if options.prompt_ids is None:
        return None
    try:
        return tuple(int(part) for part in options.prompt_ids.split(","))
    except ValueError:
        place = resolved.place("prompt_ids")
        raise OptionError(f"{place}: got {options.prompt_ids!r}, wanted token ids such as 1,2,3") from None


async def _submit(resolved: Resolved, *, as_json: bool) -> int:
    options = resolved.section(ClientOptions)
    async with Client(options.server, options.api_key, options.tls_ca) as client:
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
        on_block = printer.block if printer is not None else _print_block if options.stream else None
        result = await submit_and_wait(client, submission, on_block)
    if as_json:
        print_json(_record(result, tokenizer), in_one_line=options.stream)
    else:
        print_result(result, tokenizer, printer)
    return EXIT_OK if result.status == Status.COMPLETED else EXIT_FAILED


class BlockPrinter:
    """Prints each finished block as text, or as ids without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = 0

    def block(self, block: FinishedBlock) -> None:
        self._ids += block.token_ids
        if self._tokenizer is None:
            print(*block.token_ids, flush=True)
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
        return load_tokenizer(find_tokenizer(options.tokenizer))
    try:
        return load_tokenizer(find_tokenizer(status.tokenizer))
    except ModelError:
        if options.prompt_ids is None:
            raise
        return None


def _prompt(resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids = given_ids(resolved)
    if ids is not None:
        return ids
    assert tokenizer is not None, "a prompt that is text has a tokenizer"
    options = resolved.section(ClientOptions)
    if options.chat is not None:
        return tuple(tokenizer.encode_chat([Message("user", options.chat)]))
    return tuple(tokenizer.encode(options.prompt or ""))


def _print_block(block: FinishedBlock) -> None:
    """A line of JSON; the text comes with the result, since a character may lie across two blocks."""
    print_json({"block_index": block.block_index, "token_ids": block.token_ids}, in_one_line=True)


def _record(result: SubmitResult, tokenizer: Tokenizer | None) -> dict[str, object]:
    return {
        "request_id": result.request_id,
        "status": result.status,
        "error": result.error,
        "token_ids": result.token_ids,
        "text": None if tokenizer is None else tokenizer.decode(result.token_ids),
        "num_forward_passes": result.num_forward_passes,
        "timings": {
            "latency_s": result.latency_s,
            "time_to_first_block_s": result.time_to_first_block_s,
            "queue_s": result.queue_s,
            "server_s": result.server_s,
        },
    }


def print_result(result: SubmitResult, tokenizer: Tokenizer | None, printer: BlockPrinter | None) -> None:
    """The answer on stdout, how it went on stderr."""
    ids = result.token_ids
    if printer is not None:
        printer.finish()
    elif ids:
        print(" ".join(map(str, ids)) if tokenizer is None else _printable(tokenizer.decode(ids)))
    passes = counted(result.num_forward_passes, "forward pass", "forward passes")
    how = f"{counted(len(ids), 'token')}, {passes}, {result.latency_s:.3f} s"
    print(f"{result.status}: {result.error or how} (request {result.request_id})", file=sys.stderr)


def _printable(text: str) -> str:
    """A model may say anything; on a terminal, control characters could do anything."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else REPLACEMENT for c in text)

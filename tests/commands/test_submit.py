"""Prompts of `dbench submit`, and blocks printed as they come."""

from __future__ import annotations

import pytest

from dbench.commands.submit import BlockPrinter, given_ids, print_result
from dbench.config import resolve
from dbench.errors import OptionError
from dbench.models import embedded_directory
from dbench.options import COMMAND_SECTIONS
from dbench.serve.client import SubmitResult
from dbench.serve.tokenizer import load_tokenizer
from dbench.serve.wire import FinishedBlock


def ids_of(**flags: object) -> tuple[int, ...] | None:
    return given_ids(resolve(COMMAND_SECTIONS["submit"], flags, yaml_path=None, environment={}))


def test_prompt_is_ids_or_text() -> None:
    assert ids_of(prompt_ids="1, 2,3") == (1, 2, 3)
    assert ids_of(prompt="hello") is None
    assert ids_of(chat="hello") is None


@pytest.mark.parametrize("flags", [{}, {"prompt": "a", "prompt_ids": "1"}, {"prompt": "a", "chat": "b"}])
def test_prompt_is_given_exactly_once(flags: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="give one prompt, as --prompt TEXT, --chat TEXT or --prompt-ids 1,2,3"):
        ids_of(**flags)


@pytest.mark.parametrize("text", ["1,x", "1,", "one"])
def test_ids_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"--prompt-ids: got '{text}', wanted token ids"):
        ids_of(prompt_ids=text)


def test_character_across_two_blocks_is_printed_once_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(embedded_directory())
    ids = tokenizer.encode("aé!")
    half = ids.index(tokenizer.encode("!")[0]) - 1
    printer = BlockPrinter(tokenizer)
    printer.block(FinishedBlock(0, tuple(ids[:half])))
    assert capsys.readouterr().out == "a"
    printer.block(FinishedBlock(1, tuple(ids[half:])))
    printer.finish()
    assert capsys.readouterr().out == "é!\n"


def test_blocks_are_ids_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    printer = BlockPrinter(None)
    printer.block(FinishedBlock(0, (5, 6)))
    printer.finish()
    assert capsys.readouterr().out == "5 6\n"


@pytest.mark.parametrize(
    ("num_tokens", "num_passes", "how"), [(1, 1, "1 token, 1 forward pass, "), (2, 3, "2 tokens, 3 forward passes, ")]
)
def test_one_is_no_plural(num_tokens: int, num_passes: int, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = SubmitResult("a", "COMPLETED", (7,) * num_tokens, num_passes, "", 0.25, None, None, None)
    print_result(result, None, None)
    assert capsys.readouterr().err == f"COMPLETED: {how}0.250 s (request a)\n"

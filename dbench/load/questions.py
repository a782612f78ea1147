"""Requests that ask problems: their prompts, the room for their answers, and the check of what came back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dbench.load.target import Message, TargetInfo, Tokenizer, open_tokenizer
from dbench.load.tasks import Problem, check
from dbench.load.traces import LengthPair

ANSWER_TOKENS = 64
"""Tokens to generate for an answer and the id that ends it, before they are rounded up to whole blocks."""


@dataclass(frozen=True, slots=True)
class Question:
    """A problem as the model gets it."""

    problem: Problem
    prompt_token_ids: tuple[int, ...]
    lengths: LengthPair


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to a problem."""

    text: str
    is_right: bool


NO_ANSWER = Answer("", False)
"""Of a request that failed."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Problems in the words of one model: its tokenizer and its chat template."""

    tokenizer: Tokenizer

    def ask(self, problems: Iterable[Problem]) -> Iterator[Question]:
        """Each problem as the one message of a chat, with ANSWER_TOKENS or what its answer needs, if that is more.

        Raises ModelError for a model without a chat template.
        """
        for problem in problems:
            ids = tuple(self.tokenizer.encode_chat([Message("user", problem.prompt)]))
            needed = len(self.tokenizer.encode(problem.answer)) + 1
            yield Question(problem, ids, LengthPair(len(ids), max(ANSWER_TOKENS, needed)))

    def answer(self, problem: Problem, token_ids: tuple[int, ...]) -> Answer:
        """The generated ids as text, and whether that is the right answer."""
        text = self.tokenizer.decode(token_ids)
        return Answer(text, check(problem, text))


def questions_for(info: TargetInfo) -> Questions:
    """Raises ModelError when the target's tokenizer cannot be read here."""
    return Questions(open_tokenizer(info))

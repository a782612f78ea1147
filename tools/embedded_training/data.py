"""Training problems as byte arrays: drawn by processes, the same whatever their number is.

A row holds prompt, answer, end of text and, to its full width, more of the last. The text is ASCII, so one byte per
token is enough: a special id s >= 256 is stored as s - 128. No torch here: the processes start faster.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dbench.errors import ModelError
from dbench.load.tasks import TASKS, draw
from dbench.serve.chat import Message, read_chat_template
from dbench.serve.tokenizer import Tokenizer, load_tokenizer

TASK_NAMES = tuple(TASKS)
TASK_WEIGHTS = {"addition": 4, "subtraction": 4, "sort": 3, "reverse": 2, "copy": 2, "lookup": 2, "summarize": 1}
"""How many problems of each task are drawn; training then takes them in the shares that the loss asks for."""

ROW_WIDTH = 256
SPECIAL_OFFSET = 128
CHUNK = 20_000
"""Problems of one generator: its seed is the run's seed and the chunk's number."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The ids that the chat template puts before and after a single message of the user."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    """Ends with the header of the assistant's answer."""
    end_id: int

    def prompt_ids(self, prompt: str) -> list[int]:
        return [*self.before, *prompt.encode("ascii"), *self.after]


@dataclass(frozen=True, slots=True)
class Rows:
    """N problems: see the module's text for `bytes_NW`."""

    bytes_NW: NDArray[np.uint8]
    prompt_N: NDArray[np.int16]
    """Tokens of the framed prompt."""
    answer_N: NDArray[np.int16]
    """Tokens of the answer and the first end of text."""
    task_N: NDArray[np.int8]
    """Index into TASK_NAMES."""

    def __len__(self) -> int:
        return len(self.task_N)


def read_chat_frame(model_dir: Path) -> ChatFrame:
    """Render the directory's chat template around a marker and take the ids on both sides of it."""
    template = read_chat_template(model_dir)
    if template is None or "eos_token" not in template.tokens:
        raise ModelError(f"{model_dir}: training needs a chat template and an eos_token in tokenizer_config.json")
    marker = "MESSAGE"
    before, found, after = template.render([Message("user", marker)]).partition(marker)
    tokenizer = load_tokenizer(model_dir)
    if not found or tokenizer.encode("Az 9.") != list(b"Az 9."):
        raise ModelError(f"{model_dir}: training needs a chat template that keeps the message, and bytes as tokens")
    end_id = _single_id(tokenizer, template.tokens["eos_token"])
    return ChatFrame(tuple(tokenizer.encode(before)), tuple(tokenizer.encode(after)), end_id)


def draw_rows(frame: ChatFrame, count: int, seed: int, num_processes: int) -> Rows:
    """`count` training problems, tasks by TASK_WEIGHTS."""
    sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
    make = partial(_draw_chunk, frame, seed)
    if num_processes == 1 or len(sizes) == 1:
        return _join([make(number, size) for number, size in enumerate(sizes)])
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return _join(list(pool.map(make, range(len(sizes)), sizes)))


def _draw_chunk(frame: ChatFrame, seed: int, number: int, size: int) -> Rows:
    rng = random.Random(f"{seed} {number}")
    tasks = rng.choices(range(len(TASK_NAMES)), [TASK_WEIGHTS[name] for name in TASK_NAMES], k=size)
    before, after, end = _stored(frame.before), _stored(frame.after), _stored((frame.end_id,))
    rows, prompts, answers = [], [], []
    for task in tasks:
        problem = draw(TASK_NAMES[task], rng, held_out=False)
        prompt = before + problem.prompt.encode("ascii") + after
        answer = problem.answer.encode("ascii") + end
        rows.append((prompt + answer).ljust(ROW_WIDTH, end))
        prompts.append(len(prompt))
        answers.append(len(answer))
    return Rows(
        np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(size, ROW_WIDTH),
        np.array(prompts, dtype=np.int16),
        np.array(answers, dtype=np.int16),
        np.array(tasks, dtype=np.int8),
    )


def _join(parts: Sequence[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.bytes_NW for part in parts]),
        np.concatenate([part.prompt_N for part in parts]),
        np.concatenate([part.answer_N for part in parts]),
        np.concatenate([part.task_N for part in parts]),
    )


def _stored(ids: Sequence[int]) -> bytes:
    return bytes(token - SPECIAL_OFFSET if token >= 256 else token for token in ids)


def _single_id(tokenizer: Tokenizer, token: str) -> int:
    ids = tokenizer.encode(token)
    if len(ids) != 1:
        raise ModelError(f"special token {token!r} is {len(ids)} ids in tokenizer.json, wanted one")
    return ids[0]

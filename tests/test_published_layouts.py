"""Servers on directories laid out like the published checkpoints, and on sizes without files, answer in full."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dbench.serve.chat import Message
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.families import read_model_config
from dbench.serve.sequence import SamplingParameters
from dbench.serve.tokenizer import load_tokenizer
from dbench.serve.wire import Submission
from tests.serve.process_builders import launch
from tests.serve.published_layouts import write_dream, write_llada
from tests.serve.reference import Reference
from tests.serve.server_builders import final_state, run

BLOCK_LENGTH = 8
PATIENCE_S = 120
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DBENCH_")}
RULES = (
    SamplingParameters(),
    SamplingParameters("conf_quota", 0.8, fixed_unmask_quota=3),
    SamplingParameters("conf_dynamic", dynamic_unmask_factor=1.5),
    SamplingParameters("random", 0.5),
    SamplingParameters("entropy", 0.3, entropy_threshold=1.0),
    SamplingParameters("margin", margin_threshold=0.2),
)


def submit(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "dbench", "submit", "--server", address, *arguments)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)


@dataclass(frozen=True)
class Served:
    """A running server with two workers, and what its answers must be."""

    directory: Path
    address: str
    reference: Reference

    def wanted(self, submission: Submission) -> list[int]:
        decoded = self.reference.decode(
            list(submission.prompt_token_ids),
            submission.gen_length,
            BLOCK_LENGTH,
            submission.sampling,
            submission.request_seed or 0,
            submission.ignore_eos,
        )
        return decoded.ids


@pytest.fixture(scope="module", params=[write_llada, write_dream], ids=["llada", "dream"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = request.param(tmp_path_factory.mktemp("model"))
    reference = Reference(directory)
    reference.eos_ids = set(read_model_config(directory).eos_token_ids)
    with launch(model=str(directory), gpus="cpu,cpu", block_length=BLOCK_LENGTH) as server:
        yield Served(directory, server.address, reference)


def test_a_chat_message_is_answered_as_the_reference_answers_it(served: Served) -> None:
    prompt = load_tokenizer(served.directory).encode_chat([Message("user", "hello the tea")])
    result = submit(served.address, "--chat", "hello the tea", "--gen-length", "24", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["status"] == "COMPLETED"
    assert answer["token_ids"] == served.wanted(Submission(tuple(prompt), 24))
    assert isinstance(answer["text"], str)


def test_requests_of_all_rules_on_two_workers_equal_the_reference(served: Served) -> None:
    submissions = [
        Submission(
            tuple((7 * i * k + k) % 256 for k in range(1 + 13 * i)), 24, rule, request_seed=i, ignore_eos=i % 2 > 0
        )
        for i, rule in enumerate(RULES)
    ]

    async def scenario() -> None:
        async with Client(served.address) as client:
            results = await asyncio.gather(*(submit_and_wait(client, one) for one in submissions))
            assert [list(result.token_ids) for result in results] == [served.wanted(one) for one in submissions]
            assert all(worker.num_forward_passes > 0 for worker in (await client.status()).workers)

    run(scenario())


def test_a_prompt_of_mask_pad_and_end_ids_comes_back_untouched(served: Served) -> None:
    special = read_model_config(served.directory).reserved_token_ids
    prompt = (*special, *special[::-1], special[1])

    async def scenario() -> None:
        async with Client(served.address) as client:
            submission = Submission(prompt, 16)
            state = await final_state(client, await client.submit(submission))
            assert (state.status, state.sequence[: len(prompt)]) == ("COMPLETED", prompt)
            assert list(state.generated_token_ids) == served.wanted(submission)
            assert served.reference.mask_id not in state.generated_token_ids

    run(scenario())


def test_a_named_size_takes_token_ids_and_says_that_it_has_no_tokenizer() -> None:
    with launch(model="dream-tiny", load_format="random", block_length=BLOCK_LENGTH) as server:
        answered = submit(server.address, "--prompt-ids", "1,2,3", "--ignore-eos", "--json")
        refused = submit(server.address, "--prompt", "hello")
    assert answered.returncode == 0
    answer = json.loads(answered.stdout)
    assert (len(answer["token_ids"]), answer["text"]) == (BLOCK_LENGTH, None)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith(
        "'dream-tiny' is a size without a tokenizer; give the prompt as token ids (--prompt-ids), "
        "or a directory that holds a tokenizer (--tokenizer)\n"
    )

"""What `dbench trace` says of the named traces."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dbench.cli import main
from dbench.load.tasks import MAX_ANSWER_BYTES, MAX_PROMPT_BYTES
from dbench.load.traces import NAMED, PROFILES, open_trace


def test_every_named_trace_is_listed_and_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == [*PROFILES, "tasks"] == list(NAMED)
    assert [open_trace(name).name for name in NAMED] == list(NAMED)


@pytest.mark.parametrize(("name", "unit"), [("tasks", "bytes of problem and answer"), ("arxiv", "tokens")])
def test_the_unit_of_the_lengths_is_said(capsys: pytest.CaptureFixture[str], name: str, unit: str) -> None:
    assert main(["trace", "show", name]) == 0
    assert f"in {unit}:" in capsys.readouterr().out
    assert main(["trace", "show", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == unit


def test_lengths_of_problems_can_be_written_to_a_file(tmp_path: Path) -> None:
    assert main(["trace", "make", "tasks", str(tmp_path / "out.csv"), "--num-requests", "50"]) == 0
    trace = open_trace(str(tmp_path / "out.csv"))
    generator = np.random.default_rng(0)
    pairs = list(islice(trace.pairs(generator, shuffle=False), 50))
    assert all(1 <= p.prompt_len <= MAX_PROMPT_BYTES and 1 <= p.gen_len <= MAX_ANSWER_BYTES for p in pairs)
    assert len({pair.prompt_len for pair in pairs}) > 5

"""What every unmasking rule keeps to, and what each one chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dbench.serve.sequence import STRATEGY_PARAMETER
from dbench.serve.unmask import RULES, Candidates, choose

PARAMETERS = {"conf_threshold": (0.05, 0.5, 0.9, 1.0), "conf_quota": (1, 3, 1000), "random": (0,)}
CASES = [(name, float(value)) for name in RULES for value in PARAMETERS[name]]


def candidates(
    confidence: list[list[float | None]], parameter: list[float], *, seed: int = 0, step: int = 0, start: int = 10
) -> Candidates:
    """None: not masked."""
    masked_BL = torch.tensor([[value is not None for value in row] for row in confidence])
    filled_BL = torch.tensor([[-torch.inf if value is None else value for value in row] for row in confidence])
    count = len(confidence)
    return Candidates(
        masked_BL=masked_BL,
        confidence_BL=filled_BL,
        parameter_B=torch.tensor(parameter, dtype=torch.float32),
        seed_B=torch.full((count,), seed),
        block_start_B=torch.full((count,), start),
        step_B=torch.full((count,), step),
    )


def offsets(chosen_BL: Tensor) -> list[list[int]]:
    return [row.nonzero().squeeze(1).tolist() for row in chosen_BL]


BLOCKS = st.lists(st.one_of(st.none(), st.floats(0, 1, width=32)), min_size=8, max_size=8)


def test_the_table_holds_every_strategy_that_requests_may_name() -> None:
    assert RULES.keys() == STRATEGY_PARAMETER.keys() == PARAMETERS.keys()


@pytest.mark.parametrize(("name", "parameter"), CASES)
@given(blocks=st.lists(BLOCKS, min_size=1, max_size=4), seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 99))
def test_a_rule_fixes_masked_rows_only_and_at_least_one(
    name: str, parameter: float, blocks: list[list[float | None]], seed: int, step: int
) -> None:
    rows = candidates(blocks, [parameter] * len(blocks), seed=seed, step=step)
    chosen_BL = RULES[name](rows)
    assert not bool((chosen_BL & ~rows.masked_BL).any())
    assert chosen_BL.any(dim=1).tolist() == rows.masked_BL.any(dim=1).tolist()


@pytest.mark.parametrize(("name", "parameter"), CASES)
@given(blocks=st.lists(BLOCKS, min_size=2, max_size=5))
def test_a_block_is_treated_the_same_alone_and_in_company(
    name: str, parameter: float, blocks: list[list[float | None]]
) -> None:
    together = offsets(RULES[name](candidates(blocks, [parameter] * len(blocks))))
    alone = [offsets(RULES[name](candidates([block], [parameter])))[0] for block in blocks]
    assert together == alone


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_a_block_ends_in_at_most_its_length_in_steps(name: str, parameter: float) -> None:
    block: list[float | None] = [0.1, 0.1, 0.1, 0.2, 0.0, 0.3, 0.0, 0.1]
    for step in range(len(block)):
        (chosen,) = offsets(RULES[name](candidates([block], [parameter], step=step)))
        block = [None if i in chosen else value for i, value in enumerate(block)]
    assert block == [None] * len(block)


@pytest.mark.parametrize(
    ("threshold", "block", "wanted"),
    [
        (0.9, [0.95, 0.5, 0.9, 0.89], [0, 2]),
        (0.9, [0.1, 0.5, 0.3, 0.5], [1]),
        (0.9, [None, 0.0, 0.0, None], [1]),
        (1.0, [0.99, 1.0, 0.5, 1.0], [1, 3]),
        (0.9, [None, None, None, None], []),
    ],
)
def test_conf_threshold_takes_the_sure_rows_and_always_the_surest(
    threshold: float, block: list[float | None], wanted: list[int]
) -> None:
    assert offsets(RULES["conf_threshold"](candidates([block], [threshold]))) == [wanted]


@pytest.mark.parametrize(
    ("quota", "block", "wanted"),
    [
        (2, [0.1, 0.7, 0.3, 0.7], [1, 3]),
        (1, [0.1, 0.7, 0.3, 0.7], [1]),
        (3, [0.5, 0.5, 0.5, 0.5], [0, 1, 2]),
        (9, [None, 0.2, None, 0.1], [1, 3]),
        (1, [None, 0.0, None, 0.0], [1]),
    ],
)
def test_conf_quota_takes_the_surest_rows_and_the_first_of_equals(
    quota: int, block: list[float | None], wanted: list[int]
) -> None:
    assert offsets(RULES["conf_quota"](candidates([block], [quota]))) == [wanted]


def test_random_draws_its_number_and_its_rows_uniformly() -> None:
    trials = 4000
    rows = candidates([[0.9, None, 0.1, 0.2, 0.3, None]] * trials, [0.0] * trials)
    chosen_BL = RULES["random"](replace(rows, seed_B=torch.arange(trials)))
    numbers = Counter(chosen_BL.sum(dim=1).tolist())
    shares = chosen_BL.float().mean(dim=0).tolist()
    assert [numbers[count] / trials for count in (1, 2, 3, 4)] == pytest.approx([0.25] * 4, abs=0.03)
    assert [shares[offset] for offset in (0, 2, 3, 4)] == pytest.approx([2.5 / 4] * 4, abs=0.03)


def test_random_draws_anew_at_every_step_and_block() -> None:
    block: list[float | None] = [0.5] * 16
    chosen = {
        tuple(offsets(RULES["random"](candidates([block], [0.0], step=step, start=start)))[0])
        for step in range(4)
        for start in (0, 16, 32)
    }
    assert len(chosen) > 9


def test_blocks_of_a_batch_each_follow_their_own_rule() -> None:
    block: list[float | None] = [0.95, 0.2, 0.93, 0.94]
    names = ["conf_quota", "conf_threshold", "random", "conf_quota"]
    parameters = [1.0, 0.9, 0.0, 2.0]
    mixed = offsets(choose(names, candidates([block] * 4, parameters)))
    alone = [
        offsets(choose([name], candidates([block], [value])))[0] for name, value in zip(names, parameters, strict=True)
    ]
    assert mixed == alone
    assert mixed[0] == [0]
    assert mixed[1] == [0, 2, 3]
    assert mixed[3] == [0, 3]

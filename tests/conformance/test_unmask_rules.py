"""What every unmasking rule keeps to, and what each one chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dbench.serve.unmask import RULES, Candidates, choose
from dbench.unmasking_rules import UNMASKING_RULES, Measure

PARAMETERS = {
    "conf_threshold": (0.05, 0.5, 0.9, 1.0),
    "conf_quota": (1, 3, 1000),
    "conf_dynamic": (1e-6, 0.5, 1.5, 1e6),
    "random": (0,),
    "entropy": (0.0, 0.3, 2.0),
    "margin": (0.0, 0.4, 1.0),
}
CASES = [(name, float(value)) for name in RULES for value in PARAMETERS[name]]


def candidates(
    scores: list[list[float | None]], parameter: list[float], *, seed: int = 0, step: int = 0, start: int = 10
) -> Candidates:
    """None: not masked."""
    masked_BL = torch.tensor([[value is not None for value in row] for row in scores])
    filled_BL = torch.tensor([[-torch.inf if value is None else value for value in row] for row in scores])
    count = len(scores)
    return Candidates(
        masked_BL=masked_BL,
        score_BL=filled_BL,
        parameter_B=torch.tensor(parameter, dtype=torch.float32),
        seed_B=torch.full((count,), seed),
        block_start_B=torch.full((count,), start),
        step_B=torch.full((count,), step),
    )


def negated(values: list[float | None]) -> list[float | None]:
    return [None if value is None else -value for value in values]


def offsets(chosen_BL: Tensor) -> list[list[int]]:
    return [row.nonzero().squeeze(1).tolist() for row in chosen_BL]


BLOCKS = st.lists(st.one_of(st.none(), st.floats(-2, 1, width=32)), min_size=8, max_size=8)
"""Scores of every measure: probabilities, and entropies with a minus before them."""


def test_the_table_holds_every_strategy_that_requests_may_name() -> None:
    assert RULES.keys() == UNMASKING_RULES.keys() == PARAMETERS.keys()


def test_the_parameters_tried_here_are_in_range() -> None:
    for name, values in PARAMETERS.items():
        parameter = UNMASKING_RULES[name].parameter
        assert parameter is None or all(parameter.allows(value) for value in values)


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


@pytest.mark.parametrize(
    ("factor", "block", "wanted"),
    [
        # limits of ranks 1, 2, 3, 4: 0.5, 0.667, 0.75, 0.8
        (1.0, [0.9, 0.7, 0.76, 0.81], [0, 2, 3]),
        (1.0, [0.9, 0.66, 0.1, 0.2], [0]),
        (1.0, [0.1, 0.2, 0.05, 0.15], [1]),
        (1.0, [0.3, 0.3, None, 0.3], [0]),
        (1.0, [0.9, 0.9, 0.9, None], [0, 1, 2]),
        (0.3, [0.95, None, 0.85, 0.85], [0]),
        (3.0, [0.0, 0.01, 0.26, 0.3], [2, 3]),
        (1e6, [0.0, None, 0.0, 0.0], [0, 2, 3]),
        (1.0, [None, None, None, None], []),
    ],
)
def test_conf_dynamic_stops_at_the_first_rank_that_is_not_sure_enough(
    factor: float, block: list[float | None], wanted: list[int]
) -> None:
    assert offsets(RULES["conf_dynamic"](candidates([block], [factor]))) == [wanted]


@pytest.mark.parametrize(
    ("threshold", "entropies", "wanted"),
    [
        (0.5, [0.4, 0.6, 0.5, 1.2], [0, 2]),
        (0.1, [0.4, 0.3, 0.3, 1.2], [1]),
        (0.0, [0.0, None, 0.0, 0.01], [0, 2]),
        (9.0, [None, 3.0, None, 4.0], [1, 3]),
        (0.1, [None, None, None, None], []),
    ],
)
def test_entropy_takes_the_rows_of_little_entropy_and_always_the_least(
    threshold: float, entropies: list[float | None], wanted: list[int]
) -> None:
    assert offsets(RULES["entropy"](candidates([negated(entropies)], [threshold]))) == [wanted]


@pytest.mark.parametrize(
    ("threshold", "block", "wanted"),
    [
        (0.5, [0.5, 0.6, 0.49, None], [0, 1]),
        (0.9, [0.5, 0.6, 0.6, None], [1]),
        (0.0, [0.0, None, 0.0, 0.1], [0, 2, 3]),
        (1.0, [0.0, 0.0, 0.0, 0.0], [0]),
    ],
)
def test_margin_takes_the_rows_of_a_wide_margin_and_always_the_widest(
    threshold: float, block: list[float | None], wanted: list[int]
) -> None:
    assert offsets(RULES["margin"](candidates([block], [threshold]))) == [wanted]


def test_rules_are_ordered_by_their_measures() -> None:
    measures = {name: rule.measure for name, rule in UNMASKING_RULES.items()}
    assert measures == {
        "conf_threshold": Measure.CONFIDENCE,
        "conf_quota": Measure.CONFIDENCE,
        "conf_dynamic": Measure.CONFIDENCE,
        "random": None,
        "entropy": Measure.ENTROPY,
        "margin": Measure.MARGIN,
    }


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
    names = ["conf_quota", "conf_threshold", "random", "conf_quota", "margin", "entropy", "conf_dynamic"]
    parameters = [1.0, 0.9, 0.0, 2.0, 0.95, 0.0, 0.1]
    mixed = offsets(choose(names, candidates([block] * len(names), parameters)))
    alone = [
        offsets(choose([name], candidates([block], [value])))[0] for name, value in zip(names, parameters, strict=True)
    ]
    assert mixed == alone
    assert mixed[0] == [0]
    assert mixed[1] == [0, 2, 3]
    assert mixed[3:] == [[0, 3], [0], [0, 1, 2, 3], [0]]

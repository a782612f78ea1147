"""Problems have the answers they claim, fit their sizes, and keep training and evaluation apart."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbench.errors import TraceError
from dbench.load.tasks import (
    MAX_ANSWER_BYTES,
    MAX_PROMPT_BYTES,
    TASKS,
    Problem,
    check,
    draw,
    draw_training,
    held_out,
    is_held_out,
)

SEEDS = st.integers(0, 2**32)


def numbers_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def items_in(prompt: str) -> list[str]:
    return prompt.partition(": ")[2].split(", ")


@pytest.mark.parametrize("task", TASKS)
@given(seed=SEEDS)
def test_a_problem_is_short_plain_and_has_a_one_line_answer(task: str, seed: int) -> None:
    problem = TASKS[task](random.Random(seed))
    assert problem.task == task
    assert problem.prompt.isascii()
    assert problem.prompt == problem.prompt.strip()
    assert len(problem.prompt) <= MAX_PROMPT_BYTES
    assert problem.answer.isascii()
    assert problem.answer.isprintable()
    assert problem.answer == problem.answer.strip()
    assert 0 < len(problem.answer) <= MAX_ANSWER_BYTES


@given(seed=SEEDS)
def test_addition_is_right_and_stays_below_five_digits_each(seed: int) -> None:
    problem = TASKS["addition"](random.Random(seed))
    a, b = numbers_in(problem.prompt)
    assert max(a, b) <= 9999
    assert int(problem.answer) == a + b


@given(seed=SEEDS)
def test_subtraction_takes_the_smaller_number_from_the_larger(seed: int) -> None:
    problem = TASKS["subtraction"](random.Random(seed))
    a, b = numbers_in(problem.prompt)
    if problem.prompt.startswith("Subtract"):
        a, b = b, a
    assert a - b == int(problem.answer) >= 0


@given(seed=SEEDS)
def test_sorted_lists_hold_the_same_items_in_order(seed: int) -> None:
    problem = TASKS["sort"](random.Random(seed))
    items, answer = items_in(problem.prompt), problem.answer.split(", ")
    assert Counter(items) == Counter(answer)
    keys = [(int(item), "") if item.isdigit() else (0, item) for item in answer]
    assert keys == sorted(set(keys))


@given(seed=SEEDS)
def test_reversed_lists_read_the_same_backwards(seed: int) -> None:
    problem = TASKS["reverse"](random.Random(seed))
    assert problem.answer.split(", ")[::-1] == items_in(problem.prompt)


@given(seed=SEEDS)
def test_a_copy_is_what_stands_after_the_colon(seed: int) -> None:
    problem = TASKS["copy"](random.Random(seed))
    assert problem.prompt.endswith(f": {problem.answer}")


@given(seed=SEEDS)
def test_what_is_looked_up_stands_beside_the_answer_once(seed: int) -> None:
    problem = TASKS["lookup"](random.Random(seed))
    table, _, question = problem.prompt.rpartition(". ")
    entries = table.partition(": ")[2] or table
    asked = re.split(r"\W+", question.rstrip("?"))
    fitting = [entry for entry in entries.split(", ") if set(entry.split()) & set(asked) - {"is"}]
    assert len(fitting) == 1
    assert problem.answer in fitting[0].split()


@given(seed=SEEDS)
def test_a_summary_says_nothing_that_the_story_does_not(seed: int) -> None:
    problem = TASKS["summarize"](random.Random(seed))
    added = set(numbers_in(problem.answer)) - set(numbers_in(problem.prompt))
    names = re.findall(r"(?<!^)\b[A-Z]\w+", problem.answer)
    assert not added
    assert all(name in problem.prompt for name in names)


@given(seed=SEEDS)
def test_no_training_problem_is_held_out(seed: int) -> None:
    assert not is_held_out(draw_training(random.Random(seed)).prompt)


def test_about_a_tenth_is_held_out() -> None:
    rng = random.Random(7)
    prompts = [TASKS["addition"](rng).prompt for _ in range(2000)]
    assert 140 < sum(map(is_held_out, prompts)) < 260


def test_held_out_problems_are_different_held_out_and_balanced() -> None:
    problems = held_out(seed=3, count=72)
    assert len({problem.prompt for problem in problems}) == 72
    assert all(is_held_out(problem.prompt) for problem in problems)
    counts = Counter(problem.task for problem in problems)
    assert set(counts) == set(TASKS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_same_seed_gives_the_same_problems_and_fewer_are_the_first_of_them() -> None:
    assert held_out(seed=3, count=20) == held_out(seed=3, count=50)[:20]
    assert held_out(seed=3, count=20) != held_out(seed=4, count=20)


def test_an_answer_counts_with_white_space_around_it_and_in_no_other_form() -> None:
    problem = Problem("addition", "Add 2 and 3.", "5")
    assert check(problem, " 5\n")
    assert not check(problem, "5.")
    assert not check(problem, "05")
    assert not check(problem, "")


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TraceError, match="unknown task 'adition'; did you mean 'addition'"):
        draw("adition", random.Random(0), held_out=True)

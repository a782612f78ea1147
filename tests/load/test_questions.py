"""Problems as requests: what is sent, what is checked, and what a run says of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import ModelError, OptionError, TraceError
from dbench.events import LoadDrawn, RequestDone, RequestSent
from dbench.load.fake_target import FAKE_INFO, InProcessTarget, Script
from dbench.load.lengths import ignores_eos
from dbench.load.questions import Questions, questions_for
from dbench.load.schedule import Schedule, draw_schedule
from dbench.load.target import LoadRequest, Outcome
from dbench.load.tasks import TASKS, Problem, held_out
from dbench.options import LoadOptions, SamplingOptions
from tests.load.builders import run, small_load, some_info

SUM = Problem("addition", "Add 2 and 3.", "5")


@pytest.fixture(scope="module")
def questions() -> Questions:
    return questions_for(FAKE_INFO)


def tasks_load(**options: Any) -> LoadOptions:
    return small_load(trace="tasks", **options)


def drawn(load: LoadOptions, **info: object) -> Schedule:
    return draw_schedule(load, SamplingOptions(), some_info(**info))


def measured(schedule: Schedule) -> list[LoadRequest]:
    return [scheduled.request for scheduled in schedule.measured]


def problems(requests: list[LoadRequest]) -> list[Problem]:
    return [request.problem for request in requests if request.problem is not None]


# ---- what is sent ---------------------------------------------------------------------------------


def test_a_problem_is_one_chat_message_up_to_where_the_answer_begins(questions: Questions) -> None:
    (question,) = questions.ask([SUM])
    start, begin, end, turn = 256, 259, 260, 261
    user = [start, begin, *b"user", end, *b"\n\n", *b"Add 2 and 3.", turn]
    assert list(question.prompt_token_ids) == [*user, begin, *b"assistant", end, *b"\n\n"]


def test_there_is_room_for_64_tokens_or_for_a_longer_answer_and_its_end(questions: Questions) -> None:
    lengths = [q.lengths.gen_len for q in questions.ask([SUM, replace(SUM, answer="9" * 70)])]
    assert lengths == [64, 71]


@pytest.mark.parametrize(("block_length", "gen_length", "num_rounded"), [(32, 64, 0), (64, 64, 0), (48, 96, 8)])
def test_the_room_is_raised_to_whole_blocks(block_length: int, gen_length: int, num_rounded: int) -> None:
    schedule = drawn(tasks_load(), block_length=block_length)
    assert {request.gen_length for request in measured(schedule)} == {gen_length}
    assert schedule.drawn.num_rounded == num_rounded


def test_request_i_asks_held_out_problem_i_of_the_seed_and_the_tail_goes_on() -> None:
    schedule = drawn(tasks_load(seed=5))
    wanted = held_out(5, 14)
    assert problems(measured(schedule)) == wanted[:8]
    assert problems([scheduled.request for scheduled in islice(schedule.tail, 6)]) == wanted[8:]
    assert [problem.task for problem in wanted] == [*TASKS, *TASKS]


def test_the_warm_up_asks_other_problems() -> None:
    schedule = drawn(tasks_load(num_warmup_requests=6))
    asked = problems(list(schedule.warmup))
    assert len(asked) == 6
    assert not set(asked) & set(problems(measured(schedule)))


def test_requests_of_other_traces_ask_nothing() -> None:
    assert problems(measured(drawn(small_load(trace="arxiv")))) == []


def test_end_of_text_is_obeyed_for_problems_and_ignored_elsewhere_unless_told() -> None:
    assert [ignores_eos(load) for load in (small_load(), small_load(trace="arxiv"), tasks_load())] == [
        True,
        True,
        False,
    ]
    assert ignores_eos(tasks_load(ignore_eos=True))
    assert not ignores_eos(small_load(ignore_eos=False))
    for load, ignored in ((tasks_load(), False), (tasks_load(ignore_eos=True), True), (small_load(), True)):
        schedule = drawn(load)
        assert {request.ignore_eos for request in measured(schedule)} == {ignored}
        assert schedule.drawn.ignore_eos is ignored


# ---- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"check_answers": True}, "check_answers: length_type fixed has no answers"),
        ({"check_answers": True, "trace": "arxiv"}, "check_answers: trace arxiv has no answers.*--trace tasks"),
        ({"trace": "tasks", "length_scale": 0.5}, "trace tasks asks whole problems"),
        ({"trace": "tasks", "gen_scale": 2.0}, "leave out length_scale, prompt_scale and gen_scale"),
    ],
)
def test_options_that_do_not_go_with_problems_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        drawn(small_load(**options))


def test_a_problem_is_never_cut() -> None:
    with pytest.raises(TraceError, match=r"a problem of \d+ prompt tokens .* does not fit into max_total_tokens 100"):
        drawn(tasks_load(max_total_tokens=100))


def test_a_model_whose_tokenizer_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        drawn(tasks_load(), tokenizer=str(tmp_path))
    with pytest.raises(ModelError, match=r"names no tokenizer.*--tokenizer"):
        drawn(tasks_load(), tokenizer="")


# ---- what is checked ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "is_right"), [("5", True), (" 5\n", True), ("6", False), ("5.", False), ("", False)])
def test_an_answer_is_right_when_its_text_is(questions: Questions, text: str, is_right: bool) -> None:
    end_of_text = 257
    answer = questions.answer(SUM, (*text.encode(), end_of_text))
    assert (answer.text, answer.is_right) == (text, is_right)


class Knowing(InProcessTarget):
    """Answers additions wrongly and the other problems rightly; requests whose index is in `failing` fail."""

    failing: tuple[int, ...] = ()

    async def generate(self, request: LoadRequest, accepted: Any) -> Outcome:
        outcome = await super().generate(request, accepted)
        assert request.problem is not None
        text = "nonsense" if request.problem.task == "addition" else request.problem.answer
        if request.index in self.failing:
            return replace(outcome, status="ERROR", token_ids=(), error="refused")
        return replace(outcome, token_ids=(*text.encode(), 257))


def test_the_log_says_what_was_asked_which_answers_are_right_and_what_the_wrong_ones_said(tmp_path: Path) -> None:
    target = Knowing(Script())
    target.failing = (3,)
    ran = run(target, tasks_load(check_answers=True), tmp_path)
    sent = {event.request_id: event.index for event in ran.of(RequestSent)}
    assert {event.index: event.task for event in ran.of(RequestSent) if event.index < 8} == dict(
        enumerate([*TASKS, "addition"])
    )
    done = {sent[event.request_id]: event for event in ran.of(RequestDone)}
    answers = {index: (done[index].answer_is_right, done[index].answer_text) for index in range(8)}
    wrong = {0: (False, "nonsense"), 3: (False, ""), 7: (False, "nonsense")}
    assert answers == {index: wrong.get(index, (True, "")) for index in range(8)}
    assert ran.of(LoadDrawn)[0].checks_answers


def test_nothing_is_checked_unless_asked_for(tmp_path: Path) -> None:
    ran = run(Knowing(Script()), tasks_load(), tmp_path)
    assert {(event.answer_is_right, event.answer_text) for event in ran.of(RequestDone)} == {(None, "")}
    assert not ran.of(LoadDrawn)[0].checks_answers

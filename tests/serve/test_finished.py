"""Finished requests can be polled for a time, while there are not too many of them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from dbench.serve.finished import FinishedRequests, Retention
from dbench.serve.sequence import Status
from dbench.serve.wire import PollState

MASK_ID = 90


def ended(prompt: list[int], generated: list[int], num_masks: int = 0, status: Status = Status.COMPLETED) -> PollState:
    return PollState(
        status=status.value,
        sequence=(*prompt, *generated, *(MASK_ID,) * num_masks),
        num_prompt_tokens=len(prompt),
        num_forward_passes=3,
        error_message="" if status is Status.COMPLETED else "it went wrong",
        arrival_s=1.0,
        first_refresh_s=2.0,
        completion_s=3.0,
        generated_token_ids=tuple(generated) if status is Status.COMPLETED else (),
    )


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(IDS, IDS, st.integers(0, 9), st.sampled_from([status for status in Status if status.is_final]))
def test_a_request_is_polled_as_it_ended(prompt: list[int], generated: list[int], masks: int, status: Status) -> None:
    finished = FinishedRequests(Retention(), MASK_ID)
    state = ended(prompt, generated, masks, status)
    finished.add("r", state, array("i", prompt + generated))
    assert finished.poll("r") == state
    assert finished.status("r") == status


def test_one_that_is_not_here_is_nobody() -> None:
    finished = FinishedRequests(Retention(), MASK_ID)
    assert finished.poll("r") is None
    assert finished.status("r") is None


@given(st.integers(1, 30), st.integers(1, 6), st.lists(st.integers(0, 20), max_size=20))
def test_the_oldest_are_forgotten_by_number_and_by_tokens(num_tokens: int, num: int, lengths: list[int]) -> None:
    finished = FinishedRequests(Retention(600.0, num, num_tokens), MASK_ID)
    for name, length in enumerate(lengths):
        prompt = [1] * length
        finished.add(str(name), ended(prompt, []), array("i", prompt))
        finished.forget_old(3.0)
        here = [earlier for earlier in range(name + 1) if finished.poll(str(earlier)) is not None]
        wanted = [name]  # always, however long it is
        while len(wanted) < num and wanted[0] and sum(lengths[wanted[0] - 1 : name + 1]) <= num_tokens:
            wanted.insert(0, wanted[0] - 1)
        assert here == wanted

"""The engine, step by step, over a scripted runner."""

from __future__ import annotations

from typing import Any

import pytest

from dbench.errors import OptionError, RequestError
from dbench.serve.fake_runner import FakeScript, one_to_four
from dbench.serve.runner import Phase
from dbench.serve.sequence import BlockEnd, BlockOutcome, BlockStep, BlockTimes
from tests.serve.engine_builders import EOS, QUOTA_ONE, RANDOM, Rig, make_rig, make_task, quota

BOTH_DRIVERS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
DONE, FAILED, CANCELLED = BlockOutcome.DONE, BlockOutcome.FAILED, BlockOutcome.CANCELLED


def numbers(end: BlockEnd) -> list[int]:
    return [step.num_unmasked for step in end.steps]


def two_per_step() -> FakeScript:
    return FakeScript(num_unmasked=lambda task, step: 2, lag_s=1.0, eos_token_ids=(EOS,))


# ---- decoding a block ---------------------------------------------------------------------------


@BOTH_DRIVERS
def test_a_block_takes_one_refresh_and_then_decode_steps(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    (end,) = rig.run([make_task(prompt=8, masks=12)])
    assert (end.outcome, len(end.token_ids), numbers(end)) == (DONE, 4, [1, 1, 1, 1])
    spans = [(span.phase, span.start, span.num_rows) for batch in rig.runner.launches for span in batch]
    assert spans == [(Phase.REFRESH, 0, 20), *[(Phase.DECODE, 8, 4)] * 3]
    assert rig.refreshed == [end.key]


@BOTH_DRIVERS
def test_a_block_can_end_at_its_refresh(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    (end,) = rig.run([make_task(sampling=quota(4))])
    assert numbers(end) == [4]
    assert end.times == BlockTimes(0.0, refresh_start_s=0.0, refresh_end_s=1.0, decode_start_s=1.0, end_s=1.0)
    assert rig.refreshed == []
    assert len(rig.runner.launches) == 1


@BOTH_DRIVERS
def test_the_times_of_a_block_are_those_of_its_batches(overlap: bool) -> None:
    rig = make_rig(overlap=overlap)
    (end,) = rig.run([make_task(sampling=quota(2))])
    assert end.times == BlockTimes(0.0, refresh_start_s=0.0, refresh_end_s=1.0, decode_start_s=1.0, end_s=2.0)
    assert end.steps == (BlockStep(1.0, 2), BlockStep(2.0, 2))


def test_a_block_that_waited_was_received_before_its_refresh() -> None:
    first, second = make_rig(max_batch_size=1).run([make_task("a", sampling=quota(4)), make_task("b")])
    assert first.times is not None
    assert second.times is not None
    assert (second.times.received_s, second.times.refresh_start_s) == (0.0, first.times.end_s)


def test_ids_do_not_depend_on_the_company() -> None:
    alone = make_rig().run([make_task("c")])
    together = make_rig().run([make_task(name) for name in "abcd"])
    assert together[2].token_ids == alone[0].token_ids


def test_a_shifted_model_decodes_one_row_more() -> None:
    rig = make_rig(logit_shift=1)
    rig.run([make_task(sampling=quota(2))])
    assert [(span.start, span.num_rows) for span in rig.runner.launches[1]] == [(7, 5)]
    assert rig.batches[1].batch_gen_len == 5


def test_an_unknown_queue_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="known: arrival_order, fewest_remaining_blocks"):
        make_rig(queue_policy="fifo")


# ---- end of text --------------------------------------------------------------------------------


def eos_rig(offset: int, **changes: Any) -> Rig:
    script = FakeScript(eos_token_ids=(EOS,), eos_offsets={("a", 0): offset}, lag_s=1.0)
    return make_rig(script, block_length=8, **changes)


@BOTH_DRIVERS
@pytest.mark.parametrize("offset", range(8))
def test_a_block_is_cut_after_its_end_of_text(offset: int, overlap: bool) -> None:
    task = make_task(masks=8, block_length=8, ignore_eos=False)
    (end,) = eos_rig(offset, overlap=overlap).run([task])
    (whole,) = eos_rig(offset).run([make_task(masks=8, block_length=8, ignore_eos=True)])
    assert end.found_eos
    assert len(end.token_ids) == offset + 1
    assert end.token_ids[-1] == EOS
    assert sum(numbers(end)) == offset + 1
    assert len(end.steps) <= len(whole.steps)
    assert end.token_ids == whole.token_ids[: offset + 1]


def test_with_ignore_eos_an_end_of_text_is_a_token_like_any_other() -> None:
    (end,) = eos_rig(2).run([make_task(masks=8, block_length=8, ignore_eos=True)])
    assert (len(end.token_ids), end.token_ids[2], end.found_eos) == (8, EOS, False)


def test_an_end_of_text_in_the_prompt_does_not_count() -> None:
    (end,) = make_rig().run([make_task(token_ids=(EOS, 1, EOS), ignore_eos=False)])
    assert (len(end.token_ids), end.found_eos) == (4, False)


# ---- overlap ------------------------------------------------------------------------------------


def test_the_overlapping_driver_launches_a_batch_before_it_collects_the_one_before() -> None:
    rig = make_rig(overlap=True)
    rig.run([make_task(sampling=quota(2), masks=4)])
    assert rig.runner.calls == ["launch 0", "launch 1", "collect 0", "collect 1"]


def test_the_plain_driver_collects_a_batch_before_it_launches_the_next() -> None:
    rig = make_rig()
    rig.run([make_task(sampling=quota(2), masks=4)])
    assert rig.runner.calls == ["launch 0", "collect 0", "launch 1", "collect 1"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_block_whose_end_the_host_can_count_has_no_void_span(count: int) -> None:
    rig = make_rig(overlap=True)
    (end,) = rig.run([make_task(sampling=quota(count))])
    assert len(rig.batches) == len(end.steps) == -(-4 // count)
    assert sum(batch.batch_num_void_tokens for batch in rig.batches) == 0


def test_a_void_span_counts_in_the_batch_but_is_no_step() -> None:
    rig = make_rig(two_per_step(), overlap=True)
    (end,) = rig.run([make_task(sampling=RANDOM)])
    assert [(b.batch_prompt_len, b.batch_gen_len, b.batch_num_void_tokens) for b in rig.batches] == [
        (12, 0, 0),
        (0, 4, 0),
        (0, 4, 4),
    ]
    assert numbers(end) == [2, 2]
    assert end.times is not None
    assert [step.end_s for step in end.steps] == [1.0, 2.0]
    assert end.times.end_s == 3.0, "its pages come back after the void span"


def test_a_last_mask_needs_no_second_look_under_any_rule() -> None:
    rig = make_rig(FakeScript(num_unmasked=lambda task, step: 3 if step == 0 else 1, lag_s=1.0), overlap=True)
    rig.run([make_task(sampling=RANDOM)])
    assert [batch.batch_num_void_tokens for batch in rig.batches] == [0, 0]


def test_a_block_that_ended_keeps_its_slot_and_pages_until_its_void_span_is_collected() -> None:
    rig = make_rig(two_per_step(), overlap=True, max_batch_size=1)
    first, second = rig.run([make_task("a", sampling=RANDOM), make_task("b", sampling=RANDOM)])
    assert (first.outcome, second.outcome) == (DONE, DONE)
    assert rig.runner.calls.index("launch 3") > rig.runner.calls.index("collect 2")


def test_the_token_budget_counts_planned_spans_void_or_not() -> None:
    rig = make_rig(two_per_step(), overlap=True, max_tokens_per_iteration=12)
    rig.run([make_task("a", sampling=RANDOM), make_task("b", prompt=14, sampling=RANDOM)])
    assert [batch.batch_num_void_tokens for batch in rig.batches] == [0, 0, 4, 0, 0, 4]
    assert [batch.batch_prompt_len for batch in rig.batches] == [12, 0, 0, 18, 0, 0]
    assert max(state.deficit_tokens for state in rig.states) == 16


# ---- events -------------------------------------------------------------------------------------


def test_a_batch_is_recorded_with_its_rows_and_interval() -> None:
    rig = make_rig(max_tokens_per_iteration=20)
    rig.run([make_task("a", prompt=8, masks=4), make_task("b", prompt=12, masks=4)])
    mixed = rig.batches[1]
    assert (mixed.source, mixed.worker_id) == ("worker-3", 3)
    assert (mixed.start_s, mixed.at_s, mixed.batch_size) == (1.0, 2.0, 2)
    assert (mixed.batch_prompt_len, mixed.batch_gen_len, mixed.batch_num_unmasked_tokens) == (16, 4, 2)
    assert mixed.batch_decode_length_std is None
    assert rig.batches[2].batch_decode_length_std == 2.0


def test_an_overlapping_batch_starts_when_the_one_before_is_complete() -> None:
    rig = make_rig(overlap=True)
    rig.run([make_task()])
    assert [(batch.start_s, batch.at_s) for batch in rig.batches] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_the_workers_state_is_recorded_at_every_change() -> None:
    rig = make_rig(max_batch_size=1)
    rig.step()
    rig.run([make_task("a", sampling=quota(4)), make_task("b", sampling=quota(4))])
    seen = [(s.at_s, s.state, s.queue_depth_waiting, s.queue_depth_active, s.pages_used) for s in rig.states]
    assert seen == [
        (0.0, "idle", 0, 0, 0),
        (0.0, "queued", 1, 0, 0),
        (0.0, "queued", 2, 0, 0),
        (0.0, "busy", 1, 1, 3),
        (1.0, "queued", 1, 0, 0),
        (1.0, "busy", 0, 1, 3),
        (2.0, "idle", 0, 0, 0),
    ]
    assert [s.outstanding_prefill_tokens for s in rig.states] == [0, 12, 24, 24, 12, 12, 0]
    assert [s.decode_length_sum for s in rig.states] == [0, 0, 0, 12, 0, 12, 0]
    assert {s.pages_total for s in rig.states} == {64}


def test_the_deficit_is_part_of_the_workers_state() -> None:
    rig = make_rig(max_tokens_per_iteration=20)
    rig.run([make_task("a"), make_task("b", prompt=16)])
    assert next(s.deficit_tokens for s in rig.states if s.state == "busy") == 8
    assert rig.states[-1].deficit_tokens == 0


# ---- refusals and idleness ----------------------------------------------------------------------


def test_a_canvas_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="canvas of 257 tokens exceeds max_model_len 256"):
        make_rig(num_pages=1000).engine.submit(make_task(prompt=253))


def test_a_canvas_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    rig = make_rig(num_pages=5)
    with pytest.raises(RequestError, match="canvas of 21 tokens needs 6 KV pages, the worker has 5 of 4 tokens"):
        rig.engine.submit(make_task(prompt=17))
    assert rig.engine.is_idle
    rig.engine.submit(make_task(prompt=16))


def test_an_idle_engine_has_nothing_to_report() -> None:
    rig = make_rig()
    assert rig.engine.is_idle
    assert rig.engine.step() is None


def test_an_idle_engine_that_lacks_pages_is_an_invariant_failure_with_counts() -> None:
    rig = make_rig(num_pages=10)
    rig.pages.take(12)
    with pytest.raises(AssertionError, match=r"idle with 3 of 10 KV pages still lent \(7 free\)"):
        rig.engine.step()


def test_an_idle_engine_whose_pages_do_not_add_up_is_an_invariant_failure() -> None:
    rig = make_rig(num_pages=10)
    rig.pages._free.pop()
    with pytest.raises(AssertionError, match=r"do not add up: 9 free \+ 0 used of 10 pages"):
        rig.engine.step()


def test_planning_changes_nothing() -> None:
    rig = make_rig(max_tokens_per_iteration=20)
    rig.engine.submit(make_task("a"))
    rig.engine.submit(make_task("b", prompt=16))
    rig.step()
    assert rig.engine.plan() == rig.engine.plan()
    assert rig.pages.num_used == 3


# ---- failures -----------------------------------------------------------------------------------


@BOTH_DRIVERS
def test_non_finite_logits_end_one_block_and_the_rest_goes_on(overlap: bool) -> None:
    rig = make_rig(FakeScript(non_finite=frozenset({("a", 0, 3)})), overlap=overlap)
    bad, good = rig.run([make_task("a"), make_task("b")])
    assert (bad.outcome, bad.error) == (FAILED, "block 0, step 3: non-finite logits (scripted)")
    assert (bad.token_ids, numbers(bad)) == ((), [0, 0, 0, 0])
    assert good.outcome is DONE


@BOTH_DRIVERS
def test_non_finite_logits_at_the_refresh_name_step_0(overlap: bool) -> None:
    rig = make_rig(FakeScript(non_finite=frozenset({("a", 2, 0)})), overlap=overlap)
    (bad,) = rig.run([make_task("a", block_index=2)])
    assert bad.error.startswith("block 2, step 0: non-finite logits")
    assert rig.refreshed == []


def test_a_batch_that_fails_ends_its_blocks_and_the_engine_goes_on() -> None:
    rig = make_rig(FakeScript(failing_collects=frozenset({1})), max_batch_size=2)
    ends = rig.run([make_task("a"), make_task("b"), make_task("c")])
    assert [end.outcome for end in ends] == [FAILED, FAILED, DONE]
    assert ends[0].error == "block 0, step 1: batch failed: RuntimeError: scripted failure of batch 1"
    assert len(ends[0].steps) == 1


def test_after_a_failed_batch_the_one_launched_behind_it_is_collected_and_dropped() -> None:
    rig = make_rig(FakeScript(failing_collects=frozenset({1})), overlap=True, max_tokens_per_iteration=24)
    ends = rig.run([make_task("a"), make_task("b"), make_task("c")])
    assert [len(batch) for batch in rig.runner.launches[:3]] == [2, 3, 3]
    assert [end.outcome for end in ends] == [FAILED, FAILED, FAILED]
    assert [len(end.steps) for end in ends] == [1, 1, 0]
    assert [end.times is None for end in ends] == [False, False, True]
    assert "collect 2" in rig.runner.calls


def test_a_block_that_only_the_batch_behind_a_failed_one_holds_goes_on() -> None:
    rig = make_rig(FakeScript(failing_collects=frozenset({0})), overlap=True)
    rig.engine.submit(make_task("a"))
    rig.step()
    rig.engine.submit(make_task("b"))
    ends = rig.drain()
    assert [ends[make_task(name).key].outcome for name in "ab"] == [FAILED, DONE]


@BOTH_DRIVERS
def test_a_launch_that_fails_ends_its_blocks_and_the_engine_goes_on(overlap: bool) -> None:
    rig = make_rig(FakeScript(failing_launches=frozenset({2})), overlap=overlap, max_batch_size=1)
    bad, good = rig.run([make_task("a"), make_task("b")])
    assert (bad.outcome, good.outcome) == (FAILED, DONE)
    assert bad.error == "block 0, step 2: batch failed: RuntimeError: scripted failure of launch 2"


@BOTH_DRIVERS
def test_a_broken_rule_is_not_taken_for_a_failure_of_the_device(overlap: bool) -> None:
    rig = make_rig(FakeScript(num_unmasked=lambda task, step: 0), overlap=overlap)
    rig.engine.submit(make_task())
    with pytest.raises(AssertionError, match="fixes 0 positions"):
        rig.drain()


def test_a_block_is_submitted_once() -> None:
    rig = make_rig()
    rig.engine.submit(make_task())
    with pytest.raises(AssertionError, match="is queued already"):
        rig.engine.submit(make_task())


def test_scripted_counts_follow_the_quota_of_the_rule() -> None:
    assert one_to_four(make_task(sampling=quota(3)), 0) == 3
    assert one_to_four(make_task(sampling=QUOTA_ONE), 0) == 1
    assert {one_to_four(make_task(sampling=RANDOM), step) for step in range(40)} == {1, 2, 3, 4}

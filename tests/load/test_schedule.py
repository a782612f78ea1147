"""A schedule is drawn whole, from one seed."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbench.errors import TraceError
from dbench.load.schedule import Schedule, draw_schedule
from dbench.load.target import LoadRequest
from dbench.options import LoadOptions, SamplingOptions
from tests.load.builders import small_load, some_info


def drawn(load: LoadOptions, **info: object) -> Schedule:
    return draw_schedule(load, SamplingOptions(), some_info(**info))


def requests(schedule: Schedule) -> list[LoadRequest]:
    return [scheduled.request for scheduled in schedule.measured]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**63), qps=st.floats(0.01, 100), process=st.sampled_from(["poisson", "gamma", "static"]))
def test_another_rate_changes_the_times_by_a_factor_and_nothing_else(seed: int, qps: float, process: str) -> None:
    load = small_load(seed=seed, trace="sharegpt", interval_type=process, qps=1.0)
    at_one, scaled = drawn(load), drawn(small_load(seed=seed, trace="sharegpt", interval_type=process, qps=qps))
    assert requests(at_one) == requests(scaled)
    assert [s.offset_s for s in scaled.measured] == pytest.approx([s.offset_s / qps for s in at_one.measured])
    assert at_one.warmup == scaled.warmup


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = drawn(small_load(trace="arxiv")), drawn(small_load(trace="arxiv", num_requests=30))
    assert many.measured[:8] == few.measured


def test_the_tail_continues_the_same_draws() -> None:
    few, many = drawn(small_load(trace="arxiv")), drawn(small_load(trace="arxiv", num_requests=30))
    assert tuple(islice(few.tail, 22)) == many.measured[8:]


def test_warm_up_requests_are_others_than_the_measured_ones() -> None:
    schedule = drawn(small_load(trace="arxiv", num_warmup_requests=3))
    measured = requests(schedule)
    assert [request.index for request in schedule.warmup] == [-1, -2, -3]
    assert not {r.request_seed for r in schedule.warmup} & {r.request_seed for r in measured}
    assert not {r.prompt_token_ids for r in schedule.warmup} & {r.prompt_token_ids for r in measured}
    assert measured == requests(drawn(small_load(trace="arxiv", num_warmup_requests=0)))


def test_there_is_one_warm_up_request_per_worker_unless_told_otherwise() -> None:
    assert len(drawn(small_load(num_warmup_requests=None), num_workers=4).warmup) == 4


def test_all_at_once_and_a_closed_loop_have_no_times() -> None:
    assert {s.offset_s for s in drawn(small_load(qps=math.inf)).measured} == {0.0}
    assert {s.offset_s for s in drawn(small_load(concurrency=2)).measured} == {0.0}


def test_nothing_follows_a_run_that_sends_all_at_once() -> None:
    assert next(drawn(small_load(qps=math.inf)).tail, None) is None


def test_what_was_changed_is_counted_over_the_measured_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_len,gen_len\n10,32\n10,33\n4090,32\n")
    schedule = drawn(small_load(trace=str(path), shuffle=False, num_requests=5, num_warmup_requests=9))
    assert [(len(r.prompt_token_ids), r.gen_length) for r in requests(schedule)] == [
        (10, 32),
        (10, 64),
        (4064, 32),
        (10, 32),
        (10, 64),
    ]
    assert (schedule.drawn.num_rounded, schedule.drawn.num_shortened, schedule.drawn.num_repeated) == (2, 1, 2)


def test_a_row_that_cannot_fit_is_refused_when_measured_and_left_out_of_the_tail(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_len,gen_len\n10,32\n10,5000\n")
    load = small_load(trace=str(path), shuffle=False, num_requests=1)
    assert [s.request.gen_length for s in islice(drawn(load).tail, 3)] == [32, 32, 32]
    with pytest.raises(TraceError, match="gen_len 5000"):
        drawn(small_load(trace=str(path), shuffle=False, num_requests=2))


@pytest.mark.parametrize(
    ("options", "arrivals", "lengths"),
    [
        ({}, "poisson, 200 requests/s", "fixed, prompt 16, gen 32"),
        ({"interval_type": "gamma", "cv": 2.0}, "gamma with cv 2, 200 requests/s", "fixed, prompt 16, gen 32"),
        ({"concurrency": 3}, "closed loop, 3 in flight", "fixed, prompt 16, gen 32"),
        ({"qps": math.inf, "trace": "arxiv", "length_scale": 0.5}, "all at once", "trace arxiv, prompt x0.5, gen x0.5"),
    ],
)
def test_a_schedule_says_how_it_was_drawn(options: dict[str, object], arrivals: str, lengths: str) -> None:
    described = drawn(small_load(**options)).drawn
    assert (described.arrivals, described.lengths) == (arrivals, lengths)


def test_a_schedule_says_which_unmasking_rule_it_sends() -> None:
    quota = SamplingOptions(unmasking_strategy="conf_quota", fixed_unmask_quota=4, temperature=0.5)
    assert draw_schedule(small_load(), quota, some_info()).drawn.sampling == "conf_quota 4, temperature 0.5"
    assert drawn(small_load()).drawn.sampling == "conf_threshold 0.9, temperature 0"

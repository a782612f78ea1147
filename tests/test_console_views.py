"""What the views of `serve`, `run` and `search-capacity` say, and that they keep to the terminal's size."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dbench.console.look import ASCII, UNICODE
from dbench.console.plain import state_line
from dbench.console.rates import UNKNOWN, RateTable
from dbench.console.workers import STATE_STYLES
from dbench.progress import Progress, RuleProgress, RunPhase, RunProgress, SearchProgress, ServerState, Verdict
from dbench.serve.fleet import WorkerPhase
from tests.console_snapshots import (
    ERROR_RULE,
    RATES,
    RULE,
    lines,
    run,
    search,
    serve,
    trial,
    view_text,
    worker,
    workers,
)

LONG = "a" * 300
SNAPSHOTS: dict[str, Progress] = {"serve": serve(), "run": run(), "search": search()}
CROWDED: dict[str, Progress] = {
    "serve": serve(model=LONG, address=LONG, workers=workers(70), recent_errors=(LONG,) * 3 + ("b" * 300,) * 9),
    "run": run(name=LONG, target=LONG, workers=workers(70), recent_errors=(LONG, "short", LONG)),
    "search": search(
        job=LONG,
        rules=tuple(f"rule_{n}_{LONG}:p90<=8s" for n in range(9)),
        trials=tuple(trial(n, 1.0 + n / 10, reason=LONG) for n in range(60)),
        running=run(workers=workers(70), recent_errors=(LONG,)),
    ),
}


def nothing_known(progress: RunProgress) -> RunProgress:
    """The run with None wherever the type allows it."""
    optional: dict[str, Any] = {f.name: None for f in fields(progress) if "None" in str(f.type)}
    assert len(optional) == 5
    return replace(progress, **optional)


def test_serve_names_model_address_state_and_totals() -> None:
    text = view_text(serve())
    for words in ("embedded", "127.0.0.1:50051", "ready", "up 1:03", "in server 12", "pending 3"):
        assert words in text
    for words in ("completed 1,408", "failed 2", "cancelled 1", "requests/s 1.50"):
        assert words in text


def test_a_server_that_starts_says_so() -> None:
    text = view_text(serve(state=ServerState.STARTING, workers=()))
    assert "starting" in text
    assert "ready" not in text
    assert "no worker has reported yet" in text


def test_a_worker_row_holds_state_queue_batch_speed_and_kv_use() -> None:
    row = next(line for line in lines(serve()) if "cuda:0" in line)
    for figure in ("0", "busy", "3", "16", "912", "3.12", "61%", "━"):
        assert figure in row.replace("cuda:0", "")


def test_a_wide_terminal_shows_pages_tokens_and_history() -> None:
    row = next(line for line in lines(serve(), width=140) if "cuda:0" in line)
    assert "610/1,000" in row
    assert "312" in row
    assert "▃▅▇" in row


def test_a_worker_without_pages_has_no_share() -> None:
    row = next(line for line in lines(serve(workers=(worker(pages_total=0),))) if "cuda:0" in line)
    assert "%" not in row
    assert row.rstrip(" │").endswith("-")


def test_workers_without_room_are_counted_by_state() -> None:
    many = (*workers(30), worker(worker_id=30, state="lost"))
    text = view_text(serve(workers=many))
    shown = text.count("cuda:0")
    assert f"{31 - shown} more: {30 - shown} busy, 1 lost" in text


def test_a_worker_that_was_lost_and_came_back_shows_how_often() -> None:
    calm = lines(serve())
    assert not any(" lost" in line for line in calm)
    back = lines(serve(workers=(worker(num_losses=2), worker(worker_id=1, device="cpu on b", state="awaited"))))
    assert any(line.rstrip(" │").endswith("lost") for line in back)
    assert next(line for line in back if "cuda:0" in line).rstrip(" │").endswith("2 x")
    assert "awaited" in next(line for line in back if "cpu on b" in line)


def test_equal_errors_in_a_row_are_one_line_with_a_count() -> None:
    text = view_text(serve(recent_errors=("lost worker 1", "bad block", "bad block")))
    assert text.count("bad block") == 1
    assert "bad block (x2)" in text
    assert text.index("lost worker 1") < text.index("bad block")


def test_a_line_says_who_is_away_and_how_often_workers_were_lost() -> None:
    away = worker(state="starting", num_losses=1)
    back = worker(worker_id=1, num_losses=2)
    texts = [state_line(serve(workers=workers), RATES, ASCII) for workers in ((away,), (away, back), (worker(),))]
    assert texts[0].endswith(", 1 worker lost")
    assert texts[1].endswith(", 1 worker lost, 3 losses of workers so far")
    assert "los" not in texts[2]


def test_run_shows_progress_load_latency_and_lag() -> None:
    text = view_text(run())
    for words in ("arxiv", "measuring", "64/100", "64%", "34 s", "2.00 QPS", "1.93 QPS", "96%"):
        assert words in text
    for words in ("812 ms", "1.42 s", "2.03 s", "send lag p99 1.20 ms", "cuda:0"):
        assert words in text


@pytest.mark.parametrize("phase", RunPhase)
def test_run_marks_its_phase(phase: RunPhase) -> None:
    assert f"◆ {phase.value}" in view_text(run(phase=phase))


@pytest.mark.parametrize("height", [12, 23])
def test_what_a_run_does_not_know_is_a_dash(height: int) -> None:
    text = view_text(nothing_known(run()), height=height)
    assert "None" not in text
    assert "nan" not in text
    assert "send lag p99 -" in text


def test_a_run_without_requests_or_workers_is_drawn() -> None:
    text = view_text(run(num_requests=0, num_completed=0, num_failed=0, offered_qps=float("inf"), workers=()))
    assert "inf QPS" in text
    assert "0/0" in text


def test_search_shows_bracket_trials_and_the_running_trial() -> None:
    text = view_text(search())
    for words in ("arxiv-llada", RULE, "trials 4/20", "4:31", "highest pass 2.000", "lowest fail 8.000", "gap 300%"):
        assert words in text
    for words in ("4.00/8 s", "+50.0%", "16.0/8 s", "-100%", "growth", "cached", "trial 4 at 4.000 QPS", "64/100"):
        assert words in text


def test_verdicts_differ_by_mark_and_word() -> None:
    rows = [line for line in lines(search()) if any(f"{v.value}" in line for v in Verdict) and "/8 s" in line]
    assert ["✓ pass" in r for r in rows] == [True, True, False]
    assert ["✗ fail" in r for r in rows] == [False, False, True]


def test_the_newest_trials_are_kept() -> None:
    text = view_text(search(trials=tuple(trial(n, 1.0 + n) for n in range(1, 51))))
    assert "51.00" in text
    assert " 2.000  ✓" not in text
    shown = text.count("✓ pass")
    assert f"{50 - shown} earlier" in text


def test_a_search_without_trials_rules_or_a_run_is_drawn() -> None:
    text = view_text(search(rules=(), trials=(), highest_pass=None, lowest_fail=None, running=None))
    assert "no trial yet" in text
    assert "highest pass -" in text
    assert "lowest fail -" in text


def test_a_probe_is_a_closed_loop_and_no_trial() -> None:
    probe = search(trials=(), highest_pass=None, lowest_fail=None, running=run(offered_qps=0.0))
    text = view_text(probe)
    assert "probe" in text
    assert "offered closed loop" in text
    assert "0 QPS" not in text
    line = state_line(probe, RATES, ASCII)
    assert "; probe: measuring" in line
    assert "QPS 1.93, p50" in line


def test_several_rules_have_labels_and_a_column_each() -> None:
    both = (RuleProgress(RULE, 7.0, 8.0, "s", True, 0.125), RuleProgress(ERROR_RULE, 0.02, 0.01, "", False, -1.0))
    text = view_text(search(rules=(RULE, ERROR_RULE), trials=(trial(1, 2.0, Verdict.FAIL, rules=both),)))
    assert f"R1 {RULE}" in text
    assert f"R2 {ERROR_RULE}" in text
    assert "+12.5%" in text
    assert "-100%" in text


def test_rules_without_room_give_way_to_the_tightest() -> None:
    rules = tuple(f"metric_{n}:p90<=8s" for n in range(12))
    values = [2.0 + n / 2 for n in range(len(rules))]
    judged = tuple(RuleProgress(r, v, 8.0, "s", True, (8.0 - v) / 8.0) for r, v in zip(rules, values, strict=True))
    text = view_text(search(rules=rules, trials=(trial(1, 2.0, rules=judged),)))
    assert "margin of the tightest rule" in text
    assert "R12 +6.2%" in text


def test_a_rule_that_only_trials_know_is_shown() -> None:
    implicit = (RuleProgress(RULE, 7.0, 8.0, "s", True, 0.125), RuleProgress(ERROR_RULE, 0.0, 0.01, "", True, 1.0))
    assert f"R2 {ERROR_RULE}" in view_text(search(trials=(trial(1, 2.0, rules=implicit),)))


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_ascii_views_hold_only_ascii(kind: str) -> None:
    crowded = CROWDED[kind]
    named = search(job="größe") if isinstance(crowded, SearchProgress) else replace(crowded, recent_errors=("Gerät ✗",))
    for progress in (SNAPSHOTS[kind], crowded, named):
        for width in (80, 140):
            assert view_text(progress, width, glyphs=ASCII).isascii()


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_foreign_text_cannot_steer_the_terminal(kind: str) -> None:
    evil = "x\x1b[2J\r\n\u202e\x07y"
    marked: dict[str, Progress] = {
        "serve": serve(model=evil, recent_errors=(evil,)),
        "run": run(name=evil),
        "search": search(job=evil),
    }
    text = view_text(marked[kind])
    assert not set(text) & set("\x1b\r\u202e\x07")
    assert "x [2J" in text


@pytest.mark.parametrize("kind", CROWDED)
def test_long_text_ends_in_an_ellipsis(kind: str) -> None:
    text = view_text(CROWDED[kind])
    assert "a…" in text
    assert "a" * 80 not in text
    assert "a..." in view_text(CROWDED[kind], glyphs=ASCII)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_a_terminal_of_80_by_24_holds_every_part(kind: str, glyphs: Any) -> None:
    progress = SNAPSHOTS[kind]
    drawn = lines(progress, 80, 23, glyphs)
    assert all(cell_len(line) == 80 for line in drawn)
    assert len(drawn) <= 23
    parts = {"serve": ("workers",), "run": ("load", "latency", "workers"), "search": ("trials", "trial 4")}
    for part in parts[kind]:
        assert any(f"{glyphs.across} {part}" in line for line in drawn)


@given(
    kind=st.sampled_from(sorted(SNAPSHOTS)),
    crowded=st.booleans(),
    ascii_only=st.booleans(),
    width=st.integers(1, 220),
    height=st.integers(1, 60),
    known=st.booleans(),
)
def test_no_view_exceeds_the_terminal(
    kind: str, crowded: bool, ascii_only: bool, width: int, height: int, known: bool
) -> None:
    progress: Progress = (CROWDED if crowded else SNAPSHOTS)[kind]
    glyphs = ASCII if ascii_only else UNICODE
    rates = {} if known else {"rates": RateTable({}, UNKNOWN)}
    drawn = lines(progress, width, height, glyphs, **rates)
    assert len(drawn) <= height
    assert all(cell_len(line) <= width for line in drawn)


@given(name=st.text(max_size=120), width=st.integers(20, 120))
def test_any_name_keeps_the_frame_whole(name: str, width: int) -> None:
    for progress in (serve(model=name), run(name=name), search(job=name)):
        assert {cell_len(line) for line in lines(progress, width)} == {width}


def test_every_state_that_a_worker_can_show_has_its_style() -> None:
    of_phases = {phase.value for phase in WorkerPhase} - {"ready"}  # shown as what it does
    assert set(STATE_STYLES) == {*of_phases, "idle", "queued", "busy"}

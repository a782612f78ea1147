"""When a view is live, what it does to the terminal, the plain lines, and log messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper
from threading import Thread

import pytest
from rich.console import Console

from dbench.console import View, install_logging, make_view
from dbench.console.board import Board
from dbench.console.layout import Page
from dbench.console.live import LiveView, draw
from dbench.console.look import ASCII, UNICODE
from dbench.console.plain import ERROR_INTERVAL_S, INTERVAL_S, PlainLines, PlainView
from dbench.console.view import abilities
from dbench.progress import Progress, RunPhase, Verdict
from tests.console_snapshots import RATES, RULE, run, search, serve, trial

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"
END_OF_FRAME = "\x1b[?2026l"


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root, program = logging.getLogger(), logging.getLogger("dbench")
    before = root.handlers[:], root.level, program.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    program.setLevel(before[2])


def live_view(stream: StringIO) -> LiveView:
    return LiveView(Console(file=stream, force_terminal=True, width=80, height=24, _environ={}), UNICODE)


@pytest.mark.parametrize(
    ("dashboard", "terminal", "environment", "live"),
    [
        (True, True, {"TERM": "xterm-256color"}, True),
        (True, True, {"TERM": "xterm", "CI": ""}, True),
        (True, True, {"TERM": "xterm", "CI": "false"}, True),
        (True, True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (False, True, {"TERM": "xterm"}, False),
        (True, False, {"TERM": "xterm"}, False),
        (True, True, {"TERM": "dumb"}, False),
        (True, True, {}, False),
        (True, True, {"TERM": "xterm", "CI": "true"}, False),
        (True, True, {"TERM": "xterm", "CI": "1"}, False),
    ],
)
def test_the_view_is_live_only_where_a_terminal_redraws(
    dashboard: bool, terminal: bool, environment: dict[str, str], live: bool
) -> None:
    stream = Terminal() if terminal else StringIO()
    view = make_view(dashboard=dashboard, stream=stream, environment=environment)
    assert view.is_live == live
    assert isinstance(view, LiveView if live else PlainView)


@pytest.mark.parametrize(
    ("environment", "encoding", "only_ascii"),
    [
        ({}, "utf-8", False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", True),
        ({"LC_ALL": "POSIX"}, "utf-8", True),
        ({"LANG": "de_DE"}, "latin-1", True),
        ({}, "ascii", True),
    ],
)
def test_ascii_where_locale_or_encoding_ask_for_it(
    environment: dict[str, str], encoding: str, only_ascii: bool
) -> None:
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    assert abilities(stream, environment).only_ascii == only_ascii


def test_no_color_leaves_no_colour_in_the_live_view() -> None:
    stream = Terminal()
    with make_view(dashboard=True, stream=stream, environment={"TERM": "xterm-256color", "NO_COLOR": "1"}) as view:
        view.update(run(recent_errors=("bad",)))
        view.print("careful", "yellow")
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", stream.getvalue()) for code in found.split(";")}
    assert codes
    assert not [c for c in codes if c and 30 <= int(c) != 39 and int(c) != 49]


@pytest.mark.parametrize("error", [None, RuntimeError("boom"), SystemExit(143), KeyboardInterrupt()])
def test_the_terminal_is_restored_on_every_exit(error: BaseException | None) -> None:
    stream = StringIO()
    view = live_view(stream)

    def work() -> None:
        with view:
            view.update(run())
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    text = stream.getvalue()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert "64/100" in text
    assert text.endswith(("\n", SHOW_CURSOR))


def test_the_cursor_waits_at_the_left_where_an_echo_moves_nothing() -> None:
    stream = StringIO()
    with live_view(stream) as view:
        view.update(run())
        view.print("a message")
    frames = stream.getvalue().split(END_OF_FRAME)[:-1]
    assert frames
    assert all(frame.endswith("\r") for frame in frames)


def test_nothing_touches_the_terminal_before_the_view_is_entered() -> None:
    stream = Terminal()
    make_view(dashboard=True, stream=stream, environment={"TERM": "xterm"})
    assert stream.getvalue() == ""


def test_the_view_can_be_left_without_a_snapshot() -> None:
    stream = StringIO()
    with live_view(stream):
        pass
    assert "starting" in stream.getvalue()


def test_a_printed_line_comes_above_the_region() -> None:
    stream = StringIO()
    with live_view(stream) as view:
        view.update(run())
        view.print("hello from above")
    text = stream.getvalue()
    assert text.index("hello from above") < text.rindex("dbench run")


def test_the_region_grows_narrower_with_the_terminal() -> None:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=120, height=30, color_system=None, _environ={})
    view = LiveView(console, UNICODE)
    with view:
        view.update(run())
        view.print("wide")
        mark = len(stream.getvalue())
        console.width = 70
        view.print("narrow")
    after = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()[mark:])
    assert max(len(line) for line in after.replace("\r", "\n").split("\n")) == 70


def test_rows_that_a_narrow_terminal_wraps_are_erased_too() -> None:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=120, height=30, color_system=None, _environ={})
    view = LiveView(console, UNICODE)
    with view:
        view.update(run(workers=()))
        view.print("wide")
        drawn = stream.getvalue().rpartition("wide")[2].count("\n")
        mark = len(stream.getvalue())
        console.width = 60
        view.print("narrow")
        wrapped = stream.getvalue()[mark:].partition("narrow")[0]
    assert wrapped.count("\x1b[1A") == (2 * drawn - 1) + (drawn - 1)
    assert f"\x1b[{drawn - 1}B" in wrapped


def test_a_view_that_cannot_be_drawn_does_not_end_the_work() -> None:
    stream = StringIO()
    with live_view(stream) as view:
        view.update(run(num_requests="many"))
    text = stream.getvalue()
    assert "this view cannot be drawn: TypeError" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


class Gone(Terminal):
    """A terminal or pipe that is closed at some time."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.is_gone = False

    def write(self, text: str) -> int:
        if self.is_gone:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("dashboard", [True, False])
def test_a_reader_that_goes_away_does_not_end_the_work(dashboard: bool, error: OSError) -> None:
    stream = Gone(error)
    with make_view(dashboard=dashboard, stream=stream, environment={"TERM": "xterm"}) as view:
        view.update(run())
        stream.is_gone = True
    assert view.is_live == dashboard


def test_frames_and_labels_do_not_lend_their_style_to_figures() -> None:
    head = draw(search(), RATES, Page(80, 23, UNICODE))
    figures = [line for line in head if "64/100" in line.plain or "SLA" in line.plain]
    assert len(figures) == 2
    for line in figures:
        (name,) = [part for part in (RULE, "64/100") if part in line.plain]
        at = line.plain.index(name)
        styles = [str(s.style) for s in line.spans if s.start <= at < s.end and s.style]
        assert styles == []


def test_updates_come_from_any_thread() -> None:
    board = Board()

    def post_often(number: int) -> None:
        for _ in range(50):
            board.post(run(num_sent=number))

    threads = [Thread(target=post_often, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read().progress in [run(num_sent=n) for n in range(4)]


def test_the_board_measures_completions() -> None:
    now = iter((0.0, 2.0))
    board = Board(lambda: next(now))
    board.post(serve(num_completed=10))
    board.post(serve(num_completed=16))
    assert board.read().rates.requests_per_s == 3


class Plain:
    """Plain lines driven by hand."""

    def __init__(self) -> None:
        self.board = Board(lambda: 0.0)
        self.lines = PlainLines(ASCII)

    def due(self, now: float, progress: Progress | None = None) -> list[str]:
        if progress is not None:
            self.board.post(progress)
        return self.lines.due(self.board.read(), now)


def test_plain_says_nothing_before_a_snapshot() -> None:
    assert Plain().due(0.0) == []


def test_plain_speaks_every_few_seconds() -> None:
    plain = Plain()
    assert len(plain.due(0.0, run())) == 1
    assert plain.due(1.0, run(num_sent=70)) == []
    assert len(plain.due(INTERVAL_S, run(num_sent=71))) == 1


def test_plain_does_not_repeat_a_snapshot() -> None:
    plain = Plain()
    plain.due(0.0, run())
    assert plain.due(10 * INTERVAL_S) == []


def test_plain_speaks_at_once_when_the_phase_changes() -> None:
    plain = Plain()
    plain.due(0.0, run())
    (line,) = plain.due(0.1, run(phase=RunPhase.DRAINING))
    assert "draining" in line


def test_plain_says_every_error_once() -> None:
    plain = Plain()
    plain.due(0.0, run())
    assert plain.due(0.1, run(recent_errors=("one",))) == ["error: one"]
    assert plain.due(0.2, run(recent_errors=("one", "two"))) == []
    assert plain.due(0.2 + ERROR_INTERVAL_S) == ["error: two"]
    assert plain.due(0.3 + 2 * ERROR_INTERVAL_S, run(recent_errors=("two", "two"))) == ["error: two"]


def test_plain_says_each_trial_when_it_ends() -> None:
    plain = Plain()
    first = plain.due(0.0, search(trials=(trial(1, 2.0, Verdict.RUNNING),), highest_pass=None, lowest_fail=None))
    assert len(first) == 1
    ended = plain.due(0.1, search(trials=(trial(1, 2.0), trial(2, 4.0, Verdict.RUNNING)), lowest_fail=None))
    assert ended[0] == "trial 1: 2.000 QPS PASS, request_e2e_time:p90<=8s 4.00/8 s (+50.0%)"
    assert "highest pass 2.000, lowest fail - QPS" in ended[1]
    assert plain.due(0.2) == []


def test_plain_lines_name_what_matters() -> None:
    (served,) = Plain().due(0.0, serve())
    assert "ready, up 1:03, 12 in server, 3 pending, 1408 completed, 2 failed, 1 cancelled" in served
    (ran,) = Plain().due(0.0, run())
    assert "64/100 (64%), 1 failed, 5 in flight, QPS 1.93 of 2.00 offered, p50 812 ms" in ran


def test_the_plain_view_has_no_escape_codes_and_says_the_end() -> None:
    stream = Terminal()
    view = make_view(dashboard=True, stream=stream, environment={"TERM": "dumb"})
    install_logging(view, "info")
    with view:
        view.update(run())
        logging.getLogger("dbench.test").warning("careful")
        view.update(run(phase=RunPhase.EXPORTING, num_completed=99, recent_errors=("evil \x1b[2J",)))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "100/100" in text
    assert "error: evil" in text
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in text.splitlines())


def log_view() -> tuple[View, Terminal]:
    stream = Terminal()
    return make_view(dashboard=False, stream=stream, environment={}), stream


def test_a_message_is_time_level_and_text_on_one_line() -> None:
    view, stream = log_view()
    install_logging(view, "info")
    logging.getLogger("dbench.serve").warning("worker %d\nwas lost", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning worker 1 was lost\n", stream.getvalue())


def test_the_level_holds_for_dbench_and_libraries_only_warn() -> None:
    view, stream = log_view()
    install_logging(view, "debug")
    logging.getLogger("dbench.serve").debug("ours")
    logging.getLogger("library").info("theirs")
    logging.getLogger("library").warning("their warning")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()
    assert "their warning" in stream.getvalue()
    install_logging(view, "error")
    logging.getLogger("dbench.serve").warning("quiet now")
    assert "quiet now" not in stream.getvalue()


def test_a_second_installation_takes_the_place_of_the_first() -> None:
    first, old = log_view()
    second, new = log_view()
    install_logging(first, "info")
    install_logging(second, "info")
    logging.getLogger("dbench").info("once")
    assert old.getvalue() == ""
    assert new.getvalue().count("once") == 1


def test_warnings_are_coloured_in_a_live_view() -> None:
    stream = Terminal()
    view = make_view(dashboard=True, stream=stream, environment={"TERM": "xterm-256color"})
    install_logging(view, "info")
    with view:
        logging.getLogger("dbench").warning("careful")
    assert re.search(r"\x1b\[33m\d\d:\d\d:\d\d warning careful", stream.getvalue())


def test_a_traceback_follows_its_message() -> None:
    view, stream = log_view()
    install_logging(view, "info")
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("dbench").exception("it failed")
    lines = stream.getvalue().splitlines()
    assert "error it failed" in lines[0]
    assert lines[-1] == "  ValueError: odd"

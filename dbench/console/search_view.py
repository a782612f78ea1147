"""The view of `dbench search-capacity`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dbench.console.axis import axis, running_qps, verdict_mark
from dbench.console.layout import LABEL, Lines, Page, box, ends, pair_lines, stack, titled
from dbench.console.look import clean, elapsed, number, rate, shorten
from dbench.console.rates import RateTable
from dbench.console.run_view import phase_note, run_summary
from dbench.console.trials import all_rules, rule_label, trials_box
from dbench.progress import SearchProgress, Verdict

MIN_TRIAL_ROWS = 3
MAX_RULE_LINES = 3


def search_view(progress: SearchProgress, rates: RateTable, page: Page) -> Lines:
    """Header with the axis, trial table, the running trial. The table gets the height that the others leave."""
    rules = all_rules(progress.rules, progress.trials)
    head = _head(progress, rules, page)
    running = _running(progress, rates, page)
    room = page.height - len(head) - len(running) - 3
    if room < MIN_TRIAL_ROWS:
        running, room = [], page.height - len(head) - 3
    return stack([head, trials_box(progress.trials, rules, page, max(1, room)), running], page.height)


def _head(progress: SearchProgress, rules: Sequence[str], page: Page) -> Lines:
    g = page.glyphs
    note = Text(f"trials {len(progress.trials)}/{progress.max_iterations}")
    note.append(f" {g.separator} ", style=LABEL).append(elapsed(progress.elapsed_s))
    room = min(MAX_RULE_LINES, max(1, page.height - 20))
    body = [
        *_rule_lines(rules, page, room),
        *axis(progress, page.inner_width, g),
        *_bracket_lines(progress, page),
    ]
    return box(titled("dbench search-capacity", clean(progress.job, g)), body, page, note)


def _rule_lines(rules: Sequence[str], page: Page, max_lines: int) -> Lines:
    """The SLA, with the labels of the table's columns when there are several rules."""
    g, width = page.glyphs, page.inner_width
    if not rules:
        return [Text("SLA none: every rate is run", style=LABEL)]
    lines = [Text().append("SLA", style=LABEL)]
    for index, rule in enumerate(rules):
        label = f" {rule_label(index)} " if len(rules) > 1 else " "
        item = Text.assemble((label, LABEL), clean(rule, g))
        if lines[-1].cell_len + item.cell_len + 1 > width and lines[-1].cell_len > 4:
            if len(lines) == max_lines:
                more = Text(f" {g.ellipsis} {len(rules) - index} more", style=LABEL)
                lines[-1] = shorten(lines[-1], max(4, width - more.cell_len), g).copy().append_text(more)
                break
            lines.append(Text("   "))
        lines[-1].append_text(item)
    return [shorten(line, width, g) for line in lines]


def _bracket_lines(progress: SearchProgress, page: Page) -> Lines:
    """The bracket in figures, and how many trials passed and failed where that fits whole."""
    low, high = progress.highest_pass, progress.lowest_fail
    items = [("highest pass", rate(low)), ("lowest fail", rate(high))]
    if low and high and high > low:
        items.append(("gap", f"{number((high / low - 1) * 100)}%"))
    lines, counts = pair_lines(items, page.inner_width, style="bold"), _verdict_counts(progress, page)
    if len(lines) == 1 and lines[0].cell_len + 3 + counts.cell_len <= page.inner_width:
        return [ends(lines[0], counts, page.inner_width, page.glyphs)]
    return lines


def _verdict_counts(progress: SearchProgress, page: Page) -> Text:
    text = Text()
    for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.INVALID):
        times = sum(t.verdict == verdict for t in progress.trials)
        if times or verdict != Verdict.INVALID:
            mark, style = verdict_mark(verdict, page.glyphs)
            text.append("  " if text else "").append(f"{mark} {times} {verdict.value}", style=style)
    return text


def _running(progress: SearchProgress, rates: RateTable, page: Page) -> Lines:
    if progress.running is None:
        return []
    numbers = [t.number for t in progress.trials if t.verdict == Verdict.RUNNING]
    title = titled(f"trial {numbers[-1]}", f"at {rate(running_qps(progress))} QPS") if numbers else titled("probe")
    return box(title, run_summary(progress.running, rates, page), page, phase_note(progress.running, page))

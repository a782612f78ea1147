"""The search's trial table: one row per trial, each rule's value against its threshold with the margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from dbench.console.axis import verdict_mark
from dbench.console.layout import LABEL, Cell, Column, Lines, Page, box, fits, table, titled
from dbench.console.look import NOTHING, Glyphs, clean, number, rate, shorten
from dbench.progress import RuleProgress, TrialProgress

REASON_WIDTH = 12


@dataclass(frozen=True, slots=True)
class _Style:
    """One way to draw the rules; the first that fits is taken."""

    full_titles: bool
    with_values: bool
    form: str
    """What a cell holds, in words."""


_STYLES = (
    _Style(True, True, "value/limit, margin"),
    _Style(False, True, "value/limit, margin"),
    _Style(False, False, "margin to the limit"),
)
_TIGHTEST_FORM = "margin of the tightest rule"


def trials_box(trials: Sequence[TrialProgress], rules: Sequence[str], page: Page, max_rows: int) -> Lines:
    """Title line and the newest trials, newest last; the first row counts those left out."""
    if not trials:
        return box(titled("trials"), [Text("no trial yet", style=LABEL)], page)
    shown = trials if len(trials) <= max_rows else trials[len(trials) - max(1, max_rows - 1) :]
    form, columns, rows = _layout(shown, rules, page)
    lines = table(columns, rows, page.inner_width, page.glyphs)
    hidden = len(trials) - len(shown)
    if hidden and max_rows > 1:
        earlier = Text(f"{page.glyphs.ellipsis} {hidden} earlier", style=LABEL)
        lines.insert(1, shorten(earlier, page.inner_width, page.glyphs))
    return box(titled("trials"), lines, page, Text(form, style=LABEL) if rules else None)


def all_rules(rules: Sequence[str], trials: Sequence[TrialProgress]) -> list[str]:
    """The rules of the search, then those that only trials name."""
    return list(dict.fromkeys([*rules, *(r.rule for t in trials for r in t.rules)]))


def margin_text(rule: RuleProgress) -> str:
    """The margin in percent; infinite ones as the ends of the scale."""
    share = rule.margin
    if share is None or math.isnan(share):
        return NOTHING
    if abs(share) >= 9.995:
        return ">+999%" if share > 0 else "<-999%"
    return f"{share * 100:+.0f}%" if abs(share) >= 0.9995 else f"{share * 100:+.1f}%"


def value_text(rule: RuleProgress) -> str:
    """`value/threshold` in the threshold's unit: 7.31/8 s, 812/900 ms, 0.02/0.01."""
    factor, unit = 1.0, f" {rule.unit}" if rule.unit else ""
    if rule.unit == "s" and rule.threshold < 1:
        factor, unit = 1000.0, " ms"
    value = None if rule.value is None else rule.value * factor
    return f"{number(value)}/{rule.threshold * factor:.6g}{unit}"


def _layout(
    trials: Sequence[TrialProgress], rules: Sequence[str], page: Page
) -> tuple[str, list[Column], list[list[Cell]]]:
    """The fullest columns that fit, and what they hold; with too many rules, each row's tightest rule alone."""
    g = page.glyphs
    remarks = [_remark(t, g) for t in trials]
    heads = [Column("#", right=True), Column("QPS", right=True), Column("verdict")]
    tails = [Column("reason", rank=1, min_width=REASON_WIDTH)] if any(remarks) else []
    first = [_head_cells(t, g) for t in trials]
    last: list[list[Cell]] = [[Text(r, style=LABEL)] if tails else [] for r in remarks]
    for style in _STYLES:
        middle = [Column(_title(rule, n, rules, style, g), right=True) for n, rule in enumerate(rules)]
        cells: list[list[Cell]] = [[_rule_cell(t, rule, style) for rule in rules] for t in trials]
        columns = [*heads, *middle, *tails]
        rows: list[list[Cell]] = [[*a, *b, *c] for a, b, c in zip(first, cells, last, strict=True)]
        if fits(columns, rows, page.inner_width):
            return style.form, columns, rows
    columns = [*heads, Column("tightest", min_width=8), *tails]
    tightest: list[Cell] = [_tightest_cell(t, rules) for t in trials]
    return _TIGHTEST_FORM, columns, [[*a, b, *c] for a, b, c in zip(first, tightest, last, strict=True)]


def _title(rule: str, index: int, rules: Sequence[str], style: _Style, glyphs: Glyphs) -> str:
    if style.full_titles:
        return clean(rule, glyphs)
    return rule_label(index) if len(rules) > 1 else ("value/limit" if style.with_values else "margin")


def rule_label(index: int) -> str:
    """The short name under which the legend lists a rule."""
    return f"R{index + 1}"


def _head_cells(trial: TrialProgress, glyphs: Glyphs) -> list[Cell]:
    mark, style = verdict_mark(trial.verdict, glyphs)
    return [
        Text(str(trial.number)),
        Text(rate(trial.qps), style="bold"),
        Text(f"{mark} {trial.verdict.value}", style=style),
    ]


def _remark(trial: TrialProgress, glyphs: Glyphs) -> str:
    """Why the verdict, and whether it comes from an earlier run."""
    return ", ".join(part for part in ("cached" if trial.cached else "", clean(trial.reason, glyphs)) if part)


def _rule_cell(trial: TrialProgress, rule: str, style: _Style) -> Text:
    found = next((r for r in trial.rules if r.rule == rule), None)
    if found is None or found.value is None:
        return Text(NOTHING, style=LABEL)
    colour = {True: "green", False: "red", None: LABEL}[found.passed]
    room = Text(f"{margin_text(found):>6}", style=colour)
    return Text.assemble(value_text(found), " ", room) if style.with_values else room


def _tightest_cell(trial: TrialProgress, rules: Sequence[str]) -> Text:
    """Label and margin of the rule that is nearest to its threshold, or furthest beyond it."""
    known = [(r.margin, r) for r in trial.rules if r.margin is not None]
    if not known:
        return Text(NOTHING)
    share, rule = min(known, key=lambda pair: pair[0])
    style = "green" if share >= 0 and rule.passed is not False else "red"
    return Text.assemble(f"{rule_label(rules.index(rule.rule))} ", (margin_text(rule), style))

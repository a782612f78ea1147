"""`dbench search-capacity`: plan, search, print what was found."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from dbench.cli_options import Invocation
from dbench.commands.common import check_writable, open_view, print_json
from dbench.config import Resolved
from dbench.options import SearchOptions
from dbench.search.plan import plan_search
from dbench.search.reevaluate import reevaluate
from dbench.search.results import SearchResults
from dbench.search.sla import Rule, parse_rules
from dbench.search.study import run_search
from dbench.search.summary import result_lines, result_text
from dbench.search.yaml_jobs import is_jobs_file, read_jobs_file


def search_command(invocation: Invocation) -> int:
    """Run what is missing of the search, or judge a stored one again, and print all of it."""
    given = _flat_options(invocation)
    open_view(given)  # for what planning has to say; the jobs of a file may want another view
    stored = given.section(SearchOptions).reevaluate
    if stored is not None:
        results = reevaluate(Path(stored), _rules(given, invocation.config))
    else:
        plan = plan_search(invocation.flags, config_path=invocation.config, environment=os.environ)
        options = plan.jobs[0].options
        check_writable(plan.folder, place=options.place("output_dir"))
        with open_view(options) as view:
            results = run_search(plan, on_progress=view.update)
    _print(results, as_json=invocation.json)
    return results.exit_code


def _flat_options(invocation: Invocation) -> Resolved:
    """The options without those of a file of jobs, which has no place for them at its top."""
    if invocation.config is not None and is_jobs_file(invocation.config):
        return replace(invocation, config=None).resolve()
    return invocation.resolve()


def _rules(given: Resolved, config: Path | None) -> tuple[Rule, ...]:
    rules = parse_rules(given.section(SearchOptions).sla)
    if not rules and config is not None and is_jobs_file(config):
        return read_jobs_file(config).rules
    return rules


def _print(results: SearchResults, *, as_json: bool) -> None:
    if as_json:
        print_json(results.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(result_text(results), soft_wrap=True)
    else:
        print("\n".join(result_lines(results)))

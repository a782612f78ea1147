"""A YAML file of jobs: what every job shares, what each one changes, and the limits they all must keep.

benchmark_base: {model: embedded, trace: arxiv, num_requests: 100}
sla:
  - {metric: request_e2e_time, quantile: 0.9, threshold: 8, op: "<="}
search: {max_iterations: 20, min_search_granularity_pct: 2.5}
jobs:
  - {name: small blocks, start_qps: 1, benchmark_overrides: {block_length: 16}}
  - {name: large blocks, qps_list: [0.5, 1, 2]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dbench.config import YAML_PREFIX, option_table, read_yaml, unknown_option
from dbench.errors import OptionError, SlaError, unknown_name
from dbench.options import COMMAND_SECTIONS, SearchOptions
from dbench.search.sla import Rule, completed, parse_rule, rule_from_mapping

FILE_KEYS = ("benchmark_base", "jobs", "sla", "search")
JOB_KEYS = ("name", "start_qps", "qps_list", "benchmark_overrides")
SEARCH_KEYS = ("max_iterations", "min_search_granularity_pct", "max_qps_cap", "qps_list", "start_qps")
BENCHMARK_KEYS = tuple(option_table((*COMMAND_SECTIONS["serve"], *COMMAND_SECTIONS["run"])))
SEARCH_WIDE_KEYS = ("output_dir", "name", "log_level", "dashboard")
"""Of the whole search, so no job can override them."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One entry of `jobs`, its values not yet checked."""

    name: str
    overrides: Mapping[str, object]
    search: Mapping[str, object]
    """Options of the search: those under `search`, with the job's own rate or rates."""


@dataclass(frozen=True, slots=True)
class JobsFile:
    """The file, its values not yet checked."""

    path: Path
    base: Mapping[str, object]
    rules: tuple[Rule, ...]
    jobs: tuple[JobEntry, ...]

    @property
    def source(self) -> str:
        """The origin of its values."""
        return f"{YAML_PREFIX}{self.path}"


def is_jobs_file(path: Path) -> bool:
    """Whether the file holds jobs, rather than options alone. Raises OptionError for no YAML."""
    return any(entry.key in ("benchmark_base", "jobs", "search") for entry in read_yaml(path))


def read_jobs_file(path: Path) -> JobsFile:
    """The jobs of a file. Raises OptionError or SlaError naming file, key and what was wanted."""
    values: dict[str, object] = {}
    for entry in read_yaml(path):
        _check_keys([entry.key], FILE_KEYS, f"{path} line {entry.line}")
        values[entry.key] = entry.value
    base = _mapping(values.get("benchmark_base"), f"{path}: benchmark_base")
    _check_benchmark_keys(base, f"{path}: benchmark_base")
    search = _mapping(values.get("search"), f"{path}: search")
    _check_keys(search, SEARCH_KEYS, f"{path}: search")
    entries = values.get("jobs")
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"{path}: jobs: got {_shown(entries)}, wanted a list of jobs, each with a name")
    jobs = tuple(_read_job(entry, search, f"{path}: jobs[{n}]") for n, entry in enumerate(entries))
    names = [job.name for job in jobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"{path}: jobs: two have the name {twice!r}; give each its own")
    rules = _read_rules(values.get("sla"), f"{path}: sla")
    for job in jobs:
        if job.search.get("start_qps") is not None and not rules:
            raise SlaError(f"{path}: job {job.name} has start_qps, which needs an sla; add one, or use qps_list")
    return JobsFile(path, base, rules, jobs)


def _read_job(entry: object, search: Mapping[str, object], where: str) -> JobEntry:
    job = _mapping(entry, where)
    _check_keys(job, JOB_KEYS, where)
    name = job.get("name")
    if not isinstance(name, str | int) or not str(name).strip():
        raise OptionError(f"{where}: got the name {_shown(name)}, wanted some text")
    overrides = _mapping(job.get("benchmark_overrides"), f"{where}: benchmark_overrides")
    _check_benchmark_keys(overrides, f"{where}: benchmark_overrides")
    for key in overrides:
        if key in SEARCH_WIDE_KEYS:
            raise OptionError(
                f"{where}: benchmark_overrides: {key} holds for the whole search; put it in benchmark_base"
            )
    given = [key for key in ("start_qps", "qps_list") if job.get(key) is not None]
    if len(given) == 2:
        raise OptionError(f"{where}: both start_qps and qps_list; a list is run as it is, so give one of them")
    own = {key: job[key] if key in given else None for key in ("start_qps", "qps_list")} if given else {}
    return JobEntry(str(name).strip(), overrides, {**search, **own})


def _read_rules(value: object, where: str) -> tuple[Rule, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    rules = []
    for n, item in enumerate(items):
        if isinstance(item, str):
            rules.append(parse_rule(item, f"{where}[{n}]"))
        else:
            rules.append(rule_from_mapping(_mapping(item, f"{where}[{n}]"), f"{where}[{n}]"))
    return completed(rules)


def _check_benchmark_keys(mapping: Mapping[str, object], where: str) -> None:
    for key in mapping:
        if key in option_table((SearchOptions,)):
            raise OptionError(f"{where}: {key} belongs under search or sla, not here")
        if key not in BENCHMARK_KEYS:
            raise OptionError(unknown_option(f"{where}: {key}", key, BENCHMARK_KEYS))


def _check_keys(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in keys:
        if key not in known:
            raise OptionError(f"{where}: {unknown_name('key', key, known)}")


def _mapping(value: object, where: str) -> dict[str, object]:
    """A YAML mapping with text keys; nothing counts as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OptionError(f"{where}: got {_shown(value)}, wanted lines of 'key: value'")
    return value


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]

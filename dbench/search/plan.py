"""What a search will do, worked out and checked before anything is started."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dbench import __version__
from dbench.config import DEFAULT, ENVIRONMENT_PREFIX, Resolved, resolve
from dbench.errors import OptionError, SlaError, UsageError
from dbench.load.schedule import draw_schedule
from dbench.load.target import TargetInfo
from dbench.option_conflicts import refuse_lengths_beside_a_trace
from dbench.options import COMMAND_SECTIONS, EngineOptions, LoadOptions, SamplingOptions, SearchOptions
from dbench.resolve import check_sampling, resolve_own_server
from dbench.search.capacity import SearchSettings
from dbench.search.keys import digest, job_key
from dbench.search.sla import ACCURACY, EXAMPLE, Rule, parse_rules
from dbench.search.space import parse_qps_list, qps_name
from dbench.search.yaml_jobs import JobEntry, JobsFile, is_jobs_file, read_jobs_file
from dbench.serve.deployment import deployment_of

logger = logging.getLogger(__name__)

SECTIONS = COMMAND_SECTIONS["search-capacity"]

SET_BY_THE_SEARCH = {
    "server": "a search starts its own servers",
    "tls_ca": "a search starts its own servers, which have no TLS",
    "qps": "the rate is what is searched; give start_qps or qps_list",
    "concurrency": "a search offers rates, not a closed loop",
}
"""Load options that a search does not take, and why; in the environment they are meant for other commands."""


NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Job:
    """One capacity to find: the options it is found with, and the limits it must keep."""

    name: str
    key: str
    """Equal for jobs whose trials may stand for each other."""
    options: Resolved
    """Every option filled in."""
    rules: tuple[Rule, ...]
    """None: every rate of the list is run, and none is judged."""
    settings: SearchSettings

    @property
    def folder_name(self) -> str:
        return f"{as_folder_name(self.name)}_{self.key}"

    @property
    def sla_text(self) -> str:
        return ", ".join(rule.text for rule in self.rules)


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A folder and the jobs whose results it will hold."""

    name: str
    folder: Path
    jobs: tuple[Job, ...]


def plan_search(flags: Mapping[str, object], *, config_path: Path | None, environment: Mapping[str, str]) -> SearchPlan:
    """The search that flags, environment and a file (options, or jobs) ask for.

    Raises UsageError for anything that cannot be run. The folder depends on the command alone, so that
    the same command finds it again: on the job's key, or for a file of jobs on the path of the file.
    """
    if config_path is not None and is_jobs_file(config_path):
        return _plan_jobs(read_jobs_file(config_path), flags, environment)
    given = _without_what_the_search_sets(resolve(SECTIONS, flags, yaml_path=config_path, environment=environment))
    load = given.section(LoadOptions)
    name = load.name or (Path(load.trace).stem if load.trace else "capacity")
    job = _job(name, given, _flag_rules(given))
    return SearchPlan(name, _folder(given, name, job.key), (job,))


def as_folder_name(name: str) -> str:
    """The name with everything that a file system could mind replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:NAME_LENGTH] or "unnamed"


def _plan_jobs(file: JobsFile, flags: Mapping[str, object], environment: Mapping[str, str]) -> SearchPlan:
    above = resolve(SECTIONS, flags, yaml_path=None, environment=environment)
    above = _without_what_the_search_sets(above)
    base = _with_flags(_defaults().override(file.base, file.source), above)
    flag_rules = _flag_rules(above)
    jobs = tuple(_job_of_file(file, entry, above, flag_rules or file.rules) for entry in file.jobs)
    name = base.section(LoadOptions).name or file.path.stem
    return SearchPlan(name, _folder(base, name, digest(str(file.path.resolve()))), jobs)


def _job_of_file(file: JobsFile, entry: JobEntry, above: Resolved, rules: tuple[Rule, ...]) -> Job:
    """One job; every UsageError names the file and the job."""
    values = {**file.base, **entry.overrides, **entry.search}
    try:
        given = _with_flags(_defaults().override(values, f"{file.source} job {entry.name}"), above)
        return _job(entry.name, _without_what_the_search_sets(given), rules)
    except UsageError as error:
        if str(error).startswith(str(file.path)):  # about an option, whose place says it already
            raise
        raise type(error)(f"{file.path} job {entry.name}: {error}") from None


def _defaults() -> Resolved:
    return resolve(SECTIONS, {}, yaml_path=None, environment={})


def _with_flags(given: Resolved, above: Resolved) -> Resolved:
    """`given` under what environment and flags say."""
    for name, origin in above.origins.items():
        if above.is_explicit(name):
            given = given.replace(name, above.value(name), origin)
    return given


def _flag_rules(given: Resolved) -> tuple[Rule, ...]:
    return parse_rules(given.section(SearchOptions).sla)


def _folder(given: Resolved, name: str, key: str) -> Path:
    return Path(given.section(LoadOptions).output_dir) / f"search-{as_folder_name(name)}-{key}"


def _without_what_the_search_sets(given: Resolved) -> Resolved:
    """The options with the defaults of SET_BY_THE_SEARCH. Raises OptionError where one was given for this search."""
    for name, why in SET_BY_THE_SEARCH.items():
        if given.origins[name].startswith(ENVIRONMENT_PREFIX):
            logger.info("%s is passed over: %s", given.place(name), why)
            given = given.replace(name, _defaults().value(name), DEFAULT)
        elif given.is_explicit(name):
            raise OptionError(f"{given.place(name)}: got {given.value(name)}, but {why}; leave it out")
    return given


def _job(name: str, given: Resolved, rules: tuple[Rule, ...]) -> Job:
    settings = _settings(given)
    if not rules and not settings.qps_list:
        raise SlaError(f"no limit to search by; give --sla ({EXAMPLE}), or --qps-list to run rates without")
    if any(rule.metric == ACCURACY for rule in rules) and not given.section(LoadOptions).check_answers:
        raise SlaError(f"--sla: {ACCURACY} is known only where answers are checked; add --trace tasks --check-answers")
    check_sampling(given)
    refuse_lengths_beside_a_trace(given)
    resolved = resolve_own_server(given)
    _check_load(resolved)
    return Job(name, job_key(given), resolved, rules, settings)


def _check_load(options: Resolved) -> None:
    """Draw the requests as every trial will, so that what cannot be sent is refused before a server starts."""
    deployment = deployment_of(options.section(EngineOptions))
    info = TargetInfo(
        model=deployment.served_model_name,
        version=__version__,
        block_length=deployment.options.block_length,
        max_gen_len=deployment.max_gen_len,
        max_model_len=deployment.max_model_len,
        vocabulary_size=deployment.model.vocab_size,
        reserved_token_ids=frozenset(deployment.model.reserved_token_ids),
        num_workers=len(deployment.devices),
        resolved_config_json="",
        environment_json="",
        tokenizer=deployment.tokenizer,
    )
    draw_schedule(options.section(LoadOptions), options.section(SamplingOptions), info)


def _settings(given: Resolved) -> SearchSettings:
    search = given.section(SearchOptions)
    place = given.place("qps_list")
    qps_list = parse_qps_list(search.qps_list, place) if search.qps_list is not None else ()
    if qps_list and search.start_qps is not None:
        raise OptionError(
            f"{place}: got {search.qps_list} and a start_qps; a list is run as it is, so give one of them"
        )
    cap = search.max_qps_cap
    if cap is not None and qps_list and max(qps_list) > cap:
        raise OptionError(
            f"{place}: got {qps_name(max(qps_list))}, above max_qps_cap {qps_name(cap)}; lower one of them"
        )
    return SearchSettings(search.start_qps, search.max_iterations, search.min_search_granularity_pct, cap, qps_list)

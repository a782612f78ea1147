"""What a command or a file of jobs asks for."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from dbench.errors import OptionError, SlaError, TraceError, UsageError
from dbench.options import EngineOptions, LoadOptions
from dbench.search.plan import SearchPlan, as_folder_name, plan_search
from dbench.search.sla import IMPLICIT_ERROR_RULE, parse_rule

E2E = parse_rule("request_e2e_time:p90<=8s")

JOBS = """
benchmark_base: {trace: arxiv, num_requests: 30, block_length: 16}
sla:
  - {metric: request_e2e_time, quantile: 0.9, threshold: 8, op: "<="}
search: {max_iterations: 7, min_search_granularity_pct: 5}
jobs:
  - name: small
    start_qps: 0.5
  - name: large
    qps_list: [0.5, 1, 2]
    benchmark_overrides: {block_length: 32, length_scale: 0.1}
"""


def plan(
    tmp_path: Path, text: str | None = None, environment: dict[str, str] | None = None, **flags: object
) -> SearchPlan:
    config = None
    if text is not None:
        config = tmp_path / "search.yaml"
        config.write_text(text)
    return plan_search({"output_dir": str(tmp_path), **flags}, config_path=config, environment=environment or {})


def test_flags_make_one_job_named_after_its_trace(tmp_path: Path) -> None:
    found = plan(tmp_path, sla=["request_e2e_time:p90<=8s"], trace="arxiv", start_qps=2, max_iterations=5)
    (job,) = found.jobs
    assert found.name == job.name == "arxiv"
    assert job.rules == (E2E, IMPLICIT_ERROR_RULE)
    assert (job.settings.start_qps, job.settings.max_iterations) == (2, 5)
    assert found.folder == tmp_path / f"search-arxiv-{job.key}"
    assert job.options.section(EngineOptions).max_model_len is not None


def test_a_file_of_options_is_one_job_too(tmp_path: Path) -> None:
    found = plan(tmp_path, "sla: ['request_e2e_time:p90<=8s']\nname: mine\nstart_qps: 3\n")
    assert found.jobs[0].rules[0] == E2E
    assert found.name == "mine"


def test_jobs_share_the_base_and_change_what_they_override(tmp_path: Path) -> None:
    small, large = plan(tmp_path, JOBS).jobs
    assert (small.options.value("block_length"), large.options.value("block_length")) == (16, 32)
    assert (small.options.value("length_scale"), large.options.value("length_scale")) == (1.0, 0.1)
    assert small.options.section(LoadOptions).num_requests == large.options.section(LoadOptions).num_requests == 30
    assert small.rules == large.rules == (E2E, IMPLICIT_ERROR_RULE)
    assert (small.settings.start_qps, small.settings.qps_list) == (0.5, ())
    assert (large.settings.start_qps, large.settings.qps_list) == (None, (0.5, 1, 2))
    assert small.settings.granularity_pct == large.settings.granularity_pct == 5
    assert small.key != large.key


def test_flags_and_environment_stand_above_the_file(tmp_path: Path) -> None:
    found = plan(tmp_path, JOBS, {"DBENCH_MAX_ITERATIONS": "3"}, block_length="64", sla=["error_rate<=0.5"])
    assert [job.options.value("block_length") for job in found.jobs] == [64, 64]
    assert [job.settings.max_iterations for job in found.jobs] == [3, 3]
    assert [job.rules for job in found.jobs] == [(parse_rule("error_rate<=0.5"),)] * 2


@pytest.mark.parametrize(
    ("variable", "value", "name", "default"),
    [("DBENCH_SERVER", "127.0.0.1:1", "server", None), ("DBENCH_QPS", "7", "qps", 1.0)],
)
@pytest.mark.parametrize("text", [None, JOBS])
def test_variables_that_are_meant_for_other_commands_are_passed_over(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    name: str,
    default: object,
    text: str | None,
) -> None:
    with caplog.at_level(logging.INFO):
        found = plan(tmp_path, text, {variable: value}, sla=["error_rate<=0.5"])
    assert [job.options.value(name) for job in found.jobs] == [default] * len(found.jobs)
    assert [record.message.partition(":")[0] for record in caplog.records] == [f"{variable} is passed over"]
    assert found.folder == plan(tmp_path, text, sla=["error_rate<=0.5"]).folder


def test_a_job_without_rates_takes_those_of_the_search(tmp_path: Path) -> None:
    text = "search: {qps_list: [1, 2]}\njobs:\n  - name: a\n  - {name: b, start_qps: 1}\nsla: ['error_rate<=0.1']\n"
    a, b = plan(tmp_path, text).jobs
    assert (a.settings.qps_list, b.settings.qps_list) == ((1, 2), ())


def test_a_list_of_rates_needs_no_sla(tmp_path: Path) -> None:
    (job,) = plan(tmp_path, "jobs:\n  - {name: a, qps_list: [1]}\n").jobs
    assert job.rules == ()


def test_the_folder_of_a_file_stays_when_a_job_is_added(tmp_path: Path) -> None:
    first = plan(tmp_path, JOBS)
    second = plan(tmp_path, JOBS + "  - {name: third, start_qps: 1}\n")
    assert first.folder == second.folder
    assert [j.folder_name for j in first.jobs] == [j.folder_name for j in second.jobs[:2]]


def test_a_changed_trace_file_is_another_search(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_len,gen_len\n10,32\n")
    before = plan(tmp_path, sla=["error_rate<=0.1"], trace=str(trace))
    trace.write_text("prompt_len,gen_len\n10,64\n")
    after = plan(tmp_path, sla=["error_rate<=0.1"], trace=str(trace))
    assert before.name == after.name == "lengths"
    assert before.folder != after.folder


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        ({}, SlaError, "no limit to search by"),
        ({"sla": ["latency:p90<=8s"]}, SlaError, "unknown metric 'latency'"),
        ({"sla": ["error_rate<=1"], "server": "127.0.0.1:1"}, OptionError, "--server: got 127.0.0.1:1"),
        ({"sla": ["error_rate<=1"], "qps": "2"}, OptionError, "--qps: got 2"),
        ({"sla": ["error_rate<=1"], "concurrency": "2"}, OptionError, "--concurrency: got 2"),
        ({"sla": ["error_rate<=1"], "start_qps": "1", "qps_list": "1,2"}, OptionError, "give one of them"),
        ({"qps_list": "1,x"}, OptionError, "--qps-list: got 'x'"),
        ({"qps_list": "1,9", "max_qps_cap": "4"}, OptionError, "--qps-list: got 9, above max_qps_cap 4"),
        ({"sla": ["error_rate<=1"], "trace": "arxive"}, TraceError, "did you mean 'arxiv'"),
        ({"sla": ["error_rate<=1"], "model": "/no/such/dir"}, UsageError, "/no/such/dir"),
        ({"sla": ["error_rate<=1"], "length_type": "trace"}, OptionError, "no trace is given"),
        ({"sla": ["error_rate<=1"], "trace": "arxiv", "length_type": "fixed"}, OptionError, "length_type is fixed"),
        ({"sla": ["error_rate<=1"], "length_scale": 0.5}, OptionError, "need a trace"),
        ({"sla": ["error_rate<=1"], "max_total_tokens": 8192, "max_model_len": 512}, OptionError, "is 8192"),
        ({"sla": ["error_rate<=1"], "gen_tokens": 600, "max_model_len": 512}, TraceError, "generates 608 tokens"),
        ({"sla": ["error_rate<=1"], "gen_tokens": 64, "max_gen_len": 32}, TraceError, "max_gen_len 32"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_at_once(
    tmp_path: Path, flags: dict[str, Any], error: type[UsageError], said: str
) -> None:
    with pytest.raises(error) as caught:
        plan(tmp_path, **flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: []\njobs: []\n", "unknown key 'job'; did you mean 'jobs'?"),
        ("jobs: []\n", "jobs: got [], wanted a list of jobs"),
        ("benchmark_base: {}\n", "jobs: got nothing"),
        ("jobs: [{qps_list: [1]}]\n", "jobs[0]: got the name nothing"),
        ("jobs: [{name: a, qps: 1}]\n", "jobs[0]: unknown key 'qps' (known:"),
        ("jobs: [{name: a, qps_list: [1], start_qps: 1}]\n", "both start_qps and qps_list"),
        ("jobs: [{name: a, start_qps: 1}]\n", "job a has start_qps, which needs an sla"),
        ("jobs: [{name: a, qps_list: [1]}, {name: a, qps_list: [2]}]\n", "two have the name 'a'"),
        ("jobs: [{name: a, qps_list: [1]}]\nsearch: {max_iteration: 3}\n", "did you mean 'max_iterations'?"),
        ("jobs: [{name: a, qps_list: [1]}]\nbenchmark_base: {blok_length: 16}\n", "did you mean block_length?"),
        ("jobs: [{name: a, qps_list: [1]}]\nbenchmark_base: {max_iterations: 3}\n", "belongs under search or sla"),
        ("jobs: [{name: a, qps_list: [1], benchmark_overrides: {output_dir: x}}]\n", "put it in benchmark_base"),
        (
            "jobs: [{name: a, qps_list: [1], benchmark_overrides: {server: 'x:1'}}]\n",
            "search.yaml job a: server: got x:1",
        ),
        ("jobs: [{name: a, qps_list: [1]}]\nbenchmark_base: {qps: 2}\n", "search.yaml job a: qps: got 2"),
        ("jobs: [{name: a, qps_list: [1]}]\nbenchmark_base: {block_length: 0}\n", "block_length: got 0"),
        ("jobs: [{name: a, qps_list: [1, fast]}]\n", "qps_list: got 'fast'"),
        (
            "jobs: [{name: a, qps_list: [1]}]\nsla: [{metric: request_e2e_time, threshold: 8}]\n",
            "sla[0]: got nothing of request_e2e_time",
        ),
        ("jobs: [a]\n", "jobs[0]: got 'a', wanted lines of 'key: value'"),
        (
            "jobs: [{name: a, qps_list: [1]}, {name: b, qps_list: [1], benchmark_overrides: {model: /no/such/dir}}]\n",
            "search.yaml job b: ",
        ),
        (
            "jobs: [{name: a, qps_list: [1], benchmark_overrides: {trace: arxive}}]\n",
            "search.yaml job a: unknown trace 'arxive'",
        ),
        ("jobs: [{name: a}]\n", "search.yaml job a: no limit to search by"),
    ],
)
def test_a_wrong_file_of_jobs_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, text)
    assert said in str(caught.value)
    assert "search.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "folder"), [("arxiv", "arxiv"), ("a b/c", "a-b-c"), ("..", "unnamed"), ("é", "unnamed")]
)
def test_names_become_folder_names(name: str, folder: str) -> None:
    assert as_folder_name(name) == folder


def test_the_example_of_the_documentation_can_be_run(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "capacity-search.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    small, large, curve = plan(tmp_path, example).jobs
    assert (small.settings.start_qps, large.settings.start_qps, curve.settings.qps_list) == (1, None, (0.5, 1, 2, 4))
    assert [rule.text for rule in curve.rules] == ["request_e2e_time:p90<=8s", "error_rate<=0.02"]

"""Every metric that a rule may name has a value in a run that went well."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from dbench.load.driver import run_load
from dbench.load.fake_target import InProcessTarget, Script
from dbench.metrics import RunData, load_run
from dbench.options import LoadOptions, SamplingOptions
from dbench.progress import Verdict
from dbench.search.sla import PLAIN_METRICS, Rule, evaluate, known_metrics
from dbench.search.verdict import RunMeasurements, TrialEnd, judge


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    run_dir: Path = tmp_path_factory.mktemp("run")
    load = LoadOptions(qps=200.0, num_requests=20, interval_type="static", trace="tasks", check_answers=True)
    target = InProcessTarget(Script(service_time=lambda request: 0.002))
    result = asyncio.run(run_load(target, load, SamplingOptions(), run_dir))
    assert result.reason == "complete"
    return load_run(run_dir)


@pytest.mark.parametrize("metric", known_metrics())
@pytest.mark.parametrize("quantile", [0.5, None])
def test_a_metric_has_a_value(data: RunData, metric: str, quantile: float | None) -> None:
    rule = Rule(metric, None if metric in PLAIN_METRICS else quantile, "<=", 1e9)
    (result,) = evaluate([rule], RunMeasurements(data))
    assert math.isfinite(result.value)
    assert result.passed
    assert judge(TrialEnd.COMPLETE, "", data, [rule]).verdict in (Verdict.PASS, Verdict.INVALID)

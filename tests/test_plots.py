"""Figures draw what their CSV holds, and say what they must."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbench.measure import curves
from dbench.measure.run_data import RunData
from dbench.plots import Outcome, Title, TrialPoint, latency_cdfs, sla_metric_vs_qps
from dbench.plots.canvas import Draw, save_figure, style
from dbench.plots.run_figures import (
    arrivals_figure,
    cdf_figure,
    depths_figure,
    kv_figure,
    utilization_figure,
)
from dbench.plots.search_figures import cdfs_figure, qps_figure
from dbench.search.sla import parse_rule
from tests.event_builders import batch, run_of, simple_requests, state, worker_up

TITLE = Title("What is shown", "embedded · arxiv · 2 QPS offered")
RULE = parse_rule("request_e2e_time:p90<=2s")

LATENCIES = [0.51234567, 1.2, None, 3.4, 0.9, 2.2]


def a_run() -> RunData:
    return run_of(
        *simple_requests(LATENCIES),
        worker_up(worker_id=0),
        worker_up(worker_id=1),
        state(1.0, "busy", waiting=2, active=1, pages_used=5),
        state(3.0, "queued", waiting=1),
        state(4.0, "idle"),
        batch(1.0, 2.0, prompt_len=14),
        batch(2.0, 3.0, gen_len=4),
    )


def texts(figure: Figure) -> list[str]:
    found = [text.get_text() for axes in figure.axes for text in (*axes.texts, axes.title)]
    found += [axes.get_title(loc="left") for axes in figure.axes]
    return found + [text for axes in figure.axes for text in legend_texts(axes)]


def legend_texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def line(figure: Figure, panel: int = 0, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = figure.axes[panel].lines[index].get_data()
    return np.asarray(x), np.asarray(y)


def drawn_and_stored(table: pd.DataFrame, draw: Draw, folder: Path) -> tuple[Figure, pd.DataFrame]:
    """The figure that save_figure made, and the CSV beside it."""
    figures: list[Figure] = []

    def keep(rows: pd.DataFrame, title: Title) -> Figure:
        figures.append(draw(rows, title))
        return figures[0]

    save_figure(table, folder / "figure", TITLE, keep)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    return figures[0], pd.read_csv(folder / "figure.csv")


def test_a_cdf_draws_the_values_of_its_csv(tmp_path: Path) -> None:
    figure, stored = drawn_and_stored(curves.metric_cdf(a_run(), "request_e2e_time"), cdf_figure, tmp_path)
    x, y = line(figure)
    assert x[1:].tolist() == stored["request_e2e_time"].tolist()
    assert y[1:].tolist() == stored["cdf"].tolist()
    assert stored["request_e2e_time"][0] == 0.5123
    assert list(stored.columns) == ["cdf", "request_e2e_time", "worker_id", "schema_version"]


def test_a_cdf_with_failures_ends_below_1_and_says_so(tmp_path: Path) -> None:
    figure, stored = drawn_and_stored(curves.metric_cdf(a_run(), "request_e2e_time"), cdf_figure, tmp_path)
    assert stored["cdf"].max() == pytest.approx(5 / 6, abs=1e-4)
    assert "16.7% of the requests failed: the curve ends there" in texts(figure)
    assert [text for text in texts(figure) if text.startswith("p")] == ["p50  1.2 s"]


def test_arrivals_draw_the_values_of_their_csv(tmp_path: Path) -> None:
    figure, stored = drawn_and_stored(curves.arrivals_and_completions(a_run()), arrivals_figure, tmp_path)
    for index, name in enumerate(("arrivals", "completions")):
        x, y = line(figure, 0, index)
        assert x.tolist() == stored["time_s"].tolist()
        assert y.tolist() == stored[name].tolist()
    assert line(figure, 1)[1].tolist() == stored["in_flight"].tolist()
    last = stored.iloc[-1]
    assert (last["arrivals"], last["completions"], last["failures"], last["in_flight"]) == (6, 5, 1, 0)
    assert figure.axes[0].get_xlim()[1] > last["time_s"]  # the last step stands inside the border


@pytest.mark.parametrize(
    ("draw", "columns", "scale"),
    [
        (depths_figure, ("queue_depth_active", "queue_depth_waiting"), 1.0),
        (kv_figure, ("kv_page_utilization_ratio",), 100.0),
    ],
)
def test_each_worker_has_a_panel_with_the_values_of_the_csv(
    tmp_path: Path, draw: Draw, columns: tuple[str, ...], scale: float
) -> None:
    figure, stored = drawn_and_stored(curves.worker_depths(a_run()), draw, tmp_path)
    assert [axes.get_ylabel() for axes in figure.axes] == ["worker 0", "worker 1"]
    for panel, (_, own) in enumerate(stored.groupby("worker_id")):
        for index, name in enumerate(columns):
            x, y = line(figure, panel, index)
            assert x.tolist() == own["time_s"].tolist()
            assert y == pytest.approx(scale * own[name].to_numpy())


def test_utilization_stacks_the_shares_of_the_csv(tmp_path: Path) -> None:
    figure, stored = drawn_and_stored(curves.worker_utilization(a_run()), utilization_figure, tmp_path)
    assert [t for t in texts(figure) if t in ("prefill", "mixed", "decode", "queued", "lost")] == [
        "prefill",
        "decode",
        "queued",
    ]
    first = stored[stored["worker_id"] == 0]
    top = max(np.asarray(path.vertices)[:, 1].max() for path in figure.axes[0].collections[-1].get_paths())
    assert top == pytest.approx(100 * first[list(curves.STATE_RATIOS)].sum(axis=1).max())


def test_bins_are_time_weighted_means() -> None:
    depths = curves.worker_depths(a_run())
    first = depths[depths["worker_id"] == 0]
    width = first["time_s"].diff().mean()
    assert (first["queue_depth_waiting"] * width).sum() == pytest.approx(2 * 2.0 + 1.0)
    assert (first["kv_page_utilization_ratio"] * width).sum() == pytest.approx(0.5 * 2.0)


def test_busy_shares_add_up_to_the_time_of_the_batches() -> None:
    shares = curves.worker_utilization(a_run())
    width = shares["time_s"].diff().median()
    assert (shares["prefill_ratio"] * width).sum() == pytest.approx(1.0)
    assert (shares["decode_ratio"] * width).sum() == pytest.approx(1.0)
    assert (shares["queued_ratio"] * width).sum() == pytest.approx(1.0)


def test_a_long_run_keeps_its_curves_to_1001_points() -> None:
    run = run_of(*simple_requests([0.3] * 3000, gap=0.1))
    flow = curves.arrivals_and_completions(run)
    assert len(flow) == 1001
    assert (flow["arrivals"].iloc[-1], flow["completions"].iloc[-1]) == (3000, 3000)
    assert len(curves.metric_cdf(run, "request_client_lag")) <= 1001


def test_a_figure_without_values_says_so(tmp_path: Path) -> None:
    save_figure(curves.metric_cdf(run_of(), "request_e2e_time"), tmp_path / "empty", TITLE, cdf_figure)
    assert (tmp_path / "empty.csv").read_text() == "cdf,request_e2e_time,worker_id,schema_version\n"
    assert (tmp_path / "empty.png").exists()


def test_titles_name_the_figure_and_the_run() -> None:
    with style():
        figure = cdf_figure(curves.metric_cdf(a_run(), "request_e2e_time"), TITLE)
    assert {TITLE.text, TITLE.run} <= set(texts(figure))
    assert figure.axes[0].get_xlabel() == "end-to-end latency (s)"


def trials(*points: tuple[float, float, str]) -> pd.DataFrame:
    return pd.DataFrame(points, columns=["qps", "request_e2e_time", "verdict"])


def test_the_search_figure_marks_every_trial_and_names_limit_and_capacity() -> None:
    table = trials((1, 0.8, "pass"), (2, 1.5, "pass"), (3, 2.6, "fail"), (2.5, 2.1, "invalid"), (4, math.inf, "fail"))
    with style():
        figure = qps_figure(table, TITLE, RULE, Outcome(2, 3, 2))
    (axes,) = figure.axes
    assert legend_texts(axes) == [
        "pass",
        "fail",
        "invalid (load generator)",
        "bracket",
    ]
    offsets = [np.asarray(c.get_offsets()) for c in axes.collections if c.get_paths()]
    marks = np.concatenate([found for found in offsets if len(found)])
    assert {1, 2, 3, 2.5, 4} <= set(marks[:, 0])
    assert {"limit ≤ 2 s", "capacity 2 QPS"} <= set(texts(figure))
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "p90 end-to-end latency (s)"


def test_an_infinite_value_is_drawn_inside_the_figure_above_all_others() -> None:
    table = trials((1, 0.8, "pass"), (2, 900.0, "fail"), (4, math.inf, "fail"))
    with style():
        (axes,) = qps_figure(table, TITLE, RULE, Outcome(1, 2, 1)).axes
    heights = {x: y for c in axes.collections for x, y in np.asarray(c.get_offsets()).reshape(-1, 2) if x == 4}
    assert 900 < heights[4] < axes.get_ylim()[1]


def test_a_failure_where_large_values_are_wanted_is_drawn_at_the_foot() -> None:
    rule = parse_rule("request_tokens_unmasked_per_forward_pass:p50>=2")
    table = trials((1, 2.8, "pass"), (2, -math.inf, "fail")).rename(columns={"request_e2e_time": rule.metric})
    with style():
        (axes,) = qps_figure(table, TITLE, rule, Outcome(1, 2, 1)).axes
    heights = {x: y for c in axes.collections for x, y in np.asarray(c.get_offsets()).reshape(-1, 2) if x == 2}
    assert axes.get_ylim()[0] < heights[2] < 2


def test_search_figures_write_their_csv_with_full_rates(tmp_path: Path) -> None:
    points = [TrialPoint(0.00246913, math.inf, "fail"), TrialPoint(0.00123456789, 1.23456, "pass")]
    sla_metric_vs_qps(points, RULE, Outcome(0.00123456789, 0.00246913, 0.00123456789), tmp_path / "a", TITLE)
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "qps,request_e2e_time,verdict,schema_version",
        "0.00123456789,1.2346,pass,1",
        "0.00246913,inf,fail,1",
    ]
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("points", [[], [TrialPoint(1, math.inf, "fail")], [TrialPoint(1, 0.0, "pass")]])
def test_a_search_of_few_trials_still_has_its_figure(tmp_path: Path, points: list[TrialPoint]) -> None:
    sla_metric_vs_qps(points, RULE, Outcome(None, None, None), tmp_path / "a", TITLE)
    assert (tmp_path / "a.png").exists()


def test_latency_curves_of_two_trials_share_a_figure_and_a_csv(tmp_path: Path) -> None:
    latency_cdfs({"last pass": [1.0, 2.0], "first fail": [2.0, math.inf]}, RULE, tmp_path / "cdfs", TITLE)
    stored = pd.read_csv(tmp_path / "cdfs.csv")
    assert stored["run"].tolist() == ["last pass", "last pass", "first fail"]
    assert stored["cdf"].tolist() == [0.5, 1.0, 0.5]
    with style():
        figure = cdfs_figure(stored, TITLE, RULE.threshold)
    assert {"last pass", "first fail", "limit 2 s"} <= set(texts(figure))


def test_styles_stay_inside_a_figure() -> None:
    from matplotlib import rcParams

    before = dict(rcParams)
    with style():
        assert rcParams["axes.grid"] is True
    assert dict(rcParams) == before

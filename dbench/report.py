"""The files of a run, all made from its events.jsonl: results, tables, and figures with the CSV that each draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbench.measure import curves
from dbench.metrics import (
    REQUEST_METRICS,
    RunData,
    RunSummary,
    batch_table,
    block_table,
    load_run,
    request_table,
    summarize,
    worker_summary,
    worker_timeline,
)
from dbench.plots.canvas import Title, save_figure
from dbench.plots.run_figures import (
    arrivals_figure,
    cdf_figure,
    depths_figure,
    kv_figure,
    utilization_figure,
)
from dbench.result_files import write_csv, write_json
from dbench.run_folder import read_config

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RESULTS_FILE = "benchmark_results.json"
REQUESTS_FILE = "request_metrics.csv"
BLOCKS_FILE = "block_metrics.csv"
WORKERS_FILE = "worker_summary.csv"
TIMELINE_FILE = "worker_timeline.csv"
BATCHES_FILE = "worker_batch_metrics.csv"
REQUEST_PLOTS = "request_plots"
WORKER_PLOTS = "worker_plots"

CDF_METRICS = (
    "request_e2e_time",
    "request_time_to_first_block",
    "request_time_between_tokens",
    "request_tokens_unmasked_per_forward_pass",
)
"""Each gets a figure; request_e2e_time's is latency_cdf."""


@dataclass(frozen=True, slots=True)
class _Figure:
    stem: Path
    text: str
    table: pd.DataFrame
    draw: Callable[[pd.DataFrame, Title], Figure]


def write_report(run_dir: Path, *, with_batches: bool | None = None) -> RunSummary:
    """Write or replace every file of the report, and return the summary in it.

    worker_batch_metrics.csv is written if `with_batches`, unset: if config.yaml says so.
    Raises UsageError when the folder has no readable events.jsonl, RunError when a file cannot be written.
    """
    data = load_run(run_dir)
    config = read_config(run_dir)
    summary = summarize(data)
    requests, workers = request_table(data), worker_summary(data)
    write_json(
        run_dir / RESULTS_FILE,
        {"summary": asdict(summary), "workers": records(workers), "requests": records(requests)},
    )
    write_csv(run_dir / REQUESTS_FILE, requests)
    write_csv(run_dir / BLOCKS_FILE, block_table(data))
    write_csv(run_dir / WORKERS_FILE, workers)
    write_csv(run_dir / TIMELINE_FILE, worker_timeline(data))
    if with_batches is None:
        with_batches = config.get("enable_individual_batch_metrics") is True
    if with_batches:
        write_csv(run_dir / BATCHES_FILE, batch_table(data))
    run = run_title(data, config)
    for figure in _figures(data):
        save_figure(figure.table, figure.stem, Title(figure.text, run), figure.draw)
    return summary


def run_title(data: RunData, config: Mapping[str, Any]) -> str:
    """Which run a figure shows: model, lengths, rate, number of requests."""
    model = config.get("served_model_name") or config.get("model")
    load, qps = data.load, data.offered_qps
    lengths = (load.trace or load.lengths) if load else ""
    rate = ""
    if qps is not None:
        rate = "closed loop" if qps == 0 else "all at once" if qps == float("inf") else f"{qps:.4g} QPS offered"
    parts = (
        Path(str(model)).name if model else "",
        lengths,
        rate,
        f"{data.num_requests} request{'s' * (data.num_requests != 1)}",
    )
    return " · ".join(part for part in parts if part)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain Python values, a missing one as None."""
    columns = {name: [None if missing else value for value, missing in _cells(table[name])] for name in table.columns}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells(column: pd.Series) -> Any:
    return zip(column.tolist(), column.isna().tolist(), strict=True)


def _figures(data: RunData) -> Iterator[_Figure]:
    requests, workers = data.run_dir / REQUEST_PLOTS, data.run_dir / WORKER_PLOTS
    for metric in CDF_METRICS:
        name = "latency_cdf" if metric == "request_e2e_time" else f"{metric}_cdf"
        label = REQUEST_METRICS[metric].label
        yield _Figure(requests / name, label[:1].upper() + label[1:], curves.metric_cdf(data, metric), cdf_figure)
    flow = curves.arrivals_and_completions(data)
    yield _Figure(requests / "arrivals_and_completions", "Arrivals and completions", flow, arrivals_figure)
    depths = curves.worker_depths(data)
    queues = depths[["time_s", "queue_depth_waiting", "queue_depth_active", "worker_id"]]
    yield _Figure(workers / "queue_depth", "Waiting and active in each worker", queues, depths_figure)
    pages = depths[["time_s", "kv_page_utilization_ratio", "worker_id"]]
    yield _Figure(workers / "kv_page_utilization_ratio", "KV pages in use", pages, kv_figure)
    shares = curves.worker_utilization(data)
    yield _Figure(workers / "utilization", "What each worker did", shares, utilization_figure)

"""Figures: `run_figures` of one run, `search_figures` of a capacity search, `canvas` what they have in common."""

from dbench.plots.canvas import Title
from dbench.plots.search_figures import AT_LEAST, Outcome, TrialPoint, latency_cdfs, sla_metric_vs_qps

__all__ = ["AT_LEAST", "Outcome", "Title", "TrialPoint", "latency_cdfs", "sla_metric_vs_qps"]

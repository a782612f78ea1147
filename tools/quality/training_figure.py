"""The picture of a training run: its loss, and how many held-out problems its checkpoints answered right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbench.load.tasks import TASKS
from dbench.plots.canvas import DPI, LINE_COLOURS, Title, legend_above, log_y, new_figure, style
from dbench.result_files import replacing

ALL = "all"


def draw_training(record: Mapping[str, Any], path: Path) -> None:
    """`record` is a training.json of tools/train_embedded.py."""
    curve, evaluations = record["loss_curve"], record["evaluations"]
    num_problems = evaluations[0][ALL]["num_problems"]
    with style():
        text = f"{record['step']:,} steps on one {record['device']}; {num_problems} held-out problems per checkpoint"
        figure, (loss, accuracy) = new_figure(Title("Training of the embedded model", text), (0.9, 0.9))
        steps, losses = [point["step"] for point in curve], [point["loss"] for point in curve]
        loss.plot(steps, losses, color=LINE_COLOURS[0], linewidth=1.2)
        log_y(loss, min(losses) / 1.5, max(losses) * 1.5)
        loss.set_ylabel("loss per answer token")
        at = [evaluation["step"] for evaluation in evaluations]
        for task, colour in zip(TASKS, LINE_COLOURS, strict=True):
            right = [100 * evaluation[task]["accuracy"] for evaluation in evaluations]
            accuracy.plot(at, right, color=colour, marker="o", markersize=3.5, linewidth=1.3, label=task)
        accuracy.set_ylabel("right answers (%)")
        accuracy.set_xlabel("step")
        accuracy.set_xlim(0, 1.02 * record["step"])
        legend_above(accuracy)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": "dbench"})

"""The picture of the table: right answers and speed against tokens per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dbench.plots.canvas import BLUE, DPI, GREY, ORANGE, Title, log_x, new_figure, style
from dbench.result_files import replacing
from tools.quality.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE)
MARKERS = {"threshold": "o", "rule": "s", "block length": "^", "cache": "X"}


def draw_quality(rows: Sequence[Row], path: Path) -> None:
    """One colour per model, one mark per kind of setting; the thresholds are joined by a line."""
    models = list(dict.fromkeys(row.model for row in rows))
    with style():
        text = f"{rows[0].answers.num_asked} problems, 8 at a time, one CPU worker"
        figure, (quality, speed) = new_figure(Title("Right answers and speed", text), (1.0, 0.9), len(MARKERS) + 2)
        for colour, model in zip(COLOURS, models, strict=False):
            own = [row for row in rows if row.model == model]
            _draw(quality, own, [100 * row.answers.accuracy for row in own], colour)
            _draw(speed, own, [row.requests_per_sec for row in own], colour)
        highest = max(row.tokens_per_forward_pass for row in rows)
        lowest = min(row.tokens_per_forward_pass for row in rows)
        log_x(speed, lowest / 1.3, highest * 1.4)
        quality.set_ylabel("right answers (%)")
        speed.set_ylabel("requests per second")
        speed.set_xlabel("tokens per forward pass")
        speed.set_ylim(bottom=0)
        _legend(quality, models)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": "dbench"})


def _draw(axes: Axes, rows: Sequence[Row], heights: Sequence[float], colour: str) -> None:
    for group, marker in MARKERS.items():
        own = [(row.tokens_per_forward_pass, y) for row, y in zip(rows, heights, strict=True) if row.group == group]
        x, y = [point[0] for point in own], [point[1] for point in own]
        linestyle = "-" if group == "threshold" else "none"
        axes.plot(x, y, color=colour, marker=marker, markersize=6, linestyle=linestyle, linewidth=1.2)


def _legend(axes: Axes, models: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], color=colour, label=model) for colour, model in zip(COLOURS, models, strict=False)]
    entries += [
        Line2D([], [], color=GREY, marker=marker, linestyle="none", label=group) for group, marker in MARKERS.items()
    ]
    axes.legend(handles=entries, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.5)

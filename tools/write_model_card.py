"""Fills in what dbench/models/README.md says in figures: from the record of the training and from docs/quality.csv.

Run from the repository root, after tools/measure_quality.py:
    python tools/write_model_card.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbench.errors import DbenchError, UsageError
from dbench.load.tasks import TASKS, held_out
from dbench.models import embedded_directory
from tools.quality.document import markdown_table, replace_section
from tools.quality.rows import read_rows
from tools.quality.training_figure import ALL, draw_training

ROOT = Path(__file__).parent.parent
CARD = ROOT / "dbench" / "models" / "README.md"
FIGURE = ROOT / "docs" / "images" / "embedded-loss.png"
QUALITY = ROOT / "docs" / "quality.csv"

MODEL = "embedded"
EXAMPLE_SEED = 42
SHAPES = {
    "d_model": "width",
    "n_layers": "layers",
    "n_heads": "heads",
    "n_kv_heads": "KV heads",
    "mlp_hidden_size": "MLP width",
    "embedding_size": "tokens in the vocabulary",
    "max_sequence_length": "positions",
}
"""Key of config.json -> what it counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", type=Path, default=embedded_directory() / "training.json")
    arguments = parser.parse_args()
    try:
        for name, lines in sections(arguments.record).items():
            replace_section(CARD, name, lines)
        draw_training(read_record(arguments.record), FIGURE)
    except DbenchError as error:
        raise SystemExit(f"write_model_card: {error}") from error


def sections(record_path: Path) -> dict[str, list[str]]:
    """Name of a section of the card -> its lines."""
    record = read_record(record_path)
    config = json.loads((embedded_directory() / "config.json").read_text(encoding="utf-8"))
    return {
        "shapes": shapes(config, record),
        "tasks": tasks(record),
        "training": training(record),
        "accuracy per task": accuracy_per_task(record),
        "accuracy per rule": accuracy_per_rule(),
    }


def read_record(path: Path) -> dict[str, Any]:
    """The training.json of a run. Raises UsageError when it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no record of a training ({error}); give one with --record") from None
    assert isinstance(record, dict)
    return record


def shapes(config: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    sizes = [(what, f"{config[key]:,}") for key, what in SHAPES.items()]
    return markdown_table(("what", "how many"), [("parameters", f"{record['num_parameters']:,}"), *sizes])


def tasks(record: Mapping[str, Any]) -> list[str]:
    """One held-out example of each task, and how many problems of it the training drew."""
    rows = ["| task | example | right answer | problems drawn |", "|---|---|---|---:|"]
    for problem in held_out(EXAMPLE_SEED, len(TASKS)):
        drawn = f"{record['training_problems'][problem.task]:,}"
        rows.append(f"| {problem.task} | {problem.prompt} | {problem.answer} | {drawn} |")
    return rows


def training(record: Mapping[str, Any]) -> list[str]:
    given = record["arguments"]
    limit = f"--minutes {given['minutes']:g}" if given["minutes"] is not None else f"--steps {given['steps']}"
    minutes, training_s = record["wall_time_s"] / 60, record["loss_curve"][-1]["seconds"]
    rows = [
        ("steps", f"{record['step']:,} of {given['batch']} rows of 128 tokens, or as many tokens in longer rows"),
        ("tokens", f"{record['tokens_seen']:,} positions computed, prompts included"),
        ("problems seen", f"{record['sequences_seen']:,}"),
        ("peak learning rate", f"{given['rate']:g}, after {given['warmup_steps']} steps"),
        ("time", f"{training_s:.0f} s of training, {minutes:.1f} minutes with data and evaluation"),
        ("device", f"one {record['device']}, PyTorch {record['torch']}"),
        ("last loss", f"{record['loss_curve'][-1]['loss']:g}"),
    ]
    command = f"python tools/train_embedded.py --out DIR {limit} --seed {given['seed']}"
    return [f"Command: `{command}`", "", "| what | value |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]


def accuracy_per_task(record: Mapping[str, Any]) -> list[str]:
    """The trainer's own last evaluation, by its own decoder."""
    final = record["final"]
    variants = [name for name, scores in final.items() if isinstance(scores, dict)]
    header = ("task", "problems", *(part for name in variants for part in (name, "tokens/pass")))
    rows = []
    for task in (*TASKS, ALL):
        scores = [final[name][task] for name in variants]
        figures = (f for s in scores for f in (f"{s['accuracy']:.1%}", f"{s['tokens_per_forward_pass']:.2f}"))
        rows.append((task, scores[0]["num_problems"], *figures))
    return markdown_table(header, rows)


def accuracy_per_rule() -> list[str]:
    """Right answers through the server, from docs/quality.csv."""
    rows = [row for row in read_rows(QUALITY) if row.model == MODEL]
    if not rows:
        raise UsageError(f"{QUALITY}: no rows of the model {MODEL}; run tools/measure_quality.py first")
    header = ("setting", *(f"{task} ({rows[0].by_task[task].num_asked})" for task in TASKS), "all")
    cells = ((row.setting, *(row.by_task[t].num_right for t in TASKS), f"{row.answers.accuracy:.1%}") for row in rows)
    return markdown_table(header, cells)


if __name__ == "__main__":
    main()

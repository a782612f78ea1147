"""The files of a training run: a model directory that dbench can serve, and what a model card needs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

WEIGHTS_NAME = "model.safetensors"
REPORT_NAME = "training.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def read_json(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(values, dict), f"{path} holds no object"
    return values


def write_json(path: Path, values: object) -> None:
    """Whole or not at all: a killed run leaves the file that was there before."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def prepare_directory(source: Path, out: Path) -> None:
    """Make `out` a model directory but for its weights: config and tokenizer as in `source`.

    The config does not keep a width of random weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = read_json(source / "config.json")
    config.pop("init_std", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)

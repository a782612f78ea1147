"""Folders for results, and JSON on stdout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dbench.commands.common import new_folder, print_json
from dbench.errors import OptionError


def test_folders_of_one_second_are_different_and_new(tmp_path: Path) -> None:
    folders = {new_folder(str(tmp_path / "reports"), "run", place="--name") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() and "-run" in folder.name for folder in folders)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\0b", "two\nlines", "x" * 101])
def test_name_that_is_no_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--name: got .*, wanted a name without slashes"):
        new_folder(str(tmp_path), name, place="--name")
    assert list(tmp_path.iterdir()) == []


def test_parent_that_cannot_hold_folders_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OptionError, match="--output-dir: cannot make a folder in"):
        new_folder(str(file), "run", place="--name")


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": (1.5, math.nan), "b": {"c": math.inf}, "d": [-math.inf]})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": {"c": "inf"}, "d": ["-inf"]}

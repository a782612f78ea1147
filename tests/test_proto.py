"""The generated gRPC code in the tree is what the .proto file gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROTO_DIR = Path("dbench/serve/proto")
ROOT = Path(__file__).parent.parent


def test_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the extra 'test' brings it")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, str(PROTO_DIR / "dbench.proto")]
    subprocess.run(command, cwd=ROOT, check=True)
    for fresh in (tmp_path / PROTO_DIR).iterdir():
        assert fresh.read_text() == (ROOT / PROTO_DIR / fresh.name).read_text(), f"run 'make proto': {fresh.name}"

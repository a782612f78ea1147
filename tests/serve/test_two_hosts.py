"""A worker behind a network of its own: it gives the tokens of others, is cut off with its cable, and comes back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.two_hosts import CASES, NAMESPACE

PATIENCE_S = 180
PROBE = "ip link add probe type veth peer name other && ip link set probe up"


def why_not() -> str:
    """Why this machine gives a test no network of its own; empty if it does."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]} on this machine"
    done = subprocess.run([*NAMESPACE, "sh", "-c", PROBE], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"no network namespace here: {done.stderr.strip()}"


@pytest.mark.parametrize("case", CASES)
def test_a_worker_on_another_host_works_is_cut_off_and_comes_back(case: str, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.serve.two_hosts", case, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    logs = "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"

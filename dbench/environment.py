"""What a result was measured on: machine, packages, revision. Reads files and package metadata, imports none of them.

No host name, user or address is in it: reports are shown to others.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from dbench import __version__
from dbench.events import SCHEMA_VERSION

PACKAGES = (
    "flashinfer-python",
    "grpcio",
    "matplotlib",
    "numpy",
    "optuna",
    "pandas",
    "protobuf",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
)

NVIDIA_FILES = Path("/proc/driver/nvidia")
GIT_TIMEOUT_S = 5.0


def describe_environment() -> dict[str, Any]:
    """The record of environment.json; what this machine does not tell is None or empty."""
    import psutil

    return {
        "schema_version": SCHEMA_VERSION,
        "dbench_version": __version__,
        "git_revision": git_revision(Path(__file__).parent.parent),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(psutil.Process().cpu_affinity()) if platform.system() == "Linux" else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "nvidia_driver": nvidia_driver(),
        "gpus": gpu_names(),
    }


def package_version(name: str) -> str | None:
    """None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_revision(directory: Path) -> str | None:
    """Commit of a checkout, `-dirty` after it when tracked files differ; None elsewhere or without git."""
    git = shutil.which("git")
    if git is None or not (directory / ".git").exists():
        return None
    command = [git, "-C", str(directory), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        # Without optional locks: a report must not get in the way of a git command of the user.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel names it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def nvidia_driver(files: Path = NVIDIA_FILES) -> str | None:
    """Version of the loaded kernel module."""
    try:
        text = (files / "version").read_text(encoding="utf-8")
    except OSError:
        return None
    words = text.split("Kernel Module", 1)[-1].split()
    return next((word for word in words if word[0].isdigit()), None)


def gpu_names(files: Path = NVIDIA_FILES) -> list[str]:
    """Models of all GPUs that the driver knows, visible to this process or not."""
    names = []
    for path in sorted(files.glob("gpus/*/information")):
        lines = path.read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names

"""What a result says about the machine it was measured on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dbench import __version__
from dbench.environment import (
    cpu_model,
    describe_environment,
    git_revision,
    gpu_names,
    nvidia_driver,
    package_version,
)


def test_the_record_is_json_and_names_version_machine_and_packages() -> None:
    record = json.loads(json.dumps(describe_environment()))
    assert record["dbench_version"] == __version__
    assert record["schema_version"] == 1
    assert record["num_cpus"] >= record["num_usable_cpus"] >= 1
    assert record["memory_bytes"] > 2**20
    assert record["packages"]["numpy"] == package_version("numpy")


def test_describing_the_environment_imports_no_heavy_package() -> None:
    code = (
        "import sys; from dbench.environment import describe_environment; describe_environment(); "
        "print([m for m in ('torch', 'pandas', 'numpy', 'matplotlib', 'optuna', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert package_version("no-such-package-of-dbench") is None


def test_a_folder_that_is_no_checkout_has_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


def test_driver_and_gpus_are_read_from_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build\nGCC version: 12.3.0\n"
    )
    for number in ("0000:02:00.0", "0000:01:00.0"):
        folder = tmp_path / "gpus" / number
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 120\n")
    assert nvidia_driver(tmp_path) == "570.86.15"
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]


def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert nvidia_driver(tmp_path) is None
    assert gpu_names(tmp_path) == []


def test_the_cpu_is_named_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2.0GHz"

"""What `dbench worker` makes of its options."""

from __future__ import annotations

from contextlib import closing

import pytest

from dbench.commands.worker import worker_config
from dbench.config import Resolved, resolve
from dbench.errors import OptionError
from dbench.options import TerminalOptions, WorkerOptions
from dbench.serve.address import LOOPBACK, listen_on
from dbench.serve.child import num_cores
from dbench.serve.remote_worker import check_device


def given(**options: object) -> Resolved:
    flags = {"worker_key": "sesame", **options}
    return resolve((WorkerOptions, TerminalOptions), flags, yaml_path=None, environment={})


@pytest.mark.parametrize(("gpu", "device"), [("cpu", "cpu"), ("0", "cuda:0"), ("03", "cuda:3")])
def test_a_gpu_is_a_number_or_the_cpu(gpu: str, device: str) -> None:
    assert worker_config(given(gpu=gpu)).device == device


def test_a_worker_computes_on_all_cores_unless_told_otherwise() -> None:
    assert worker_config(given()).num_threads == num_cores()
    assert worker_config(given(num_threads="3")).num_threads == 3


def test_the_key_is_shown_nowhere() -> None:
    resolved = given()
    texts = [repr(worker_config(resolved)), resolved.to_yaml(), resolved.to_json(), str(resolved.lines())]
    assert [text for text in texts if "sesame" in text] == []
    assert [line.value_text for line in resolved.lines() if line.name == "worker_key"] == ["set"]


def test_a_port_that_is_taken_is_refused_before_a_server_is_asked() -> None:
    with closing(listen_on(LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"--worker-port: got {port}, which is in use on {LOOPBACK}, wanted"):
            worker_config(given(worker_port=str(port)))
    assert worker_config(given(worker_port=str(port))).board_port == port


def test_a_device_that_is_not_there_is_refused_before_a_server_is_asked() -> None:
    with pytest.raises(OptionError, match=r"gpu: got 99, but torch sees \d+ CUDA devices here"):
        check_device("cuda:99")

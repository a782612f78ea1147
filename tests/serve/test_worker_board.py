"""What a worker shows over HTTP: its health and its metrics."""

from __future__ import annotations

import json
import logging
import signal
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dbench.events import BatchExecuted, WorkerState
from dbench.serve.client import Client, submit_and_wait
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, Fault
from dbench.serve.wire import ServerStatus, Submission
from dbench.serve.worker_board import Availability, BoardServer, WorkerBoard
from tests.serve.process_builders import answer, assert_all_end, family_of, launch, server_child
from tests.serve.remote_builders import is_bindable, worker_process
from tests.serve.server_builders import WORKER_KEY, run

HOST = "127.0.0.1"


@pytest.fixture
def board() -> WorkerBoard:
    return WorkerBoard()


@pytest.fixture
def server(board: WorkerBoard) -> Iterator[BoardServer]:
    with closing(BoardServer(board, HOST, 0)) as made:
        made.start()
        yield made


def get(address: str, path: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics_of(address: str) -> dict[str, float]:
    """Name -> value, of the only worker there."""
    status, text = get(address, "/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def batch(start_s: float, at_s: float) -> BatchExecuted:
    return BatchExecuted(
        at_s=at_s,
        source="worker-3",
        worker_id=3,
        start_s=start_s,
        batch_size=2,
        batch_prompt_len=40,
        batch_gen_len=16,
        batch_num_void_tokens=8,
        batch_num_unmasked_tokens=5,
        batch_decode_length_std=None,
        batch_sampling_time=0.0,
    )


def state(waiting: int, pages_used: int) -> WorkerState:
    return WorkerState(
        at_s=1.0,
        source="worker-3",
        worker_id=3,
        state="busy",
        queue_depth_waiting=waiting,
        queue_depth_active=2,
        outstanding_prefill_tokens=90,
        decode_length_sum=80,
        pages_used=pages_used,
        pages_total=20,
        deficit_tokens=7,
    )


def test_health_is_good_only_while_a_worker_takes_blocks(board: WorkerBoard, server: BoardServer) -> None:
    assert get(server.address, "/health")[0] == 503
    board.ready(3, 20)
    status, text = get(server.address, "/health")
    assert (status, json.loads(text)) == (200, {"status": "ready", "worker_id": 3, "state": "idle"})
    board.availability = Availability.DRAINING
    status, text = get(server.address, "/health")
    assert (status, json.loads(text)["status"]) == (503, "draining")


def test_metrics_sum_what_iterations_bring_and_show_the_last_state(board: WorkerBoard, server: BoardServer) -> None:
    board.ready(3, 20)
    failed = BlockEnd.without_steps(BlockKey("r", 0, 0), BlockOutcome.FAILED, "error", Fault.OWN)
    board.note([state(4, 9), batch(1.0, 1.5)], [failed])
    board.note([batch(1.5, 1.75), state(1, 5)], [])
    found = metrics_of(server.address)
    assert found["dbench_batches_total"] == 2
    assert found["dbench_batch_seconds_total"] == 0.75
    assert found["dbench_diffusion_num_canvas_positions_total"] == 2 * (40 + 16 - 8)
    assert found["dbench_diffusion_num_committed_tokens_total"] == 10
    assert (found["dbench_blocks_done_total"], found["dbench_blocks_failed_total"]) == (0, 1)
    assert (found["dbench_queue_depth_waiting"], found["dbench_kv_page_utilization_ratio"]) == (1, 0.25)
    assert 'worker_id="3"' in get(server.address, "/metrics")[1]


def test_a_worker_whose_server_is_gone_holds_nothing(board: WorkerBoard, server: BoardServer) -> None:
    board.ready(3, 20)
    board.note([state(4, 9), batch(1.0, 1.5)], [])
    board.away()
    status, text = get(server.address, "/health")
    assert (status, json.loads(text)) == (503, {"status": "starting", "worker_id": None, "state": "idle"})
    found = metrics_of(server.address)
    assert (found["dbench_kv_pages_used"], found["dbench_queue_depth_waiting"], found["dbench_batches_total"]) == (
        0,
        0,
        1,
    )


@pytest.mark.parametrize(
    ("host", "wanted"), [("0.0.0.0", "127.0.0.1:"), ("::1", "[::1]:"), ("localhost", "localhost:")]
)
def test_its_address_is_one_that_can_be_asked(board: WorkerBoard, host: str, wanted: str) -> None:
    with closing(BoardServer(board, host, 0)) as server:
        server.start()
        if not server.address and ":" in host:
            pytest.skip("no IPv6 here")
        assert server.address.startswith(wanted)
        assert get(server.address, "/health")[0] == 503


def test_another_path_says_what_there_is(server: BoardServer) -> None:
    assert get(server.address, "/") == (404, "/: nothing here; there are /health and /metrics\n")


def test_a_caller_that_hangs_up_early_leaves_standard_error_alone(
    server: BoardServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with socket.create_connection((HOST, port_of(server.address))) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.sendall(b"GET /metr")
    assert get(server.address, "/health")[0] == 503
    assert capfd.readouterr().err == ""


def test_it_answers_where_no_name_server_does(board: WorkerBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_ever(name: str = "") -> str:
        pytest.fail(f"the name of {name} was looked up")

    monkeypatch.setattr(socket, "getfqdn", wait_for_ever)
    with closing(BoardServer(board, HOST, 0)) as server:
        server.start()
        assert get(server.address, "/health")[0] == 503


def test_a_port_that_is_taken_costs_the_figures_but_not_the_worker(
    server: BoardServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(BoardServer(WorkerBoard(), HOST, port_of(server.address))) as second:
        second.start()
        assert second.address == ""
    assert f"no health and metrics at {server.address}: " in caplog.text


def test_workers_of_a_server_have_their_ports_and_free_them() -> None:
    first = two_free_ports()

    async def scenario(address: str) -> ServerStatus:
        async with Client(address) as client:
            result = await submit_and_wait(client, Submission((1, 2, 3), 8, ignore_eos=True))
            assert result.status == "COMPLETED"
            return await client.status()

    with server_child(gpus="cpu,cpu", base_worker_port=first) as server:
        workers = run(scenario(answer(server)["address"])).workers
        family = family_of(server.pid)
        addresses = [worker.metrics_address for worker in workers]
        assert addresses == [f"{HOST}:{first}", f"{HOST}:{first + 1}"]
        assert [get(address, "/health")[0] for address in addresses] == [200, 200]
        both = [metrics_of(address) for address in addresses]
        for name, wanted in (
            ("dbench_diffusion_num_denoising_steps_total", sum(worker.num_forward_passes for worker in workers)),
            ("dbench_diffusion_num_committed_tokens_total", 8),
            ("dbench_blocks_done_total", 2),
            ("dbench_kv_pages_used", 0),
        ):
            assert sum(one[name] for one in both) == wanted, name
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert_all_end(family)
    assert all(is_bindable(address) for address in addresses)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def two_free_ports() -> int:
    """The first of two that follow one another."""
    while True:
        with socket.create_server((HOST, 0)) as one:
            port: int = one.getsockname()[1]
            try:
                with socket.create_server((HOST, port + 1)):
                    return port
            except (OSError, OverflowError):
                continue


def test_a_worker_of_another_host_shows_its_figures_and_frees_its_port(tmp_path: Path) -> None:
    port = two_free_ports()
    address = f"{HOST}:{port}"
    with launch(gpus="cpu", worker_key=WORKER_KEY) as server:
        with worker_process(server.address, tmp_path, "--worker-port", str(port)) as worker:
            assert worker.wait_until_ready() == f"ready as worker 1 of {server.address}"
            assert run(status_of(server.address)).workers[1].metrics_address == address
            assert json.loads(get(address, "/health")[1])["worker_id"] == 1
            worker.process.send_signal(signal.SIGTERM)
            assert worker.exit_code() == 0
        assert is_bindable(address)


async def status_of(address: str) -> ServerStatus:
    async with Client(address) as client:
        return await client.status()

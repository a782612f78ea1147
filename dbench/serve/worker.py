"""A worker process: one device, one engine, one stream to the scheduler.

`python -m dbench.serve.worker` reads a WorkerConfig from standard input. The main thread is the engine
loop. torch is imported only once the scheduler has taken the worker in.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dbench.errors import DbenchError, RequestError, ServerUnavailable, WorkerRefused, one_line
from dbench.options import PREFILL
from dbench.serve import child
from dbench.serve.deployment import Deployment, deployment_of
from dbench.serve.engine import Engine
from dbench.serve.engine_state import StepReport
from dbench.serve.handover import WorkerConfig
from dbench.serve.pages import PagePool
from dbench.serve.runner import Runner
from dbench.serve.sequence import BlockEnd, BlockKey, BlockOutcome, BlockTask, Fault, HandedOver
from dbench.serve.transit import KvArrived, KvFailed, KvSent
from dbench.serve.wire_link import CancelBlock, Drain, Fatal, Hello, Ready, ReserveBlock, SendBlock, Welcome
from dbench.serve.worker_board import Availability, BoardServer, WorkerBoard
from dbench.serve.worker_stream import BlockArrived, Incoming, Report, StreamEnded, WorkerStream

if TYPE_CHECKING:
    from dbench.serve.kv import KvRunner
    from dbench.serve.torch_runner import RunnerConfig
    from dbench.serve.transfer import Transfer

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms, for which a busy I/O thread may hold up the engine, is a whole decode step."""

CPU_NICENESS = 10
"""A worker that computes on the CPU yields to the scheduler and the load generator, which need little but need
it at once: on two busy cores the generator's p99 send lag was tens of milliseconds without it."""

DRAINING = "the worker is draining and takes nothing new"

logger = logging.getLogger(__name__)


class WorkerLoop:
    """The engine loop: commands in, one iteration, one report out."""

    def __init__(
        self,
        engine: Engine,
        stream: WorkerStream,
        board: WorkerBoard,
        drain_timeout_s: float = math.inf,
        transfer: Transfer | None = None,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._board = board
        self._transfer = transfer
        self._drain_timeout_s = drain_timeout_s
        self._iteration = 0
        self._is_draining = False
        self._drained_by_s = math.inf
        self._refused: list[BlockEnd] = []

    def run(self) -> None:
        """Until a drain is done. Raises ServerUnavailable when the stream is lost."""
        try:
            self._run()
        finally:
            if self._transfer is not None:
                self._transfer.close()

    def _run(self) -> None:
        while True:
            if time.monotonic() > self._drained_by_s:
                self._hand_back(self._engine.held)
                self._drained_by_s = math.inf
            with self._stream.iteration():
                report = self._engine.step()
            commands = self._stream.commands()
            self._obey(commands)  # before the report: the blocks that came meanwhile are in its events
            self._report(report)
            if report is None and not commands:
                if self._is_draining and self._engine.is_idle:
                    return
                self._obey(self._stream.wait_for_commands(self._drained_by_s - time.monotonic()))

    def _report(self, report: StepReport | None) -> None:
        events = tuple(self._engine.take_events())
        ended = (*self._take_refused(), *(report.ended if report is not None else ()))
        self._board.note(events, ended)
        if report is not None:
            self._iteration += 1
            self._stream.send(
                Report(self._iteration, report.refreshed, ended, events, report.reserved, report.handed_over)
            )
        elif events or ended:
            self._stream.send(Report(self._iteration, (), ended, events))

    def _obey(self, commands: Iterable[Incoming]) -> None:
        for command in commands:
            match command:
                case BlockArrived(task, at_s):
                    self._take(task, at_s)
                case ReserveBlock():
                    self._reserve(command)
                case CancelBlock(key):
                    self._engine.cancel(key)
                case KvArrived(key, refreshed, at_s):
                    self._engine.arrive(key, refreshed, at_s)
                case KvSent(key, epoch):
                    self._engine.hand_over(HandedOver(key, epoch))
                case KvFailed():
                    self._engine.transfer_failed(command)
                case Drain():
                    self._is_draining = True
                    self._board.availability = Availability.DRAINING
                    self._drained_by_s = time.monotonic() + self._drain_timeout_s
                    self._hand_back(self._engine.waiting)
                case StreamEnded(reason):
                    raise ServerUnavailable(f"the stream to the scheduler ended: {reason}")
                case Welcome():
                    raise ServerUnavailable("the scheduler said welcome twice")

    def _hand_back(self, keys: Iterable[BlockKey]) -> None:
        """What ends as cancelled while the scheduler wants it goes to another worker."""
        for key in keys:
            self._engine.cancel(key)

    def _take(self, task: BlockTask, received_s: float) -> None:
        if self._is_draining:
            self._refuse(task, DRAINING, Fault.NOBODY)
            return
        try:
            self._engine.submit(task, received_s)
        except RequestError as error:
            self._refuse(task, str(error), Fault.OWN)

    def _reserve(self, command: ReserveBlock) -> None:
        if self._is_draining:
            self._refuse(command.task, DRAINING, Fault.NOBODY)
        else:
            self._engine.reserve(command.task, command.sender_id, command.epoch)

    def _refuse(self, task: BlockTask, reason: str, fault: Fault) -> None:
        if self._transfer is not None:
            self._transfer.drop(task.key)
        self._refused.append(BlockEnd.without_steps(task.key, BlockOutcome.FAILED, reason, fault))

    def _take_refused(self) -> list[BlockEnd]:
        refused, self._refused = self._refused, []
        return refused


def load_runner(
    deployment: Deployment, device: str, num_threads: int, *, refresh_only: bool
) -> tuple[KvRunner, Deployment]:
    """Load the model and run it once; the deployment then has the number of KV pages.

    Raises ModelError, OptionError or ServerStartError.
    """
    from dbench.serve.torch_runner import RunnerConfig

    options = deployment.options
    config = RunnerConfig(
        model_dir=deployment.model_dir,
        load_format=options.load_format,
        dtype=options.dtype,
        device=device,
        seed=options.server_seed,
        num_pages=deployment.kv_max_pages,
        page_size=options.kv_page_size,
        num_slots=options.max_batch_size,
        block_length=options.block_length,
        mask_token_id=deployment.mask_token_id,
        num_threads=num_threads,
    )
    if device.startswith("cuda"):
        runner, num_pages = _load_on_cuda(config, deployment, refresh_only=refresh_only)
    else:
        runner, num_pages = _load_on_cpu(config, deployment)
    if options.profile_dir is not None:
        from dbench.serve.profiled_runner import ProfiledRunner

        runner = ProfiledRunner(runner, Path(options.profile_dir), device)
    gc.collect()
    gc.freeze()
    return runner, replace(deployment, kv_max_pages=num_pages)


def _load_on_cpu(config: RunnerConfig, deployment: Deployment) -> tuple[KvRunner, int]:
    from dbench.serve.torch_runner import build_runner
    from dbench.serve.warm_up import warm_up

    assert config.num_pages is not None, "a CPU worker is told its number of KV pages"
    runner = build_runner(config)
    warm_up(runner, block_length=config.block_length, page_size=config.page_size, logit_shift=deployment.logit_shift)
    return runner, config.num_pages


def _load_on_cuda(config: RunnerConfig, deployment: Deployment, *, refresh_only: bool) -> tuple[KvRunner, int]:
    from dbench.serve.cuda_build import CudaSettings, build_cuda_runner

    options = deployment.options
    runner = build_cuda_runner(
        config,
        CudaSettings(
            max_model_len=deployment.max_model_len,
            max_tokens_per_iteration=deployment.most_refresh_tokens,
            cache_mode=options.cache_mode,
            attention_backend=options.attention_backend,
            gpu_memory_utilization=options.gpu_memory_utilization,
            graph_batch_sizes=deployment.graph_batch_sizes(refresh_only=refresh_only),
            measured_layer=deployment.measured_layer(),
        ),
    )
    return runner, runner.num_pages


class EagerTransfer:
    """What a transfer is told by the reader of a worker's stream."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def block_arrived(self, task: BlockTask) -> None:
        self._transfer.announce(task.key)

    def send_block(self, command: SendBlock) -> None:
        self._transfer.send(command.key, command.receiver_id, command.epoch)


def new_transfer(welcome: Welcome, deployment: Deployment, runner: KvRunner, stream: WorkerStream) -> Transfer | None:
    """The worker's way to others; None in colocated mode."""
    if not welcome.meeting_address:
        return None
    from dbench.serve.kv_links import TransferConfig
    from dbench.serve.transfer import Transfer

    timeout_s = deployment.options.kv_transfer_timeout_s
    transfer = Transfer(TransferConfig(welcome.worker_id, welcome.meeting_address, timeout_s), runner.kv, stream.post)
    if welcome.kind == PREFILL:
        runner.watch_layers(transfer)
        stream.listen(EagerTransfer(transfer))
    return transfer


def new_engine(welcome: Welcome, deployment: Deployment, runner: Runner, transfer: Transfer | None) -> Engine:
    """An engine on top of a runner whose slots and pages are all free."""
    assert deployment.kv_max_pages is not None, "the runner was loaded"
    pages = PagePool(deployment.kv_max_pages, deployment.options.kv_page_size)
    limits = deployment.engine_limits(refresh_only=welcome.kind == PREFILL)
    return Engine(runner, pages, limits, worker_id=welcome.worker_id, transfer=transfer)


def wait_for_welcome(stream: WorkerStream) -> Welcome:
    """Raises ServerUnavailable unless the scheduler takes this worker in, WorkerRefused if it never will."""
    match stream.wait_for_commands():
        case [Welcome() as welcome, *_]:
            return welcome
        case [StreamEnded(reason, is_refusal), *_]:
            raise (WorkerRefused if is_refusal else ServerUnavailable)(f"the worker was not taken in: {reason}")
        case other:
            raise ServerUnavailable(f"the worker waited for a welcome, got {other}")


def ready(deployment: Deployment, board: BoardServer | None) -> Ready:
    assert deployment.kv_max_pages is not None, "the runner was loaded"
    return Ready(
        deployment.kv_max_pages,
        deployment.options.kv_page_size,
        deployment.max_model_len,
        "" if board is None else board.address,
    )


def run_worker(config: WorkerConfig, stream: WorkerStream) -> None:
    """Load, report ready, and work until drained. Raises DbenchError, or whatever broke the engine."""
    board = WorkerBoard()
    with closing(BoardServer(board, config.board_host, config.board_port)) as board_server:
        board_server.start()
        _serve(config, stream, board, board_server)


def _serve(config: WorkerConfig, stream: WorkerStream, board: WorkerBoard, board_server: BoardServer) -> None:
    welcome = wait_for_welcome(stream)
    deployment = deployment_of(welcome.engine)
    refresh_only = welcome.kind == PREFILL
    runner, deployment = load_runner(deployment, config.device, config.num_threads, refresh_only=refresh_only)
    try:
        transfer = new_transfer(welcome, deployment, runner, stream)
        engine = new_engine(welcome, deployment, runner, transfer)
        board.ready(welcome.worker_id, deployment.kv_max_pages or 0)
        stream.send(ready(deployment, board_server))
        WorkerLoop(engine, stream, board, transfer=transfer).run()
    finally:
        runner.close()


def yield_the_cpu(device: str) -> None:
    """What a worker's process sets for itself before it loads anything."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if device.startswith("cpu"):
        os.nice(CPU_NICENESS)


def main() -> NoReturn:
    """Run one worker process, and end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    child.die_with_parent_thread()
    line = child.read_config_line()
    if not line:
        child.leave(child.PARENT_GONE_EXIT_CODE)
    child.end_with_parent()
    config = WorkerConfig.from_json(line)
    child.log_to_stderr(config.log_level)
    yield_the_cpu(config.device)
    stream = WorkerStream(config.scheduler, Hello(config.worker_key, config.worker_id, config.device, os.getpid()))
    stream.start()
    exit_code = 0
    try:
        run_worker(config, stream)
    except DbenchError as error:
        logger.error("%s", error)
        stream.send(Fatal(str(error)))
        exit_code = error.exit_code
    except Exception as error:
        logger.exception("worker %d cannot go on", config.worker_id)
        stream.send(Fatal(f"{type(error).__name__}: {one_line(error)}"))
        exit_code = 1
    stream.close()
    child.leave(exit_code)  # a thread may wait for a worker that hangs, in code that a normal end would abort


if __name__ == "__main__":
    main()

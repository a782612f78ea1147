"""`dbench worker`: a worker of this host for a server anywhere."""

from __future__ import annotations

from dbench.cli_options import Invocation
from dbench.commands.common import check_host_port, open_view
from dbench.config import Resolved
from dbench.errors import OptionError
from dbench.options import WorkerOptions
from dbench.serve.address import LOOPBACK, bind_fault
from dbench.serve.child import num_cores
from dbench.serve.remote_worker import CUDA, RemoteWorker, RemoteWorkerConfig

CPU = "cpu"


def worker_command(invocation: Invocation) -> int:
    """Work until Ctrl-C or SIGTERM, then drain; returns the exit code."""
    resolved = invocation.resolve()
    view = open_view(resolved)
    config = worker_config(resolved)
    for line in resolved.lines():
        if line.name not in invocation.command.hidden:
            view.print(f"{line.name} = {line.value_text} ({line.origin})")
    return RemoteWorker(config, lambda worker_id: _announce(config.scheduler, worker_id)).run()


def worker_config(resolved: Resolved) -> RemoteWorkerConfig:
    """Raises OptionError for what is missing, no device, or a port that is taken."""
    options = resolved.section(WorkerOptions)
    if options.worker_key is None:
        raise OptionError("--worker-key: not given; set DBENCH_WORKER_KEY to the key that the server was started with")
    check_host_port(resolved, "scheduler")
    if options.gpu != CPU and not options.gpu.isdecimal():
        raise OptionError(f"{resolved.place('gpu')}: got {options.gpu!r}, wanted 'cpu' or the number of a CUDA device")
    board_port = options.worker_port
    if board_port is not None and (fault := bind_fault("worker_port", LOOPBACK, "worker_port", board_port)):
        raise OptionError(f"{resolved.place(fault.option)}: got {fault.got}, wanted {fault.wanted}")
    return RemoteWorkerConfig(
        scheduler=options.scheduler,
        worker_key=options.worker_key,
        device=CPU if options.gpu == CPU else f"{CUDA}{int(options.gpu)}",
        model=options.model,
        num_threads=num_cores() if options.num_threads is None else options.num_threads,
        drain_timeout_s=options.drain_timeout_s,
        reconnect_timeout_s=options.reconnect_timeout_s,
        tls_ca=options.tls_ca,
        board_port=board_port,
        kind=options.worker_type,
    )


def _announce(address: str, worker_id: int) -> None:
    """A result, for a program that waits for it."""
    print(f"ready as worker {worker_id} of {address}", flush=True)

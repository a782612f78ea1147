"""What the child processes of dbench are told by whoever starts them: one line of JSON on standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from dbench.config import options_from_dict, options_to_dict
from dbench.options import EngineOptions, ServiceOptions


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker, and the scheduler that it dials, whose welcome says the rest."""

    scheduler: str
    """host:port"""
    worker_key: str = field(repr=False)
    worker_id: int
    device: str
    num_threads: int
    log_level: int
    board_host: str
    board_port: int
    """Of its health and metrics; 0: any free one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> WorkerConfig:
        """The inverse of to_json. Raises ValueError or TypeError for anything else."""
        return WorkerConfig(**json.loads(line))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server process."""

    engine: EngineOptions
    """Resolved."""
    service: ServiceOptions = field(repr=False)
    """Resolved; it holds the API key."""
    config_json: str
    """The resolved options with their origins, as GetServerStatus shows them."""
    log_level: int

    def to_json(self) -> str:
        return json.dumps(
            {
                "engine": options_to_dict(self.engine),
                "service": options_to_dict(self.service),
                "config_json": self.config_json,
                "log_level": self.log_level,
            }
        )

    @staticmethod
    def from_json(line: str) -> ServerConfig:
        """The inverse of to_json. Raises ValueError, KeyError or OptionError for anything else."""
        values = json.loads(line)
        return ServerConfig(
            engine=options_from_dict(EngineOptions, values["engine"]),
            service=options_from_dict(ServiceOptions, values["service"]),
            config_json=values["config_json"],
            log_level=values["log_level"],
        )

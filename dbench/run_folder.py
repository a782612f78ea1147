"""What the folder of a run or a server holds from its beginning: how it was configured, and on which machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbench.config import read_yaml
from dbench.environment import describe_environment
from dbench.errors import OptionError
from dbench.result_files import write_json, write_text

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
SERVER_LOG_FILE = "server.log"
"""What a server that a command started itself says."""

logger = logging.getLogger(__name__)


def write_origin(folder: Path, config_yaml: str) -> None:
    """Save a configuration and what this machine is. Raises RunError when they cannot be written."""
    write_text(folder / CONFIG_FILE, config_yaml)
    write_json(folder / ENVIRONMENT_FILE, describe_environment())


def read_config(folder: Path) -> Mapping[str, Any]:
    """Option name -> saved value; empty without a file, and with a warning where it cannot be read."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return {}
    try:
        return {entry.key: entry.value for entry in read_yaml(path)}
    except OptionError as error:
        logger.warning("%s; the report does without it: figures name no model, batches get no table", error)
        return {}

"""Notebook client of OPPO Platform (docs/client.md). Its only dependency is httpx.

from oppo_client import Client
run = Client().submit("ppo.yaml")
run.watch()
"""

from oppo_client.client import Client
from oppo_client.comparison import Comparison
from oppo_client.config import Config, config_path, load_config, save_config
from oppo_client.errors import (
    ApiError,
    ConfigError,
    Conflict,
    DownloadError,
    FieldProblem,
    Forbidden,
    MissingPackage,
    NoCheckpoint,
    NoRoom,
    NotFound,
    NotThePlatform,
    OppoError,
    Refused,
    RunFailed,
    ServerFault,
    TooManyRequests,
    Unauthenticated,
    UnknownMetric,
    Unreachable,
    WaitTimeout,
)
from oppo_client.records import LogLine, Sample
from oppo_client.retry import Retries
from oppo_client.run import Checkpoint, Run
from oppo_client.tables import Table
from oppo_client.timeline import Timeline

__all__ = [
    "ApiError",
    "Checkpoint",
    "Client",
    "Comparison",
    "Config",
    "ConfigError",
    "Conflict",
    "DownloadError",
    "FieldProblem",
    "Forbidden",
    "LogLine",
    "MissingPackage",
    "NoCheckpoint",
    "NoRoom",
    "NotFound",
    "NotThePlatform",
    "OppoError",
    "Refused",
    "Retries",
    "Run",
    "RunFailed",
    "Sample",
    "ServerFault",
    "Table",
    "Timeline",
    "TooManyRequests",
    "Unauthenticated",
    "UnknownMetric",
    "Unreachable",
    "WaitTimeout",
    "config_path",
    "load_config",
    "save_config",
]

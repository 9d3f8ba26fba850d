"""What an environment is and how its servers are run, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.curve import ClientKeys
from envs.logs import LogFormat
from orchestrator.discovery import Source
from orchestrator.env_servers.on_ray.cluster import RayCluster
from orchestrator.env_servers.templates import Templates


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how soon a server is restarted."""

    max_restarts: int
    window_s: float
    first_delay_s: float
    max_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """What an environment is and how its servers are run; see the configuration reference for each field."""

    name: str
    id: str
    split: str
    train: bool
    args: Mapping[str, Any] = field(repr=False)
    model: str
    sampling: Mapping[str, Any]
    system_prompt: str | None
    api_key_env: str | None
    python: str | None
    module_dirs: tuple[Path, ...]
    """Where a spawned server finds modules, beside the working directory."""
    workers: int
    addresses: tuple[str, ...]
    sources: tuple[Source, ...]
    """Who else names servers that run elsewhere."""
    ray: RayCluster | None
    """The cluster whose nodes its servers run on; None: this machine, or `addresses`."""
    templates: Templates
    """What its servers on this machine are forked from, shared by the envs of a run."""
    resources: Mapping[str, float]
    """What a server takes up of a Ray node."""
    capacity: int
    seed: int
    ready_timeout_s: float
    silence_timeout_s: float
    reconnect_timeout_s: float
    ping_interval_s: float
    lease_s: float
    restart: RestartPolicy
    keys: ClientKeys | None
    insecure: bool
    withheld: frozenset[str]
    """Environment variables that a spawned server does not get: the secrets of the service itself."""
    log_dir: Path
    log_level: str
    log_format: LogFormat
    report: Path | None
    """Where a spawned server describes its first tasks before it is ready, for `check --deep`."""

    @property
    def elsewhere(self) -> bool:
        """Whether its servers are started by others."""
        return bool(self.addresses or self.sources)

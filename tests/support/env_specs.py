"""Specs of environments for tests and benchmarks, which name only what matters to them, and their servers' processes."""

from pathlib import Path
from typing import Any

from orchestrator.env_servers.child_servers import ChildServer
from orchestrator.env_servers.env import Env, EnvSpec, EvalSettings, RestartPolicy, TrainSettings
from orchestrator.env_servers.templates import Templates


def restart_policy(**fields: Any) -> RestartPolicy:
    defaults = {"max_restarts": 5, "window_s": 600.0, "first_delay_s": 0.1, "max_delay_s": 30.0}
    return RestartPolicy(**(defaults | fields))


def env_spec(**fields: Any) -> EnvSpec:
    defaults: dict[str, Any] = {
        "name": "e",
        "id": "reverse",
        "split": "train",
        "train": True,
        "args": {},
        "model": "local",
        "sampling": {},
        "system_prompt": None,
        "api_key_env": None,
        "python": None,
        "module_dirs": (),
        "workers": 1,
        "addresses": (),
        "sources": (),
        "ray": None,
        "templates": Templates(),
        "resources": {},
        "capacity": 256,
        "seed": 0,
        "ready_timeout_s": 120.0,
        "silence_timeout_s": 30.0,
        "reconnect_timeout_s": 600.0,
        "ping_interval_s": 1.0,
        "lease_s": 15.0,
        "restart": restart_policy(),
        "keys": None,
        "insecure": False,
        "withheld": frozenset(),
        "log_dir": Path("logs"),
        "log_level": "info",
        "log_format": "json",
        "report": None,
    }
    return EnvSpec(**(defaults | fields))


def train_settings(**fields: Any) -> TrainSettings:
    defaults: dict[str, Any] = {
        "ratio": None,
        "group_size": 8,
        "min_batch_allocation": 0.0,
        "max_inflight": None,
        "rollouts_per_minute": None,
    }
    return TrainSettings(**(defaults | fields))


def eval_settings(**fields: Any) -> EvalSettings:
    defaults: dict[str, Any] = {"num_examples": None, "rollouts_per_example": 1, "interval": 20}
    return EvalSettings(**(defaults | fields))


def server_pids(env: Env) -> dict[str, int]:
    """Processes of the servers that an environment spawned, by server name."""
    processes = {slot.name: slot.process for slot in env._slots}
    return {name: kept_by(child.pid) for name, child in processes.items() if isinstance(child, ChildServer)}


def kept_by(keeper: int) -> int:
    """The process that a keeper keeps, its first child; the keeper itself before there is one."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0]) if children else keeper


def free_room(env: Env) -> int:
    """Rollouts for which the ready servers have room."""
    return sum(link.capacity - link.inflight for link in env._links if link.state == "ready")

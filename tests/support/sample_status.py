"""A run at one moment, made up, for what shows it: the progress display, the metrics, HTTP, `status`."""

from typing import Any

from orchestrator.facts import EndpointStatus, EnvStatus, Status, WaitStatus, by_domain


def env_status(**changes: Any) -> EnvStatus:
    """One env, in the middle of a run."""
    fields: dict[str, Any] = {
        "domain": "math",
        "target": 0.4,
        "actual": 0.391,
        "recent": 0.412,
        "dispatched": 120,
        "inflight": 12,
        "completed": 100,
        "emitted": 96,
        "acceptance": 0.96,
        "mean_latency_s": 0.25,
        "reward": 0.75,
        "first_reward": 0.125,
        "quarantined": False,
        "servers_ready": 1,
        "servers": 2,
        "restarts": 3,
        "queued": 8,
        "minimum": 4,
        "minimum_waived": "",
        "dropped": {"equal_rewards": 4},
        "failed": 8,
    }
    return EnvStatus(**(fields | changes))


def sample_status(**changes: Any) -> Status:
    """A run with one env; `changes` replaces fields."""
    fields: dict[str, Any] = {
        "state": "running",
        "waiting_for": "a free slot",
        "waits": [WaitStatus("slot", "a free slot", None), WaitStatus("groups", "24 sequences", None)],
        "step": 5,
        "max_steps": 20,
        "trained": 4,
        "version": 4,
        "published": 4,
        "reward": 0.75,
        "first_reward": 0.125,
        "rollouts_per_s": 37.4,
        "tokens_per_s": 9123.0,
        "eta_s": 754.0,
        "inflight": 12,
        "limit": 64,
        "queued_sequences": 8,
        "queued_groups": 1,
        "batch_size": 32,
        "buffer": "24 sequences are missing",
        "outcomes": {"completed": 100, "failed": 8, "cancelled": 0},
        "failures": {"math: error": 8},
        "envs": {"math": env_status()},
        "endpoints": [
            EndpointStatus("http://127.0.0.1:8000/v1", healthy=True, inflight=12, version=4, error="")
        ],
        "evals": [],
        "staleness": {"mean": 0.5, "max": 2.0},
        "refused": "",
        "notes": [],
        "minimums_waived": 2,
        "loop_lag_p99_s": 0.003,
        "journal_backlog_bytes": 1024,
        "seconds": 61.7,
    }
    fields |= changes
    return Status(**({"domains": by_domain(fields["envs"])} | fields))

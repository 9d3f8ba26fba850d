"""A run at one moment, as plain data: what the display, the metrics, HTTP and the summary show.

`orchestrator.run.status` fills it in; nothing is counted here.
"""

from typing import Any

import msgspec


class WaitStatus(msgspec.Struct):
    """One thing that is waited for; `seconds` until time ends the wait, None where an event must."""

    kind: str
    text: str
    seconds: float | None


class EnvStatus(msgspec.Struct):
    """One training env now."""

    target: float
    actual: float
    recent: float
    dispatched: int
    inflight: int
    completed: int
    emitted: int
    acceptance: float
    mean_latency_s: float | None
    reward: float | None
    first_reward: float | None
    quarantined: bool
    servers_ready: int
    servers: int
    restarts: int
    queued: int
    minimum: int
    minimum_waived: str
    dropped: dict[str, int]


class EndpointStatus(msgspec.Struct):
    """One inference server now."""

    url: str
    healthy: bool
    inflight: int
    version: int
    error: str


class Status(msgspec.Struct):
    """A run at one moment."""

    state: str
    waiting_for: str
    waits: list[WaitStatus]
    step: int
    max_steps: int | None
    trained: int
    version: int
    published: int
    reward: float | None
    first_reward: float | None
    rollouts_per_s: float
    inflight: int
    limit: int
    queued_sequences: int
    queued_groups: int
    batch_size: int
    buffer: str
    outcomes: dict[str, int]
    failures: dict[str, int]
    envs: dict[str, EnvStatus]
    endpoints: list[EndpointStatus]
    evals: list[dict[str, Any]]
    staleness: dict[str, float]
    refused: str
    minimums_waived: int
    loop_lag_p99_s: float
    journal_backlog_bytes: int
    seconds: float

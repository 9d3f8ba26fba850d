"""What is known and remembered about a run: `facts` is told and remembers, `status` is what it looks like. Pure."""

from orchestrator.facts.facts import Facts
from orchestrator.facts.status import (
    DomainStatus,
    EndpointStatus,
    EnvStatus,
    ReportStatus,
    SourceStatus,
    Status,
    TaskStatus,
    TrackerStatus,
    WaitStatus,
    by_domain,
    status_without_run,
)
from orchestrator.facts.steps import EnvStep, Spread, StepRecord

__all__ = [
    "DomainStatus",
    "EndpointStatus",
    "EnvStatus",
    "EnvStep",
    "Facts",
    "ReportStatus",
    "SourceStatus",
    "Spread",
    "Status",
    "StepRecord",
    "TaskStatus",
    "TrackerStatus",
    "WaitStatus",
    "by_domain",
    "status_without_run",
]

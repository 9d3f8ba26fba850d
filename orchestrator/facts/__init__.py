"""What is known and remembered about a run: `facts` is told and remembers, `status` is what it looks like. Pure."""

from orchestrator.facts.facts import Facts
from orchestrator.facts.status import EndpointStatus, EnvStatus, Status, WaitStatus

__all__ = ["EndpointStatus", "EnvStatus", "Facts", "Status", "WaitStatus"]

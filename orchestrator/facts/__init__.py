"""What is known and remembered about a run: `facts` is told, `status` answers. Pure."""

from orchestrator.facts.facts import Facts
from orchestrator.facts.status import EndpointStatus, EnvStatus, Status

__all__ = ["EndpointStatus", "EnvStatus", "Facts", "Status"]

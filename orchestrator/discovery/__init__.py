"""Members that are found instead of listed: servers behind a name in DNS, or in a file, followed as they come and go.

Used by `env_servers` and `inference` alike, which say what joining and leaving means there.
"""

from orchestrator.discovery.following import Followed, Patience
from orchestrator.discovery.lookup import Look, LookupFailed, look_up
from orchestrator.discovery.membership import Membership
from orchestrator.discovery.source import (
    DnsSource,
    FileSource,
    Source,
    is_source,
    parse_source,
    source_problem,
)

__all__ = [
    "DnsSource",
    "FileSource",
    "Followed",
    "Look",
    "LookupFailed",
    "Membership",
    "Patience",
    "Source",
    "is_source",
    "look_up",
    "parse_source",
    "source_problem",
]

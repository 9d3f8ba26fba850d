"""One inference server as the pool sees it: plain state, which the pool's parts change and everyone may read.

`error` is why the endpoint is out of service now, or what its last check complained about; it is empty while
all is well. `version` and `version_newest` bound the weights that the engine may sample with at this moment;
they differ only while an update is under way or after one that failed. A rollout's span of versions is
`version` when it was dispatched and `version_newest` when it ended. `adapter` is the name to ask for in place of the
model's, where versions are adapters. One that `lacks_weights` waits for the trainer to send them. One that is `leaving` stays in service for the
rollouts that it has, and gets no others; one that is `joining` has no share of what may be in flight before it has
entered service for the first time. `source` is what names it, empty where it is listed or was added by hand.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from envs.errors import shown_url
from orchestrator.inference.blame import Blame
from orchestrator.inference.metrics import EngineMetrics


class EndpointState(StrEnum):
    """Whether an endpoint gets work."""

    STARTING = "starting"  # not seen ready yet
    READY = "ready"  # gets work
    SUSPECT = "suspect"  # answers health checks but finishes nothing: no new work until a probe succeeds
    LOST = "lost"  # does not answer, or does not have the current weights


IN_SERVICE = (EndpointState.READY, EndpointState.SUSPECT)


@dataclass(slots=True, eq=False)
class Endpoint:
    """State of one inference server. `url` is its OpenAI base URL (…/v1), `root` the server's own.

    `out_since` is the pool's clock when it last stopped getting work, None while it gets work.
    """

    url: str
    root: str
    state: EndpointState = EndpointState.STARTING
    inflight: int = 0
    limit: int = 1
    version: int = 0
    version_newest: int = 0
    adapter: str = ""
    lacks_weights: bool = False
    error: str = ""
    out_since: float | None = None
    updating: bool = False
    metrics: EngineMetrics | None = None
    losses: int = 0
    source: str = ""
    leaving: bool = False
    joining: bool = False

    # The pool's own bookkeeping.
    serial: int | None = field(default=None, repr=False)
    label: str | None = field(default=None, repr=False)
    doubt: Blame = field(default=Blame.NOT_THE_ENDPOINT, repr=False)
    checks_failed: int = field(default=0, repr=False)
    requests_failed: int = field(default=0, repr=False)
    progress_at: float = field(default=float("-inf"), repr=False)
    trusted_until: float = field(default=float("-inf"), repr=False)
    retry_at: float = field(default=float("-inf"), repr=False)
    retries: int = field(default=0, repr=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    wake: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def name(self) -> str:
        """Its URL as logs and messages may show it, without credentials."""
        return shown_url(self.url)

    @property
    def healthy(self) -> bool:
        """Whether it gets work."""
        return self.state is EndpointState.READY and not self.leaving

    def forget_weights(self) -> None:
        """Nobody knows any more which weights the engine has: it must load the target before it gets work."""
        self.serial = self.label = None


def build_endpoint(base_url: str, *, now: float) -> Endpoint:
    """An endpoint from its configured base URL; the administrative calls live beside its `/v1`."""
    url = base_url.rstrip("/")
    return Endpoint(url=url, root=url.removesuffix("/v1"), out_since=now)

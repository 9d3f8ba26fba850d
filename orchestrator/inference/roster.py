"""The synchronous core of the pool: the endpoints' states, who gets the next group, how much may be in flight.

Nothing here waits or speaks to anybody. Watches and weight updates ask for the transitions (`enter`, `suspect`,
`lose`, `set_limit`), the dispatcher acquires and releases and says how rollouts went. Invariants: an endpoint gets
work only while it is READY and not leaving; `inflight` counts what was acquired and not released, lost endpoints
included; `limit` is the sum over the endpoints that get work, 0 without any. One that leaves is gone with its last rollout.
"""

from collections.abc import Callable, Sequence

import structlog

from orchestrator.discovery import Membership
from orchestrator.dispatch.placement import next_in_turn
from orchestrator.errors import ConfigError
from orchestrator.inference.blame import Blame, blame
from orchestrator.inference.endpoint import IN_SERVICE, Endpoint, EndpointState, build_endpoint

log = structlog.get_logger(__name__)


class Roster:
    """The endpoints and who of them is in service.

    `on_change` is called whenever `limit` or the set of ready endpoints changed; `on_lost` with an endpoint
    whose requests in flight will not come back, or come back from weights that nobody knows. Failures within
    `trust_s` of an endpoint's entry are left over from before and do not count.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        membership: Membership,
        suspect_after: int,
        trust_s: float,
        clock: Callable[[], float],
    ) -> None:
        if not base_urls and not membership:
            raise ConfigError("inference.base_urls is empty; name at least one inference server")
        if len({url.rstrip("/") for url in base_urls}) != len(base_urls):
            raise ConfigError(f"inference.base_urls names a server twice: {', '.join(base_urls)}")
        self.endpoints = [build_endpoint(url, now=clock()) for url in base_urls]
        self.membership = membership
        """Who the sources name."""
        self.inflight = 0
        self.limit = 0
        self.ready: Sequence[Endpoint] = []
        """Endpoints that get work."""
        self.on_change: Callable[[], None] = _nothing
        self.on_lost: Callable[[Endpoint], None] = _nothing
        self.clock = clock
        self._suspect_after = suspect_after
        self._trust_s = trust_s
        self._turn = 0

    def explain(self) -> str:
        """Why no endpoint gets work; empty if one does."""
        if self.ready:
            return ""
        said = [describe_errors(self.endpoints)] if self.endpoints else []
        if self.membership and (not said or any(followed.trouble for followed in self.membership.sources)):
            said.append(self.membership.explain())
        return f"no inference endpoint is in service: {'; '.join(said)}"

    # Placement.

    def acquire(self, n: int = 1, prefer: Endpoint | None = None) -> Endpoint | None:
        """The ready endpoint with the most room in proportion to its limit, now with `n` more in flight.

        `prefer` is taken as long as it is ready: the rollouts of a group share an endpoint and its prefix cache.
        None if no endpoint is ready. Ties go round. The limit itself is the caller's to keep: a group larger
        than what is left of one endpoint's share still goes to one endpoint.
        """
        if prefer is not None and prefer.healthy:
            prefer.inflight += n
            self.inflight += n
            return prefer
        at = next_in_turn(self.ready, self._turn)
        if at is None:
            return None
        self._turn = at + 1
        best = self.ready[at]
        best.inflight += n
        self.inflight += n
        return best

    def release(self, endpoint: Endpoint, n: int = 1) -> None:
        """`n` rollouts of an endpoint are over."""
        if n > endpoint.inflight:
            raise ValueError(f"{endpoint.name}: {n} released, but only {endpoint.inflight} in flight")
        endpoint.inflight -= n
        self.inflight -= n
        if endpoint.leaving:
            self._part_with(endpoint)

    def note_success(self, endpoint: Endpoint) -> None:
        """A rollout on the endpoint completed: it makes progress."""
        endpoint.requests_failed = 0
        endpoint.progress_at = self.clock()

    def note_failure(self, endpoint: Endpoint, kind: str) -> None:
        """A rollout on the endpoint failed; `blame` decides whether that speaks against the endpoint.

        Several that do, in a row and without a success, make it suspect: it is probed before it gets more work.
        """
        doubt = blame(kind)
        if doubt is Blame.NOT_THE_ENDPOINT:
            return
        endpoint.requests_failed += 1
        if not endpoint.healthy or self.clock() < endpoint.trusted_until:
            return
        if endpoint.requests_failed >= self._suspect_after:
            reason = f"{endpoint.requests_failed} rollouts in a row failed, the last one with {kind}"
            self.suspect(endpoint, reason, doubt)

    # Transitions, asked for by the watches and the weight updates.

    def enter(self, endpoint: Endpoint) -> None:
        """The endpoint gets work from now on."""
        now = self.clock()
        endpoint.state = EndpointState.READY
        endpoint.error = ""
        endpoint.out_since = None
        endpoint.doubt = Blame.NOT_THE_ENDPOINT
        endpoint.checks_failed = endpoint.requests_failed = endpoint.retries = 0
        endpoint.progress_at = now
        endpoint.trusted_until = now + self._trust_s
        self._recount()

    def set_limit(self, endpoint: Endpoint, limit: int) -> None:
        """The endpoint may have this much in flight."""
        endpoint.limit = limit
        self._recount()

    def suspect(self, endpoint: Endpoint, reason: str, doubt: Blame) -> None:
        """The endpoint gets no new work until the doubt is cleared."""
        self._take_out(endpoint, EndpointState.SUSPECT, reason)
        endpoint.doubt = doubt
        log.warning("endpoint.suspected", endpoint=endpoint.name, reason=reason)
        self._recount()

    def lose(self, endpoint: Endpoint, reason: str) -> None:
        """The endpoint is out of service until it was admitted again."""
        if endpoint.state not in IN_SERVICE:
            endpoint.error = reason
            return
        self._take_out(endpoint, EndpointState.LOST, reason)
        endpoint.losses += 1
        endpoint.forget_weights()
        endpoint.metrics = None
        endpoint.retry_at = self.clock()
        log.warning("endpoint.lost", endpoint=endpoint.name, reason=reason, inflight=endpoint.inflight)
        self.on_lost(endpoint)
        self._recount()

    def leave(self, endpoint: Endpoint) -> None:
        """The endpoint gets no new work, and is gone when what it has in flight has ended, however."""
        endpoint.leaving = True
        endpoint.error = "it was removed: rollouts on it end, it gets no new ones"
        self._part_with(endpoint)
        self._recount()

    def _part_with(self, endpoint: Endpoint) -> None:
        """Forget an endpoint that leaves, once nothing is in flight on it."""
        if endpoint.inflight == 0 and endpoint in self.endpoints:
            self.endpoints.remove(endpoint)
            endpoint.state = EndpointState.LOST
            log.info("endpoint.removed", endpoint=endpoint.name)
            self._forget(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        """An endpoint is gone for good."""

    def _take_out(self, endpoint: Endpoint, state: EndpointState, reason: str) -> None:
        endpoint.state = state
        endpoint.error = reason
        if endpoint.out_since is None:
            endpoint.out_since = self.clock()
        endpoint.wake.set()

    def _recount(self) -> None:
        self.ready = [endpoint for endpoint in self.endpoints if endpoint.healthy]
        self.limit = sum(endpoint.limit for endpoint in self.ready)
        self.on_change()


def describe_errors(endpoints: Sequence[Endpoint]) -> str:
    """Each endpoint that gets no work, and why."""
    return "; ".join(
        f"{endpoint.name}: {endpoint.error or 'has not answered yet'}"
        for endpoint in endpoints
        if not endpoint.healthy
    )


def _nothing(*_: object) -> None:
    pass

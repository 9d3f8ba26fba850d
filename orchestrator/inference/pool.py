"""The inference servers of a run: who gets the next group, how much may be in flight, who is out of service.

Owns the HTTP session, the endpoints' state and the weight updates. Placement (`acquire`, `release`) is
synchronous and never waits. Invariants: an endpoint gets work only while it is READY; it becomes READY only
when it answers, lists the model and serves the newest published weights, decided without an `await` in
between; `inflight` counts what was acquired and not released, lost endpoints included.

Generation requests go from the environments straight to the endpoint that a group was given. To keep prefix
caches right, the dispatcher sends a `cache_salt` that names the version, and a session id that names the
group (`X-Session-ID`) for routers behind one URL.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import structlog

from orchestrator.errors import ConfigError
from orchestrator.inference.concurrency import AdaptiveConcurrency, FixedConcurrency
from orchestrator.inference.endpoint import (
    IN_SERVICE,
    Endpoint,
    EndpointState,
    EngineApi,
    EngineUnfitError,
    InferenceError,
    build_endpoint,
)
from orchestrator.inference.sync import UpdateReport, WeightSync
from orchestrator.inference.watch import EndpointWatch, HealthPolicy
from orchestrator.inference.weights import WeightUpdate

log = structlog.get_logger(__name__)


class InferencePool:
    """Inference servers behind one door. `run()` must be running for losses and returns to be noticed.

    `on_change` is called whenever `limit` or the set of ready endpoints changed; `on_lost` with an endpoint
    whose requests in flight will not come back, or come back from weights that nobody knows.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        model: str,
        update: WeightUpdate,
        concurrency: FixedConcurrency | AdaptiveConcurrency,
        api_key_env: str | None = None,
        version: int = 0,
        weights_path: str | None = None,
        check_weights: bool = True,
        health: HealthPolicy | None = None,
        update_timeout_s: float = 600.0,
        straggler_grace_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not base_urls:
            raise ConfigError("inference.base_urls is empty; name at least one inference server")
        if len({url.rstrip("/") for url in base_urls}) != len(base_urls):
            raise ConfigError(f"inference.base_urls names a server twice: {', '.join(base_urls)}")
        self.endpoints = tuple(build_endpoint(url) for url in base_urls)
        self.inflight = 0
        self.limit = 0
        self.on_change: Callable[[], None] = _nothing
        self.on_lost: Callable[[Endpoint], None] = _nothing
        self._model = model
        self._headers = _headers(api_key_env)
        self._controllers = dict(
            zip(self.endpoints, concurrency.controllers(len(self.endpoints)), strict=True)
        )
        self._sync = WeightSync(
            update,
            model=model,
            timeout_s=update_timeout_s,
            check_paths=check_weights,
            version=version,
            path=weights_path,
            clock=clock,
        )
        self._policy = health or HealthPolicy()
        self._straggler_grace_s = straggler_grace_s
        self.clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[Endpoint, EndpointWatch] = {}
        self._ready: list[Endpoint] = []
        self._turn = 0
        for endpoint, controller in self._controllers.items():
            endpoint.limit = controller.limit
            endpoint.version = endpoint.version_newest = version

    async def __aenter__(self) -> Self:
        # No connection is kept: calls are rare, and one that an engine closed a moment ago would fail the next call.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        for endpoint, controller in self._controllers.items():
            api = EngineApi(
                url=endpoint.url,
                root=endpoint.root,
                session=self._session,
                check_timeout_s=self._policy.check_timeout_s,
            )
            self._watches[endpoint] = EndpointWatch(
                endpoint=endpoint,
                api=api,
                controller=controller,
                sync=self._sync,
                service=self,
                policy=self._policy,
                model=self._model,
                clock=self.clock,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # Placement.

    @property
    def version(self) -> int:
        """The newest published version that was accepted."""
        return self._sync.target.version

    @property
    def ready(self) -> Sequence[Endpoint]:
        """Endpoints that get work."""
        return self._ready

    @property
    def watches(self) -> Sequence[EndpointWatch]:
        """The watch of each endpoint, in order; there are none before the pool is entered."""
        return list(self._watches.values())

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
        ready = self._ready
        best: Endpoint | None = None
        best_load = 0.0
        best_at = 0
        for offset in range(len(ready)):
            at = (self._turn + offset) % len(ready)
            endpoint = ready[at]
            load = endpoint.inflight / endpoint.limit
            if best is None or load < best_load:
                best, best_load, best_at = endpoint, load, at
        if best is not None:
            self._turn = best_at + 1
            best.inflight += n
            self.inflight += n
        return best

    def release(self, endpoint: Endpoint, n: int = 1) -> None:
        """`n` rollouts of an endpoint are over."""
        if n > endpoint.inflight:
            raise ValueError(f"{endpoint.url}: {n} released, but only {endpoint.inflight} in flight")
        endpoint.inflight -= n
        self.inflight -= n

    def note_success(self, endpoint: Endpoint) -> None:
        """A rollout on the endpoint completed: it makes progress."""
        endpoint.requests_failed = 0
        endpoint.progress_at = self.clock()

    def note_failure(self, endpoint: Endpoint, kind: str) -> None:
        """A rollout on the endpoint failed for a reason that may be the endpoint's (no answer, time-out, …).

        Several in a row without a success make the endpoint suspect: it is probed before it gets more work.
        """
        endpoint.requests_failed += 1
        if not endpoint.healthy or self.clock() < endpoint.trusted_until:
            return
        if endpoint.requests_failed >= self._policy.suspect_after:
            self.suspect(
                endpoint, f"{endpoint.requests_failed} rollouts in a row failed, the last one with {kind}"
            )

    # Life.

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every endpoint is ready; after `timeout_s` the ready ones are enough, and none is an error.

        A server that is up but does not fit (another model, no way to update weights) is an error at once.
        """
        target = self._sync.target
        if target.path is not None:
            await self._sync.retarget(target.version, target.path)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for endpoint in self.endpoints:
                    group.create_task(self._watches[endpoint].wait_ready(), name=f"ready {endpoint.url}")
        except TimeoutError:
            missing = [endpoint for endpoint in self.endpoints if not endpoint.healthy]
            if len(missing) == len(self.endpoints):
                said = "; ".join(endpoint.error or f"{endpoint.url}: did not answer" for endpoint in missing)
                raise InferenceError(
                    f"no inference endpoint was ready within {timeout_s:g} s ({said}); "
                    f"start the servers, correct inference.base_urls or raise inference.ready_timeout_s"
                ) from None
            for endpoint in missing:
                log.warning("endpoint.missing", endpoint=endpoint.url, error=endpoint.error)
        except ExceptionGroup as group_error:
            unfit = group_error.subgroup(EngineUnfitError)
            raise unfit.exceptions[0] if unfit else group_error from None

    async def run(self) -> None:
        """Watch every endpoint until cancelled."""
        async with asyncio.TaskGroup() as group:
            for endpoint in self.endpoints:
                group.create_task(self._watches[endpoint].run(), name=f"watch {endpoint.url}")

    async def update_weights(self, version: int, path: str | None) -> UpdateReport:
        """Bring every endpoint in service to a published version, side by side; the others follow on their return.

        An endpoint that fails is taken out until it has caught up. So is one that is still at it when the
        others have long been done (`straggler_grace_s`, and three times as long as they took): one stuck
        server holds up nobody. WeightUpdateError if the version cannot be loaded at all; then no engine was
        touched and the old version stays.
        """
        started = self.clock()
        weights = await self._sync.retarget(version, path)
        failed: dict[str, str] = {}
        live = [endpoint for endpoint in self.endpoints if endpoint.state in IN_SERVICE]
        try:
            async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as group:
                update = _Update(
                    patience, self._straggler_grace_s, len(live), asyncio.get_running_loop().time()
                )
                for endpoint in live:
                    group.create_task(self._update(endpoint, failed, update), name=f"update {endpoint.url}")
        except TimeoutError:
            log.warning("weights.stragglers", version=version, endpoints=sorted(failed))
        report = UpdateReport(
            version=version,
            updated=tuple(endpoint.url for endpoint in live if endpoint.url not in failed),
            failed=failed,
            superseded=self._sync.target.serial != weights.serial,
            seconds=self.clock() - started,
        )
        log.info(
            "weights.updated",
            version=self.version,
            endpoints=len(report.updated),
            failed=len(failed),
            seconds=round(report.seconds, 3),
        )
        return report

    async def _update(self, endpoint: Endpoint, failed: dict[str, str], update: "_Update") -> None:
        try:
            await self._sync.catch_up(endpoint, self._watches[endpoint].api)
        except InferenceError as error:
            failed[endpoint.url] = str(error)
            log.error("weights.failed", endpoint=endpoint.url, version=self.version, error=str(error))
            self.lose(endpoint, str(error))
        except asyncio.CancelledError:
            if endpoint.serial is None:
                failed[endpoint.url] = "a weight update was given up half-way"
                self.lose(endpoint, failed[endpoint.url])
            raise
        else:
            update.note_done()

    # Transitions, called by the watches.

    def enter(self, endpoint: Endpoint) -> None:
        """The endpoint gets work from now on."""
        now = self.clock()
        endpoint.state = EndpointState.READY
        endpoint.error = ""
        endpoint.checks_failed = endpoint.requests_failed = endpoint.retries = 0
        endpoint.progress_at = now
        endpoint.trusted_until = now + self._policy.interval_s
        self._recount()

    def set_limit(self, endpoint: Endpoint, limit: int) -> None:
        """The endpoint may have this much in flight."""
        endpoint.limit = limit
        self._recount()

    def suspect(self, endpoint: Endpoint, reason: str) -> None:
        """The endpoint gets no new work until it was probed."""
        endpoint.state = EndpointState.SUSPECT
        endpoint.error = reason
        log.warning("endpoint.suspected", endpoint=endpoint.url, reason=reason)
        endpoint.wake.set()
        self._recount()

    def lose(self, endpoint: Endpoint, reason: str) -> None:
        """The endpoint is out of service until it was admitted again."""
        endpoint.error = reason
        if endpoint.state not in IN_SERVICE:
            return
        endpoint.state = EndpointState.LOST
        endpoint.losses += 1
        endpoint.serial = endpoint.label = None  # it may come back with any weights
        endpoint.metrics = None
        endpoint.retry_at = self.clock()
        log.warning("endpoint.lost", endpoint=endpoint.url, reason=reason, inflight=endpoint.inflight)
        endpoint.wake.set()
        self.on_lost(endpoint)
        self._recount()

    def _recount(self) -> None:
        self._ready = [endpoint for endpoint in self.endpoints if endpoint.healthy]
        self.limit = sum(endpoint.limit for endpoint in self._ready)
        self.on_change()


@dataclass(slots=True)
class _Update:
    """How long the stragglers of an update are waited for: it begins to count when half of the endpoints are done."""

    patience: asyncio.Timeout
    grace_s: float
    endpoints: int
    started: float
    done: int = 0

    def note_done(self) -> None:
        self.done += 1
        if 2 * self.done >= self.endpoints and self.patience.when() is None:
            now = asyncio.get_running_loop().time()
            self.patience.reschedule(now + max(self.grace_s, 3 * (now - self.started)))


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(f"inference.api_key_env names {api_key_env}, which is not set in the environment")
    return {"Authorization": f"Bearer {key}"}


def _nothing(*_: object) -> None:
    pass

"""The inference servers of a run: a roster of endpoints, watched, and brought to every published version.

Owns the HTTP session, the watches and the weight updates; placement and states are the `Roster`'s. Invariants:
an endpoint becomes READY only when it answers, lists the model and serves the newest published weights, decided
without an `await` in between; `loaded` are weights that an engine has loaded, never such as were only asked for.

Generation requests go from the environments straight to the endpoint that a group was given. To keep prefix
caches right, the dispatcher sends a `cache_salt` that names the version, and a session id that names the
group (`X-Session-ID`) for routers behind one URL.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import aiohttp
import structlog

from envs.addresses import base_url_problem, shown_url
from envs.vanished import watchful_socket
from orchestrator.discovery import Membership
from orchestrator.errors import ConfigError
from orchestrator.inference.broadcast import Broadcast, UpdateReport
from orchestrator.inference.concurrency import AdaptiveConcurrency, FixedConcurrency
from orchestrator.inference.endpoint import IN_SERVICE, Endpoint, build_endpoint
from orchestrator.inference.engine import EngineApi
from orchestrator.inference.recipe import WeightUpdate, WeightUpdateError
from orchestrator.inference.roster import Roster, describe_errors
from orchestrator.inference.sampling import SamplingCheck
from orchestrator.inference.sending import Sending
from orchestrator.inference.startup import Start
from orchestrator.inference.sync import Beginning, Weights, WeightSync
from orchestrator.inference.watch import EndpointWatch, HealthPolicy

log = structlog.get_logger(__name__)

MOST_ENDPOINTS = 1024
"""Each is watched by a task of its own."""


class InferencePool(Roster):
    """Inference servers behind one door. `run()` must be running for losses and returns to be noticed.

    `version` and `weights_path` are what the run begins or goes on with: engines load them before they get work; without
    a path, `beginning` says what they may have. `sampling` is
    what training asks of their log-probabilities, None where nothing is trained on.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        membership: Membership,
        model: str,
        update: WeightUpdate,
        sampling: SamplingCheck | None,
        concurrency: FixedConcurrency | AdaptiveConcurrency,
        api_key_env: str | None,
        version: int,
        weights_path: str | None,
        beginning: Beginning,
        check_weights: bool,
        health: HealthPolicy,
        update_timeout_s: float,
        straggler_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            base_urls,
            membership=membership,
            suspect_after=health.suspect_after,
            trust_s=health.interval_s,
            clock=clock,
        )
        self.on_found: Callable[[str, str], None] = self.take_in
        """Called with the address of an endpoint that a source names from now on, and with the source."""
        self.on_gone: Callable[[str], None] = self.let_go
        """Called with an address that no source names any more."""
        membership.on_join = lambda url, source: self.on_found(url, source)
        membership.on_leave = lambda url: self.on_gone(url)
        self._model = model
        self._sampling = sampling
        self._headers = _headers(api_key_env)
        self._concurrency = concurrency
        self._controllers = dict(
            zip(self.endpoints, concurrency.controllers(len(self.endpoints)), strict=True)
        )
        self._sync = WeightSync(
            update,
            endpoints=self.endpoints,
            model=model,
            timeout_s=update_timeout_s,
            check_paths=check_weights,
            version=version,
            path=weights_path,
            beginning=beginning,
            clock=clock,
            on_refused=lambda: self.on_change(),
        )
        self._policy = health
        self._straggler_grace_s = straggler_grace_s
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[Endpoint, EndpointWatch] = {}
        self._watching: asyncio.TaskGroup | None = None
        self.sending = Sending(
            endpoints=self.endpoints,
            watches=self._watches,
            sync=self._sync,
            roster=self,
            timeout_s=update_timeout_s,
            clock=clock,
        )
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._start: Start | None = None
        for endpoint, controller in self._controllers.items():
            endpoint.limit = controller.limit
            endpoint.version = endpoint.version_newest = version

    async def __aenter__(self) -> Self:
        # No connection is kept: calls are rare, and one that an engine closed a moment ago would fail the next call.
        connector = aiohttp.TCPConnector(force_close=True, limit=0, socket_factory=watchful_socket)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        for endpoint in self.endpoints:
            self._watches[endpoint] = self._build_watch(endpoint, self._session)
        return self

    def _build_watch(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> EndpointWatch:
        api = EngineApi(
            url=endpoint.url,
            root=endpoint.root,
            session=session,
            check_timeout_s=self._policy.check_timeout_s,
        )
        return EndpointWatch(
            endpoint=endpoint,
            api=api,
            controller=self._controllers[endpoint],
            sync=self._sync,
            roster=self,
            policy=self._policy,
            model=self._model,
            sampling=self._sampling,
            clock=self.clock,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # Facts.

    @property
    def version(self) -> int:
        """The version that every endpoint is brought to: the newest published one that was not refused."""
        return self._sync.target.version

    @property
    def loaded(self) -> Weights:
        """The newest weights that at least one engine has loaded; at the start, those that the run goes on with."""
        return self._sync.loaded

    @property
    def settled(self) -> bool:
        """Whether an engine has loaded the version that every endpoint is brought to."""
        return self._sync.loaded is self._sync.target

    def whereabouts(self, version: int) -> dict[str, str | None]:
        """By endpoint why it does not serve a published version or a later one: empty when it does, None while it may soon."""
        if not self.endpoints:  # the sources name nobody at the moment
            return dict.fromkeys((followed.source.text for followed in self.membership.sources), None)
        return {endpoint.name: self._lacks(endpoint, version) for endpoint in self.endpoints}

    def _lacks(self, endpoint: Endpoint, version: int) -> str | None:
        in_service = endpoint.state in IN_SERVICE
        if in_service and endpoint.serial is not None and endpoint.version >= version:
            return ""
        untried = endpoint.retries == 0 and endpoint.checks_failed == 0
        if self.version < version or self.awaits_initial or endpoint.updating or in_service or untried:
            return None
        return endpoint.error or "is out of service"

    @property
    def awaits_initial(self) -> bool:
        """Whether no engine gets work before the trainer has published version 0."""
        return self._sync.begins and self._sync.beginning is Beginning.TRAINER

    @property
    def refusal(self) -> str:
        """What engines said of the last version that none could load."""
        return self._sync.refusal

    @property
    def sent_by_trainer(self) -> bool:
        """Whether the trainer brings versions to the engines itself, between the ends of `sending`."""
        return self._sync.update.sent

    @property
    def missing_weights(self) -> str:
        """Why no endpoint has the weights that it should have; empty when one has, or none was asked to load them."""
        return "" if any(map(self._sync.is_current, self.ready)) else self._sync.problem

    # Life.

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every endpoint is ready; after `timeout_s` the ready ones are enough, and none is an error.

        A server that is up but does not fit (another model, no way to update weights) is an error at once. One that
        cannot load the run's weights any more is not: it stays out until a version is published that it can load. Those
        that sources name come and go meanwhile, and of these one is enough.
        """
        self._start = Start(list(self._watches.values()), self._sync, self.membership)
        try:
            await self._start.wait(timeout_s)
        finally:
            self._start = None
        if self.missing_weights:
            log.error("weights.missing", error=self.missing_weights)

    async def run(self) -> None:
        """Watch every endpoint, and follow the sources, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._watching = group
                self.membership.follow(group)
                for endpoint in self.endpoints:
                    self._watch(endpoint)
        finally:
            self._watching = None

    def _watch(self, endpoint: Endpoint) -> None:
        if self._watching is not None:
            watch = self._watches[endpoint].run()
            self._tasks[endpoint] = self._watching.create_task(watch, name=f"watch {endpoint.url}")

    async def check_version(self, version: int, path: str | None) -> None:
        """Look at published weights before anything relies on them; WeightUpdateError if they cannot be loaded."""
        await self._sync.check(version, path)

    async def update_weights(self, version: int, path: str | None) -> UpdateReport:
        """Bring every endpoint in service to a published version, side by side; the others follow on their return.

        An endpoint that fails is taken out until it has caught up. So is one that is still at it when the
        others have long been done (`straggler_grace_s`, and three times as long as they took). WeightUpdateError
        if the version cannot be loaded, by its path or because every endpoint failed to: then the weights that
        were loaded last stay, and the endpoints return with them.
        """
        started = self.clock()
        weights = await self._sync.retarget(version, path)
        self._retry_now()
        broadcast = Broadcast(
            weights=weights,
            endpoints=[endpoint for endpoint in self.endpoints if endpoint.state in IN_SERVICE],
            watches=dict(self._watches),
            sync=self._sync,
            roster=self,
            straggler_grace_s=self._straggler_grace_s,
        )
        try:
            await broadcast.run()
        except WeightUpdateError:
            self._retry_now()
            raise
        report = UpdateReport(
            version=version,
            updated=broadcast.updated,
            failed=broadcast.failed,
            superseded=self._sync.target is not weights,
            seconds=self.clock() - started,
        )
        log.info(
            "weights.updated",
            version=self.version,
            endpoints=len(report.updated),
            failed=len(report.failed),
            seconds=round(report.seconds, 3),
        )
        return report

    # What is changed while a run goes on. Each refusal is asked for first, and nothing happens in between.

    def refuse_max_inflight(self, value: int) -> str:
        """Why so many rollouts in flight cannot be had; empty if they can."""
        try:
            replace(self._concurrency, max_inflight=value)
        except ValueError as error:
            return str(error)
        return ""

    def set_max_inflight(self, value: int) -> None:
        """So many rollouts over all endpoints from now on; what is above it ends."""
        self._concurrency = replace(self._concurrency, max_inflight=value)
        self._share_out()

    def refuse_add(self, url: str) -> str:
        """Why there can be no further endpoint at an address; empty if there can."""
        if problem := base_url_problem(url):
            return problem
        if (endpoint := self._find(url)) is not None and not endpoint.leaving:
            return f"{endpoint.name} is one of the inference servers already"
        if len(self.endpoints) >= MOST_ENDPOINTS:
            return f"there are {len(self.endpoints)} inference servers already"
        return ""

    def add_endpoint(self, url: str) -> None:
        """Watch a further endpoint: it enters service when it answers, fits and has the newest weights."""
        endpoint, source = self._find(url), self.membership.named_by(url)
        if endpoint is not None:  # it was about to leave
            endpoint.leaving, endpoint.error, endpoint.source = False, "", source
        else:
            assert self._session is not None
            endpoint = build_endpoint(url, now=self.clock())
            endpoint.joining, endpoint.source = True, source
            endpoint.version = endpoint.version_newest = self._sync.loaded.version
            self.endpoints.append(endpoint)
            self._controllers[endpoint] = self._concurrency.controllers(len(self.endpoints))[-1]
            self._watches[endpoint] = self._build_watch(endpoint, self._session)
            self._watch(endpoint)
            if self._start is not None:
                self._start.join(self._watches[endpoint])
        self._share_out()

    def take_in(self, url: str, source: str) -> None:
        """Watch an endpoint that a source names."""
        if why := self.refuse_add(url):
            log.info("endpoint.not_added", endpoint=shown_url(url), source=source, why=why)
        else:
            log.info("endpoint.joins", endpoint=shown_url(url), source=source)
            self.add_endpoint(url)

    def let_go(self, url: str) -> None:
        """Give an endpoint that no source names any more no new work, were it the last one."""
        endpoint = self._find(url)
        if endpoint is not None and endpoint.source and not endpoint.leaving:
            log.info("endpoint.leaves", endpoint=endpoint.name, inflight=endpoint.inflight)
            self.remove_endpoint(url)

    def refuse_remove(self, url: str) -> str:
        """Why an endpoint cannot be removed; empty if it can."""
        staying = [endpoint for endpoint in self.endpoints if not endpoint.leaving]
        endpoint = self._find(url)
        if endpoint is None or endpoint.leaving:
            there = ", ".join(endpoint.name for endpoint in staying)
            return f"there is no inference server {shown_url(url)}; there are: {there}"
        if len(staying) == 1:
            return f"{endpoint.name} is the last inference server; add another one first, or pause the run"
        if endpoint.healthy and len(self.ready) == 1:
            others = describe_errors([other for other in staying if other is not endpoint])
            return f"{endpoint.name} is the only inference server in service ({others})"
        return ""

    def remove_endpoint(self, url: str) -> None:
        """Give an endpoint no new work, and forget it when what it has has ended."""
        endpoint = self._find(url)
        assert endpoint is not None
        self.leave(endpoint)
        self._share_out()

    def enter(self, endpoint: Endpoint) -> None:
        """The endpoint gets work from now on; the first time, it gets its share of what may be in flight too."""
        if endpoint.joining:
            endpoint.joining = False
            self._share_out()
        super().enter(endpoint)

    def _find(self, url: str) -> Endpoint | None:
        return next((endpoint for endpoint in self.endpoints if endpoint.url == url), None)

    def _share_out(self) -> None:
        """Divide what may be in flight anew among the endpoints that have joined and stay."""
        staying = [endpoint for endpoint in self.endpoints if not endpoint.leaving]
        sharing = [endpoint for endpoint in staying if not endpoint.joining] or staying
        for endpoint, (low, high) in zip(sharing, self._concurrency.bounds(len(sharing)), strict=True):
            controller = self._controllers[endpoint]
            controller.resize(low, high)
            endpoint.limit = controller.limit
        self._recount()

    def _forget(self, endpoint: Endpoint) -> None:
        if self._start is not None:
            self._start.leave(endpoint)
        del self._controllers[endpoint], self._watches[endpoint]
        if (task := self._tasks.pop(endpoint, None)) is not None:
            task.cancel()

    def _retry_now(self) -> None:
        """The target changed: whoever is out of service may be able to load this one."""
        for endpoint in self.endpoints:
            if endpoint.state not in IN_SERVICE:
                endpoint.retry_at = self.clock()
                endpoint.retries = 0
                endpoint.wake.set()


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(f"inference.api_key_env names {api_key_env}, which is not set in the environment")
    return {"Authorization": f"Bearer {key}"}

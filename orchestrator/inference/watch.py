"""Watches one endpoint: is it alive, does it have the right weights, does it make progress, how full is it.

One `EndpointWatch` per endpoint, each in its own task, so that a mute server delays nobody else. It finds out
and reports; the roster changes states. An endpoint enters service only when it answers, lists the model, serves
the newest weights and, once it was lost, has finished a request.

A hung engine keeps answering health checks, and so does a proxy without an engine behind it. They show by
rollouts that fail in a row or by rollouts in flight while no token is made; then the endpoint gets no new work
until it is cleared (`blame` says by what): by counters that move, or by a probe of one token that comes back as a
chat completion. A false suspicion (every rollout is busy with its tools) costs one token.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from envs.backoff import backoff_s
from orchestrator.errors import InferenceError
from orchestrator.inference.blame import Blame
from orchestrator.inference.concurrency import ConcurrencyController
from orchestrator.inference.endpoint import IN_SERVICE, Endpoint, EndpointState
from orchestrator.inference.engine import (
    EngineApi,
    EngineError,
    EngineRefusedError,
    EngineUnfitError,
    reason_of,
)
from orchestrator.inference.recipe import WeightUpdateError
from orchestrator.inference.roster import Roster
from orchestrator.inference.sampling import SamplingCheck
from orchestrator.inference.sync import OWN_WEIGHTS, Beginning, WeightSync

log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 60.0
_LOADS_AT_START = 3
"""Failed loads after which the start does not wait any longer for an engine that answers and fits."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When an endpoint is checked, and what takes it out of service.

    `failures_allowed` failed checks in a row lose it; `suspect_after` failed rollouts in a row, or
    `progress_timeout_s` without a token while rollouts are in flight, make it suspect; a probe has
    `probe_timeout_s` to come back.
    """

    interval_s: float
    progress_timeout_s: float
    failures_allowed: int = 3
    suspect_after: int = 8
    check_timeout_s: float = 10.0
    probe_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EndpointWatch:
    """Checks of one endpoint."""

    endpoint: Endpoint
    api: EngineApi
    controller: ConcurrencyController
    sync: WeightSync
    roster: Roster
    policy: HealthPolicy
    model: str
    sampling: SamplingCheck | None
    clock: Callable[[], float]

    async def wait_ready(self) -> EngineError | None:
        """Try until the endpoint is in service, or nothing but the weights keeps it out, or it is refused.

        EngineUnfitError if trying again cannot help. One that a source names is refused instead, and is not waited for
        when another is in service.
        """
        attempt = loads = 0
        while not self.endpoint.healthy:
            try:
                await self._check_fit()
                loads += 1
                await self._bring_in()
            except InferenceError as error:
                self.endpoint.error = reason_of(error)
                if isinstance(error, EngineUnfitError) and not self.endpoint.source:
                    raise
                if isinstance(error, EngineRefusedError | EngineUnfitError):
                    return error
                if self.endpoint.source and self.roster.ready:
                    return None
                if isinstance(error, WeightUpdateError) or loads >= _LOADS_AT_START:
                    return None
                attempt += 1
                await asyncio.sleep(backoff_s(attempt, first_s=_RETRY_FIRST_S, max_s=self.policy.interval_s))
        return None

    async def run(self) -> None:
        """Check every interval, and at once when the endpoint is woken, until cancelled."""
        endpoint = self.endpoint
        while True:
            endpoint.wake.clear()
            # An update has its own time limit, and an engine may be mute while it loads.
            if not endpoint.updating:
                await self.check()
            try:
                async with asyncio.timeout(self.policy.interval_s):
                    await endpoint.wake.wait()
            except TimeoutError:
                continue

    async def check(self) -> None:
        """One round."""
        endpoint = self.endpoint
        try:
            await self.api.check_health()
            if endpoint.state in IN_SERVICE:
                await self._check_label()
        except EngineError as error:
            self._note_failed_check(error)
            return
        answers_again = endpoint.checks_failed > 0
        endpoint.checks_failed = 0
        if endpoint.state in IN_SERVICE:
            await self._check_progress()
        elif answers_again or self.clock() >= endpoint.retry_at:
            await self._try_return()

    def _note_failed_check(self, error: EngineError) -> None:
        endpoint = self.endpoint
        endpoint.error = error.said
        endpoint.checks_failed += 1
        # A suspect that fails a check has given two signs that do not depend on each other.
        suspect = endpoint.state is EndpointState.SUSPECT
        if suspect or endpoint.checks_failed >= self.policy.failures_allowed:
            self.roster.lose(endpoint, error.said)

    async def _check_fit(self) -> None:
        """Raise InferenceError unless the server answers and can be used as configured."""
        await self.api.check_health()
        await self.api.check_model(self.model)
        if self.sync.update.admit is not None:
            async with self.endpoint.lock:
                if self.endpoint.updating:  # it stands still because the trainer is sending it weights
                    raise EngineError(self.api.url, "is being sent weights")
                await self.sync.update.admit(self.api)
        if self.sampling is not None:
            await self.sampling.check(self.api)
        await self._refuse_foreign_weights()

    async def _bring_in(self) -> None:
        """Take the endpoint into service with the target's weights, or raise InferenceError with what is missing."""
        endpoint = self.endpoint
        probed = endpoint.losses == 0
        while True:
            await self.sync.catch_up(endpoint, self.api)
            if not probed:
                await self._request_token()
                probed = True
            # No await between this test and the entry: a version published later finds the endpoint in service.
            if self.sync.is_current(endpoint):
                break
        self.controller.reset()
        self.roster.enter(endpoint)

    async def _refuse_foreign_weights(self) -> None:
        """A run that has published nothing takes an engine's weights for the initial ones: they must be its own."""
        read_label = self.sync.update.read_label
        if self.sync.update.adapters or self.sync.update.sent:
            # What it was started with is as it was, whatever adapters it has; or the trainer sends it what it lacks.
            return
        if read_label is None or not self.sync.begins or self.sync.beginning is not Beginning.OWN:
            return
        found = await read_label(self.api)
        if found is None:
            log.warning(
                "endpoint.unlabelled_weights",
                endpoint=self.endpoint.name,
                remedy="it does not say which weights it has; set inference.initial_weights to be sure that they are not another run's",
            )
        elif found != OWN_WEIGHTS:
            raise EngineRefusedError(
                self.api.url,
                f'has the weights "{found}" of another run; restart it, name the folder of the initial weights in '
                'inference.initial_weights, or set it to "trainer" and have the trainer publish version 0',
            )

    async def _check_label(self) -> None:
        """An engine that restarted between two checks is noticed by its lack of the label it was given."""
        endpoint = self.endpoint
        label, serial = endpoint.label, endpoint.serial
        if label is None or self.sync.update.read_label is None:
            return
        found = await self.sync.update.read_label(self.api)
        if found != label and endpoint.serial == serial:
            reason = f'its weights are labelled "{found}" instead of "{label}": the engine was restarted'
            self.roster.lose(endpoint, reason)

    async def _check_progress(self) -> None:
        endpoint = self.endpoint
        before = endpoint.metrics
        complaint = ""
        try:
            metrics = await self.api.read_metrics()
        except EngineError as error:
            metrics, complaint = None, error.said
        if endpoint.healthy:
            endpoint.error = complaint  # what an earlier check complained about is over
        if endpoint.updating or endpoint.state not in IN_SERVICE:
            return  # a paused engine's queue says nothing about its capacity
        now = self.clock()
        moved = False
        if metrics is not None:
            endpoint.metrics = metrics
            moved = before is not None and metrics.generated_tokens != before.generated_tokens
        # Our own count of what is in flight decides whether there should be progress: the gauges of a hung engine
        # stay at whatever they were last, which may be zero.
        if moved or endpoint.inflight == 0:
            endpoint.progress_at = now
        self.controller.observe(metrics, inflight=endpoint.inflight, now=now)
        if self.controller.limit != endpoint.limit:
            self.roster.set_limit(endpoint, self.controller.limit)
        if endpoint.state is EndpointState.SUSPECT:
            await self._clear_or_lose(moved=moved)
        elif now - endpoint.progress_at > self.policy.progress_timeout_s:
            idle_s = now - endpoint.progress_at
            reason = f"{endpoint.inflight} rollouts in flight, no progress for {idle_s:.0f} s"
            self.roster.suspect(endpoint, reason, Blame.NO_PROGRESS)

    async def _clear_or_lose(self, *, moved: bool) -> None:
        """Whether a suspect works: by its own counters, if it may just be full, else by one token."""
        endpoint = self.endpoint
        try:
            if not (moved and endpoint.doubt is Blame.NO_PROGRESS):
                await self._request_token()
        except EngineError as error:
            complaint = (
                "finishes nothing" if error.status is None else "does not answer requests as it should"
            )
            self.roster.lose(endpoint, f"it says that it is well but {complaint}: {error.said}")
            return
        if endpoint.state is EndpointState.SUSPECT:  # it may have been lost meanwhile
            log.info("endpoint.cleared", endpoint=endpoint.name)
            self.roster.enter(endpoint)

    async def _request_token(self) -> None:
        token_ids = self.endpoint.doubt is Blame.NO_TOKEN_IDS
        await self.api.probe(self.model, timeout_s=self.policy.probe_timeout_s, token_ids=token_ids)

    async def _try_return(self) -> None:
        endpoint, target = self.endpoint, self.sync.target
        returning = endpoint.state is EndpointState.LOST
        try:
            await self._check_fit()
            await self._bring_in()
        except InferenceError as error:
            endpoint.error = reason_of(error)
            # It may be restarted before the next try, and come back with any weights.
            endpoint.forget_weights()
            endpoint.retries += 1
            delay_s = backoff_s(endpoint.retries, first_s=self.policy.interval_s, max_s=_RETRY_MAX_S)
            if self.sync.target is not target:
                delay_s = 0.0  # what failed is not what is wanted any more
            endpoint.retry_at = self.clock() + delay_s
            log.warning("endpoint.refused", endpoint=endpoint.name, error=str(error), again_in_s=delay_s)
        else:
            event = "endpoint.returned" if returning else "endpoint.ready"
            log.info(event, endpoint=endpoint.name, version=endpoint.version)

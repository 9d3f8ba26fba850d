"""Watches one endpoint: is it alive, does it have the right weights, does it make progress, how full is it.

One `EndpointWatch` per endpoint, each in its own task, so that a mute server delays nobody else. It finds out
and reports; the pool (through `Transitions`) changes states. An endpoint enters service only by `admit`: it
answers, lists the model, serves the newest weights and, once it was lost, has finished a request.

A hung engine keeps answering health checks. It shows by rollouts that fail in a row or by rollouts in flight
while no token is made; then it gets no new work until its counters move or a probe of one token comes back.
A false suspicion (every rollout is busy with its tools) costs one token.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from envs.backoff import backoff_s
from orchestrator.inference.concurrency import ConcurrencyController
from orchestrator.inference.endpoint import (
    IN_SERVICE,
    Endpoint,
    EndpointState,
    EngineApi,
    EngineError,
    EngineUnfitError,
    InferenceError,
)
from orchestrator.inference.sync import WeightSync

log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When an endpoint is checked, and what takes it out of service.

    `failures_allowed` failed checks in a row lose it; `suspect_after` failed rollouts in a row, or
    `progress_timeout_s` without a token while rollouts are in flight, make it suspect; a probe has `probe_timeout_s` to come back.
    """

    interval_s: float = 2.0
    failures_allowed: int = 3
    suspect_after: int = 8
    check_timeout_s: float = 10.0
    probe_timeout_s: float = 30.0
    progress_timeout_s: float = 120.0


class Transitions(Protocol):
    """The transitions of an endpoint, made by the pool."""

    def enter(self, endpoint: Endpoint) -> None:
        """It gets work from now on."""

    def suspect(self, endpoint: Endpoint, reason: str) -> None:
        """It gets no new work until it was probed."""

    def lose(self, endpoint: Endpoint, reason: str) -> None:
        """It is out of service; what it had in flight is lost."""

    def set_limit(self, endpoint: Endpoint, limit: int) -> None:
        """It may have this much in flight."""


@dataclass(frozen=True, slots=True)
class EndpointWatch:
    """Checks of one endpoint."""

    endpoint: Endpoint
    api: EngineApi
    controller: ConcurrencyController
    sync: WeightSync
    service: Transitions
    policy: HealthPolicy
    model: str
    clock: Callable[[], float]

    async def wait_ready(self) -> None:
        """Try until the endpoint is in service; EngineUnfitError if trying again cannot help."""
        attempt = 0
        while not self.endpoint.healthy:
            try:
                await self.admit()
            except EngineUnfitError:
                raise
            except InferenceError as error:
                self.endpoint.error = str(error)
                attempt += 1
                await asyncio.sleep(backoff_s(attempt, first_s=_RETRY_FIRST_S, max_s=self.policy.interval_s))

    async def run(self) -> None:
        """Check every interval, and at once when the endpoint is woken, until cancelled."""
        endpoint = self.endpoint
        while True:
            endpoint.wake.clear()
            if (
                not endpoint.updating
            ):  # an update has its own time limit, and an engine may be mute while it loads
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
            endpoint.error = str(error)
            endpoint.checks_failed += 1
            # A suspect that fails a check has given two signs that do not depend on each other.
            suspect = endpoint.state is EndpointState.SUSPECT
            if suspect or endpoint.checks_failed >= self.policy.failures_allowed:
                self.service.lose(endpoint, str(error))
            return
        endpoint.checks_failed = 0
        if endpoint.state in IN_SERVICE:
            await self._check_progress()
        elif self.clock() >= endpoint.retry_at:
            await self._try_return()

    async def admit(self) -> None:
        """Take the endpoint into service, or raise InferenceError with what is missing."""
        endpoint = self.endpoint
        await self.api.check_health()
        await self.api.check_model(self.model)
        if self.sync.update.admit is not None:
            await self.sync.update.admit(self.api)
        await self._warn_of_foreign_weights()
        probed = endpoint.losses == 0
        while True:
            await self.sync.catch_up(endpoint, self.api)
            if not probed:
                await self.api.probe(self.model, self.policy.probe_timeout_s)
                probed = True
            # No await between this test and the entry: a version published later finds the endpoint in service.
            if self.sync.is_current(endpoint):
                break
        self.controller.reset()
        self.service.enter(endpoint)

    async def _warn_of_foreign_weights(self) -> None:
        """A run that has published nothing takes an engine's weights for the initial ones; say so if they are not."""
        read_label, target = self.sync.update.read_label, self.sync.target
        if read_label is None or target.serial > 0 or target.path is not None:
            return
        found = await read_label(self.api)
        if found not in (None, "default"):
            log.warning(
                "endpoint.foreign_weights",
                endpoint=self.endpoint.url,
                label=found,
                remedy="another run left its weights there; restart the engine to begin with the model's own",
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
            self.service.lose(endpoint, reason)

    async def _check_progress(self) -> None:
        endpoint = self.endpoint
        before = endpoint.metrics
        try:
            metrics = await self.api.read_metrics()
        except EngineError as error:
            endpoint.error = str(error)
            metrics = None
        if endpoint.updating or endpoint.state not in IN_SERVICE:
            return  # a paused engine's queue says nothing about its capacity
        now = self.clock()
        moved = False
        if metrics is not None:
            endpoint.metrics, endpoint.metrics_at = metrics, now
            moved = before is not None and metrics.generated_tokens != before.generated_tokens
        # Our own count of what is in flight decides whether there should be progress: the gauges of a hung engine
        # stay at whatever they were last, which may be zero.
        if moved or endpoint.inflight == 0:
            endpoint.progress_at = now
        self.controller.observe(metrics, inflight=endpoint.inflight, now=now)
        if self.controller.limit != endpoint.limit:
            self.service.set_limit(endpoint, self.controller.limit)
        if endpoint.state is EndpointState.SUSPECT:
            await self._probe(moved=moved)
        elif now - endpoint.progress_at > self.policy.progress_timeout_s:
            idle_s = now - endpoint.progress_at
            self.service.suspect(
                endpoint, f"{endpoint.inflight} rollouts in flight, no progress for {idle_s:.0f} s"
            )

    async def _probe(self, *, moved: bool) -> None:
        """Whether a suspect makes progress: by its own counters (it may just be full), else by one token."""
        try:
            if not moved:
                await self.api.probe(self.model, self.policy.probe_timeout_s)
        except EngineError as error:
            self.service.lose(self.endpoint, f"it says that it is well but finishes nothing: {error}")
            return
        if self.endpoint.state is EndpointState.SUSPECT:  # it may have been lost meanwhile
            log.info("endpoint.cleared", endpoint=self.endpoint.url)
            self.service.enter(self.endpoint)

    async def _try_return(self) -> None:
        endpoint = self.endpoint
        returning = endpoint.state is EndpointState.LOST
        try:
            await self.admit()
        except InferenceError as error:
            endpoint.error = str(error)
            endpoint.retries += 1
            delay_s = backoff_s(endpoint.retries, first_s=self.policy.interval_s, max_s=_RETRY_MAX_S)
            endpoint.retry_at = self.clock() + delay_s
            log.warning("endpoint.refused", endpoint=endpoint.url, error=str(error), again_in_s=delay_s)
        else:
            event = "endpoint.returned" if returning else "endpoint.ready"
            log.info(event, endpoint=endpoint.url, version=endpoint.version)

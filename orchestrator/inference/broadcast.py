"""One published version on its way to all endpoints in service, side by side.

An endpoint that fails is taken out until it has caught up. So is one that is still at it when the others have
long been done: one stuck server holds up nobody. A version that every endpoint failed to load is refused: the
weights that were loaded last are the target again, and endpoints that were not touched never leave service. Where all of
them are away, which says nothing about the version, it stays the target, and whoever comes back loads it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from orchestrator.errors import InferenceError
from orchestrator.inference.endpoint import Endpoint
from orchestrator.inference.engine import EngineAwayError, reason_of
from orchestrator.inference.recipe import WeightUpdateError
from orchestrator.inference.roster import Roster
from orchestrator.inference.sync import Weights, WeightSync
from orchestrator.inference.watch import EndpointWatch

log = structlog.get_logger(__name__)

_PATIENCE = 3
"""Stragglers get at least this many times as long as the first half of the endpoints took."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What became of a published version: who serves it (or a newer one), and who was taken out and why.

    Nobody is in `updated` when no endpoint was in service; those that come back load the version by themselves.
    `superseded` says that a newer version was published before this one had reached everyone.
    """

    version: int
    updated: tuple[str, ...]
    failed: dict[str, str]
    superseded: bool
    seconds: float


@dataclass(slots=True)
class Broadcast:
    """The endpoints that were in service when it began, and what became of each."""

    weights: Weights
    endpoints: Sequence[Endpoint]
    watches: Mapping[Endpoint, EndpointWatch]
    sync: WeightSync
    roster: Roster
    straggler_grace_s: float
    failed: dict[str, str] = field(default_factory=dict)
    _away: set[str] = field(default_factory=set)
    _untouched: list[tuple[Endpoint, str]] = field(default_factory=list)
    _done: int = 0

    @property
    def updated(self) -> tuple[str, ...]:
        """Who serves the version, or a newer one."""
        return tuple(endpoint.name for endpoint in self.endpoints if endpoint.name not in self.failed)

    async def run(self) -> None:
        """Return when every endpoint has the version or was taken out; WeightUpdateError if it was refused."""
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as group:
                for endpoint in self.endpoints:
                    update = self._update(endpoint, patience, started)
                    group.create_task(update, name=f"update {endpoint.name}")
        except TimeoutError:
            log.warning("weights.stragglers", version=self.weights.version, endpoints=sorted(self.failed))
        if self.failed and not self.updated and self.failed.keys() - self._away:
            await self._refuse_unless_loaded()
        for endpoint, reason in self._untouched:
            self.roster.lose(endpoint, reason)

    async def _refuse_unless_loaded(self) -> None:
        """Every endpoint in service has failed; one that is coming back, or tries again, may still load the version."""
        await self.sync.wait_idle()
        said = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
        self.sync.refuse(self.weights, why=said)
        if self.sync.is_refused(self.weights):
            raise WeightUpdateError(
                f"version {self.weights.version} was loaded by no inference server, "
                f"version {self.sync.loaded.version} stays ({said})"
            )

    async def _update(self, endpoint: Endpoint, patience: asyncio.Timeout, started: float) -> None:
        try:
            await self.sync.catch_up(endpoint, self.watches[endpoint].api)
        except WeightUpdateError as error:
            self._note_failed(endpoint, str(error))
            self._untouched.append((endpoint, str(error)))
        except InferenceError as error:
            if isinstance(error, EngineAwayError):
                self._away.add(endpoint.name)
            self._note_failed(endpoint, reason_of(error))
            self.roster.lose(endpoint, reason_of(error))
        except asyncio.CancelledError:
            if not self.sync.is_current(endpoint):
                self.failed[endpoint.name] = "a weight update was given up half-way"
                self.roster.lose(endpoint, self.failed[endpoint.name])
            raise
        else:
            self._done += 1
            if 2 * self._done >= len(self.endpoints) and patience.when() is None:
                now = asyncio.get_running_loop().time()
                patience.reschedule(now + max(self.straggler_grace_s, _PATIENCE * (now - started)))

    def _note_failed(self, endpoint: Endpoint, reason: str) -> None:
        self.failed[endpoint.name] = reason
        log.error("weights.failed", endpoint=endpoint.name, version=self.weights.version, error=reason)

"""What the outside sees of a service: the run's status, with what the shells know beside it."""

import time
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.env_servers.env import Env
from orchestrator.facts import (
    EndpointStatus,
    SourceStatus,
    Status,
    TrackerStatus,
    WaitStatus,
    status_without_run,
)
from orchestrator.inference import InferencePool
from orchestrator.run.run import Run
from orchestrator.run.status import build_status
from orchestrator.service.driver import Driver
from orchestrator.service.health import DiskSpace, LoopLag
from orchestrator.trainer_link.server import BatchServer
from orchestrator.views.metrics import render_metrics


class Front:
    """There before there is a run: the display and HTTP say from the very start what is waited for."""

    def __init__(
        self,
        *,
        notes: Sequence[str],
        max_steps: int | None,
        batch_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notes`: what the configuration does that people should know."""
        self.lag = LoopLag()
        self.disk = DiskSpace()
        self.trackers: Callable[[], list[TrackerStatus]] = list
        self.troubles: list[Callable[[], str]] = []
        """What is amiss beside the run; each is empty while nothing is."""
        self._notes = notes
        self._max_steps = max_steps
        self._batch_size = batch_size
        self._clock = clock
        self._started = clock()
        self._envs: Sequence[Env] = ()
        self._pool: InferencePool | None = None
        self._driver: Driver[Run] | None = None
        self._server: BatchServer | None = None
        self._world_size = 0
        self._last: Status | None = None

    def await_neighbours(self, envs: Sequence[Env], pool: InferencePool) -> None:
        """These are waited for from now on."""
        self._envs, self._pool = envs, pool

    def enter(self, driver: Driver[Run], server: BatchServer, *, world_size: int) -> None:
        """There is a run from now on."""
        self._driver, self._server, self._world_size = driver, server, world_size

    def leave(self) -> None:
        """The run is over; its last numbers stay to be seen."""
        if self._driver is not None:
            self._last = msgspec.structs.replace(
                self.read(self._driver), state="finished", waits=[], waiting_for="", buffer="the run is over"
            )
        self._driver = None

    def status(self) -> Status:
        """The run at this moment; before there is one, what its start waits for."""
        if self._driver is not None:
            return self.read(self._driver)
        if self._last is not None:
            return self._last
        return status_without_run(
            "starting",
            [WaitStatus(wait.kind.value, wait.text, None, wait.remedy) for wait in self.start_waits()],
            endpoints=[
                EndpointStatus(e.name, e.healthy, e.inflight, e.version, e.error, e.source)
                for e in (self._pool.endpoints if self._pool is not None else ())
            ],
            max_steps=self._max_steps,
            batch_size=self._batch_size,
            notes=self._notes,
            seconds=self._clock() - self._started,
            sources=self._sources(),
        )

    def start_waits(self) -> list[Wait]:
        """What the start waits for: env servers that load, inference servers that are not ready."""
        if self._pool is None:
            return [Wait(WaitKind.START, "the journal to be read")]
        found = [
            Wait(
                WaitKind.SERVER,
                f'env "{env.name}" to load ({env.ready_servers} of {env.servers} servers are ready)',
            )
            for env in self._envs
            if env.ready_servers < env.servers and not env.missing
        ]
        found += self._missing_servers()
        if not self._pool.endpoints:
            found.append(Wait(WaitKind.ENDPOINT, f"an inference server: {self._pool.explain()}"))
        found += [
            Wait(
                WaitKind.ENDPOINT,
                f"the inference server {endpoint.name}: {endpoint.error or 'it has not answered yet'}",
            )
            for endpoint in self._pool.endpoints
            if not endpoint.healthy
        ]
        return found or [Wait(WaitKind.START, "the run to be put together")]

    def metrics(self) -> bytes:
        """The same for Prometheus."""
        driver = self._driver
        if driver is None:
            return b""
        return render_metrics(lambda: self.read(driver), driver.run.parts.ledger)

    def read(self, driver: Driver[Run]) -> Status:
        """The status of a run, with what the shells around it know."""
        return build_status(
            driver.run,
            driver.clock(),
            loop_lag_p99_s=self.lag.percentile(0.99),
            disk_free_bytes=self.disk.free_bytes,
            waits=[*self._missing_servers(), *self._missing_ranks()],
            notes=[*self._notes, *filter(None, (trouble() for trouble in self.troubles))],
            trackers=self.trackers(),
            sources=self._sources(),
        )

    def _sources(self) -> list[SourceStatus]:
        """Where servers come from that are not listed."""
        memberships = [*(env.membership for env in self._envs)]
        if self._pool is not None:
            memberships.append(self._pool.membership)
        return [
            SourceStatus(one.source.text, membership.of, len(one.members), one.trouble)
            for membership in memberships
            for one in membership.sources
        ]

    def _missing_servers(self) -> list[Wait]:
        """Environments without a ready server, whose servers sources name."""
        return [
            Wait(WaitKind.SERVER, f'a server of env "{env.name}": {env.missing}')
            for env in self._envs
            if env.missing
        ]

    def _missing_ranks(self) -> list[Wait]:
        """Ranks that have batches to train on and are not connected."""
        if self._server is None or not self._server.leased:
            return []
        there = {rank.rank for rank in self._server.ranks}
        missing = [str(rank) for rank in range(self._world_size) if rank not in there]
        if not missing:
            return []
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return [Wait(WaitKind.RANKS, f"the trainer's rank {shown} of {self._world_size} to connect")]

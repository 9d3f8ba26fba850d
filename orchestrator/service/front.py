"""What the outside sees of a service: the run's status, with what the shells know beside it."""

from collections.abc import Sequence

from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.facts import Status
from orchestrator.run.run import Run
from orchestrator.run.status import build_status
from orchestrator.service.driver import Driver
from orchestrator.service.health import LoopLag
from orchestrator.trainer_link.server import BatchServer
from orchestrator.views.metrics import render_metrics


class Front:
    """There before there is a run: HTTP answers from the very start."""

    def __init__(self, *, notes: Sequence[str]) -> None:
        """`notes`: what the configuration does that people should know."""
        self.lag = LoopLag()
        self._notes = notes
        self._driver: Driver[Run] | None = None
        self._server: BatchServer | None = None
        self._world_size = 0

    def enter(self, driver: Driver[Run], server: BatchServer, *, world_size: int) -> None:
        """There is a run from now on."""
        self._driver, self._server, self._world_size = driver, server, world_size

    def leave(self) -> None:
        """The run is over."""
        self._driver = None

    def status(self) -> Status | None:
        """The run at this moment, if there is one."""
        return None if self._driver is None else self.read(self._driver)

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
            waits=self._missing_ranks(),
            notes=self._notes,
        )

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

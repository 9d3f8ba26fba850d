"""New weights: published versions are looked at before they count, and loaded one after the other."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from orchestrator.inference import InferencePool, WeightUpdateError
from orchestrator.local.policy import find_policy_flaw
from orchestrator.run.run import Run
from orchestrator.service.driver import Driver
from orchestrator.trainer_link.publications import Loads

log = structlog.get_logger()


class VersionChecks:
    """Looks at published versions before they are counted."""

    def __init__(self, pool: InferencePool, *, local: bool) -> None:
        """`local`: the policy server of [local] loads them, whose folders look different from those of engines."""
        self._pool = pool
        self._local = local
        self._asked: asyncio.Queue[tuple[int, str | None, Callable[[str], None]]] = asyncio.Queue()

    def ask(self, version: int, path: str | None, decided: Callable[[str], None]) -> None:
        """Have a version looked at; `decided` is called with what is wrong with it, if anything is."""
        self._asked.put_nowait((version, path, decided))

    async def run(self) -> None:
        """Look at one after the other until cancelled."""
        while True:
            version, path, decided = await self._asked.get()
            try:
                await self._pool.check_version(version, path)
                flaw = await asyncio.to_thread(find_policy_flaw, path) if self._local and path else ""
                if flaw:
                    raise WeightUpdateError(f"version {version}: {flaw}; publish after the files are written")
            except WeightUpdateError as error:
                log.error("version.refused", version=version, why=str(error))
                decided(str(error))
            else:
                decided("")


@dataclass(slots=True, eq=False)
class _Waiting:
    """Who wants to know what becomes of a published version."""

    version: int
    then: Loads
    timer: asyncio.TimerHandle | None = None


class WeightLoader:
    """Brings the inference servers to every published version, the newest first."""

    def __init__(self, pool: InferencePool) -> None:
        self._pool = pool
        self._asked = asyncio.Event()
        self._newest: tuple[int, str | None] = (0, None)
        self._pending: int | None = None
        """A version that the servers have been given, and that none has answered for yet."""
        self._waiting: list[_Waiting] = []

    def load(self, version: int, path: str | None) -> None:
        """A version is to be loaded; one that was asked for before and not begun is left out."""
        self._newest = version, path
        self._asked.set()

    def look(self, driver: Driver[Run]) -> None:
        """The inference servers changed: one that came back may have loaded what was asked for, or refused it."""
        run, loaded = driver.run, self._pool.loaded
        # A path alone is new when the trainer has published version 0.
        if loaded.version > run.version or (
            loaded.version == run.version and loaded.path != run.weights.loaded_path
        ):
            driver.tell(run.on_loaded, loaded.version, loaded.path)
        pending = self._pending
        if pending is not None and (self._pool.version < pending or self._pool.awaits_initial):
            self._pending = None
            stays = (
                "another is waited for" if self._pool.awaits_initial else f"version {loaded.version} stays"
            )
            said = f" ({self._pool.refusal})" if self._pool.refusal else ""
            driver.tell(run.on_refused, pending, f"no inference server could load it{said}; {stays}")
        elif self._pool.settled:
            self._pending = None
        self._answer(driver.run)
        driver.wake()

    def wait(self, driver: Driver[Run], version: int, wait_s: float, then: Loads) -> None:
        """Call `then` once: when every inference server has the version or is out of service, or it is refused, or in `wait_s`."""
        waiting = _Waiting(version, then)
        waiting.timer = asyncio.get_running_loop().call_later(wait_s, self._answer, driver.run, waiting)
        self._waiting.append(waiting)
        self._answer(driver.run)

    def _answer(self, run: Run, overdue: _Waiting | None = None) -> None:
        """Tell those who wait what is known for sure; one whose time is over hears what is known."""
        for waiting in list(self._waiting):
            gone = f"version {waiting.version} was refused"
            refused = (run.weights.refused or gone) if run.weights.newest < waiting.version else ""
            found = self._pool.whereabouts(waiting.version)
            if not refused and waiting is not overdue and None in found.values():
                continue
            self._waiting.remove(waiting)
            if waiting.timer is not None:
                waiting.timer.cancel()
            late = "has not loaded it in the time that was to be waited"
            waiting.then(refused, {name: late if why is None else why for name, why in found.items()})

    async def run(self, driver: Driver[Run]) -> None:
        """Load until cancelled, and tell the run what came of it."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            version, path = self._newest
            try:
                await self._pool.update_weights(version, path)
            except WeightUpdateError as error:
                driver.tell(driver.run.on_refused, version, str(error))
                self._answer(driver.run)
            else:
                # With no server in service nothing is loaded yet; the first that comes back loads or refuses it.
                self._pending = version
                self.look(driver)

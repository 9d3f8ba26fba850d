"""New weights: published versions are looked at before they count, and loaded one after the other."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from orchestrator.inference import InferencePool, WeightUpdateError
from orchestrator.local.policy import WEIGHTS_FILE
from orchestrator.run.run import Run
from orchestrator.service.driver import Driver

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
                if self._local and path is not None:
                    await asyncio.to_thread(_look_for_policy, version, path)
            except WeightUpdateError as error:
                log.error("version.refused", version=version, why=str(error))
                decided(str(error))
            else:
                decided("")


def _look_for_policy(version: int, path: str) -> None:
    try:
        there = (Path(path) / WEIGHTS_FILE).is_file()
    except ValueError:  # a name that no file can have
        there = False
    if not there:
        raise WeightUpdateError(
            f"version {version}: there is no {WEIGHTS_FILE} in {path!r}, which the policy server of [local] loads; "
            "publish after the files are written"
        )


class WeightLoader:
    """Brings the inference servers to every published version, the newest first."""

    def __init__(self, pool: InferencePool) -> None:
        self._pool = pool
        self._asked = asyncio.Event()
        self._loading = False
        self._newest: tuple[int, str | None] = (0, None)

    def load(self, version: int, path: str | None) -> None:
        """A version is to be loaded; one that was asked for before and not begun is left out."""
        self._newest = version, path
        self._asked.set()

    def look(self, driver: Driver[Run]) -> None:
        """The inference servers changed: one that came back may have loaded what was asked for, or refused it."""
        run, loaded = driver.run, self._pool.loaded
        published = run.parts.versions.published
        if published > self._pool.version and not self._loading and not self._asked.is_set():
            # No server was in service when it was asked for, and the first that came back could not load it.
            driver.tell(run.on_refused, published, "no inference server could load it")
        if loaded.version > run.version:
            driver.tell(run.on_loaded, loaded.version, loaded.path)
        driver.wake()

    async def run(self, driver: Driver[Run]) -> None:
        """Load until cancelled, and tell the run what came of it."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            version, path = self._newest
            self._loading = True
            try:
                await self._pool.update_weights(version, path)
            except WeightUpdateError as error:
                self._loading = False
                driver.tell(driver.run.on_refused, version, str(error))
            else:
                self._loading = False
                # With no server in service nothing is loaded yet; the first that comes back brings it.
                self.look(driver)

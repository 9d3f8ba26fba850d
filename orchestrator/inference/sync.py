"""Brings engines to the version that was published last.

There is one target, the newest published weights. An engine that is behind is brought to the target as it is
when its turn comes, so versions published while an update is under way coalesce to the newest. One engine is
never updated twice at once (a lock per endpoint); engines are independent of each other and every update is
bounded in time. What happens to an engine that failed is the pool's decision.

Invariant: an endpoint whose `serial` equals the target's serves exactly the target's weights; an update that
fails or is cancelled leaves `serial` None, because then nobody knows which weights the engine has.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.inference.endpoint import Endpoint, EngineApi, EngineError, InferenceError
from orchestrator.inference.weights import UpdateRequest, WeightUpdate, check_weights


@dataclass(frozen=True, slots=True)
class Weights:
    """What engines are to serve. `serial` counts publications, because a version may be published again."""

    serial: int
    version: int
    path: str | None


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What became of a published version: who serves it (or a newer one), and who was taken out and why.

    `superseded` says that a newer version was published before this one had reached everyone.
    """

    version: int
    updated: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    superseded: bool = False
    seconds: float = 0.0


class WeightSync:
    """The target and the way to it."""

    def __init__(
        self,
        update: WeightUpdate,
        *,
        model: str,
        timeout_s: float,
        check_paths: bool,
        version: int = 0,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.update = update
        self.target = Weights(serial=0, version=version, path=path)
        self._model = model
        self._timeout_s = timeout_s
        self._check_paths = check_paths
        self._clock = clock
        self._serial = 0

    async def retarget(self, version: int, path: str | None) -> Weights:
        """Make a published version the target. WeightUpdateError if it cannot be loaded; then nothing changes."""
        self._serial += 1
        serial = self._serial
        path = await check_weights(self.update, version, path, local=self._check_paths)
        weights = Weights(serial=serial, version=version, path=path)
        if serial > self.target.serial:  # a later one may have been checked faster
            self.target = weights
        return weights

    def is_current(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint serves the target."""
        return endpoint.serial == self.target.serial

    async def catch_up(self, endpoint: Endpoint, api: EngineApi) -> bool:
        """Bring one engine to the target; False if it was there already. InferenceError if it did not get there."""
        changed = False
        async with endpoint.lock:
            while not self.is_current(endpoint):
                changed = True
                await self._bring_to(self.target, endpoint, api)
        return changed

    async def _bring_to(self, target: Weights, endpoint: Endpoint, api: EngineApi) -> None:
        if target.serial == 0 and target.path is None:
            # Nothing was published yet: the weights that the engine was started with are the initial ones.
            self._settle(endpoint, target, label=None)
            return
        endpoint.updating = True
        endpoint.serial = None
        endpoint.version_newest = max(endpoint.version_newest, target.version)
        try:
            # The folder may be gone by the time that a restarted engine needs it, so it is looked at every time.
            path = await check_weights(self.update, target.version, target.path, local=self._check_paths)
            request = UpdateRequest(
                engine=api, version=target.version, path=path, model=self._model, timeout_s=self._timeout_s
            )
            await self._apply(request)
            label = await self._read_label(request)
        finally:
            endpoint.updating = False
            endpoint.progress_at = self._clock()
        self._settle(endpoint, target, label=label)

    async def _apply(self, request: UpdateRequest) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.update.apply(request)
        except InferenceError:
            raise
        except TimeoutError as error:
            raise EngineError(
                request.engine.url, f"version {request.version} was not loaded within {self._timeout_s:g} s"
            ) from error
        # A recipe may be the user's own code: whatever it raises is a failed update of one engine, not of the run.
        except Exception as error:
            raise EngineError(
                request.engine.url, f"weight update {self.update.name} raised {type(error).__name__}: {error}"
            ) from error

    async def _read_label(self, request: UpdateRequest) -> str | None:
        """The label that the engine has now, by which a restart will be noticed; None if it has no labels."""
        if self.update.read_label is None:
            return None
        label = await self.update.read_label(request.engine)
        if label is not None and label != str(request.version):
            raise EngineError(
                request.engine.url,
                f'was given version {request.version} but says that it has "{label}"; it was restarted',
            )
        return label

    def _settle(self, endpoint: Endpoint, target: Weights, *, label: str | None) -> None:
        endpoint.serial = target.serial
        endpoint.version = endpoint.version_newest = target.version
        endpoint.label = label

"""Brings engines to the version that was published last, and knows which one was loaded last.

There is one target, the newest published weights that were not refused. An engine that is behind is brought to
the target as it is when its turn comes, so versions published while an update is under way coalesce to the
newest. One engine is never updated twice at once (a lock per endpoint); engines are independent of each other
and every update is bounded in time. What happens to an engine that failed is the pool's decision.

Invariants: an endpoint whose `serial` equals the target's serves exactly the target's weights; an update that
fails or is cancelled leaves `serial` None, because then nobody knows which weights the engine has. `loaded` is
what an engine has loaded, never what was only asked for; a target that no engine loads is refused, and `loaded`
is the target again.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from orchestrator.errors import InferenceError
from orchestrator.inference.checkpoint import find_foreign
from orchestrator.inference.endpoint import IN_SERVICE, Endpoint
from orchestrator.inference.engine import EngineApi, EngineAwayError, EngineError
from orchestrator.inference.lora import adapter_name
from orchestrator.inference.recipe import UpdateRequest, WeightUpdate, WeightUpdateError
from orchestrator.inference.weights import check_weights, sent_label

log = structlog.get_logger(__name__)

_AT_PUBLICATION = "publish after the files are written; if only the engines see the folder, set inference.check_weights = false"
_AT_LOADING = "publish a newer version, or put it back"


_AWAITED = (
    'waits for the trainer to publish version 0, because of inference.initial_weights = "trainer"; '
    "publish(version=0, path=…) before the first batch"
)


_AWAITED_SENT = (
    'waits for the trainer to send version 0, because of inference.initial_weights = "trainer": '
    "with trainer.updating(0) as engines, before the first batch"
)
OWN_WEIGHTS = "default"
"""The label of an engine that nobody gave any weights."""


class Beginning(StrEnum):
    """What engines serve as long as nothing was published and no initial weights are known."""

    OWN = "own"  # the weights that an engine was started with; one that was given others since is refused
    ANY = "any"  # whatever it has
    TRAINER = "trainer"  # nothing: the trainer publishes version 0 first


@dataclass(frozen=True, slots=True)
class Weights:
    """What engines are to serve. `serial` counts publications, because a version may be published again."""

    serial: int
    version: int
    path: str | None


class WeightSync:
    """The target and the way to it. `problem` is why the target could not be loaded when it was last tried, `refusal` why an earlier one was given up.

    `on_refused` is called when a target was given up, because no engine may come into service by that.
    """

    def __init__(
        self,
        update: WeightUpdate,
        *,
        endpoints: Sequence[Endpoint],
        model: str,
        timeout_s: float,
        check_paths: bool,
        version: int,
        path: str | None,
        beginning: Beginning,
        clock: Callable[[], float],
        on_refused: Callable[[], None],
    ) -> None:
        self.update = update
        self._on_refused = on_refused
        self.beginning = beginning
        self.target = self.loaded = Weights(serial=0, version=version, path=path)
        self.problem = ""
        self.refusal = ""
        self._endpoints = endpoints
        self._model = model
        self._timeout_s = timeout_s
        self._check_paths = check_paths
        self._clock = clock
        self._serial = 0

    @property
    def begins(self) -> bool:
        """Whether nothing is known yet that an engine could be told to load."""
        return self.target.serial == 0 and self.target.path is None

    async def check(self, version: int, path: str | None) -> str | None:
        """The path as engines are to be given it; WeightUpdateError if a version cannot be loaded."""
        found = await check_weights(
            self.update, version, path, local=self._check_paths, remedy=_AT_PUBLICATION
        )
        if found is not None and self._check_paths and self.update.needs_path and not self.update.adapters:
            before = self.loaded.path
            foreign = await asyncio.to_thread(
                find_foreign, Path(found), Path(before or self._model), same_names=before is not None
            )
            if foreign:
                raise WeightUpdateError(
                    f"version {version}: {foreign}; publish weights of the model that is trained"
                )
        return found

    async def retarget(self, version: int, path: str | None) -> Weights:
        """Make a published version the target. WeightUpdateError if it cannot be loaded; then nothing changes."""
        self._serial += 1
        serial = self._serial
        weights = Weights(serial=serial, version=version, path=await self.check(version, path))
        if serial > self.target.serial:  # a later one may have been checked faster
            self._aim_at(weights)
        return weights

    def refuse(self, weights: Weights, *, why: str) -> bool:
        """Give up weights that nobody could load and go back to what was loaded last.

        False if they are not the target, or an engine has them, or one is at it and may get them.
        """
        at_it = any(endpoint.updating for endpoint in self._endpoints)
        if weights is not self.target or weights is self.loaded or at_it:
            return False
        self._aim_at(self.loaded)
        self.refusal = why
        log.error("weights.refused", version=weights.version, path=weights.path, instead=self.loaded.version)
        self._on_refused()
        return True

    def is_refused(self, weights: Weights) -> bool:
        """Whether the target went back behind these weights."""
        return weights.serial > self.target.serial

    async def wait_idle(self) -> None:
        """Wait until no engine is being updated, which takes no longer than updates may.

        One that stands still for the trainer is not waited for: nobody holds its lock, and what it gets is a later version.
        """
        while locked := [
            endpoint.lock for endpoint in self._endpoints if endpoint.updating and endpoint.lock.locked()
        ]:
            async with locked[0]:
                pass

    def is_current(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint serves the target."""
        return endpoint.serial == self.target.serial

    async def catch_up(self, endpoint: Endpoint, api: EngineApi) -> None:
        """Bring one engine to the target; InferenceError if it did not get there.

        WeightUpdateError says that the engine was not touched.
        """
        async with endpoint.lock:
            while not self.is_current(endpoint):
                target = self.target
                try:
                    await self._bring_to(target, endpoint, api)
                except InferenceError as error:
                    if target is not self.target:
                        continue  # a newer version was published meanwhile, and that one counts
                    away = isinstance(error, EngineAwayError)
                    if not away and not self._any_in_service() and self.refuse(target, why=str(error)):
                        continue  # rather the weights that were loaded before than no engine at all
                    untouched = isinstance(error, WeightUpdateError)
                    self.problem = (
                        str(error) if untouched else f"version {target.version} was not loaded: {error}"
                    )
                    raise

    def _any_in_service(self) -> bool:
        """Whether a broadcast is (or was) to bring engines to the target, and judges them all together."""
        return any(endpoint.state in IN_SERVICE for endpoint in self._endpoints)

    async def _bring_to(self, target: Weights, endpoint: Endpoint, api: EngineApi) -> None:
        if self.update.sent:
            await self._find_sent(target, endpoint, api)
            return
        if self.begins:
            if self.beginning is Beginning.TRAINER:
                raise WeightUpdateError(_AWAITED)
            # Nothing was published yet: the weights that the engine was started with are the initial ones. They
            # cannot be loaded again. After a load that failed, vLLM ends and starts with them, SGLang goes back.
            self._settle(endpoint, target, label=None, adapter="")
            return
        # Before the disk is looked at, which may take its time: nobody is to give the version up meanwhile.
        endpoint.updating = True
        try:
            # The folder may be gone by the time that a restarted engine needs it, so it is looked at every time.
            path = await check_weights(
                self.update, target.version, target.path, local=self._check_paths, remedy=_AT_LOADING
            )
            endpoint.forget_weights()
            endpoint.version_newest = max(endpoint.version_newest, target.version)
            request = UpdateRequest(
                engine=api,
                version=target.version,
                path=path,
                model=self._model,
                timeout_s=self._timeout_s,
                adapter=adapter_name(self._model, target.version, secrets.token_hex(4)),
            )
            await self._apply(request)
            label = await self._read_label(request)
        finally:
            endpoint.updating = False
            endpoint.progress_at = self._clock()
        self._settle(endpoint, target, label=label, adapter=request.adapter if self.update.adapters else "")

    async def _find_sent(self, target: Weights, endpoint: Endpoint, api: EngineApi) -> None:
        """The trainer has sent the target to the engine, if its label says so; nothing can be loaded without the trainer."""
        assert self.update.read_label is not None
        if self.begins and self.beginning is Beginning.TRAINER:
            endpoint.lacks_weights = True
            raise WeightUpdateError(_AWAITED_SENT)
        wanted = OWN_WEIGHTS if self.begins else sent_label(target.version, target.path)
        try:
            found = await self.update.read_label(api)
        except EngineError as error:
            raise EngineAwayError(api.url, error.said, status=error.status) from error
        if found != wanted and not (self.begins and self.beginning is Beginning.ANY):
            endpoint.lacks_weights = True
            raise WeightUpdateError(
                f'has the weights "{found}": it waits for the trainer to send version {target.version} or a later one '
                f"(with trainer.updating({target.version}) as engines)"
            )
        self._settle(endpoint, target, label=found, adapter="")

    async def _apply(self, request: UpdateRequest) -> None:
        url = request.engine.url
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.update.apply(request)
        except (EngineError, WeightUpdateError):
            raise
        except TimeoutError as error:
            said = f"version {request.version} was not loaded within {self._timeout_s:g} s"
            raise EngineError(url, said) from error
        # A recipe may be the user's own code: whatever it raises is a failed update of one engine, not of the run.
        except Exception as error:
            said = f"weight update {self.update.name} raised {type(error).__name__}: {error}"
            raise EngineError(url, said) from error

    async def _read_label(self, request: UpdateRequest) -> str | None:
        """The label that the engine has now, by which a restart will be noticed; None if it has no labels."""
        if self.update.read_label is None:
            return None
        label = await self.update.read_label(request.engine)
        given = request.adapter if self.update.adapters else str(request.version)
        if label is not None and label != given:
            raise EngineError(
                request.engine.url,
                f'was given version {request.version} but says that it has "{label}"; it was restarted',
            )
        return label

    def _settle(self, endpoint: Endpoint, weights: Weights, *, label: str | None, adapter: str) -> None:
        endpoint.serial = weights.serial
        endpoint.version = endpoint.version_newest = weights.version
        endpoint.label = label
        endpoint.adapter = adapter
        endpoint.lacks_weights = False
        # An engine that is behind may be done later than the others, and one may be done with refused weights.
        if self.loaded.serial <= weights.serial <= self.target.serial:
            self.loaded = weights
        if weights is self.target:
            self.problem = ""

    def _aim_at(self, weights: Weights) -> None:
        self.target = weights
        self.problem = ""

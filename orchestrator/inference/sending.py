"""Weights that the trainer sends to the engines by itself: one version at a time, between `begin` and one of three ends.

`begin` freezes every engine that answers, in service or not, and marks it by a label that is no version's; so whatever
happens meanwhile, to whichever process, an engine with half of a version is never taken for one with a whole.
`finish` labels the version, and whose it is, on every engine that still has the mark and lets it go on. `take_back` lets them go on
as they were, where the trainer says that it sent nothing at all. `give_up` is for a trainer that failed or died within: nobody knows
what the engines have, so their requests are aborted and they are out of service until the next version. Each call
is bounded; an engine that fails one is lost, and the others go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from orchestrator.errors import InferenceError
from orchestrator.inference.endpoint import IN_SERVICE, Endpoint
from orchestrator.inference.engine import EngineApi, EngineError, reason_of
from orchestrator.inference.recipe import WeightUpdateError
from orchestrator.inference.roster import Roster, describe_errors
from orchestrator.inference.sync import WeightSync
from orchestrator.inference.watch import EndpointWatch
from orchestrator.inference.weights import SENT, sent_label

log = structlog.get_logger(__name__)

_RECOVERY_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class _Before:
    """What an engine said of its weights, and what was known of them, before it was frozen."""

    found: str | None
    serial: int | None
    label: str | None


class Sending:
    """The version that is being sent, if one is, and the engines that were frozen for it."""

    def __init__(
        self,
        *,
        endpoints: Sequence[Endpoint],
        watches: Mapping[Endpoint, EndpointWatch],
        sync: WeightSync,
        roster: Roster,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._endpoints = endpoints
        self._watches = watches
        self._sync = sync
        self._roster = roster
        self._timeout_s = timeout_s
        self._clock = clock
        self.version: int | None = None
        """What is being sent."""
        self._frozen: dict[Endpoint, _Before] = {}

    @property
    def waiting(self) -> int:
        """Engines that answer and lack nothing but weights, while none are being sent."""
        if self.version is not None:
            return 0
        return sum(
            endpoint.lacks_weights and endpoint.state not in IN_SERVICE for endpoint in self._endpoints
        )

    @property
    def engines(self) -> list[str]:
        """Base URLs of the engines that are frozen now."""
        return [endpoint.url for endpoint in self._frozen]

    async def begin(self, version: int) -> None:
        """Freeze every engine that answers; WeightUpdateError if there is none."""
        assert self.version is None
        self.version = version
        staying = [endpoint for endpoint in self._endpoints if not endpoint.leaving]
        await self._each(staying, self._freeze)
        if not self._frozen:
            self.version = None
            raise WeightUpdateError(
                f"no inference server can be sent version {version}: {describe_errors(staying)}"
            )
        log.info("weights.sending", version=version, endpoints=len(self._frozen))

    async def finish(self, path: str = SENT) -> None:
        """The trainer has sent the version, published under `path`, to all of them; WeightUpdateError if none has it."""
        version = self.version
        assert version is not None

        async def label(endpoint: Endpoint, api: EngineApi) -> None:
            await self._expect_mark(api)
            await api.post("/update_weight_version", body={"new_version": sent_label(version, path)})
            await api.post("/resume", timeout_s=_RECOVERY_TIMEOUT_S)

        failed = await self._end(label)
        if not any(endpoint in self._watches and endpoint not in failed for endpoint in self._frozen):
            said = "; ".join(
                f"{endpoint.name}: {failed.get(endpoint, 'was removed meanwhile')}"
                for endpoint in self._frozen
            )
            self._close()
            raise WeightUpdateError(f"no inference server has version {version} ({said})")
        self._close()

    async def take_back(self) -> None:
        """The trainer says that it sent nothing: the engines go on with what they have, under the label that they had."""

        async def restore(endpoint: Endpoint, api: EngineApi) -> None:
            before = self._frozen[endpoint]
            await self._expect_mark(api)
            await api.post("/update_weight_version", body={"new_version": str(before.found)})
            await api.post("/resume", timeout_s=_RECOVERY_TIMEOUT_S)
            endpoint.serial, endpoint.label = before.serial, before.label
            endpoint.version_newest = endpoint.version

        await self._end(restore)
        self._close()

    async def give_up(self, reason: str) -> None:
        """Nobody knows what the engines have: what they do is aborted, and they wait for the next version."""

        async def abort(endpoint: Endpoint, api: EngineApi) -> None:
            try:
                async with asyncio.timeout(_RECOVERY_TIMEOUT_S):
                    await api.post("/pause", query={"mode": "abort"})
                    await api.post("/resume")
            except (EngineError, TimeoutError) as error:
                log.warning("weights.resume_failed", endpoint=endpoint.name, error=str(error) or "timed out")
            raise EngineError(endpoint.url, reason)

        await self._end(abort)
        self._close()

    async def _freeze(self, endpoint: Endpoint, api: EngineApi) -> None:
        read_label = self._sync.update.read_label
        assert read_label is not None
        async with endpoint.lock:
            if endpoint not in self._watches:
                return  # it was removed while others were at it
            endpoint.updating = True
            try:
                before = _Before(await read_label(api), endpoint.serial, endpoint.label)
                endpoint.forget_weights()
                query = {"mode": "keep", "clear_cache": "true"}
                await api.post("/pause", query=query, timeout_s=self._timeout_s)
                self._frozen[endpoint] = before
                await api.post("/update_weight_version", body={"new_version": self._mark})
                assert self.version is not None
                endpoint.version_newest = max(endpoint.version_newest, self.version)
            except InferenceError as error:
                self._frozen.pop(endpoint, None)
                endpoint.updating = False
                self._lose(endpoint, f"cannot be paused: {reason_of(error)}")

    @property
    def _mark(self) -> str:
        return f"updating {self.version}"

    async def _expect_mark(self, api: EngineApi) -> None:
        assert self._sync.update.read_label is not None
        found = await self._sync.update.read_label(api)
        if found != self._mark:
            said = f'was restarted while version {self.version} was sent: its weights are "{found}"'
            raise EngineError(api.url, said)

    async def _end(self, act: Callable[[Endpoint, EngineApi], Awaitable[None]]) -> dict[Endpoint, str]:
        """Do the last thing with every frozen engine; those that failed, and why, are lost."""
        failed: dict[Endpoint, str] = {}

        async def one(endpoint: Endpoint, api: EngineApi) -> None:
            try:
                await act(endpoint, api)
            except InferenceError as error:
                failed[endpoint] = reason_of(error)
            finally:
                endpoint.updating = False
                endpoint.progress_at = self._clock()
            if endpoint in failed:
                self._lose(endpoint, failed[endpoint])

        # An engine that was removed meanwhile is nobody's any more.
        await self._each([endpoint for endpoint in self._frozen if endpoint in self._watches], one)
        return failed

    def _lose(self, endpoint: Endpoint, reason: str) -> None:
        log.error("weights.failed", endpoint=endpoint.name, version=self.version, error=reason)
        endpoint.forget_weights()
        self._roster.lose(endpoint, reason)

    def _close(self) -> None:
        self.version = None
        self._frozen.clear()

    async def _each(
        self, endpoints: Sequence[Endpoint], act: Callable[[Endpoint, EngineApi], Awaitable[None]]
    ) -> None:
        async def run(endpoint: Endpoint, api: EngineApi) -> None:
            await act(endpoint, api)

        async with asyncio.TaskGroup() as group:
            for endpoint in endpoints:
                # Not looked up in the task: an endpoint may be removed before that begins.
                api = self._watches[endpoint].api
                group.create_task(run(endpoint, api), name=f"send {endpoint.name}")

"""Waits for the inference servers at the start of a run, and says what it waits for.

A server that does not fit (another model, no way to update weights) ends the wait at once; one that is not there
is waited for, with a line in the log about what it says. One whose answers must not be trained on stays out; where
all are such, the wait ends with the reason. Servers that are there, but cannot load the run's weights
any more, do not end the run: the trainer may publish a version that they can load. Servers that sources name join and
leave the wait; one of them that does not fit stays out, and none is waited for when another is in service.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from orchestrator.discovery import Membership
from orchestrator.errors import InferenceError
from orchestrator.inference.endpoint import Endpoint
from orchestrator.inference.engine import EngineError, EngineUnfitError
from orchestrator.inference.roster import describe_errors
from orchestrator.inference.sync import WeightSync
from orchestrator.inference.watch import EndpointWatch

log = structlog.get_logger(__name__)

_REPORT_AFTER_S = 4.0
_REPORT_EVERY_S = 30.0


class Start:
    """The wait for endpoints; those that sources name may join and leave it."""

    def __init__(self, watches: Sequence[EndpointWatch], sync: WeightSync, membership: Membership) -> None:
        self._watches = list(watches)
        self._sync = sync
        self._membership = membership
        self._waits: dict[Endpoint, asyncio.Task[EngineError | None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._settled = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait until every endpoint is in service or lacks nothing but its weights; after `timeout_s` one is enough.

        InferenceError if there is not even one.
        """
        try:
            with self._reports():
                async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as self._group:
                    for watch in self._watches:
                        self._begin(watch)
                    following = self._membership.follow(self._group)
                    await self._settled.wait()
                    for task in following:
                        task.cancel()
        except TimeoutError:
            if not self._sync.problem and not any(endpoint.healthy for endpoint in self._endpoints):
                raise self._not_ready(timeout_s) from None
        except ExceptionGroup as group_error:
            unfit = group_error.subgroup(EngineUnfitError)
            raise unfit.exceptions[0] if unfit else group_error from None
        else:
            refusals = [refusal for wait in self._waits.values() if (refusal := wait.result()) is not None]
            if len(refusals) == len(self._waits):
                raise refusals[0]
        for endpoint in self._endpoints:
            if not endpoint.healthy:
                log.warning("endpoint.missing", endpoint=endpoint.name, error=endpoint.error)

    def join(self, watch: EndpointWatch) -> None:
        """Wait for one endpoint more."""
        self._watches.append(watch)
        self._begin(watch)

    def leave(self, endpoint: Endpoint) -> None:
        """An endpoint is waited for no longer."""
        self._watches = [watch for watch in self._watches if watch.endpoint is not endpoint]
        if (wait := self._waits.pop(endpoint, None)) is not None:
            wait.cancel()
        self._look()

    @property
    def _endpoints(self) -> list[Endpoint]:
        return [watch.endpoint for watch in self._watches]

    def _begin(self, watch: EndpointWatch) -> None:
        assert self._group is not None
        wait = self._group.create_task(watch.wait_ready(), name=f"ready {watch.endpoint.url}")
        self._waits[watch.endpoint] = wait
        wait.add_done_callback(self._look)

    def _look(self, *_: object) -> None:
        if self._waits and all(wait.done() for wait in self._waits.values()):
            self._settled.set()

    def _not_ready(self, timeout_s: float) -> InferenceError:
        said = [describe_errors(self._endpoints)] if self._watches else []
        if self._membership and (not said or any(one.trouble for one in self._membership.sources)):
            said.append(self._membership.explain())
        return InferenceError(
            f"no inference endpoint was ready within {timeout_s:g} s ({'; '.join(said)}); "
            f"start the servers, correct inference.base_urls or raise inference.ready_timeout_s"
        )

    @contextmanager
    def _reports(self) -> Iterator[None]:
        """Log what the endpoints that are waited for say: soon, and then now and then."""
        loop = asyncio.get_running_loop()

        timer: asyncio.TimerHandle

        def report() -> None:
            nonlocal timer
            for endpoint in self._endpoints:
                if not endpoint.healthy:
                    error = endpoint.error or "has not answered yet"
                    log.warning("endpoint.awaited", endpoint=endpoint.name, error=error)
            timer = loop.call_later(_REPORT_EVERY_S, report)

        timer = loop.call_later(_REPORT_AFTER_S, report)
        try:
            yield
        finally:
            timer.cancel()

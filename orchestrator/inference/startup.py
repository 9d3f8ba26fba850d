"""Waits for the inference servers at the start of a run, and says what it waits for.

A server that does not fit (another model, no way to update weights) ends the wait at once; one that is not there
is waited for, with a line in the log about what it says. One whose answers must not be trained on stays out; where
all are such, the wait ends with the reason. Servers that are there, but cannot load the run's weights
any more, do not end the run: the trainer may publish a version that they can load.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from orchestrator.errors import InferenceError
from orchestrator.inference.endpoint import Endpoint
from orchestrator.inference.engine import EngineUnfitError
from orchestrator.inference.roster import describe_errors
from orchestrator.inference.sync import WeightSync
from orchestrator.inference.watch import EndpointWatch

log = structlog.get_logger(__name__)

_REPORT_AFTER_S = 4.0
_REPORT_EVERY_S = 30.0


async def wait_ready(watches: Sequence[EndpointWatch], sync: WeightSync, timeout_s: float) -> None:
    """Wait until every endpoint is in service or lacks nothing but its weights; after `timeout_s` one is enough.

    InferenceError if there is not even one.
    """
    endpoints = [watch.endpoint for watch in watches]
    try:
        with _reports(endpoints):
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                waits = [
                    group.create_task(watch.wait_ready(), name=f"ready {watch.endpoint.url}")
                    for watch in watches
                ]
    except TimeoutError:
        if not sync.problem and not any(endpoint.healthy for endpoint in endpoints):
            raise InferenceError(
                f"no inference endpoint was ready within {timeout_s:g} s ({describe_errors(endpoints)}); "
                f"start the servers, correct inference.base_urls or raise inference.ready_timeout_s"
            ) from None
    except ExceptionGroup as group_error:
        unfit = group_error.subgroup(EngineUnfitError)
        raise unfit.exceptions[0] if unfit else group_error from None
    else:
        refusals = [refusal for wait in waits if (refusal := wait.result()) is not None]
        if len(refusals) == len(endpoints):
            raise refusals[0]
    for endpoint in endpoints:
        if not endpoint.healthy:
            log.warning("endpoint.missing", endpoint=endpoint.name, error=endpoint.error)


@contextmanager
def _reports(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Log what the endpoints that are waited for say: soon, and then now and then."""
    loop = asyncio.get_running_loop()

    timer: asyncio.TimerHandle

    def report() -> None:
        nonlocal timer
        for endpoint in endpoints:
            if not endpoint.healthy:
                error = endpoint.error or "has not answered yet"
                log.warning("endpoint.awaited", endpoint=endpoint.name, error=error)
        timer = loop.call_later(_REPORT_EVERY_S, report)

    timer = loop.call_later(_REPORT_AFTER_S, report)
    try:
        yield
    finally:
        timer.cancel()

"""The asyncio driver of a run, with a run that does what it is told to and an env that writes down what it gets."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from envs import wire
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import CancelAttempt, StartAttempt
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.env_servers.env import Env
from orchestrator.env_servers.requests import OnDone, RolloutRequest
from orchestrator.run.ports import EndRun, EvaluationFinished, LoadWeights, RunInstruction
from orchestrator.service.driver import TOGETHER_S, Driver
from orchestrator.simulate.world import result_of
from orchestrator.tasks.task import TrainTask
from tests.support.waiting import until

FAILURE = wire.Failure(0, "broken", "it broke", retryable=True)


class Endpoint:
    url = "http://engine/v1"
    adapter = ""


def make_attempt(count: int = 1) -> Attempt:
    """An attempt at a group of `count`, on one server and one inference server."""
    task = TrainTask(env="math", split="train", index=3, epoch=0, position=3)
    group = PendingGroup(
        task=task,
        lane=Lane.TRAIN,
        size=count,
        needed=count,
        group_scored=False,
        version=7,
        opened=0.0,
    )
    return Attempt(group=group, count=count, started=0.0, endpoint=Endpoint(), server="server-1")


class FakeEnv:
    """Keeps what was submitted and cancelled."""

    def __init__(self) -> None:
        self.submitted: list[tuple[RolloutRequest, OnDone, Any]] = []
        self.cancelled: list[RolloutRequest] = []

    def submit(self, request: RolloutRequest, on_done: OnDone, *, server: Any) -> None:
        self.submitted.append((request, on_done, server))

    def cancel(self, request: RolloutRequest) -> None:
        self.cancelled.append(request)


class FakeRun:
    """Says what a test puts into `out`, and writes down what it is told."""

    version = 7

    def __init__(self) -> None:
        self.out: list[RunInstruction] = []
        self.told: list[tuple[Any, ...]] = []
        self.advanced: list[float] = []
        self.due: float | None = None
        self.more = 0
        self.idle = False
        self.error: Exception | None = None
        self.abandoned = False

    def _tell(self, *what: Any) -> None:
        self.told.append(what)
        if self.error is not None:
            raise self.error

    def on_result(self, attempt: Attempt, result: wire.Result, now: float) -> None:
        self._tell("result", attempt)

    def on_failure(self, attempt: Attempt, failure: wire.Failure, now: float, *, together: int = 0) -> None:
        self._tell("failure", attempt, together)

    def on_endpoint_lost(self, endpoint: Any, now: float) -> None:
        self._tell("endpoint_lost", endpoint)

    def abandon(self, now: float) -> None:
        self.abandoned = True

    def advance(self, now: float, *, at_most: int = 256) -> bool:
        self.advanced.append(now)
        self.more -= 1
        return self.more >= 0

    def next_event_at(self, now: float) -> float | None:
        due, self.due = self.due, None
        return due

    def drain(self) -> list[RunInstruction]:
        out, self.out = self.out, []
        return out


class World:
    """A driver between a run and an env; `loaded` and `evaluated` are what it passed on."""

    def __init__(self) -> None:
        self.run, self.env = FakeRun(), FakeEnv()
        self.loaded: list[tuple[int, str | None]] = []
        self.evaluated: list[Mapping[str, Any]] = []
        self.driver: Driver[FakeRun] = Driver(
            self.run,
            train={"math": cast("Env", self.env)},
            evals={},
            on_weights=lambda version, path: self.loaded.append((version, path)),
            on_evaluation=self.evaluated.append,
            clock=asyncio.get_running_loop().time,
        )

    def start(self, attempt: Attempt) -> tuple[RolloutRequest, OnDone]:
        """Have the run start an attempt; returns what the env got."""
        self.run.out.append(StartAttempt(attempt))
        self.driver.perform()
        request, on_done, _ = self.env.submitted[-1]
        return request, on_done


@asynccontextmanager
async def driven() -> AsyncIterator[tuple[World, "asyncio.Task[None]"]]:
    """A world whose driver drives, and has had its first turn."""
    world = World()
    task = asyncio.create_task(world.driver.drive())
    await until(lambda: bool(world.run.advanced))
    try:
        yield world, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RuntimeError):
            await task


# --- instructions ---------------------------------------------------------------------------------------------------


async def test_a_start_becomes_a_request_on_the_reserved_server() -> None:
    """With the task, where to sample, and a salt that keeps what older weights cached apart."""
    world, attempt = World(), make_attempt(count=4)
    request, _ = world.start(attempt)
    assert (request.split, request.index, request.count) == ("train", 3, 4)
    assert (request.base_url, request.cache_salt) == ("http://engine/v1", "7")
    assert request.session == attempt.group.task.key
    assert world.env.submitted[0][2] == "server-1"
    assert request.model == ""


async def test_where_versions_are_adapters_their_name_is_asked_for() -> None:
    """The name of the version that the attempt's own inference server has."""
    world, attempt = World(), make_attempt()
    attempt.endpoint.adapter = "tiny-v3-01234567"
    request, _ = world.start(attempt)
    assert request.model == "tiny-v3-01234567"


async def test_a_cancel_reaches_the_request_once() -> None:
    """An attempt that has ended, or was cancelled before, has none any more."""
    world, attempt = World(), make_attempt()
    request, _ = world.start(attempt)
    world.run.out += [CancelAttempt(attempt), CancelAttempt(attempt)]
    world.driver.perform()
    assert world.env.cancelled == [request]


async def test_weights_evaluations_and_the_end_are_passed_on() -> None:
    """The first end counts."""
    world = World()
    world.run.out += [LoadWeights(3, "step_3"), EvaluationFinished({"env": "math"})]
    world.run.out += [EndRun("done"), EndRun("done again")]
    world.driver.perform()
    assert world.loaded == [(3, "step_3")]
    assert world.evaluated == [{"env": "math"}]
    assert await world.driver.ended == "done"


# --- answers --------------------------------------------------------------------------------------------------------


async def test_an_answer_is_told_and_what_follows_is_performed_at_once() -> None:
    """A free slot does not wait for the driver's next turn."""
    world, attempt = World(), make_attempt()
    request, on_done = world.start(attempt)
    world.run.out.append(StartAttempt(make_attempt()))
    on_done(request, result_of([]))
    assert world.run.told == [("result", attempt)]
    assert attempt.request is None
    assert len(world.env.submitted) == 2


@pytest.mark.parametrize(
    ("kind", "inflight", "together"),
    [("broken", 0, 0), (wire.SERVER_LOST, 1, 1), (wire.SERVER_LOST, 5, 5), (wire.SERVER_LOST, 0, 2)],
)
async def test_a_failure_tells_how_many_died_together(kind: str, inflight: int, together: int) -> None:
    """Only a lost server ends several; a request that was never sent is no suspect, so it did not die alone."""
    world, attempt = World(), make_attempt()
    request, on_done = world.start(attempt)
    on_done(request, wire.Failure(0, kind, "", retryable=True, inflight=inflight))
    assert world.run.told == [("failure", attempt, together)]


async def test_failures_of_a_kind_are_logged_once_in_full_and_then_by_the_hundred() -> None:
    """An env that always fails does not fill the log."""
    world = World()
    with capture_logs() as logs:
        for _ in range(250):
            request, on_done = world.start(make_attempt())
            on_done(request, FAILURE)
    assert [record["event"] for record in logs] == ["rollout.failed", *["rollout.failed_again"] * 2]
    assert [record["times"] for record in logs[1:]] == [100, 200]
    assert logs[0]["message"] == "it broke"


# --- driving --------------------------------------------------------------------------------------------------------


async def test_a_run_is_advanced_when_something_wakes_it_and_else_not() -> None:
    """Nothing polls."""
    async with driven() as (world, _):
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(world.run.advanced) == 1
        world.driver.wake()
        await until(lambda: len(world.run.advanced) == 2)


async def test_a_run_that_has_more_to_do_is_advanced_again_at_once() -> None:
    """In turns, so that answers come in between."""
    async with driven() as (world, _):
        world.run.more = 3
        world.driver.wake()
        await until(lambda: len(world.run.advanced) == 5)


async def test_the_driver_wakes_at_the_time_that_the_run_names() -> None:
    """No event is needed for what time alone makes due."""
    async with driven() as (world, _):
        due = world.run.due = world.driver.clock() + 0.05
        world.driver.wake()
        await until(lambda: len(world.run.advanced) == 3)
        # Timers of an event loop may fire earlier by its clock's resolution.
        assert world.run.advanced[2] >= due - 0.01


async def test_what_a_run_raises_inside_an_answer_ends_the_driving() -> None:
    """The link that brought the answer goes on; the broken run is not advanced again."""
    async with driven() as (world, task):
        request, on_done = world.start(make_attempt())
        world.run.error = RuntimeError("out of step")
        on_done(request, FAILURE)
        with pytest.raises(RuntimeError, match="out of step"):
            await task
        assert len(world.run.advanced) == 1


async def test_what_a_run_raises_when_it_is_told_something_ends_the_driving() -> None:
    """A neighbour that tells, such as the trainer link, does not get the error."""
    async with driven() as (world, task):
        world.run.error = RuntimeError("out of step")
        world.driver.tell(world.run.on_endpoint_lost, "engine")
        with pytest.raises(RuntimeError, match="out of step"):
            await task
    assert world.run.told == [("endpoint_lost", "engine")]


async def test_waiting_for_idle_ends_with_the_last_group() -> None:
    """It looks after every turn."""
    async with driven() as (world, _):
        waiting = asyncio.create_task(world.driver.wait_idle())
        world.driver.wake()
        await until(lambda: len(world.run.advanced) == 2)
        assert not waiting.done()
        world.run.idle = True
        world.driver.wake()
        await waiting


async def test_closing_gives_up_what_is_in_flight() -> None:
    """And cancels it at the servers."""
    world, attempt = World(), make_attempt()
    request, _ = world.start(attempt)
    world.run.out.append(CancelAttempt(attempt))
    world.driver.close()
    assert world.run.abandoned
    assert world.env.cancelled == [request]


async def test_answers_that_come_together_are_looked_at_together() -> None:
    """Hundreds of them wake the run once in a millisecond, and it looks again after the last one."""
    async with driven() as (world, _):
        for _ in range(500):
            world.driver.wake()
            await asyncio.sleep(0)
        looked = len(world.run.advanced)
        await until(lambda: len(world.run.advanced) > looked)
        times = world.run.advanced
        # A timer may come a nanosecond early.
        assert all(later - earlier > 0.9 * TOGETHER_S for earlier, later in itertools.pairwise(times))

"""The process's own health: the event loop's lag, room on the disk, and the watchdog that says what a run waits for."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.errors import InferenceError, StalledError
from orchestrator.run.status import diagnose
from orchestrator.service.health import WAITING_S, DiskSpace, LoopLag, Watchdog
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.simulate.world import World
from tests.support.waiting import until
from tests.support.worlds import make_settings

DIAGNOSIS: dict[str, Any] = {
    "waiting_for": "the trainer",
    "waits": {"trainer": "the trainer", "groups": "8 sequences"},
    "buffer": "32 of 32",
    "failures_told": "math: error (3 rollouts)",
    "failures": {"math: error": 3},
    "remedies": ["make the trainer faster"],
}


class Watched:
    """A run as the watchdog sees it: what moved last, how long everything has failed, what the time is."""

    def __init__(
        self,
        *,
        now: float = 1000.0,
        exit_on_stall: bool = False,
        timeout_s: float = 0.1,
        starved: bool = False,
    ) -> None:
        self.now = now
        self.starved = starved
        self.diagnosis = DIAGNOSIS
        self.progressed = 0.0
        self.failing_s = 0.0
        self.bereft = ""
        self.looks = 0
        self.looked = asyncio.Event()
        self.watchdog = Watchdog(
            timeout_s=timeout_s,
            exit_on_stall=exit_on_stall,
            progressed_at=lambda: self.progressed,
            starved=lambda: self.starved,
            all_failing_s=self._look,
            bereft=lambda: self.bereft,
            diagnose=lambda: self.diagnosis,
            clock=lambda: self.now,
        )

    def _look(self) -> float:
        self.looks += 1
        self.looked.set()
        return self.failing_s

    async def wait_looks(self, n: int) -> None:
        """Wait until the watchdog has looked `n` times more."""
        end = self.looks + n
        while self.looks < end:
            self.looked.clear()
            await self.looked.wait()


async def records_while(watched: Watched, *changes: dict[str, Any]) -> list[Any]:
    """What is logged while a run changes; between two changes the watchdog looks several times."""
    with capture_logs() as records:
        task = asyncio.create_task(watched.watchdog.run())
        for change in changes:
            for name, value in change.items():
                setattr(watched, name, value)
            await watched.wait_looks(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    return [record for record in records if record["event"] == "run.stalled"]


async def test_a_stall_is_reported_once_with_what_is_waited_for() -> None:
    """However long it lasts, one record says it."""
    (record,) = await records_while(Watched(), {"now": 1000.0}, {"now": 2000.0})
    assert record["idle_s"] == 1000.0
    assert record["waiting_for"] == "the trainer"
    assert record["buffer"] == "32 of 32"


async def test_a_second_stall_is_reported_again() -> None:
    """Progress in between makes it another one."""
    records = await records_while(Watched(), {"now": 1000.0}, {"progressed": 1999.0, "now": 2000.0})
    assert [record["idle_s"] for record in records] == [1000.0, 1.0]


async def test_a_run_that_moves_is_left_alone() -> None:
    """No record as long as something has moved within the timeout."""
    assert await records_while(Watched(), {"now": 1.0, "progressed": 1.0}, {"now": 1.05}) == []


async def test_a_stall_may_end_the_run() -> None:
    """With exit_on_stall the run ends with an exit code of its own and the reason."""
    watched = Watched(exit_on_stall=True)
    with pytest.raises(StalledError, match="nothing has moved for 1000 s: waiting for the trainer; 32 of 32"):
        await watched.watchdog.run()
    assert StalledError.exit_code == 7


async def test_a_run_in_which_every_env_fails_ends() -> None:
    """Even without exit_on_stall: going on would only burn rollouts."""
    watched = Watched()
    watched.progressed, watched.failing_s = watched.now, 5.0
    with pytest.raises(StalledError, match=r"every env has been failing for 5 s: .*math: error"):
        await watched.watchdog.run()


async def test_a_run_whose_weights_are_gone_for_good_ends() -> None:
    """Not at once, and not because of exit_on_stall: somebody may put them back, but nothing else can bring any."""
    watched = Watched(now=0.0, timeout_s=10_000.0)
    watched.bereft = "no weights at step_8"
    while watched.now < WAITING_S:
        watched.now += watched.watchdog.look()
    with pytest.raises(InferenceError, match="no weights at step_8"):
        watched.watchdog.look()
    assert watched.now < 2 * WAITING_S
    watched.bereft = ""
    watched.watchdog.look()


def waits_told(watched: Watched, until: float) -> list[tuple[float, Any]]:
    """Let virtual time pass, looking whenever the watchdog asks for it; what it said about waiting, and when."""
    told = []
    while watched.now < until:
        with capture_logs() as records:
            pause = watched.watchdog.look()
        told += [(watched.now, record) for record in records if record["event"] == "run.waiting"]
        watched.now += pause
    return told


def starving(**changes: Any) -> Watched:
    """A run whose trainer has no batch from time 0 on; it counts as stalled only much later."""
    return Watched(now=0.0, timeout_s=10_000.0, **({"starved": True} | changes))


def test_a_trainer_that_waits_is_told_what_for_and_what_to_change() -> None:
    """Once, 30 s after the last thing moved; long before the run counts as stalled."""
    world = World(make_settings(["math"]), {"math": Behaviour()})
    world.envs["math"].kill(0)
    world.turn()
    watched = starving()
    watched.diagnosis = diagnose(world.run, world.now)
    [(when, record)] = waits_told(watched, until=200.0)
    assert when == 30.0
    assert (record["log_level"], record["idle_s"]) == ("warning", 30.0)
    assert record["waits"]["server"] == 'a ready server (env "math")'
    assert record["remedies"] == ["look into the env's log in the run directory"]


def test_a_wait_that_lasts_is_told_every_five_minutes() -> None:
    """So that whoever reads only the end of a log still finds it."""
    assert [when for when, _ in waits_told(starving(), until=1000.0)] == [30.0, 330.0, 630.0, 930.0]


def test_another_wait_is_told_at_once() -> None:
    """What is waited for changed, so what was said no longer helps."""
    watched = starving()
    assert len(waits_told(watched, until=50.0)) == 1
    watched.diagnosis = DIAGNOSIS | {"waits": {"server": "a ready server"}}
    [(when, record)] = waits_told(watched, until=100.0)
    assert when <= 60.0
    assert record["waits"] == {"server": "a ready server"}


def test_no_wait_is_told_while_the_trainer_works() -> None:
    """However long a step takes; and when it ends, the next batch has its 30 s."""
    watched = starving(starved=False)
    assert waits_told(watched, until=1000.0) == []
    watched.starved = True
    [(when, _)] = waits_told(watched, until=1100.0)
    assert 1030.0 <= when <= 1036.0


def test_no_wait_is_told_while_rollouts_end() -> None:
    """A batch that is slow to fill is not a run that waits."""
    watched = starving()
    for second in range(0, 500, 20):
        watched.progressed = float(second)
        assert waits_told(watched, until=second + 20.0) == []


async def test_the_lag_of_a_blocked_loop_is_seen() -> None:
    """A call that holds the loop shows up in the highest percentile."""
    lag = LoopLag()
    assert lag.percentile(0.99) == 0.0
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    blocked_s = 0.2
    time.sleep(blocked_s)  # noqa: ASYNC251  holding the loop is the point
    await until(lambda: lag.percentile(1.0) > 0.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lag.percentile(1.0) > blocked_s / 2


async def test_room_on_the_disk_of_the_run_is_looked_at(tmp_path: Path) -> None:
    """It is known soon after the start, and unknown where the directory cannot be looked at, which ends nothing."""
    disk, gone = DiskSpace(), DiskSpace()
    gone.free_bytes = 1
    looking = [asyncio.create_task(disk.run(tmp_path)), asyncio.create_task(gone.run(tmp_path / "gone"))]
    await until(lambda: disk.free_bytes is not None and gone.free_bytes is None)
    assert disk.free_bytes is not None
    assert disk.free_bytes > 0
    for task in looking:
        assert not task.done()
        task.cancel()
    await asyncio.wait(looking)

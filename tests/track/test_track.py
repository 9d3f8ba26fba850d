"""Trackers: what they are told, and that nothing they do reaches the run."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from orchestrator.errors import ConfigError
from orchestrator.track import SampleRule, Tracker, Trackers, TrackerSetup, build_maker, flat_eval, flat_step
from orchestrator.track.names import MOST_NAMES
from tests.support.sample_steps import sample_step
from tests.support.waiting import until
from tests.track.trackers import Raising, Recording, calls

ROOT = Path(__file__).parents[2]
EVALUATION = {
    "kind": "eval",
    "env": "eval-math",
    "step": 0,
    "version": 0,
    "tasks": 8,
    "k": 2,
    "rollouts": 15,
    "failures": 1,
    "failure_kinds": {"timeout": 1},
    "avg@2": 0.5,
    "avg@2_stderr": None,
    "pass@2": 0.75,
    "pass@2_stderr": 0.1,
    "seconds": 3.5,
    "at": 1e9,
}


def step_line(step: int = 1, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl with everything in it."""
    return {"kind": "step", **msgspec.to_builtins(sample_step(step=step)), **changes}


class TestNames:
    def test_every_number_of_a_step_is_documented_under_its_name(self) -> None:
        """docs/tracking.md lists what trackers get, no more and no less."""
        page = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
        table = page.partition("## The names")[2].partition("## A tracker of your own")[0]
        documented = set(
            re.findall(r"`([\w/@]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
        )
        patterns = set(flat_step(step_line())) | {f"eval/math/{name}" for name in flat_eval(EVALUATION)}
        made = {
            re.sub(r"/(metrics|outcomes|dropped|failure_kinds)/\w+", r"/\1/NAME", name)
            .replace("env/math/", "env/ENV/")
            .replace("eval/math/", "eval/ENV/")
            .replace("trainer/loss", "trainer/NAME")
            .replace("@2", "@K")
            .removesuffix("_stderr")
            for name in patterns
        }
        assert made == documented - {"_stderr"}

    def test_numbers_keep_their_values(self) -> None:
        """A histogram becomes its mean and its largest value, true becomes 1, and what is not known is left out."""
        line = step_line()
        line["envs"]["math"]["quarantined"] = True
        line["envs"]["math"]["reward"] = None
        numbers = flat_step(line)
        assert numbers["staleness/mean"] == 1.0
        assert numbers["staleness/max"] == 2.0
        assert numbers["env/math/quarantined"] == 1.0
        assert numbers["env/math/latency_s/p90"] == 3.0
        assert numbers["trainer/loss"] == 0.25
        assert "env/math/reward" not in numbers
        assert all(isinstance(number, float) for number in numbers.values())

    def test_the_number_of_names_is_bounded(self) -> None:
        """Whatever environments make up."""
        line = step_line(trainer={f"name{n}": 1.0 for n in range(5000)})
        assert len(flat_step(line)) == MOST_NAMES


class Held(Tracker):
    """Waits in `log` until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        self.go.wait()
        self.steps.append(step)


@pytest.fixture
def held() -> Iterator[Held]:
    tracker = Held()
    yield tracker
    tracker.go.set()


def trackers_of(*makers: Callable[[], Tracker], **settings: Any) -> Trackers:
    named = [TrackerSetup(f"t{number}", make) for number, make in enumerate(makers)]
    return Trackers(named, config={"seed": 3}, run_id="abc", resumed=True, **settings)


async def test_a_tracker_is_told_everything_in_order_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """The start with configuration and id, every step, every evaluation, the end."""
    path = tmp_path / "calls"
    trackers = trackers_of(lambda: Recording(str(path)))
    for line in (step_line(1), EVALUATION, step_line(2)):
        trackers.tell(line)
    await trackers.aclose()
    start, first, evaluation, second, close = calls(path)
    assert start == ["start", {"seed": 3}, "abc", True]
    assert first == ["log", 1, flat_step(step_line(1))]
    assert evaluation == ["log_eval", 0, "math", flat_eval(EVALUATION)]
    assert second[:2] == ["log", 2]
    assert close == ["close"]
    assert '"tracker t0"]' in path.read_text(encoding="utf-8")
    (status,) = trackers.status()
    assert (status.logged, status.lost, status.error) == (3, 0, "")


async def test_by_default_an_evaluation_is_logged_as_numbers_of_its_step() -> None:
    """Who overrides `log` alone misses nothing."""
    told: list[tuple[int, Mapping[str, float]]] = []

    class Least(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            told.append((step, metrics))

    trackers = trackers_of(Least)
    trackers.tell(EVALUATION)
    await trackers.aclose()
    ((step, metrics),) = told
    assert step == 0
    assert metrics["eval/math/pass@2"] == 0.75


async def test_one_that_raises_is_told_once_and_disturbs_nobody(tmp_path: Path) -> None:
    """Every line that it does not take is counted; the tracker beside it gets all."""
    path = tmp_path / "calls"
    with capture_logs() as logs:
        trackers = trackers_of(Raising, lambda: Recording(str(path)))
        for step in range(1, 6):
            trackers.tell(step_line(step))
        await trackers.aclose()
    raising, recording = trackers.status()
    assert (raising.logged, raising.lost) == (0, 5)
    assert raising.error == "ConnectionError: the tracking server is away"
    assert (recording.logged, recording.lost) == (5, 0)
    (told,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert (told["event"], told["tracker"]) == ("track.failed", "t0")


@pytest.mark.parametrize("fails", ["make", "start"])
async def test_one_that_cannot_start_is_off(fails: str) -> None:
    """Whether its constructor, an import or `start` raises, even by ending the process."""

    class Unable(Tracker):
        def __init__(self) -> None:
            if fails == "make":
                raise ModuleNotFoundError("No module named 'something'")

        def start(self, config: Mapping[str, Any], run_id: str, resumed: bool) -> None:
            raise SystemExit("log in first")

    with capture_logs() as logs:
        trackers = trackers_of(Unable)
        trackers.tell(step_line(1))
        await until(lambda: trackers.status()[0].lost == 1)
        trackers.tell(step_line(2))
        await trackers.aclose()
    (status,) = trackers.status()
    assert (status.logged, status.lost) == (0, 2)
    assert status.error in ("ModuleNotFoundError: No module named 'something'", "SystemExit: log in first")
    assert [entry["event"] for entry in logs] == ["track.off"]


async def test_one_that_hangs_holds_nothing_up(held: Held) -> None:
    """Telling never waits, the queue is bounded, what does not fit is counted, and closing takes a bounded time."""
    with capture_logs() as logs:
        trackers = trackers_of(lambda: held, most_waiting=3, close_s=0.05, silent_s=0.0)
        trackers.tell(step_line(0))
        await asyncio.to_thread(held.entered.wait)
        for step in range(1, 10):
            trackers.tell(step_line(step))
        (status,) = trackers.status()
        assert (status.logged, status.lost) == (0, 6)
        assert "it has not come back for" in status.error
        await trackers.aclose()
    events = [entry["event"] for entry in logs]
    assert sorted(events) == ["track.left_behind", "track.silent", "track.slow"]
    assert logs[events.index("track.left_behind")]["lines"] == 3


async def test_one_that_was_only_slow_gets_what_is_queued_at_the_end(held: Held) -> None:
    """The end waits for it as long as it may."""
    trackers = trackers_of(lambda: held)
    for step in range(1, 4):
        trackers.tell(step_line(step))
    held.go.set()
    await trackers.aclose()
    assert held.steps == [1, 2, 3]


async def test_samples_are_read_for_trackers_that_show_them_now_and_then(tmp_path: Path) -> None:
    """Of the first step and of every third; a tracker without such a method costs no reading, and a failed reading no line.

    Samples that are not there yet are looked for again, and at the end once more.
    """
    asked: list[int] = []
    shown: list[tuple[int, Any]] = []

    class Showing(Recording):
        def log_samples(self, step: int, rows: Any) -> None:
            shown.append((step, rows))

    def read(step: int) -> list[dict[str, Any]]:
        asked.append(step)
        if step == 6:
            raise OSError("the disk is gone")
        there = {3: 2, 9: 4}.get(step, 1)  # how often it must be asked for
        return [{"env": "math", "reply": "42"}] if asked.count(step) >= there else []

    rule = SampleRule(read=read, interval=3)
    trackers = trackers_of(
        lambda: Showing(str(tmp_path / "a")), lambda: Recording(str(tmp_path / "b")), samples=rule
    )
    for step in range(1, 10):
        trackers.tell(step_line(step))
    trackers.tell(EVALUATION)
    await trackers.aclose()
    assert asked == [1, 3, 3, 6, 9, 9, 9, 9]
    assert shown == [(step, [{"env": "math", "reply": "42"}]) for step in (1, 3, 9)]
    showing, recording = trackers.status()
    assert (showing.logged, showing.lost, showing.error) == (10, 0, "OSError: the disk is gone")
    assert (recording.logged, recording.error) == (10, "")


class TestMaking:
    """What is found before a run is started."""

    @pytest.mark.parametrize("name", ["wandb", "tensorboard"])
    def test_a_library_that_is_missing_is_named_with_its_extra(self, name: str) -> None:
        """So that one command mends it. These are not installed beside the tests."""
        with pytest.raises(ConfigError, match=re.escape(f'pip install "rollout-orchestrator[{name}]"')):
            build_maker(name, {})

    def test_a_folder_of_a_librarys_name_is_not_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """wandb makes one for its files."""
        (tmp_path / "wandb").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match="needs a library that is not installed"):
            build_maker("wandb", {})

    @pytest.mark.parametrize(
        ("name", "options", "problem"),
        [
            ("tensorbord", {}, '"tensorbord" is not one of tensorboard, wandb nor "module:Class"'),
            ("no_such_module:Tracker", {}, "no_such_module"),
            ("tests.track.trackers:Recordin", {}, 'did you mean "Recording"'),
            (
                "tests.track.trackers:NOT_A_TRACKER",
                {},
                "not a class that derives from orchestrator.track.Tracker",
            ),
            ("tests.track.trackers:Mute", {}, "has no method log(step, metrics)"),
            ("tests.track.trackers:Recording", {}, "missing a required argument: 'path'"),
            (
                "tests.track.trackers:Recording",
                {"path": "x", "colour": 1},
                "unexpected keyword argument 'colour'",
            ),
        ],
    )
    def test_what_cannot_be_made_is_told(self, name: str, options: dict[str, Any], problem: str) -> None:
        """In one line that says what is wrong."""
        with pytest.raises(ConfigError, match=re.escape(problem)):
            build_maker(name, options)

    def test_a_class_of_ones_own_gets_its_options(self, tmp_path: Path) -> None:
        """It is made when the thread asks for it, not before."""
        make = build_maker("tests.track.trackers:Recording", {"path": str(tmp_path / "x")})
        assert isinstance(make(), Recording)

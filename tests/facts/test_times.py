"""How long things took, in the records of steps: attempts by how they ended, the trainer, and the loading of weights."""

from collections import Counter

import msgspec
import pytest

from orchestrator.dispatch.versions import Versions
from orchestrator.facts.steps import ENDS, SLOWEST, StepRecord, seconds_of, time_step
from orchestrator.facts.turns import Turns
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import make_world


def test_every_attempt_is_counted_with_its_time_and_its_end() -> None:
    """Rollouts of 1 s, failures after as long, and attempts that hang until their time-out of 5 s."""
    world = make_world(
        {
            "a": Behaviour(latency=lambda rng: 1.0, loss=0.3, retryable=1.0),
            "b": Behaviour(latency=lambda rng: 100.0 if rng.random() < 0.2 else 2.0),
        },
        batch_size=16,
        rollout_timeout_s=5.0,
        train_s=0.5,
        max_steps=20,
    )
    assert world.play(until=lambda: bool(world.ended))
    times: dict[str, dict[str, Counter[int]]] = {"a": {}, "b": {}}
    for record in world.journal.steps:
        for name, env in record.envs.items():
            for end, counts in env.times.items():
                times[name].setdefault(end, Counter()).update(counts)
    assert set(times["a"]) <= {*ENDS, SLOWEST}
    assert set(times["a"]["completed"]) == set(times["a"]["retryable"]) == {time_step(1.0)}
    assert set(times["b"]["completed"]) == set(times["b"][SLOWEST]) == {time_step(2.0)}
    assert max(times["b"]["cut"]) == time_step(5.0)
    assert times["a"][SLOWEST].total() * 4 <= times["a"]["completed"].total()
    counted = sum(record.envs["a"].outcomes.get("completed", 0) for record in world.journal.steps)
    assert times["a"]["completed"].total() == counted


def test_the_trainer_and_the_weights_have_their_times() -> None:
    """Three seconds a batch, and one for each version, whatever else happens."""
    world = make_world({"a": Behaviour(latency=lambda rng: 0.5)}, batch_size=16, train_s=3.0, max_steps=12)
    world._load_s = lambda rng: 1.0
    assert world.play(until=lambda: bool(world.ended))
    trained = [seconds for record in world.journal.steps for seconds in record.trained_s]
    loaded = [seconds for record in world.journal.steps for seconds in record.loaded_s]
    assert len(trained) >= 9
    assert trained == pytest.approx([3.0] * len(trained))
    assert loaded == pytest.approx([1.0] * len(loaded))
    assert loaded


def test_what_is_under_way_at_a_start_counts_from_there() -> None:
    """A process that goes on does not know when an earlier one began."""
    versions = Versions(max_versions=2)
    versions.formed, versions.trained = 4, 3
    turns = Turns(versions, 0.0)
    turns.begin(100.0)
    versions.trained = 4
    turns.look(102.0)
    assert (turns.drain_trained(), turns.drain_trained()) == ([2.0], [])


def test_a_record_without_times_is_still_read() -> None:
    """Those of earlier versions have none."""
    from tests.support.step_records import step_record

    told = msgspec.to_builtins(step_record(1))
    for name in ("trained_s", "loaded_s"):
        del told[name]
    for env in told["envs"].values():
        del env["times"]
    record = msgspec.json.decode(msgspec.json.encode(told), type=StepRecord)
    assert (record.trained_s, record.envs["agree"].times) == ([], {})
    with_times = msgspec.structs.replace(record.envs["agree"], times={"completed": {7: 3}})
    again = msgspec.json.decode(msgspec.json.encode(with_times), type=type(with_times))
    assert again.times == {"completed": {7: 3}}
    assert seconds_of(time_step(3.0)) == pytest.approx(3.0, rel=0.022)

"""The one stream of facts."""

import numpy as np
import pytest

from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.dispatch.versions import Versions
from orchestrator.facts import Facts, StepRecord
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask


def facts(versions: Versions | None = None) -> Facts:
    versions = versions or Versions(max_versions=2)
    return Facts({"a": 0.75, "b": 0.25}, ledger=Ledger(), versions=versions, now=0.0)


def group(env: str, position: int, size: int, version: int = 0) -> Group:
    n = np.zeros(size, dtype=np.float32)
    task = TrainTask(env=env, split="train", index=position, epoch=0, position=position)
    return Group(
        task=task,
        version=version,
        version_end=version,
        rollouts=size,
        lengths=(1,) * size,
        tokens=np.zeros(size, dtype=np.int32),
        mask=np.ones(size, dtype=np.uint8),
        logprobs=n,
        rewards=n,
        advantages=n,
        facts=plain_facts(size, version=version, version_end=version),
        details=b"",
        digest=0,
    )


def formed(told: Facts, batch: Batch) -> StepRecord:
    return told.batch_formed(batch, quarantined=frozenset(), now=1.0)


def test_the_reward_is_weighted_by_the_targets() -> None:
    """An env that finished nothing in a step keeps its last reward instead of dropping out."""
    told = facts()
    told.scored("a", [1.0, 0.0])
    told.scored("b", [1.0, 1.0])
    formed(told, Batch(1, 0, (group("a", 0, 3), group("b", 0, 1))))
    assert told.reward == pytest.approx(0.75 * 0.5 + 0.25)
    told.scored("a", [1.0])
    formed(told, Batch(2, 1, (group("a", 1, 4),)))
    assert told.reward == pytest.approx(1.0)
    assert told.envs["b"].reward == 1.0
    assert told.first_reward == pytest.approx(0.625)


def test_shares_are_those_of_what_was_emitted() -> None:
    """Whole run, and the last batches."""
    told = facts()
    for step in range(1, 18):
        formed(told, Batch(step, 0, (group("a", step, 4),)))
    formed(told, Batch(18, 0, (group("b", 0, 4),)))
    assert told.delivered.shares()["b"] == pytest.approx(1 / 18)
    assert told.delivered.recent_shares()["b"] == pytest.approx(1 / 16)


def test_ages_are_counted_in_published_versions() -> None:
    """Mean and largest, over sequences."""
    versions = Versions(max_versions=2)
    told = facts(versions)
    versions.publish(10)
    versions.trained = 1
    formed(told, Batch(2, 10, (group("a", 0, 3, version=0), group("a", 1, 1, version=10))))
    assert told.staleness_numbers() == {"mean": 0.75, "max": 1.0}


def test_a_later_process_goes_on_with_the_same_facts() -> None:
    """Counts, rewards and time continue; an env that is gone is left out."""
    told = facts()
    told.scored("a", [1.0])
    told.dropped("b", "stale", 4)
    formed(told, Batch(1, 0, (group("a", 0, 3), group("b", 0, 1))))
    later = Facts({"a": 1.0}, ledger=Ledger(), versions=Versions(max_versions=2), now=100.0)
    later.load_state_dict(told.state_dict(7.0))
    assert later.seconds(101.0) == pytest.approx(8.0)
    assert later.sequences == 4
    assert later.delivered.counts["a"] == 3
    assert later.reward == told.reward


def test_the_rate_is_that_of_completed_training_rollouts() -> None:
    """Over the last seconds."""
    told = facts()
    told.ledger.start(Lane.TRAIN, "a", 30)
    told.rate(0.0)
    told.ledger.end(Lane.TRAIN, "a", 20, Outcome.COMPLETED)
    told.ledger.end(Lane.TRAIN, "a", 10, Outcome.FAILED, "x")
    assert told.rate(2.0) == pytest.approx((10.0, 0.0))
    assert told.failures() == {"a: x": 10}


def test_what_earlier_processes_completed_is_not_in_the_rate() -> None:
    """The ledger goes on from their counts, which took no time of this process."""
    told = facts()
    told.ledger.load_state_dict({"outcomes": [["train", "a", "completed", "", 1000]]})
    told.begin(10.0)
    told.ledger.start(Lane.TRAIN, "a", 20)
    told.ledger.end(Lane.TRAIN, "a", 20, Outcome.COMPLETED)
    assert told.rate(12.0) == pytest.approx((10.0, 0.0))


def test_a_failure_is_remembered_with_what_it_said() -> None:
    """The last of each kind, in one line of bounded length; the env's own last one too."""
    told = facts()
    for n in range(3):
        told.ledger.start(Lane.TRAIN, "a", 1)
        told.failed(Lane.TRAIN, "a", "error", f"KeyError: {n}\nfurther, at mine.py:{n} in rollout")
        told.ledger.end(Lane.TRAIN, "a", 1, Outcome.FAILED, "error")
    assert told.failures() == {"a: error": 3}
    assert told.failure_reasons() == {"a: error": "KeyError: 2 further, at mine.py:2 in rollout"}
    assert told.explain("a", "error") == "error: KeyError: 2 further, at mine.py:2 in rollout"
    assert told.explain("a", "equal_rewards") == "equal_rewards"
    assert told.envs["a"].failure == "KeyError: 2 further, at mine.py:2 in rollout"
    assert told.failures_told() == (
        "a: error (3 rollouts), the last: KeyError: 2 further, at mine.py:2 in rollout"
    )
    told.failed(Lane.TRAIN, "a", "error", "x" * 10_000 + "at the end")
    assert len(told.explain("a", "error")) < 500
    assert told.explain("a", "error").endswith("at the end")


def test_a_lost_server_is_told_under_the_name_that_is_counted() -> None:
    """The ledger has an outcome for it and not a kind."""
    told = facts()
    told.ledger.start(Lane.EVAL, "eval-a", 1)
    told.failed(Lane.EVAL, "eval-a", "server_lost", "server eval-a-0: its process was ended by SIGKILL")
    told.ledger.end(Lane.EVAL, "eval-a", 1, Outcome.LOST)
    assert told.failures() == {"eval-a: lost": 1}
    assert told.failure_reasons() == {"eval-a: lost": "server eval-a-0: its process was ended by SIGKILL"}

"""Advantages and the finished group."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.wire import Result, RolloutHeader
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.errors import ConfigError
from orchestrator.groups.scoring import (
    build_advantage,
    build_group,
    has_variance,
    join_transcripts,
    seats_of,
)
from orchestrator.tasks.task import TrainTask
from tests.support.worlds import make_data


def pending(*results: Result) -> PendingGroup:
    task = TrainTask(env="math", split="train", index=3, epoch=0, position=7)
    group = PendingGroup(
        task=task, lane=Lane.TRAIN, size=4, needed=4, group_scored=False, version=2, opened=0.0
    )
    group.results.extend(results)
    return group


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-1.0, 1.0, -1.0, 1.0]),
        ("mean", [-0.5, 0.5, -0.5, 0.5]),
        ("rloo", [-2 / 3, 2 / 3, -2 / 3, 2 / 3]),
        ("none", [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_named_advantages(name: str, expected: list[float]) -> None:
    """Each named function on a group that is half solved."""
    rewards = np.array([0.0, 1.0, 0.0, 1.0])
    assert build_advantage(name)(rewards) == pytest.approx(np.array(expected), abs=1e-4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_rloo_is_the_distance_from_the_mean_of_the_others(rewards: list[float]) -> None:
    """Checked against the definition."""
    got = build_advantage("rloo")(np.array(rewards))
    for i, value in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        assert got[i] == pytest.approx(value - sum(others) / len(others), abs=1e-6)


def test_a_lone_rollout_has_no_rloo_advantage() -> None:
    """There is nothing to compare it with."""
    assert build_advantage("rloo")(np.array([3.0])).tolist() == [0.0]


def double(rewards: np.ndarray) -> np.ndarray:
    return rewards * 2


def test_an_advantage_function_of_ones_own() -> None:
    """ "module:attr" is imported."""
    assert build_advantage("tests.groups.test_scoring:double")(np.array([1.0, 2.0])).tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "name",
    ["gpro", "no_such_module:f", "tests.groups.test_scoring:nothing", "tests.groups.test_scoring:__doc__"],
)
def test_an_unusable_advantage_is_a_config_error_that_names_it(name: str) -> None:
    """Found at the start, not at the first group."""
    with pytest.raises(ConfigError, match=r"dispatch\.advantage"):
        build_advantage(name)


def test_sequences_of_a_rollout_share_its_reward_and_advantage() -> None:
    """A rollout of two sequences counts twice in the arrays and once in the group's comparison."""
    two = Result(
        id=0,
        rollouts=[RolloutHeader(1.0, [2, 1], "stop", False, {}, {})],
        tokens=np.array([1, 2, 3], dtype=np.int32),
        mask=np.ones(3, dtype=np.uint8),
        logprobs=np.zeros(3, dtype=np.float32),
        transcript=b"\x90",
    )
    group = pending(two, make_data([0.0]))
    made = build_group(group, seats_of(group), build_advantage("mean"), version_end=5)
    assert made.lengths == (2, 1, 3)
    assert made.size == 3
    assert made.rollouts == 2
    assert made.rewards.tolist() == [1.0, 1.0, 0.0]
    assert made.advantages.tolist() == [0.5, 0.5, -0.5]
    assert made.tokens.tolist() == [1, 2, 3, 0, 1, 2]
    assert (made.version, made.version_end) == (2, 5)
    assert made.tokens.dtype == np.int32
    assert made.mask.dtype == np.uint8
    assert made.logprobs.dtype == np.float32


def test_an_advantage_that_is_not_finite_is_an_error() -> None:
    """It would poison the trainer."""
    group = pending(make_data([0.0, 1.0]))
    with pytest.raises(ValueError, match="advantage function returned"):
        build_group(group, seats_of(group), lambda _: np.array([np.nan, 1.0]), version_end=0)


def test_variance_ignores_rounding() -> None:
    """Equal up to rounding is equal."""
    assert not has_variance(np.array([0.1 + 0.2, 0.3]))
    assert has_variance(np.array([0.3, 0.4]))


@given(
    st.lists(
        st.lists(st.dictionaries(st.text(max_size=3), st.integers(-1000, 1000)), max_size=40),
        min_size=1,
        max_size=5,
    )
)
def test_transcripts_are_joined_without_decoding(parts: list[list[dict[str, int]]]) -> None:
    """The joined list holds every entry in order."""
    joined = join_transcripts([msgspec.msgpack.encode(part) for part in parts])
    assert msgspec.msgpack.decode(joined) == [entry for part in parts for entry in part]


def test_a_group_is_split_without_copying() -> None:
    """Both parts hold their own sequences; ids differ."""
    group = pending(make_data([0.0, 1.0, 2.0, 3.0], length=2))
    whole = build_group(group, seats_of(group), build_advantage("none"), version_end=2)
    first, rest = whole.split(3)
    assert (first.size, rest.size) == (3, 1)
    assert first.id != rest.id
    assert np.concatenate([first.tokens, rest.tokens]).tolist() == whole.tokens.tolist()
    assert rest.rewards.tolist() == [3.0]
    assert first.tokens.base is not None

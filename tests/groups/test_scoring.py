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


def game(white: float, black: float, *, version: int = 0) -> Result:
    """A rollout of two seats: white has two sequences of a token each, black one."""
    header = RolloutHeader(
        (white + black) / 2,
        [1, 1, 1],
        metrics={"moves": 3.0},
        seats=["white", "black", "white"],
        rewards=[white, black, white],
        temperatures=[0.7, None, 0.7],
        stop_reasons=["stop", "resigned", "stop"],
        truncations=[False, False, True],
    )
    return Result(
        id=0,
        rollouts=[header],
        tokens=np.arange(3, dtype=np.int32) + version,
        mask=np.ones(3, dtype=np.uint8),
        logprobs=np.zeros(3, dtype=np.float32),
        transcript=b"\x90",
        digest=7,
    )


def test_a_seat_is_compared_with_itself_and_with_nothing_else() -> None:
    """The advantage function is called once per seat, with the reward that each rollout earned there."""
    group = pending(game(1.0, -1.0), game(0.0, 0.0), game(1.0, -1.0))
    called: list[list[float]] = []

    def advantage(rewards: np.ndarray) -> np.ndarray:
        called.append(rewards.tolist())
        return np.asarray(rewards - rewards.mean())

    made = build_group(group, seats_of(group), advantage, version_end=5)
    assert called == [[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0]]
    assert made.rewards.tolist() == [1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 1.0, -1.0, 1.0]
    third = 1 / 3
    expected = [third, -third, third, -2 * third, 2 * third, -2 * third, third, -third, third]
    assert made.advantages.tolist() == pytest.approx(expected)
    assert any(has_variance(seat.rewards) for seat in seats_of(group))
    assert not has_variance(np.array([result.rollouts[0].reward for result in group.results]))


def test_a_seat_that_not_every_rollout_played_is_compared_among_those_that_did() -> None:
    """Nobody is given a reward for a part that it did not have."""
    group = pending(game(1.0, -1.0), make_data([0.5]), game(0.0, 2.0))
    seats = seats_of(group)
    assert [seat.rewards.tolist() for seat in seats] == [[1.0, 0.0], [-1.0, 2.0], [0.5]]
    made = build_group(group, seats, build_advantage("none"), version_end=5)
    assert made.advantages.tolist() == [1.0, -1.0, 1.0, 0.5, 0.0, 2.0, 0.0]


def test_each_sequence_has_the_facts_of_its_own_rollout() -> None:
    """Versions, rollout, seat, temperature and end; the group keeps the widest span."""
    group = pending(game(1.0, -1.0), make_data([0.5]))
    group.spans = [(2, 3), (4, 6)]
    made = build_group(group, seats_of(group), build_advantage("none"), version_end=6)
    details = made.decode_details()
    rows = made.facts
    assert rows["version"].tolist() == [2, 2, 2, 4]
    assert rows["version_end"].tolist() == [3, 3, 3, 6]
    assert rows["rollout"].tolist() == [0, 0, 0, 1]
    assert [details.names[place] for place in rows["seat"]] == ["white", "black", "white", ""]
    assert [details.names[place] for place in rows["stop_reason"]] == ["stop", "resigned", "stop", "stop"]
    assert rows["temperature"].tolist()[:1] == [pytest.approx(0.7)]
    assert np.isnan(rows["temperature"][[1, 3]]).all()
    assert rows["truncated"].tolist() == [0, 0, 1, 0]
    assert details.metrics == [{"moves": 3.0}, {}]
    assert (made.version, made.version_end, made.digest) == (2, 6, 7)
    first, rest = made.split(2)
    assert first.facts["rollout"].tolist() == [0, 0]
    assert rest.facts["rollout"].tolist() == [0, 1]

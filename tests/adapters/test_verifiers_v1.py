"""The verifiers v1 adapter against the real library."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import Driver, driver
from tests.adapters.test_verifiers_classic import call, spans
from tests.adapters.venvs import V1

ID = "verifiers::v1-tested"


def test_a_taskset_is_scored_by_its_rewards_and_runs_locally(v1: Driver) -> None:
    """The library's default runtime is a paid remote one; here a rollout needs nothing but this machine."""
    answer = v1.rollout(ID, turns=[[{"content": "enots"}]])
    rollout = answer["rollouts"][0]
    assert rollout["reward"] == 2.0
    assert rollout["metrics"] == {"correct": 1.0, "length": 5.0, "num_turns": 1.0}
    assert rollout["stop_reason"] == "agent_completed"
    assert answer["tokens"][-6:] == [*map(ord, "enots"), 2]
    assert answer["mask"][-7:] == [0, 1, 1, 1, 1, 1, 1]
    assert answer["logprobs"][-1] == pytest.approx(-0.002)


def test_rollouts_side_by_side_have_turns_of_their_own(v1: Driver) -> None:
    """Each trace is recorded apart, also when several harnesses ask at once."""
    turns = [[{"content": "a"}], [{"content": "b"}], [{"content": "enots"}]]
    args = {"agent": {"harness": {"id": "v1-tested", "turns": 3}}}
    played = v1.play(ID, [{"index": index % 4} for index in range(8)], args=args, turns=turns)
    for index, answer in enumerate(played["answers"]):
        assert answer["rollouts"][0]["reward"] == (2.0 if index % 4 == 0 else 0.0)
        assert answer["rollouts"][0]["metrics"]["num_turns"] == 3.0
        assert len(answer["rollouts"][0]["lengths"]) == 1
        assert spans(answer["mask"]) == 3


def test_the_splits_of_a_taskset_are_its_own(v1: Driver) -> None:
    """A taskset whose config has a `split` is loaded again for it."""
    played = v1.play(ID, [{"split": "eval", "index": 1}], splits=["train", "eval"])
    assert played["tasks"] == {"train": 4, "eval": 2}
    assert played["requests"][0]["messages"][-1]["content"] == "Reverse river"


def test_an_endless_taskset_counts_as_so_many_tasks(v1: Driver) -> None:
    """It can only be read from its beginning, so it is bounded by `tasks`."""
    args = {"taskset": {"endless": True}, "tasks": 50}
    played = v1.play(ID, [{"index": 49}], args=args)
    assert played["tasks"] == {"train": 50}
    assert played["requests"][0]["messages"][-1]["content"] == "Reverse river"


def test_a_harness_that_streams_gets_a_stream(v1: Driver) -> None:
    """The whole answer arrives as events."""
    args = {"agent": {"harness": {"id": "v1-tested", "stream": True, "turns": 2}}}
    turns = [[{"content": "a"}], [{"content": "enots"}]]
    answer = v1.rollout(ID, args=args, turns=turns)
    assert answer["rollouts"][0]["reward"] == 2.0
    assert answer["requests"][1]["messages"][-2]["content"] == "a"


def test_a_reward_that_raises_is_a_failed_rollout(v1: Driver) -> None:
    """It keeps the library's type and is not repeated."""
    answer = v1.rollout(ID, args={"taskset": {"task": {"raises": True}}}, turns=[[{"content": "enots"}]])
    assert (answer["kind"], answer["retryable"]) == ("task_error", False)
    assert "no such column" in answer["message"]


def test_a_sandbox_error_is_retryable(v1: Driver) -> None:
    """Infrastructure is worth another attempt."""
    answer = v1.rollout(ID, args={"taskset": {"task": {"sandbox": True}}})
    assert (answer["kind"], answer["retryable"]) == ("sandbox_error", True)


def test_a_failing_endpoint_fails_the_rollout_as_in_native_environments(v1: Driver) -> None:
    """What `Model` raises comes out of the library unchanged, behind the harness and its HTTP."""
    answer = v1.rollout(ID, turns=[[{"status": 400, "error": "bad temperature"}]])
    assert (answer["kind"], answer["retryable"]) == ("bad_request", False)


def test_the_operators_sampling_wins_over_the_harness(v1: Driver) -> None:
    """The harness asks for a temperature of its own; it is used only where none is configured."""
    ours = v1.rollout(ID, sampling={"temperature": 1.0})["requests"][0]["temperature"]
    theirs = v1.rollout(ID)["requests"][0]["temperature"]
    assert (ours, theirs) == (1.0, 0.1)


@pytest.mark.timeout(600)
def test_a_tool_with_state_works_with_the_librarys_own_chat_program(v1: Driver) -> None:
    """The shipped `null` harness runs as a local program, calls the tool's server, and asks our policy."""
    turns = [[call("bank_deposit", '{"amount": 5}')], [{"content": "done"}]]
    answer = v1.rollout("verifiers::v1-tools", args={"agent": {"harness": {"id": "null"}}}, turns=turns)
    assert "rollouts" in answer, answer
    assert answer["rollouts"][0]["reward"] == 105.0
    assert answer["requests"][0]["tools"][0]["function"]["name"] == "bank_deposit"
    assert len(answer["rollouts"][0]["lengths"]) == 1
    assert spans(answer["mask"]) == 2


@pytest.mark.timeout(600)
def test_a_program_whose_packages_cannot_be_had_now_is_tried_again(v1: Driver, tmp_path: Path) -> None:
    """`uv` asks the package index before every program of the library, and the index may be away for a moment."""
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\ncase "$*" in *--help*) echo --script ;; *) echo no index >&2; exit 2 ;; esac\n')
    uv.chmod(0o755)
    harness = {"id": "null", "env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}}
    for fresh in driver(V1):  # a process that has prepared the program once does not ask again
        answer = fresh.rollout("verifiers::v1-tools", args={"agent": {"harness": harness}})
        assert (answer["kind"], answer["retryable"]) == ("harness_error", True)
        assert "no index" in answer["message"]


def test_a_shipped_environment_plays_a_taskset_with_several_attempts(v1: Driver) -> None:
    """`best-of-n` of the package, paired with a taskset: all attempts are handed in, each with what it earned."""
    turns = [[{"content": "enots"}, {"content": "no"}]]
    answer = v1.rollout("verifiers::best-of-n+v1-tested", args={"n": 2}, turns=turns)
    rollout = answer["rollouts"][0]
    assert rollout["reward"] == 1.0
    assert len(rollout["lengths"]) == 2
    first, second = rollout["seats"]
    assert second == f"{first}#2"
    assert sorted(rollout["rewards"]) == [0.0, 2.0]
    assert answer["transcripts"][0]["seats"] == dict(zip(rollout["seats"], rollout["rewards"], strict=True))


@pytest.mark.parametrize(
    ("id", "args", "said"),
    [
        ("verifiers::classic-tested", {}, "needs"),
        ("verifiers::no-such-taskset", {}, 'no module "no_such_taskset"'),
        (ID, {"taskset": {"splt": "train"}}, "splt"),
        (ID, {"agnt": {}}, "agnt"),
    ],
)
def test_a_mistake_is_one_line(v1: Driver, id: str, args: dict[str, Any], said: str) -> None:  # noqa: A002
    """Environments that cannot be loaded say why."""
    played = v1.play(id, args=args)
    assert said in played["load_error"]
    assert "\n" not in played["load_error"]

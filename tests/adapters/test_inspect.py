"""The Inspect adapter against tasks of the real library, and against its own run of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.adapters.inspect_tasks import LOADER, refuse_other_releases
from envs.errors import EnvironmentLoadError
from tests.adapters.conftest import Driver

TESTED = "inspect_tested"
MINUTES = 600
"""The library takes many seconds to import where the machine is busy."""

pytestmark = pytest.mark.timeout(MINUTES)


def played(driver: Driver, task: str, directory: Path, **scenario: Any) -> dict[str, Any]:
    """Runs of a task, whose log goes into a directory."""
    args = {"log_dir": str(directory), **scenario.pop("args", {})}
    return driver.play(f"inspect::{TESTED}/{task}", args=args, **scenario)


def test_score_prompt_and_reply_are_those_of_the_librarys_own_run(inspect_ai: Driver, tmp_path: Path) -> None:
    """The scorer is Inspect's; its letter is a number here."""
    for reply, value, reward in (("It is 1.", "C", 1.0), ("It is 7.", "I", 0.0)):
        library = inspect_ai.call(f"{TESTED}:library_run", name="sums", replies=[reply])
        answer = played(inspect_ai, "sums", tmp_path, turns=[[{"content": reply}]])["answers"][0]
        messages = answer["transcripts"][0]["messages"]
        assert library["value"] == value
        assert answer["rollouts"][0]["reward"] == reward
        assert answer["rollouts"][0]["metrics"] == {"includes": reward}
        assert [[message["role"], message["content"]] for message in messages] == library["messages"]


def test_token_ids_and_logprobs_are_those_of_the_engine(inspect_ai: Driver, tmp_path: Path) -> None:
    """The sampled tokens are the end of the sequence, with the engine's log-probabilities."""
    answer = played(inspect_ai, "sums", tmp_path, turns=[[{"content": "1"}]])["answers"][0]
    assert answer["tokens"][-2:] == [ord("1"), 2]
    assert answer["mask"] == [0] * (len(answer["mask"]) - 2) + [1, 1]
    assert answer["logprobs"][-2:] == pytest.approx([-0.049, -0.002])


def test_many_samples_run_side_by_side_in_one_eval_whose_log_opens(
    inspect_ai: Driver, tmp_path: Path
) -> None:
    """Also several rollouts of one sample; the log is Inspect's own, complete when the server stops."""
    runs = [{"index": index % 20} for index in range(48)]
    answers = played(inspect_ai, "sums", tmp_path, runs=runs, turns=[[{"content": "It is 1"}]])["answers"]
    assert [answer["rollouts"][0]["reward"] for answer in answers] == [
        float("1" in str(index % 20 + 1) and index % 20 + 1 == 1) for index in range(48)
    ]
    (log,) = inspect_ai.call(f"{TESTED}:read_logs", directory=str(tmp_path))
    assert (log["status"], log["samples"]) == ("success", 48)
    assert log["scores"].count("C") == 3


def test_a_sample_that_is_a_conversation_is_the_same_task_in_every_process(
    inspect_ai: Driver, tmp_path: Path
) -> None:
    """Whatever ids Inspect gives the messages when the dataset is made."""
    runs = [{"index": 0}, {"index": 1}]
    first, second = (
        [answer["digest"] for answer in played(inspect_ai, "conversations", tmp_path, runs=runs)["answers"]]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 2


def test_the_log_is_written_for_many_samples_at_once(inspect_ai: Driver, tmp_path: Path) -> None:
    """Each write goes through all samples before it, which would cost a long run more and more."""
    turns = [[{"content": "1", "delay_s": 0.05 * number} for number in range(60)]]
    played(inspect_ai, "sums", tmp_path, runs=[{}] * 60, turns=turns)
    (writes,) = inspect_ai.call(f"{TESTED}:count_writes", directory=str(tmp_path))
    assert 0 < writes < 10


def test_tools_are_inspects_and_turns_extend_each_other(inspect_ai: Driver, tmp_path: Path) -> None:
    """A call goes back to the engine as it was sampled, so that the rollout is one sequence."""
    call = {"name": "add", "arguments": json.dumps({"a": 0, "b": 1})}
    turns = [[{"content": "I add.", "tool_calls": [call]}], [{"content": "1"}]]
    result = played(inspect_ai, "with_tools", tmp_path, turns=turns)
    answer = result["answers"][0]
    assert result["requests"][0]["tools"][0]["function"]["name"] == "add"
    assert [message["role"] for message in result["requests"][1]["messages"]] == ["user", "assistant", "tool"]
    assert result["requests"][1]["messages"][2]["content"] == "1"
    assert answer["rollouts"][0]["reward"] == 1.0
    assert len(answer["rollouts"][0]["lengths"]) == 1
    assert sum(answer["mask"]) > len("I add.") + 2


def test_a_grader_that_is_the_policy_itself_is_not_trained_on(inspect_ai: Driver, tmp_path: Path) -> None:
    """The scorer's question reaches the endpoint without token ids and is in no sequence."""
    turns = [[{"content": "It is 1"}, {"content": "GRADE: C"}]]
    result = played(inspect_ai, "graded", tmp_path, turns=turns)
    answer = result["answers"][0]
    assert len(result["requests"]) == 2
    assert "return_token_ids" not in result["requests"][1]
    assert answer["rollouts"][0]["reward"] == 1.0
    assert sum(answer["mask"]) == len("It is 1") + 1


def test_of_several_scores_one_must_be_named(inspect_ai: Driver, tmp_path: Path) -> None:
    """All are metrics; a score of several values has one for each."""
    turns = [[{"content": "1"}]]
    unnamed = played(inspect_ai, "several", tmp_path, turns=turns)["answers"][0]
    named = played(inspect_ai, "several", tmp_path, turns=turns, args={"score": "parts.length"})["answers"][0]
    assert unnamed["kind"] == "no_score"
    assert "includes" in unnamed["message"]
    assert named["rollouts"][0]["reward"] == 7.0
    assert named["rollouts"][0]["metrics"] == {"includes": 1.0, "parts.right": 1.0, "parts.length": 7.0}


def test_a_score_that_is_no_number_is_a_failed_rollout_and_not_a_zero(
    inspect_ai: Driver, tmp_path: Path
) -> None:
    """Where it is the reward; where another score is, it is no metric."""
    rewards = {"P": 0.5, "N": 0.0, "yes": 1.0, "False": 0.0, "0.25": 0.25, "0": 0.0}
    replies = [*rewards, "B+", "nan", ""]
    turns = [[{"content": reply} for reply in replies]]
    answers = played(inspect_ai, "judged", tmp_path, turns=turns, runs=[{}] * len(replies))["answers"]
    got = sorted(answer["rollouts"][0]["reward"] for answer in answers if "rollouts" in answer)
    assert got == sorted(rewards.values())
    failed = [answer for answer in answers if "kind" in answer]
    assert [answer["kind"] for answer in failed] == ["no_score"] * 3
    assert any("'B+', no number" in answer["message"] for answer in failed)
    args = {"task": {"with_parts": True}, "score": "parts.length"}
    other = played(inspect_ai, "judged", tmp_path, turns=[[{"content": "B+"}]], args=args)["answers"][0]
    assert other["rollouts"][0]["metrics"] == {"parts.right": 0.0, "parts.length": 7.0}


def test_a_failure_in_a_sample_is_a_failed_rollout_and_not_a_zero(inspect_ai: Driver, tmp_path: Path) -> None:
    """What the endpoint said comes back as it was; a solver that raises is told; the eval goes on for the others."""
    refused = [[{"status": 400, "error": "no such thing"}, {"content": "It is 1"}]]
    answers = played(inspect_ai, "sums", tmp_path, turns=refused, runs=[{}, {}])["answers"]
    broken = played(inspect_ai, "broken", tmp_path)["answers"][0]
    failed = [answer for answer in answers if "kind" in answer]
    assert [(answer["kind"], answer["retryable"]) for answer in failed] == [("bad_request", False)]
    assert len([answer for answer in answers if "rollouts" in answer]) == 1
    assert broken["kind"] == "sample_error"
    assert "nothing works" in broken["message"]


def test_a_limit_of_the_task_ends_the_rollout_truncated(inspect_ai: Driver, tmp_path: Path) -> None:
    """As Inspect does it: scored on what there is."""
    call = {"name": "add", "arguments": json.dumps({"a": 0, "b": 1})}
    answer = played(inspect_ai, "limited", tmp_path, turns=[[{"content": "", "tool_calls": [call]}]])[
        "answers"
    ][0]
    assert answer["rollouts"][0]["truncated"] is True
    assert answer["rollouts"][0]["stop_reason"] == "message"


def test_images_are_refused_clearly(inspect_ai: Driver, tmp_path: Path) -> None:
    """Only text works here."""
    answer = played(inspect_ai, "picture", tmp_path)["answers"][0]
    assert answer["kind"] == "not_text"
    assert "image_url" in answer["message"]


def test_a_sample_that_takes_too_long_is_given_up_and_the_next_one_runs(
    inspect_ai: Driver, tmp_path: Path
) -> None:
    """The deadline is ours; the sample is cancelled in the eval, which goes on to a log that is whole."""
    turns = [[{"content": "It is 1", "delay_s": 20.0}, {"content": "It is 1"}]]
    runs: list[dict[str, Any]] = [{"timeout_s": 3.0}, {"index": 0}]
    hurried, patient = played(inspect_ai, "sums", tmp_path, turns=turns, runs=runs)["answers"]
    assert hurried.get("kind", "timed_out") == "timed_out"
    assert patient["rollouts"][0]["reward"] == 1.0
    (log,) = inspect_ai.call(f"{TESTED}:read_logs", directory=str(tmp_path))
    assert log["status"] == "success"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("sum", {}, 'did you mean "sums"'),
        ("sums", {"task": {"prefax": "x"}}, "its parameters do not fit"),
        ("sums", {"scorer": "x"}, "unexpected keyword argument 'scorer'"),
        ("unscored", {}, "has no scorer"),
        ("questions", {}, "returned a MemoryDataset, not a task of Inspect"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    inspect_ai: Driver, name: str, args: dict[str, Any], said: str
) -> None:
    """Before any eval is begun."""
    result = inspect_ai.play(f"inspect::{TESTED}/{name}", args=args)
    assert said in result["load_error"]


def test_parameters_of_the_task_are_its_own(inspect_ai: Driver, tmp_path: Path) -> None:
    """And every sample is a task of the split."""
    result = played(inspect_ai, "sums", tmp_path, args={"task": {"prefix": "Say: "}})
    assert result["tasks"] == {"train": 20}
    assert result["requests"][0]["messages"][0]["content"] == "Say: What is 0 + 1?"


@pytest.mark.parametrize("version", ["0.3.200", "0.4.0", "1.0"])
def test_another_release_is_an_error_that_says_what_to_install(version: str) -> None:
    """Tasks that are fed while they run are new."""
    with pytest.raises(
        EnvironmentLoadError, match=r"not supported.*rollout-orchestrator\[inspect\].*`python`"
    ):
        refuse_other_releases(version)


def test_a_library_that_is_missing_is_named() -> None:
    """With the line that installs it."""
    with pytest.raises(
        EnvironmentLoadError, match=r"inspect-ai is not installed.*rollout-orchestrator\[inspect\]"
    ):
        LOADER.names()

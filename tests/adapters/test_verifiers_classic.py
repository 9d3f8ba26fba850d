"""The classic verifiers adapter against the real library."""

from typing import Any

import pytest

from tests.adapters.conftest import Driver

ID = "verifiers::classic-tested"


def call(name: str, arguments: str) -> dict[str, Any]:
    """A reply that calls a tool."""
    return {"tool_calls": [{"name": name, "arguments": arguments}], "finish_reason": "tool_calls"}


def spans(mask: list[int]) -> int:
    """Stretches of sampled tokens."""
    return sum(now == 1 and before == 0 for before, now in zip([0, *mask], mask, strict=False))


def test_a_single_turn_is_scored_by_the_rubric_with_its_weights(classic: Driver) -> None:
    """The reward is the weighted sum, every function is a metric, the prompts are the environment's."""
    answer = classic.rollout(
        ID, args={"extra": 3.0}, turns=[[{"content": "enots"}]], system_prompt="Be brief."
    )
    rollout = answer["rollouts"][0]
    assert rollout["reward"] == 3.0
    assert rollout["metrics"] == {"correct": 1.0, "shout": 0.0, "num_turns": 1.0}
    assert rollout["stop_reason"] == "max_turns_reached"
    assert answer["requests"][0]["messages"] == [
        {"role": "system", "content": "Be brief.\n\nYou reverse words."},
        {"role": "user", "content": "Reverse stone"},
    ]


def test_tokens_are_those_of_the_engine(classic: Driver) -> None:
    """Token ids and log-probabilities arrive as in native environments."""
    answer = classic.rollout(ID, turns=[[{"content": "ok"}]])
    assert answer["tokens"][-3:] == [ord("o"), ord("k"), 2]
    assert answer["mask"][-4:] == [0, 1, 1, 1]
    assert answer["logprobs"][-3:] == pytest.approx([-0.111, -0.107, -0.002])


def test_splits_are_the_librarys_datasets(classic: Driver) -> None:
    """Train and eval have their own rows."""
    played = classic.play(ID, [{"split": "eval", "index": 1}], splits=["train", "eval"])
    assert played["tasks"] == {"train": 4, "eval": 2}
    assert played["requests"][0]["messages"][-1]["content"] == "Reverse cloud"


def test_a_group_rubric_makes_groups_that_are_scored_together(classic: Driver) -> None:
    """The environment declares itself group-scored and rewards compare the members."""
    replies = [[{"content": "enots"}, {"content": "no"}, {"content": "long answer"}]]
    played = classic.play(ID, [{"kind": "group", "count": 3}], args={"kind": "group"}, turns=replies)
    assert played["group_scored"]
    rollouts = played["answers"][0]["rollouts"]
    transcripts = played["answers"][0]["transcripts"]
    rewards = {t["messages"][-1]["content"]: r["reward"] for t, r in zip(transcripts, rollouts, strict=True)}
    assert rewards == {"enots": 1.0, "no": 2.0, "long answer": 0.0}
    assert [set(rollout["metrics"]) for rollout in rollouts] == [{"correct", "shortest", "num_turns"}] * 3


def test_an_environment_without_a_group_rubric_is_not_group_scored(classic: Driver) -> None:
    """Whether groups are needed is read off the loaded rubric, not off the class."""
    assert not classic.play(ID)["group_scored"]


def test_a_mixture_is_group_scored_when_one_of_its_parts_is(classic: Driver) -> None:
    """Rubrics inside a group of environments are found, and each task is scored by its own."""
    replies = [[{"content": "enots"}, {"content": "x"}]]
    runs = [{"kind": "group", "count": 2, "index": 0}]
    played = classic.play(ID, runs, args={"kind": "mixture"}, turns=replies)
    assert played["group_scored"]
    assert sorted(rollout["reward"] for rollout in played["answers"][0]["rollouts"]) == [0.0, 1.0]


def test_tools_are_offered_and_called_and_the_conversation_is_one_sequence(classic: Driver) -> None:
    """Two turns with a tool result between them merge into one sequence with two sampled stretches."""
    turns = [[call("add", '{"a": 2, "b": 3}')], [{"content": "enots"}]]
    answer = classic.rollout(ID, args={"kind": "tools"}, turns=turns)
    first, second = answer["requests"]
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    assert answer["rollouts"][0]["reward"] == 1.0
    assert answer["rollouts"][0]["metrics"]["add_calls"] == 1.0
    assert len(answer["rollouts"][0]["lengths"]) == 1
    assert spans(answer["mask"]) == 2


def test_a_tool_keeps_state_per_rollout(classic: Driver) -> None:
    """Rollouts side by side do not share the tool's state."""
    turns = [[call("deposit", '{"amount": 5}')], [{"content": "done"}]]
    played = classic.play(
        ID, [{"index": index} for index in range(4)], args={"kind": "stateful"}, turns=turns
    )
    assert [answer["rollouts"][0]["reward"] for answer in played["answers"]] == [105.0] * 4


def test_a_multi_turn_environment_answers_until_its_stop_condition(classic: Driver) -> None:
    """The environment's own messages are in the conversation and its stop condition is the stop reason."""
    turns = [[{"content": "one"}], [{"content": "two"}], [{"content": "enots"}]]
    answer = classic.rollout(ID, args={"kind": "multi_turn"}, turns=turns)
    assert answer["rollouts"][0]["stop_reason"] == "out"
    assert answer["rollouts"][0]["reward"] == 1.0
    assert [request["messages"][-1]["content"] for request in answer["requests"]] == [
        "Reverse stone",
        "1 left",
        "0 left",
    ]
    assert spans(answer["mask"]) == 3


def test_what_the_policy_says_as_a_judge_is_not_trained_on(classic: Driver) -> None:
    """A judge that is the policy is asked while scoring; only the trajectory's own turn is handed in."""
    answer = classic.rollout(ID, args={"kind": "judged"}, turns=[[{"content": "enots"}]])
    rollout = answer["rollouts"][0]
    assert rollout["reward"] == 2.0
    assert len(answer["requests"]) == 3
    assert rollout["lengths"] == [len(answer["mask"])]
    assert sum(answer["mask"]) == len("enots") + 1
    assert rollout["metrics"]["sampled_tokens"] == len("enots") + 1
    assert all("judge" not in str(message) for message in answer["transcripts"][0]["messages"])
    assert [request.get("logprobs") for request in answer["requests"]] == [True, None, None]


def test_the_authors_longest_sequence_is_obeyed(classic: Driver) -> None:
    """What the library cuts off is not trained on, and the turns behind it are left out."""
    turns = [[{"content": "one"}], [{"content": "two"}], [{"content": "enots"}]]
    whole = classic.rollout(ID, args={"kind": "multi_turn"}, turns=turns)
    first_end = whole["mask"].index(0, whole["mask"].index(1))
    cut = classic.rollout(ID, args={"kind": "short", "extra": first_end - 1}, turns=turns)
    assert cut["rollouts"][0]["lengths"] == [first_end - 1]
    assert cut["tokens"] == whole["tokens"][: first_end - 1]
    assert sum(cut["mask"]) == 3
    assert cut["rollouts"][0]["reward"] == 3.0


@pytest.mark.parametrize("kind", ["raising_reward", "reward_of_nothing"])
def test_a_reward_function_that_raises_is_a_failed_rollout(classic: Driver, kind: str) -> None:
    """The library would count it as zero."""
    answer = classic.rollout(ID, args={"kind": kind}, turns=[[{"content": "enots"}]])
    assert answer["kind"] == "reward_error"
    assert not answer["retryable"]
    assert "raises" in answer["message"] or "nothing" in answer["message"]


def test_a_group_reward_that_raises_fails_the_group(classic: Driver) -> None:
    """No member gets a made-up zero."""
    played = classic.play(ID, [{"kind": "group", "count": 2}], args={"kind": "raising_group"})
    assert played["answers"][0]["kind"] == "reward_error"
    assert "the judge is out" in played["answers"][0]["message"]


def test_a_metric_that_raises_is_left_out(classic: Driver) -> None:
    """A function without weight does not decide over the rollout, and its zero is not reported either."""
    answer = classic.rollout(ID, args={"kind": "raising_metric"}, turns=[[{"content": "enots"}]])
    assert answer["rollouts"][0]["reward"] == 1.0
    assert set(answer["rollouts"][0]["metrics"]) == {"correct", "num_turns"}


@pytest.mark.parametrize(("run", "kind"), [({}, "keeping"), ({"kind": "group", "count": 3}, "keeping_group")])
def test_a_sandbox_that_waits_for_the_rubric_is_closed_also_when_nothing_is_scored(
    classic: Driver, run: dict[str, Any], kind: str
) -> None:
    """That of the rollout that failed, and those of the members of its group that had ended."""
    good = [{"content": "one"}]
    for first in ("one", "fail"):
        turns = [[{"content": "fine"}, {"content": "fine"}, {"content": first, "delay_s": 0.2}], good, good]
        answers = classic.play(ID, [run] * (1 if run else 3), args={"kind": kind}, turns=turns)["answers"]
        failed = [answer["kind"] for answer in answers if "kind" in answer]
        assert failed == (["sandbox_error"] if first == "fail" else [])
        assert classic.call("classic_tested:count_kept") == 0


@pytest.mark.parametrize(
    ("kind", "expected", "retryable"),
    [
        ("sandbox_error", "sandbox_error", True),
        ("tool_error", "tool_call_error", False),
        ("bug", "error", False),
    ],
)
def test_errors_keep_their_type_and_whether_they_are_retryable(
    classic: Driver, kind: str, expected: str, retryable: bool
) -> None:
    """Infrastructure is worth another attempt, a bug is not."""
    answer = classic.rollout(ID, args={"kind": kind})
    assert (answer["kind"], answer["retryable"]) == (expected, retryable)


@pytest.mark.parametrize(
    ("status", "text", "kind", "retryable"),
    [
        (400, "bad temperature", "bad_request", False),
        (400, "This model's maximum context length is 10 tokens", "context_length", False),
        (401, "who are you", "unauthorized", False),
    ],
)
def test_a_failing_endpoint_fails_the_rollout_as_in_native_environments(
    classic: Driver, status: int, text: str, kind: str, retryable: bool
) -> None:
    """What `Model` raises comes out of the library unchanged."""
    answer = classic.rollout(ID, turns=[[{"status": status, "error": text}]])
    assert (answer["kind"], answer["retryable"]) == (kind, retryable)


def test_a_prompt_that_outgrows_the_context_ends_the_rollout_truncated(classic: Driver) -> None:
    """As the library does it: what was said so far is scored."""
    turns = [[{"content": "one"}], [{"status": 400, "error": "exceeds maximum context length"}]]
    answer = classic.rollout(ID, args={"kind": "multi_turn"}, turns=turns)
    assert answer["rollouts"][0]["truncated"]
    assert answer["rollouts"][0]["stop_reason"] == "prompt_too_long"
    assert spans(answer["mask"]) == 1


def test_the_operators_sampling_wins_over_the_authors(classic: Driver) -> None:
    """The author's defaults fill in only what the configuration leaves open; there is always one choice."""
    answer = classic.rollout(
        ID, args={"kind": "author_sampling"}, sampling={"temperature": 1.0, "max_tokens": 9}
    )
    request = answer["requests"][0]
    assert (request["temperature"], request["max_tokens"], request["top_p"]) == (1.0, 9, 0.9)
    assert "n" not in request


def test_an_evaluation_asks_for_no_token_ids(classic: Driver) -> None:
    """Then there are no sequences, and the reward is there all the same."""
    answer = classic.rollout(ID, train=False, turns=[[{"content": "enots"}]])
    assert "return_token_ids" not in answer["requests"][0]
    assert answer["rollouts"][0]["lengths"] == []
    assert answer["rollouts"][0]["reward"] == 1.0


def test_an_environment_that_the_package_ships_works(classic: Driver) -> None:
    """The library's own reasoning-gym environment, which needs no download."""
    answer = classic.rollout(ID, args={"kind": "reasoning_gym"}, turns=[[{"content": "<answer>1</answer>"}]])
    assert "check_answer_reward_func" in answer["rollouts"][0]["metrics"]


@pytest.mark.parametrize(
    ("id", "args", "said"),
    [
        (ID, {"kind": "unheard-of"}, "no kind unheard-of"),
        (ID, {"knid": "single"}, "knid"),
        ("verifiers::no-such-environment", {}, 'no module "no_such_environment"'),
        ("verifiers::v1-tested", {}, "if it is a v1 taskset"),
    ],
)
def test_a_mistake_is_one_line(classic: Driver, id: str, args: dict[str, Any], said: str) -> None:  # noqa: A002
    """Environments that cannot be loaded say why."""
    played = classic.play(id, args=args)
    assert said in played["load_error"]
    assert "\n" not in played["load_error"]

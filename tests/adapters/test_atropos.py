"""The Atropos adapter against environments on the real library's base class, and against its own run."""

from typing import Any

import numpy as np
import pytest

from envs.adapters.atropos import refuse_other_releases
from envs.adapters.atropos_record import Conversation, find
from envs.completion import Usage
from envs.errors import EnvironmentLoadError
from envs.merging import Turn
from envs.model import Reply
from tests.adapters.conftest import Driver

TESTED = "atropos_tested"
REPLIES = [[{"content": "enots"}, {"content": "no idea"}, {"content": "stone"}]]
GROUP = {"kind": "group", "count": 3}
MINUTES = 600
"""The library takes many seconds to import where the machine is busy."""

pytestmark = pytest.mark.timeout(MINUTES)


def group(driver: Driver, environment: str, **scenario: Any) -> dict[str, Any]:
    """The answer to the only group of a scenario."""
    return driver.rollout(
        f"atropos::{TESTED}:{environment}", **{"runs": [GROUP], "turns": REPLIES, **scenario}
    )


def replies(answer: dict[str, Any]) -> list[str]:
    """What the policy said at last in each rollout."""
    return [transcript["messages"][-1]["content"] for transcript in answer["transcripts"]]


def rewards(answer: dict[str, Any]) -> list[float]:
    return [rollout["reward"] for rollout in answer["rollouts"]]


def sequences(answer: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, mask and log-probabilities of every sequence."""
    found, start = [], 0
    for rollout in answer["rollouts"]:
        for length in rollout["lengths"]:
            end = start + length
            found.append(
                (answer["tokens"][start:end], answer["mask"][start:end], answer["logprobs"][start:end])
            )
            start = end
    return found


def engine_tokens(prompt: str, reply: str) -> list[int]:
    """As the driver's server tokenises: by characters."""
    return [1, ord("u"), *map(ord, prompt), 2, 1, ord("a"), *map(ord, reply), 2]


def test_scores_and_their_order_are_those_of_the_librarys_own_run(atropos: Driver) -> None:
    """The environment shuffles its answers; each keeps its score, and the prompt and the sampling are the same."""
    library = atropos.call(f"{TESTED}:library_run", environment="Reversing", turns=REPLIES)
    answer = group(atropos, "Reversing")
    assert rewards(answer) == library["scores"]
    assert [text.split("<assistant>")[1].removesuffix("</s>") for text in library["texts"]] == replies(answer)
    assert sorted(rewards(answer)) == [0.0, 0.0, 1.0]
    asked, own = answer["requests"][0], library["requests"][0]
    assert {key: asked[key] for key in ("messages", "max_tokens", "temperature")} == {
        key: own[key] for key in ("messages", "max_tokens", "temperature")
    }


def test_tokens_are_the_engines_where_the_environment_tokenised_the_text_again(atropos: Driver) -> None:
    """Its own ids differ; what is trained on is what the engine sampled, with its log-probabilities."""
    answer = group(atropos, "Reversing")
    for reply, (tokens, mask, logprobs) in zip(replies(answer), sequences(answer), strict=True):
        assert tokens == engine_tokens("Reverse stone", reply)
        assert sum(mask) == len(reply) + 1
        assert logprobs[-2] == pytest.approx(-ord(reply[-1]) / 1000)


def test_a_reply_of_nothing_and_one_with_a_special_token_are_found_too(atropos: Driver) -> None:
    """What the environment's tokenizer leaves out of its text does not make the reply somebody else's."""
    turns = [[{"content": ""}, {"content": "what? me"}, {"content": "enots"}]]
    answer = group(atropos, "Reversing", turns=turns)
    assert sorted(zip(replies(answer), rewards(answer), strict=True)) == [
        ("", 0.0),
        ("enots", 1.0),
        ("what? me", 0.0),
    ]
    assert sorted(tokens[-2] for tokens, _, _ in sequences(answer)) == [ord("a"), ord("e"), ord("s")]


def test_nodes_of_the_managed_server_have_the_engines_tokens_and_what_is_left_out_weighs_nothing(
    atropos: Driver,
) -> None:
    """The group stays whole: a rollout without a score earns the mean of the others."""
    turns = [[{"content": "enots"}, {"content": "no idea"}, {"content": "x"}]]
    answer = group(atropos, "Managed", turns=turns)
    assert replies(answer) == ["enots", "no idea", "x"]
    assert rewards(answer) == [1.0, 0.0, 0.5]
    assert [rollout["metrics"]["scored"] for rollout in answer["rollouts"]] == [1.0, 1.0, 0.0]
    assert sequences(answer)[0][0] == engine_tokens("Reverse stone", "enots")


def test_a_conversation_of_several_turns_is_one_sequence_with_every_turn_unmasked(atropos: Driver) -> None:
    """Members talk side by side; each call continues the conversation whose tokens it extends."""
    turns = [[{"content": "one"}, {"content": "two"}, {"content": "six"}], [{"content": "enots"}]]
    answer = group(atropos, "Talking", turns=turns)
    assert rewards(answer) == [1.0, 1.0, 1.0]
    said = {
        "".join(chr(token) for token, sampled in zip(tokens, mask, strict=True) if sampled and token > 2)
        for tokens, mask, _ in sequences(answer)
    }
    assert said == {"oneenots", "twoenots", "sixenots"}


def test_leftovers_come_before_the_next_item_and_a_retry_has_the_same_item(atropos: Driver) -> None:
    """An index keeps its item; another takes what an earlier group left over. Groups of another size wait."""
    runs = [{"kind": "group", "count": count, "index": index} for index, count in ((0, 3), (1, 2), (0, 3))]
    played = atropos.play(f"atropos::{TESTED}:Talking", runs, turns=[[{"content": "enots"}]])
    prompts = [answer["transcripts"][0]["messages"][0]["content"] for answer in played["answers"]]
    assert prompts == ["Reverse stone", "Reverse again", "Reverse stone"]


def test_raw_completions_are_recorded_too(atropos: Driver) -> None:
    """The prompt goes to the engine as it is, without a chat template."""
    answer = group(atropos, "Completing")
    assert answer["requests"][0]["prompt"] == "stone, reversed: "
    assert rewards(answer) == [1.0, 0.0, 0.0]
    assert sequences(answer)[0][0] == [*map(ord, "stone, reversed: enots"), 2]


def test_a_group_with_pictures_is_refused(atropos: Driver) -> None:
    """What no trainer gets must not have been seen."""
    answer = group(atropos, "Seeing")
    assert (answer["kind"], answer["retryable"]) == ("not_text", False)


def test_a_dropped_group_is_no_failure(atropos: Driver) -> None:
    """It is handed on with equal rewards, which the service does not train on."""
    answer = group(atropos, "Dropping")
    assert rewards(answer) == [0.0, 0.0, 0.0]
    assert {rollout["metrics"]["scored"] for rollout in answer["rollouts"]} == {0.0}


def test_a_failure_of_the_model_stays_one_when_the_environment_drops_the_group_for_it(
    atropos: Driver,
) -> None:
    """Environments catch broadly; what the endpoint said is what happened."""
    answer = group(atropos, "Dropping", turns=[[{"status": 400, "error": "no such thing"}]])
    assert (answer["kind"], answer["retryable"]) == ("bad_request", False)
    assert "no such thing" in answer["message"]


def test_steps_that_are_groups_of_their_own_are_seats(atropos: Driver) -> None:
    """Rewards are compared within a step; every rollout has a sequence of each."""
    turns = [
        [{"content": "enots"}, {"content": "a"}, {"content": "b"}, {"content": "stone"}, {"content": "c"}]
    ]
    answer = group(atropos, "Stepping", turns=turns)
    assert [len(rollout["lengths"]) for rollout in answer["rollouts"]] == [2, 2, 2]
    assert [rollout["seats"] for rollout in answer["rollouts"]] == [["step 1", "step 2"]] * 3
    rewarded = [
        reward
        for rollout in answer["rollouts"]
        for reward in rollout.get("rewards") or [rollout["reward"]] * 2
    ]
    assert sorted(rewarded) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_groups_of_two_sizes_share_an_environment(atropos: Driver) -> None:
    """The size is the instance's own, so that groups of another size wait."""
    runs = [{"kind": "group", "count": count, "index": index} for index, count in enumerate((2, 3, 2, 4))]
    played = atropos.play(f"atropos::{TESTED}:Reversing", runs, turns=REPLIES)
    assert [len(answer["rollouts"]) for answer in played["answers"]] == [2, 3, 2, 4]


def test_an_evaluation_has_scores_and_no_tokens(atropos: Driver) -> None:
    """Nothing is matched there: the scores are those that were handed in; a dropped group has none to tell."""
    answer = group(atropos, "Reversing", train=False)
    assert sorted(rewards(answer)) == [0.0, 0.0, 1.0]
    assert answer["tokens"] == []
    assert group(atropos, "Dropping", train=False)["kind"] == "dropped"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        (f"{TESTED}:Reversin", {}, 'did you mean "Reversing"'),
        (f"{TESTED}:WORDS", {}, "not a subclass of Atropos' BaseEnv"),
        (f"{TESTED}:Reversing", {"facter": 2.0}, 'has no option "facter"; did you mean "factor"'),
        (f"{TESTED}:Reversing", {"factor": "much"}, "args do not fit"),
        (f"{TESTED}:Reversing", {"tokenizer_name": "/nowhere"}, "set args.tokenizer_name"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    atropos: Driver, name: str, args: dict[str, Any], said: str
) -> None:
    """Unknown classes and options that do not fit are load errors."""
    played = atropos.play(f"atropos::{name}", args=args)
    assert said in played["load_error"]
    assert "\n" not in played["load_error"]


def test_args_are_fields_of_the_environments_config(atropos: Driver) -> None:
    """Its own knobs too."""
    assert sorted(rewards(group(atropos, "Reversing", args={"factor": 3.0}))) == [0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("library", "tokenisers"), [("0.3.9", "4.50"), ("0.5.0", "4.50"), ("1.0", "4.50"), ("0.4.0", "5.0.1")]
)
def test_another_release_is_an_error_that_says_what_to_install(library: str, tokenisers: str) -> None:
    """The adapter knows one of the library, which does not work with every release of transformers."""
    with pytest.raises(EnvironmentLoadError, match=r"atroposlib.*rollout-orchestrator\[atropos\].*`python`"):
        refuse_other_releases(library, tokenisers)


def conversation(*texts: str, prompt: int = 7) -> Conversation:
    """One with these replies, tokenised by characters."""
    said = [Reply(text, {}, "stop", [], "", Usage(), 0.0) for text in texts]
    turns = []
    before = [prompt]
    for text in texts:
        tokens = [ord(character) for character in text]
        turns.append(
            Turn(np.array(before, np.int32), np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))
        )
        before = [*before, *tokens, 1]
    return Conversation(said, [], turns)


def test_what_was_handed_in_is_found_by_ids_then_by_the_text_that_fits_best() -> None:
    """White space does not count; an answer within another's text is not mistaken for it; a cut one is found."""
    short, long, talk = conversation("ab"), conversation("ab cd"), conversation("why", "so")
    talks = [short, long, talk]
    assert find(talks, [7, ord("a"), ord("b")], "nonsense") is short
    assert find(talks, [0], "ab") is short
    assert find(talks, [0], " ab  cd\n") is long
    assert find(talks, [0], "whyso") is talk
    assert find(talks, [0], "so") is talk
    assert find(talks, [0], "<think></think>ab cd") is long
    assert find(talks, [0], "wh") is talk
    assert find(talks, [0], "nothing of it") is None

"""The reasoning-gym adapter against the real library."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envs.adapters.reasoning_gym_tasks import refuse_older_releases
from envs.errors import EnvironmentLoadError
from tests.adapters.conftest import Driver
from tests.adapters.venvs import CHECKOUT, REASONING_GYM

COMPOSITE = [{"name": "chain_sum", "weight": 3.0}, {"name": "leg_counting", "config": {"max_animals": 3}}]


def question(answer: dict[str, Any]) -> str:
    """What the policy was asked in the only turn of the only rollout."""
    text: str = answer["transcripts"][0]["messages"][-2]["content"]
    return text


def checked(*words: str, hash_seed: str = "0") -> Any:
    """What `gym_checks` found inside the library's virtualenv."""
    done = subprocess.run(
        [REASONING_GYM.python, Path(__file__).with_name("gym_checks.py"), *words],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_a_right_answer_of_every_dataset_is_worth_everything(reasoning_gym: Driver) -> None:
    """The stored one; of the five that store none an example of theirs, or one that is worked out."""
    scores = checked("answers")
    assert len(scores) > 90
    assert {name: score for name, score in scores.items() if score != 1.0} == {}


def test_a_composite_has_the_tasks_of_the_librarys_own(reasoning_gym: Driver) -> None:
    """The same parts at the same places, with the same seeds."""
    ours, theirs = checked("composite")
    assert ours == theirs


def test_a_dataset_that_draws_from_the_global_generator_is_the_same_in_every_process(
    reasoning_gym: Driver,
) -> None:
    """The library's own would differ."""
    assert checked("questions", "list_functions") == checked("questions", "list_functions")


def test_a_slow_part_of_a_composite_holds_up_no_other(reasoning_gym: Driver) -> None:
    """While one generates for ever, tasks of the other are generated, answered and scored."""
    played = checked("slow")
    assert played["done"] == played["quick"] > 5
    assert played["stuck"] > 5


def test_the_librarys_own_score_is_the_reward_of_what_stands_in_the_answer_tags(
    reasoning_gym: Driver,
) -> None:
    """A sum is scored by `score_answer`, and the reply's last answer tag is what counts."""
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    asked = reasoning_gym.rollout("reasoning_gym::chain_sum", args=args)
    terms = question(asked).rsplit("?", 1)[0].split(":")[-1].replace("=", "").strip()
    total = eval(terms)
    right = f"Let me see. <answer>{total - 1}</answer> No: <answer>{total}</answer>"
    replies = [[{"content": right}]]
    answer = reasoning_gym.rollout("reasoning_gym::chain_sum", args=args, turns=replies)
    assert question(answer) == question(asked)
    assert answer["rollouts"][0]["reward"] == 1.0
    assert asked["rollouts"][0]["reward"] < 0.1


def test_token_ids_and_logprobs_are_those_of_the_engine(reasoning_gym: Driver) -> None:
    """The sampled tokens are the end of the sequence, with mask 1 and the engine's log-probabilities."""
    answer = reasoning_gym.rollout("reasoning_gym::chain_sum", turns=[[{"content": "42"}]])
    assert answer["tokens"][-3:] == [ord("4"), ord("2"), 2]
    assert answer["mask"] == [0] * (len(answer["mask"]) - 3) + [1, 1, 1]
    assert answer["logprobs"][-3:] == pytest.approx([-0.052, -0.050, -0.002])


@pytest.mark.timeout(600)
def test_every_dataset_name_loads_generates_far_out_and_scores(reasoning_gym: Driver) -> None:
    """All names of the library work, at an index far beyond any size that the library has."""
    names = [name for name in reasoning_gym.names("reasoning_gym") if name != "composite"]
    assert len(names) > 90
    for name in names:
        runs = [{"index": 2**31 + 7}]
        played = reasoning_gym.play(
            f"reasoning_gym::{name}", runs, turns=[[{"content": "<answer>no idea</answer>"}]]
        )
        assert "rollouts" in played["answers"][0], (name, played["answers"][0])
        assert played["tasks"] == {"train": None}


def test_an_answer_that_the_dataset_cannot_read_is_wrong_and_not_a_failure(reasoning_gym: Driver) -> None:
    """This dataset's scorer raises at anything that is not a product of numbers."""
    answer = reasoning_gym.rollout("reasoning_gym::prime_factorization", turns=[[{"content": "no idea"}]])
    assert answer["rollouts"][0]["reward"] == 0.0
    assert answer["rollouts"][0]["metrics"] == {"answered": 1.0, "readable": 0.0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["countdown", "puzzle24", "simple_integration"])
def test_an_answer_that_cannot_be_worked_out_holds_up_nobody(reasoning_gym: Driver, name: str) -> None:
    """It counts as one that cannot be read, and the rollouts beside it are scored meanwhile."""
    turns = [[{"content": "<answer>9**9**9</answer>"}, {"content": "<answer>1 + 1</answer>"}]]
    answers = reasoning_gym.play(f"reasoning_gym::{name}", [{}] * 6, turns=turns)["answers"]
    readable = [answer["rollouts"][0]["metrics"]["readable"] for answer in answers]
    assert sorted(readable) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_task_is_a_pure_function_of_args_split_and_index(reasoning_gym: Driver) -> None:
    """The same index gives the same question in another server, in any order of asking."""
    runs = [{"index": index} for index in range(600)]
    shuffled = random.Random(0).sample(runs, len(runs))
    one = reasoning_gym.play("reasoning_gym::gsm_symbolic", runs)["answers"]
    other = reasoning_gym.play("reasoning_gym::gsm_symbolic", shuffled)["answers"]
    by_index = {run["index"]: question(answer) for run, answer in zip(shuffled, other, strict=True)}
    assert [question(answer) for answer in one] == [by_index[run["index"]] for run in runs]


@pytest.mark.parametrize(
    "name",
    [
        "isomorphic_strings",
        "polynomial_multiplication",
        "ransom_note",
        "list_functions",
        "word_ladder",
        "chain_sum",
    ],
)
def test_a_task_is_the_same_in_two_server_processes(
    name: str, reasoning_gym: Driver, reasoning_gym_again: Driver
) -> None:
    """Also of datasets that draw from hashes or from the global `random`, asked in another order."""
    digests = []
    for driver, order in ((reasoning_gym, range(12)), (reasoning_gym_again, range(11, -1, -1))):
        runs = [{"index": index} for index in order]
        answers = driver.play(f"reasoning_gym::{name}", runs)["answers"]
        digests.append({run["index"]: answer["digest"] for run, answer in zip(runs, answers, strict=True)})
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) > 1


def test_splits_and_seeds_draw_different_tasks(reasoning_gym: Driver) -> None:
    """Train, eval and another seed do not repeat each other."""
    args = {"min_digits": 6, "max_digits": 9}

    def questions(split: str, seed: int) -> set[str]:
        runs = [{"index": index, "split": split} for index in range(64)]
        played = reasoning_gym.play(
            "reasoning_gym::chain_sum", runs, args={**args, "seed": seed}, splits=[split]
        )
        return {question(answer) for answer in played["answers"]}

    sets = [questions("train", 0), questions("eval", 0), questions("train", 1), questions("test", 0)]
    assert [len(questions) for questions in sets] == [64] * 4
    assert len(set().union(*sets)) == 256


def test_args_reach_the_datasets_config(reasoning_gym: Driver) -> None:
    """An option of the dataset changes what it generates."""
    args = {"min_terms": 9, "max_terms": 9}
    answer = reasoning_gym.rollout("reasoning_gym::chain_sum", args=args)
    operators = question(answer).count(" + ") + question(answer).count(" - ")
    assert operators == 8


def test_size_makes_the_tasks_finite(reasoning_gym: Driver) -> None:
    """With `size` the split has a length, and asking beyond it is a failure that is not repeated."""
    played = reasoning_gym.play("reasoning_gym::chain_sum", [{"index": 3}, {"index": 4}], args={"size": 4})
    assert played["tasks"] == {"train": 4}
    assert "rollouts" in played["answers"][0]
    assert (played["answers"][1]["kind"], played["answers"][1]["retryable"]) == ("no_such_task", False)


def test_a_composite_mixes_its_parts_and_scores_with_each(reasoning_gym: Driver) -> None:
    """Both parts are asked, by weight, each with its own options and its own score."""
    runs = [{"index": index} for index in range(200)]
    played = reasoning_gym.play("reasoning_gym::composite", runs, args={"datasets": COMPOSITE})
    legs = sum("legs" in question(answer) for answer in played["answers"])
    assert 25 <= legs <= 75
    assert all("rollouts" in answer for answer in played["answers"])


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("chain_summ", {}, 'did you mean "chain_sum"'),
        ("chain_sum", {"min_term": 2}, 'did you mean "min_terms"'),
        ("chain_sum", {"min_terms": 0}, "args do not fit: min_terms must be positive"),
        ("chain_sum", {"size": 0}, "size must be positive"),
        ("chain_sum", {"seed": -1}, "seed must be"),
        ("composite", {}, "Must specify at least one dataset"),
        ("composite", {"datasets": [{"name": "chain_summ"}]}, 'did you mean "chain_sum"'),
        ("composite", {"datasets": [{"name": "chain_sum", "wieght": 1}]}, "wieght"),
        ("composite", {"datasets": [{"name": "chain_sum"}, {"name": "chain_sum"}]}, "named twice"),
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 0}]}, "weight must be positive"),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"seed": 1}}]}, "without seed and size"),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"min_term": 1}}]}, '"min_terms"'),
        ("composite", {"datasets": [{"name": "chain_sum"}], "min_terms": 3}, "are in its config"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    reasoning_gym: Driver, name: str, args: dict[str, Any], said: str
) -> None:
    """Unknown datasets and options that do not fit are load errors."""
    played = reasoning_gym.play(f"reasoning_gym::{name}", args=args)
    assert said in played["load_error"]
    assert "\n" not in played["load_error"]


def test_a_release_that_is_too_old_says_what_to_install() -> None:
    """The adapter builds on what newer ones have."""
    for version in ("0.1.24", "0.2.0"):
        refuse_older_releases(version)
    with pytest.raises(EnvironmentLoadError, match=r"too old.*rollout-orchestrator\[reasoning-gym\]"):
        refuse_older_releases("0.1.23")


def test_a_reply_that_opens_answers_without_end_is_read_at_once(reasoning_gym: Driver) -> None:
    """As a policy that repeats itself writes them; the last that is closed counts."""
    endless = "<answer>" * 100_000
    answered = reasoning_gym.rollout(
        "reasoning_gym::chain_sum", turns=[[{"content": f"<answer>1</answer>{endless}"}]]
    )
    assert answered["rollouts"][0]["metrics"]["answered"] == 1.0


def test_the_configured_system_prompt_comes_first_and_instructions_can_be_left_out(
    reasoning_gym: Driver,
) -> None:
    """`instructions` is the adapter's own; without it only the operator's prompt is sent."""
    both = reasoning_gym.rollout("reasoning_gym::chain_sum", system_prompt="Be brief.")
    plain = reasoning_gym.rollout(
        "reasoning_gym::chain_sum", system_prompt="Be brief.", args={"instructions": ""}
    )
    assert both["requests"][0]["messages"][0]["content"].startswith("Be brief.\n\n")
    assert "<answer>" in both["requests"][0]["messages"][0]["content"]
    assert plain["requests"][0]["messages"][0] == {"role": "system", "content": "Be brief."}

"""The built-in environments: tasks, rewards, latency, and how they are listed."""

import itertools
import pkgutil
import statistics
from collections.abc import Mapping, Sized
from typing import Any

import msgspec
import pytest

import envs.builtin
from envs import Environment, Model, ModelSettings, Rollout, is_group_scored
from envs.builtin import BUILTIN
from envs.builtin._latency import Latency
from envs.builtin._scoring import overlap
from envs.builtin.agree import Agree
from envs.builtin.calculator import Calculator, calculate
from envs.builtin.duel import Duel
from envs.builtin.larger import Larger
from envs.builtin.lookup import Lookup
from envs.builtin.reverse import Reverse
from envs.loader import load_environment
from orchestrator.local.tokenizer import END, apply_chat_template, encode
from tests.support.chat_only import ChatOnly

INSTANT: dict[str, Environment] = {
    "reverse": Reverse(),
    "larger": Larger(latency_s=0),
    "agree": Agree(latency_s=0),
    "lookup": Lookup(latency_s=0),
    "duel": Duel(),
    "calculator": Calculator(),
}


class Script(ChatOnly):
    """A `ChatClient` that gives prepared answers and keeps the conversations it was asked about."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.asked: list[list[dict[str, Any]]] = []

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        messages = msgspec.json.decode(body)["messages"]
        self.asked.append(messages)
        text = self._answers.pop(0)
        tokens = [*encode(text), END]
        choice = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -1.0} for _ in tokens]},
        }
        return msgspec.json.encode({"choices": [choice], "prompt_token_ids": apply_chat_template(messages)})


async def attempt(environment: Environment, task: Mapping[str, Any], *answers: str) -> Rollout:
    script = Script(*answers)
    rollout = await environment.rollout(task, Model(ModelSettings("local"), client=script, base_url="local"))
    rollout.check()
    return rollout


def first_tasks(environment: Environment, split: str, limit: int = 500) -> list[Mapping[str, Any]]:
    tasks = environment.tasks(split)
    count = min(limit, len(tasks)) if isinstance(tasks, Sized) else limit
    return [tasks[index] for index in range(count)]


def test_the_table_names_every_built_in_environment() -> None:
    """What is listed can be loaded, what can be loaded is listed, and the targets are right."""
    modules = {
        info.name for info in pkgutil.iter_modules(envs.builtin.__path__) if not info.name.startswith("_")
    }
    assert set(BUILTIN) == modules
    for name, (target, description) in BUILTIN.items():
        environment = load_environment(f"builtin::{name}")
        assert target == f"{type(environment).__module__}:{type(environment).__qualname__}"
        assert description


def test_one_environment_is_group_scored() -> None:
    """Only the one whose reward needs the whole group says so."""
    assert {name for name, environment in INSTANT.items() if is_group_scored(environment)} == {"agree"}


@pytest.mark.parametrize("name", sorted(INSTANT))
def test_tasks_are_the_same_for_every_instance(name: str) -> None:
    """A task is a function of its split and index, so that any server process gives the same one."""
    again = load_environment(f"builtin::{name}")
    for split in ("train", "eval"):
        assert first_tasks(again, split) == first_tasks(INSTANT[name], split)


@pytest.mark.parametrize("name", sorted(INSTANT))
def test_no_task_is_in_both_splits(name: str) -> None:
    """What is evaluated was never trained on."""
    questions = {}
    for split in ("train", "eval"):
        tasks = first_tasks(INSTANT[name], split)
        questions[split] = {
            (task["key"], task["table"][task["key"]]) if name == "lookup" else next(iter(task.values()))
            for task in tasks
        }
        assert len(questions[split]) >= 10
    assert not questions["train"] & questions["eval"]


@pytest.mark.parametrize(
    ("text", "wanted", "share"),
    [
        ("abc", "abc", 1.0),
        ("abx", "abc", 2 / 3),
        ("abcd", "abc", 0.75),
        ("", "abc", 0.0),
        ("bca", "abc", 0.0),
    ],
)
def test_partial_credit_is_the_share_of_characters_in_place(text: str, wanted: str, share: float) -> None:
    """Missing and superfluous characters cost alike; only the exact answer earns everything."""
    assert overlap(text, wanted) == pytest.approx(share)


async def test_reverse_rewards_the_word_backwards() -> None:
    """Each letter in its place counts."""
    assert (await attempt(Reverse(), {"word": "abc"}, "cba")).reward == 1.0
    assert (await attempt(Reverse(), {"word": "abc"}, "cbb")).reward == pytest.approx(2 / 3)
    assert (await attempt(Reverse(), {"word": "abc"}, "abc")).reward == pytest.approx(1 / 3)


async def test_larger_rewards_the_larger_digit() -> None:
    """The smaller one earns nothing, in either order."""
    for pair in ("38", "83"):
        assert (await attempt(INSTANT["larger"], {"pair": pair}, "8")).reward == 1.0
        assert (await attempt(INSTANT["larger"], {"pair": pair}, "3")).reward == 0.0


async def test_what_one_seat_of_a_duel_wins_the_other_loses() -> None:
    """Nothing where both are right, or both wrong."""
    rollout = await attempt(INSTANT["duel"], {"letters": "ab"}, "a", "x")
    assert {one.seat: one.reward for one in rollout.sequences} == {"white": 1.0, "black": -1.0}
    rollout = await attempt(INSTANT["duel"], {"letters": "ab"}, "a", "b")
    assert {one.seat: one.reward for one in rollout.sequences} == {"white": 0.0, "black": 0.0}
    assert (rollout.reward, rollout.metrics) == (0.0, {"white": 1.0, "black": 1.0})


async def test_agree_rewards_those_who_answer_like_the_group() -> None:
    """A reward is the share of the group with the same valid answer; agreeing on something not offered earns nothing."""
    task = {"offer": "abc"}
    rollouts = [await attempt(INSTANT["agree"], task, answer) for answer in ("a", "a", "b", "x", "x", "ab")]
    assert await INSTANT["agree"].score_group(task, rollouts) == pytest.approx([2 / 6, 2 / 6, 1 / 6, 0, 0, 0])
    everyone = [await attempt(INSTANT["agree"], task, "c") for _ in range(4)]
    assert await INSTANT["agree"].score_group(task, everyone) == [1.0] * 4


async def test_lookup_passes_on_what_the_tool_says_for_the_key_asked() -> None:
    """The tool answers for the key that the policy asked for, and both turns are one training sequence."""
    task = {"key": "c", "table": {"c": "7", "d": "2"}, "seed": "0"}
    script = Script("d", "2")
    model = Model(ModelSettings("local"), client=script, base_url="local")
    rollout = await INSTANT["lookup"].rollout(task, model)
    assert [message["content"] for message in script.asked[1]] == ["lookup c", "d", "2"]
    assert rollout.reward == 0.0
    assert len(rollout.sequences) == 1
    assert rollout.sequences[0].mask.sum() == 4


@pytest.mark.parametrize(
    ("call", "answer", "reward"),
    [("c", "7", 1.0), ("c", "2", 0.5), ("?", "7", 0.5), ("", "", 0.0), ("cc", "7", 0.75)],
)
async def test_lookup_rewards_the_call_and_the_answer(call: str, answer: str, reward: float) -> None:
    """Half is earned by asking for the right key, half by the right value."""
    task = {"key": "c", "table": {"c": "7"}, "seed": "0"}
    assert (await attempt(INSTANT["lookup"], task, call, answer)).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("expression", "value"), [("2 * (3 + 4)", 14), ("-1.5 - 2", -3.5), (" 7/2 ", 3.5), ("0", 0)]
)
def test_the_calculator_works_out_expressions(expression: str, value: float) -> None:
    """Numbers, the four operations and brackets."""
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["2 ** 9", "open('x')", "a", "'7'", "True", "1 if 2 else 3"])
def test_the_calculator_takes_nothing_but_numbers(expression: str) -> None:
    """What the policy writes is never run."""
    with pytest.raises(ValueError, match="only numbers"):
        calculate(expression)


def test_latencies_spread_around_their_median_and_repeat() -> None:
    """Half of the waits are shorter than the median, a few much longer, and a task's wait is always the same."""
    latency = Latency(0.2, spread=0.5)
    waits = [latency.draw_s(str(index)) for index in range(2000)]
    assert statistics.median(waits) == pytest.approx(0.2, rel=0.1)
    assert max(waits) > 2 * 0.2 > 0.2 / 2 > min(waits)
    assert waits == [latency.draw_s(str(index)) for index in range(2000)]
    assert len(set(waits)) == len(waits)


def test_without_a_latency_nothing_is_waited_for() -> None:
    """A median of 0 does not even yield to the event loop."""
    with pytest.raises(StopIteration):
        Latency(0.0).wait("0").send(None)


@pytest.mark.parametrize("name", ["larger", "agree", "lookup"])
@pytest.mark.parametrize("argument", ["latency_s", "latency_spread"])
def test_negative_latencies_are_refused(name: str, argument: str) -> None:
    """A wait cannot be shorter than nothing."""
    with pytest.raises(ValueError, match="must not be negative"):
        load_environment(f"builtin::{name}", {argument: -1.0})


def test_default_latencies_differ_clearly() -> None:
    """Instant, some tens of milliseconds and some hundreds: a mix that has to cope with different paces."""
    medians = [0.0] + [
        load_environment(name)._latency.median_s  # type: ignore[attr-defined]
        for name in ("larger", "agree", "lookup")
    ]
    assert all(slower > 2 * faster for faster, slower in itertools.pairwise(medians))

"""What a server makes of an environment: one task per index, groups of its own doing, seats, and what is refused."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envs import Environment, Model, ModelSettings, Rollout, RolloutFailure, Task, Tasks, wire
from envs.answering import Responder
from tests.support.chat_endpoint import completion
from tests.support.chat_only import ChatOnly


class Client(ChatOnly):
    """Answers every chat alike."""

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(completion("yes"))


class Shuffled(Environment):
    """Tasks in an order that nobody seeded, each with a number that nobody seeded either."""

    def tasks(self, split: str) -> Tasks:
        words = [f"word {number}" for number in range(50)]
        random.shuffle(words)

        class Drawn:
            def __getitem__(self, index: int, /) -> Task:
                return {"word": words[index], "number": random.random()}

        return Drawn()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await model.chat([{"role": "user", "content": task["word"]}])
        return model.rollout(reward=random.random())


class Moment(Shuffled):
    """Its tasks carry something of the moment, which is no part of the problem."""

    def tasks(self, split: str) -> Tasks:
        return [{"word": "same", "made": random.SystemRandom().random()}]

    def identity(self, task: Task) -> object:
        return task["word"]


async def answered(
    environment: Environment, *, seed: int = 0, train: bool = True, **fields: Any
) -> wire.Result | wire.Failure:
    """What a fresh server answers to one request."""
    responder = Responder(environment, client=Client(), env="e", seed=seed)
    asked = {"id": 1, "kind": "rollout", "split": "train", "index": 3, "base_url": "http://x/v1", **fields}
    frames = await responder.answer(wire.Request(**asked), ModelSettings("m", train=train))
    message = wire.decode_to_client(frames)
    assert isinstance(message, wire.Result | wire.Failure)
    return message


async def result(environment: Environment, **fields: Any) -> wire.Result:
    got = await answered(environment, **fields)
    assert isinstance(got, wire.Result), got
    return got


async def test_an_index_is_one_task_on_every_server_though_the_environment_draws_unseeded() -> None:
    """The generators are seeded while tasks are listed and looked up, and by the run's seed."""
    one, other = await result(Shuffled()), await result(Shuffled())
    assert one.digest == other.digest != 0
    assert (await result(Shuffled(), index=4)).digest != one.digest
    assert (await result(Shuffled(), seed=1)).digest != one.digest


async def test_what_a_rollout_draws_differs_from_rollout_to_rollout() -> None:
    """A group whose members all draw the same would explore nothing."""
    rewards = {(await result(Shuffled())).rollouts[0].reward for _ in range(4)}
    assert len(rewards) == 4


async def test_an_environment_may_say_what_identifies_a_task() -> None:
    """For tasks that carry something of the moment."""
    digests = {(await result(Moment(), index=0)).digest for _ in range(3)}
    assert len(digests) == 1


def test_a_server_declares_the_digests_of_its_first_tasks() -> None:
    """By which servers are compared before the first rollout; a task that cannot be made has none."""

    class Half(Shuffled):
        def tasks(self, split: str) -> Tasks:
            class Some:
                def __len__(self) -> int:
                    return 5

                def __getitem__(self, index: int, /) -> Task:
                    if index == 0:
                        raise OSError("no such file")
                    return {"index": index}

            return Some()

    one = Responder(Shuffled(), client=Client(), env="e").samples_of("train")
    assert one == Responder(Shuffled(), client=Client(), env="e").samples_of("train")
    assert list(one) == [0, 1]
    assert list(Responder(Half(), client=Client(), env="e").samples_of("train")) == [1]


class OwnGroup(Shuffled):
    """Does its groups by itself: every member hears of the one before."""

    def __init__(self, returned: int | None = None) -> None:
        self.returned = returned
        self.stopped = False

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        rollouts = []
        for number in range(count if self.returned is None else self.returned):
            member = model.sibling()
            await member.chat([{"role": "user", "content": f"{number} of {count}"}])
            rollouts.append(member.rollout(reward=float(number)))
        return rollouts


async def test_an_environment_may_do_its_groups_by_itself() -> None:
    """It is asked for whole groups only, and every member is handed in with its own turns and reward."""
    assert OwnGroup().group_scored
    got = await result(OwnGroup(), kind="group", count=3)
    assert [rollout.reward for rollout in got.rollouts] == [0.0, 1.0, 2.0]
    assert [len(rollout.lengths) for rollout in got.rollouts] == [1, 1, 1]
    said = [entry["messages"][0]["content"] for entry in msgspec.msgpack.decode(got.transcript)]
    assert said == ["0 of 3", "1 of 3", "2 of 3"]
    single = await answered(OwnGroup())
    assert isinstance(single, wire.Failure)
    assert single.kind == "not_a_group"


async def test_a_group_of_another_size_than_was_asked_for_is_an_invalid_rollout() -> None:
    """Nothing of it is trained on."""
    got = await answered(OwnGroup(returned=2), kind="group", count=3)
    assert isinstance(got, wire.Failure)
    assert (got.kind, got.message) == ("invalid_rollout", "rollout_group must return 3 rollouts, got 2")


class Waiting(OwnGroup):
    """Its group never ends by itself."""

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True
        raise AssertionError


async def test_a_group_of_its_own_doing_has_a_deadline_and_can_be_cancelled() -> None:
    """As rollouts have."""
    environment = Waiting()
    got = await answered(environment, kind="group", count=2, timeout_s=0.01)
    assert isinstance(got, wire.Failure)
    assert (got.kind, got.retryable, environment.stopped) == ("timed_out", True, True)
    environment = Waiting()
    responder = Responder(environment, client=Client(), env="e")
    request = wire.Request(1, "group", "train", 0, "http://x/v1", 2)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(responder.answer(request, ModelSettings("m")))
        await asyncio.sleep(0)
        asked.cancel()
    assert asked.cancelled()


class Failing(OwnGroup):
    """Its group fails in a way that it names."""

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        raise RolloutFailure("no_table", "the table is taken", retryable=True)


async def test_what_a_group_of_its_own_doing_raises_is_its_failure() -> None:
    """With the kind that the environment gave it."""
    got = await answered(Failing(), kind="group", count=2)
    assert isinstance(got, wire.Failure)
    assert (got.kind, got.retryable) == ("no_table", True)


class Game(Shuffled):
    """Two seats, and a judge that is the policy."""

    def __init__(self, white: Any = 1.0) -> None:
        self.white = white

    async def rollout(self, task: Task, model: Model) -> Rollout:
        for name in ("white", "black", "white"):
            await model.seat(name).chat([{"role": "user", "content": f"your move, {name}"}])
        await model.unrecorded().chat([{"role": "user", "content": "who won?"}])
        return model.rollout(rewards={"white": self.white, "black": -1.0})


async def test_a_game_is_handed_in_by_seat_and_without_its_judge() -> None:
    """Each seat has its sequences and its reward; the transcript says whose each message is."""
    got = await result(Game())
    (rollout,) = got.rollouts
    assert rollout.seats == ["white", "white", "black"]
    assert (rollout.reward, rollout.rewards) == (0.0, [1.0, 1.0, -1.0])
    (entry,) = msgspec.msgpack.decode(got.transcript)
    assert entry["seats"] == {"white": 1.0, "black": -1.0}
    assert {message["seat"] for message in entry["messages"]} == {"white", "black"}
    assert "who won?" not in str(entry)


@pytest.mark.parametrize("wrong", [float("nan"), "much", 1e39])
async def test_a_reward_of_a_seat_that_is_no_number_is_an_invalid_rollout(wrong: Any) -> None:
    """As a reward of the whole is."""
    got = await answered(Game(white=wrong))
    assert isinstance(got, wire.Failure)
    assert got.kind in ("invalid_rollout", "error")


async def test_sequences_of_one_seat_have_one_reward() -> None:
    """Otherwise nobody could say what the seat earned in that rollout."""

    class Two(Shuffled):
        async def rollout(self, task: Task, model: Model) -> Rollout:
            await model.chat([{"role": "user", "content": "one"}])
            await model.chat([{"role": "user", "content": "two"}])
            rollout = model.rollout(0.0)
            rollout.sequences[0].reward = 1.0
            return rollout

    got = await answered(Two())
    assert isinstance(got, wire.Failure)
    assert got.kind == "invalid_rollout"
    assert "sequences of one seat have one reward" in got.message


async def test_a_message_that_is_no_unicode_is_a_failure_and_not_the_end_of_the_server() -> None:
    """Names of metrics are the environment's: half of a surrogate pair is in the text of a model sooner or later."""

    class Odd(Shuffled):
        async def rollout(self, task: Task, model: Model) -> Rollout:
            await model.chat([{"role": "user", "content": "?"}])
            return model.rollout(0.0, metrics={"said \ud83d": float("nan")})

    failure = await answered(Odd())
    assert isinstance(failure, wire.Failure)
    assert (failure.kind, failure.message) == (
        "invalid_rollout",
        'metric "said ?" must be a finite number, got nan',
    )


async def test_an_error_where_the_working_directory_is_gone_is_a_failure_and_not_the_end_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment may go to a folder that it removes; generated code has a name that is relative to it."""

    class Moved(Shuffled):
        async def rollout(self, task: Task, model: Model) -> Rollout:
            exec("raise ValueError('no')")
            raise AssertionError

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    failure = await answered(Moved())
    assert isinstance(failure, wire.Failure)
    assert (failure.kind, failure.message) == ("error", "ValueError: no")
    assert "test_answering.py" in failure.where

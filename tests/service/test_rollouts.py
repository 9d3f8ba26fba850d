"""Rollouts for scripts and notebooks: rows of an environment against an endpoint."""

from collections.abc import AsyncIterator

import pytest

import orchestrator
from envs import Environment, EnvironmentLoadError, Model, Rollout, Task
from orchestrator.errors import ConfigError
from tests.support.chat_endpoint import ChatEndpoint, chat_endpoint

HERE = "tests.service.test_rollouts"


class Counts(Environment):
    """Rewards the index of the task; the last one is broken."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.closed = False

    def tasks(self, split: str) -> list[Task]:
        return [{"index": index} for index in range(self.size)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await model.chat([{"role": "user", "content": f"task {task['index']}"}])
        if task["index"] == self.size - 1:
            raise KeyError("the last one")
        return model.rollout(reward=float(task["index"]))

    async def close(self) -> None:
        self.closed = True


class Ranked(Counts):
    """Scored as a group."""

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        return [float(rank) for rank in range(len(rollouts))]


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with chat_endpoint() as running:
        yield running


async def test_every_attempt_is_a_row_failed_ones_included(endpoint: ChatEndpoint) -> None:
    """In order, with rewards and messages, or with what was raised and where."""
    rows = await orchestrator.rollouts(
        f"{HERE}:Counts", base_url=endpoint.base_url, model="m", n=2, indices=[1, 2], args={"size": 3}
    )
    assert [(row.index, row.attempt, row.reward) for row in rows] == [
        (1, 0, 1.0),
        (1, 1, 1.0),
        (2, 0, None),
        (2, 1, None),
    ]
    assert rows[0].rollout is not None
    assert rows[0].rollout.messages[0]["content"] == "task 1"
    assert rows[0].rollout.sequences
    assert rows[2].rollout is None
    assert rows[2].failure_kind == "error"
    assert rows[2].failure.startswith("KeyError: 'the last one', at ")
    assert rows[2].failure.endswith(" in rollout")


async def test_an_environment_that_is_made_already_will_do(endpoint: ChatEndpoint) -> None:
    """As in a notebook, where its class stands in a cell; it is closed afterwards."""
    environment = Counts(size=2)
    [row] = await orchestrator.rollouts(environment, base_url=endpoint.base_url, model="m", train=False)
    assert (row.split, row.index, row.reward) == ("train", 0, 0.0)
    assert environment.closed


async def test_a_group_is_scored_as_a_whole(endpoint: ChatEndpoint) -> None:
    """Its rows are the group, however few requests may run at once."""
    rows = await orchestrator.rollouts(
        f"{HERE}:Ranked@eval", base_url=endpoint.base_url, model="m", n=3, indices=[0, 1], max_inflight=2
    )
    assert [(row.split, row.index, row.attempt, row.reward) for row in rows] == [
        ("eval", index, attempt, float(attempt)) for index in (0, 1) for attempt in (0, 1, 2)
    ]


async def test_without_an_endpoint_the_local_policy_answers() -> None:
    """Nothing else is needed to try an environment."""
    [row] = await orchestrator.rollouts("reverse", sampling={"max_tokens": 4})
    assert row.reward is not None
    assert not row.failure


async def test_mistakes_are_errors_with_one_line(endpoint: ChatEndpoint) -> None:
    """Of the environment, of the endpoint, or of the arguments."""
    with pytest.raises(EnvironmentLoadError, match='did you mean "Counts"'):
        await orchestrator.rollouts(f"{HERE}:Count", base_url=endpoint.base_url)
    with pytest.raises(ConfigError, match="is not like http://"):
        await orchestrator.rollouts("reverse", base_url="localhost:8000")
    with pytest.raises(ConfigError, match="is the inference server up"):
        await orchestrator.rollouts("reverse", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="args are for an environment that is named"):
        await orchestrator.rollouts(Counts(), args={"size": 3})
    with pytest.raises(ConfigError, match="n and max_inflight must be at least 1"):
        await orchestrator.rollouts("reverse", n=0)
    with pytest.raises(ConfigError, match="sampling must not set n"):
        await orchestrator.rollouts("reverse", sampling={"n": 2})

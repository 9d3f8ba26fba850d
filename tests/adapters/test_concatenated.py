"""Several datasets as one environment."""

from typing import Any

import pytest

from envs.adapters.concatenated import join
from envs.environment import Environment
from envs.errors import EnvironmentLoadError
from envs.loader import load_environment
from envs.model import Model, ModelSettings
from envs.rollout import Rollout
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.service import env_blueprint
from tests.adapters.test_domains import HERE, Yes

DOMAINS: dict[str, Any] = {"math": {"rollout": f"{HERE}:solve", "dataset": f"{HERE}:problems"}}


def config(ids: list[str], domains: dict[str, Any] = DOMAINS, **env: Any) -> Config:
    section = {"id": ids, "name": "mixed", "ratio": 1.0, **env}
    return Config(local={}, domains=domains, train={"env": [section]})


def built(ids: list[str], **args: Any) -> Environment:
    """Load a list of ids as an env server does that got it from the service."""
    spec = env_blueprint.build_train_envs(config(ids, args=args))["mixed"].spec
    assert spec.split == "train"
    return load_environment(spec.id, spec.args)


def model() -> Model:
    return Model(ModelSettings("policy", train=False), client=Yes(), base_url="http://nowhere/v1")


async def test_tasks_come_one_dataset_after_the_other_and_say_where_they_are_from() -> None:
    """A split in an id is that dataset's; the others get the env's. Each task is known by domain and dataset."""
    environment = built(["math::gsm", "math::aime@2024"], limit=3)
    tasks = environment.tasks("train")
    assert len(tasks) == 6  # type: ignore[arg-type]  # finite ones have a length
    assert [dict(tasks[index]) for index in (2, 3)] == [
        {"domain": "math", "dataset": "gsm", "question": "gsm/train/2", "answer": "yes"},
        {"domain": "math", "dataset": "aime@2024", "question": "aime/2024/0", "answer": "yes"},
    ]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            tasks[index]


async def test_a_rollout_is_done_by_the_dataset_that_the_task_is_from() -> None:
    """Args go to every dataset; the environment of each gets the task as it made it."""
    environment = built(["math::gsm", "builtin::reverse"])
    await environment.setup()
    tasks = environment.tasks("train")
    assert (await environment.rollout(tasks[0], model())).reward == 1.0
    word = tasks[3]
    assert (word["domain"], word["dataset"]) == ("builtin", "reverse")
    assert (await environment.rollout(word, model())).reward < 1.0
    assert not environment.group_scored
    await environment.close()


async def test_one_group_scored_dataset_makes_all_rollouts_groups() -> None:
    """Its own groups are scored by it; the others keep their rewards."""
    environment = built(["builtin::agree", "builtin::reverse"])
    assert environment.group_scored
    tasks = environment.tasks("train")
    rollouts = [Rollout(reward=reward, sequences=[]) for reward in (0.25, 0.75)]
    assert await environment.score_group(tasks[len(tasks) - 1], rollouts) == [0.25, 0.75]  # type: ignore[arg-type]  # finite


def test_a_dataset_without_end_cannot_be_followed() -> None:
    """Positions are counted through, so every dataset has to have an end."""
    environment = built(["builtin::lookup", "builtin::reverse"])
    with pytest.raises(EnvironmentLoadError, match='"builtin::lookup" has tasks without end'):
        environment.tasks("train")


def test_the_joined_id_names_no_split() -> None:
    """What a server reports as its id is what it was asked for."""
    joined, _ = join(["math::gsm", "math::aime@2024"], [("x::a", {}), ("x::b@2024", {})])
    assert joined == "envs.adapters.concatenated:LOADER::math::gsm+math::aime~2024"


def test_prompts_that_differ_must_be_settled() -> None:
    """One env has one system prompt."""
    domains = {**DOMAINS, "code": {**DOMAINS["math"], "system_prompt": "Write code."}}
    ids = ["math::gsm", "code::mbpp"]
    with pytest.raises(ConfigError, match="different system prompts"):
        env_blueprint.build_train_envs(config(ids, domains))
    made = env_blueprint.build_train_envs(config(ids, domains, system_prompt="Think."))
    assert made["mixed"].spec.system_prompt == "Think."


def test_a_mistake_in_one_id_is_told_with_the_env() -> None:
    """Each id of a list is checked like a single one."""
    with pytest.raises(ConfigError, match='env "mixed": environment id "maths::gsm": there is no domain'):
        env_blueprint.build_train_envs(config(["math::gsm", "maths::gsm"]))

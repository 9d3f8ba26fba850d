"""Domains: a rollout function and a dataset loader instead of a class."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from envs.adapters.domains import Domain, route
from envs.environment import Environment, Task
from envs.errors import EnvironmentLoadError
from envs.loader import load_environment
from envs.model import Model, ModelSettings
from envs.rollout import Rollout
from tests.support.chat_only import ChatOnly

HERE = "tests.adapters.test_domains"
MATH = Domain(rollout=f"{HERE}:solve", dataset=f"{HERE}:problems", system_prompt="Think.")


async def solve(task: Task, model: Model, bonus: float = 0.0) -> Rollout:
    """A rollout function: what a domain is made of."""
    reply = await model.chat([{"role": "user", "content": task["question"]}])
    return model.rollout(float(reply.text == task["answer"]) + bonus)


def problems(name: str, subset: str, limit: int = 3) -> Sequence[Task]:
    """A dataset loader that shows what it was asked for."""
    return [{"question": f"{name}/{subset}/{place}", "answer": "yes"} for place in range(limit)]


def plain(task: Task, model: Model) -> None:
    """Not a coroutine function."""


class Yes(ChatOnly):
    """A chat client that always answers yes."""

    async def chat(self, base_url: str, body: bytes, headers: Any) -> bytes:
        message = {"role": "assistant", "content": "yes"}
        return msgspec.json.encode({"choices": [{"message": message, "finish_reason": "stop"}]})


def routed(text: str, args: dict[str, Any] | None = None, domain: Domain = MATH) -> Environment:
    """Load an id as an env server does that got it from the service."""
    found = route(text, args or {}, domains={"math": domain})
    assert found is not None
    return load_environment(found.id, found.args)


async def test_a_domain_is_an_environment_without_a_class() -> None:
    """The dataset function makes the tasks of the subset, the rollout function the reward."""
    environment = routed("math::aime@2024", {"bonus": 0.5, "limit": 7})
    tasks = environment.tasks("2024")
    assert tasks[6] == {"question": "aime/2024/6", "answer": "yes"}
    model = Model(ModelSettings("policy", train=False), client=Yes(), base_url="http://nowhere/v1")
    rollout = await environment.rollout(tasks[0], model)
    assert rollout.reward == 1.5
    assert not environment.group_scored


def test_the_subset_is_the_split_of_the_id() -> None:
    """It stays where the service looks for it, and the domain's system prompt comes along."""
    found = route("math::aime@2024", {}, domains={"math": MATH})
    assert found is not None
    assert found.id.endswith("::math::aime@2024")
    assert found.system_prompt == "Think."


def test_other_ids_are_left_alone() -> None:
    """Loaders, built-ins and classes are not domains."""
    for text in ("reasoning_gym::chain_sum", "reverse", "pkg.module:Class"):
        assert route(text, {}, domains={"math": MATH}, loaders=["reasoning_gym", "builtin"]) is None


def test_a_domain_that_does_not_exist_names_the_nearest() -> None:
    """Neither a domain nor a loader is a mistake of the user."""
    with pytest.raises(EnvironmentLoadError, match='no domain or loader "maths"; did you mean "math"'):
        route("maths::aime", {}, domains={"math": MATH}, loaders=["verifiers"])


@pytest.mark.parametrize(
    ("domain", "args", "said"),
    [
        (Domain(f"{HERE}:solv", f"{HERE}:problems"), {}, 'did you mean "solve"'),
        (Domain(f"{HERE}:plain", f"{HERE}:problems"), {}, "must be an async function"),
        (Domain("no_such_package:solve", f"{HERE}:problems"), {}, "no module no_such_package"),
        (Domain("solve", f"{HERE}:problems"), {}, "is not module:attribute"),
        (MATH, {"bonsu": 1}, "takes bonsu"),
    ],
)
def test_a_mistake_is_found_when_the_domain_is_loaded(
    domain: Domain, args: dict[str, Any], said: str
) -> None:
    """Functions and args are checked before anything runs."""
    with pytest.raises(EnvironmentLoadError, match=said):
        routed("math::aime", args, domain)

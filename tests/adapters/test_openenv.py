"""The OpenEnv adapter against servers of the real library, and against its own client."""

from typing import Any

import pytest

from envs.adapters.openenv_actions import action_kind, observation_text
from envs.adapters.openenv_server import refuse_other_releases
from envs.errors import EnvironmentLoadError
from envs.loader import find_loader, load_environment
from tests.adapters.conftest import Driver

TESTED = "openenv_tested"
MINUTES = 600
"""The library takes many seconds to import where the machine is busy."""


@pytest.fixture(scope="module")
def urls(openenv: Driver) -> dict[str, str]:
    """Servers of all three environments."""
    return {app: openenv.call(f"{TESTED}:serve", app=app) for app in ("guess", "walk", "sums")}


def calls(*pairs: tuple[str, str]) -> dict[str, Any]:
    """A reply that calls tools."""
    return {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in pairs]}


def said(answer: dict[str, Any]) -> list[str]:
    """What the environment said, in its order."""
    messages = answer["transcripts"][0]["messages"]
    return [message["content"] for message in messages if message["role"] != "assistant"]


@pytest.mark.timeout(MINUTES)
def test_rewards_and_observations_are_those_of_the_librarys_own_client(
    openenv: Driver, urls: dict[str, str]
) -> None:
    """The same seed and the same guesses: every observation is a turn, and the reward is the sum or the last."""
    guesses = ["0", "5", "4", "1", "2"]
    turns = [[{"content": guess}] for guess in guesses]
    args = {"reset": {"top": 5}, "max_turns": len(guesses)}
    library = openenv.call(
        f"{TESTED}:library_run",
        app="guess",
        reset={"seed": 3, "top": 5},
        actions=[{"guess": guess} for guess in guesses],
    )
    last = next(place for place, result in enumerate(library) if result["done"])
    answers = {
        reward: openenv.rollout(
            f"openenv::{urls['guess']}", turns=turns, args={**args, "reward": reward}, runs=[{"index": 3}]
        )
        for reward in ("sum", "last")
    }
    assert 1 < last < len(guesses)
    for answer in answers.values():
        assert said(answer) == [result["observation"]["hint"] for result in library[:last]]
        assert answer["rollouts"][0]["stop_reason"] == "done"
        assert answer["rollouts"][0]["metrics"] == {"turns": last, "refused_actions": 0, "done": 1}
        assert len(answer["rollouts"][0]["lengths"]) == 1
    assert answers["sum"]["rollouts"][0]["reward"] == sum(
        result["reward"] for result in library[1 : last + 1]
    )
    assert answers["last"]["rollouts"][0]["reward"] == 2.0


@pytest.mark.timeout(MINUTES)
def test_a_server_with_one_session_serves_many_rollouts_one_after_the_other(
    openenv: Driver, urls: dict[str, str]
) -> None:
    """The server says how many sessions it has, which is the capacity; more rollouts wait and none fails."""
    played = openenv.play(f"openenv::{urls['guess']}", [{} for _ in range(6)], args={"max_turns": 2})
    assert played["capacity"] == 1
    # Its guesses are no numbers, which the environment raises at: each rollout had a session to fail in.
    assert {answer["kind"] for answer in played["answers"]} == {"execution_error"}
    unaware = openenv.play(
        f"openenv::{urls['guess']}",
        [{"index": index} for index in range(6)],
        turns=[[{"content": "4"}]],
        args={"max_turns": 2, "sessions": 6},
    )
    assert unaware["capacity"] == 6
    assert all("rollouts" in answer for answer in unaware["answers"]), unaware["answers"]


@pytest.mark.timeout(MINUTES)
def test_an_action_of_several_fields_is_a_tool_and_its_mistakes_go_back_to_the_policy(
    openenv: Driver, urls: dict[str, str]
) -> None:
    """The tool has the action's schema; what does not fit it is told and costs only the turn; plain JSON will do."""
    turns = [
        [calls(("act", '{"direction": "up"}'))],
        [calls(("act", "{nonsense"))],
        [calls(("act", '{"direction": "right"}'), ("act", '{"direction": "left"}'))],
        [{"content": 'I go: {"direction": "right", "steps": 3}'}],
    ]
    played = openenv.play(f"openenv::{urls['walk']}", turns=turns)
    answer = played["answers"][0]
    tool = played["requests"][0]["tools"][0]["function"]
    assert (tool["name"], tool["description"]) == ("act", "Walk some steps along the line.")
    assert set(tool["parameters"]["properties"]) == {"direction", "steps"}
    assert played["capacity"] == 3
    first, *rest = said(answer)
    assert first == '{"place":0,"goal":3}'
    assert rest[0].startswith("error: direction: Input should be 'left' or 'right'")
    assert rest[1].startswith("error: the arguments are not JSON")
    assert rest[2:] == ['{"place":1,"goal":3}', '{"place":0,"goal":3}']
    assert answer["rollouts"][0]["reward"] == 1.0 + 0.0 + 10.0
    assert answer["rollouts"][0]["metrics"] == {"turns": 4, "refused_actions": 2, "done": 1}
    roles = [message["role"] for message in answer["transcripts"][0]["messages"]]
    assert "".join(role[0] for role in roles) == "uatatatta"


@pytest.mark.timeout(MINUTES)
def test_an_environment_with_tools_of_its_own_gives_them_to_the_policy(
    openenv: Driver, urls: dict[str, str]
) -> None:
    """The tools are listed with their schemas, a call is a step, and a reply without a call ends the episode."""
    sums = calls(("add", '{"a": 20, "b": 22}'), ("subtract", "{}"))
    turns = [[sums], [calls(("submit", '{"answer": 42}'))]]
    played = openenv.play(f"openenv::{urls['sums']}", turns=turns)
    answer = played["answers"][0]
    tools = {tool["function"]["name"]: tool["function"] for tool in played["requests"][0]["tools"]}
    assert set(tools) == {"add", "submit"}
    assert tools["add"]["description"] == "Add two numbers."
    assert set(tools["add"]["parameters"]["properties"]) == {"a", "b"}
    assert said(answer)[:2] == ["What is 20 + 22?", "42"]
    assert said(answer)[2].startswith("error: Unknown tool")
    assert answer["rollouts"][0]["reward"] == 1.0
    silent = openenv.rollout(f"openenv::{urls['sums']}", turns=[[{"content": "42, I think"}]])
    assert (silent["rollouts"][0]["stop_reason"], silent["rollouts"][0]["reward"]) == ("no_action", 0.0)


@pytest.mark.timeout(MINUTES)
def test_a_session_outlives_a_policy_that_thinks_longer_than_the_server_waits_for_pings(
    openenv: Driver,
) -> None:
    """Servers drop clients that do not answer pings, which only happens while somebody reads."""
    url = openenv.call(f"{TESTED}:serve", app="walk", ws_ping_interval=0.5, ws_ping_timeout=2.0)
    slow = {**calls(("act", '{"direction": "right", "steps": 3}')), "delay_s": 5.0}
    answer = openenv.rollout(f"openenv::{url}", turns=[[slow]])
    assert answer["rollouts"][0]["reward"] == 10.0


@pytest.mark.timeout(MINUTES)
def test_an_app_is_served_by_a_server_of_its_own_which_comes_back_when_it_ended(openenv: Driver) -> None:
    """An app by its name needs no server; a rollout whose server dies may be repeated, and the next one has a server."""
    played = openenv.play(
        f"openenv::{TESTED}:guess",
        [{"index": 3}, {"index": 4}, {"index": 5}],
        turns=[[{"content": "exit"}, {"content": "4"}, {"content": "5"}]],
        args={"max_turns": 1},
    )
    lost, *others = played["answers"]
    assert (lost["kind"], lost["retryable"]) == ("connection", True)
    assert [answer["rollouts"][0]["metrics"]["turns"] for answer in others] == [1, 1]


@pytest.mark.timeout(MINUTES)
def test_an_address_without_a_server_is_told_when_the_environment_loads(openenv: Driver) -> None:
    """Nothing listens on port 1; the message names the address and what is expected there."""
    played = openenv.play("openenv::http://127.0.0.1:1")
    assert "openenv::http://127.0.0.1:1 cannot be used" in played["load_error"]
    assert "is an OpenEnv server running there?" in played["load_error"]


@pytest.mark.parametrize("version", ["", "0.2.1", "0.10.0", "1.0"])
def test_another_release_is_an_error_that_says_what_to_install(version: str) -> None:
    """Also a package of the same name that another distribution installed."""
    with pytest.raises(
        EnvironmentLoadError, match=r"not supported.*rollout-orchestrator\[openenv\].*`python`"
    ):
        refuse_other_releases(version)


@pytest.mark.parametrize(
    ("name", "args", "remedy"),
    [
        ("localhost-8000", {}, "neither the URL of a server"),
        ("http://localhost:8000", {"reward": "mean"}, 'reward must be "sum" or "last"'),
        ("http://localhost:8000", {"max_turns": 0}, "max_turns must be a positive whole number"),
        ("http://localhost:8000", {"sessions": 0}, "sessions must be a positive whole number"),
        ("http://localhost:8000", {"seed": -1}, "seed must be a whole number from 0"),
        ("http://localhost:8000", {"rewards": "sum"}, "unexpected keyword argument 'rewards'"),
        ("package.server.app:app", {}, r"openenv is not installed.*rollout-orchestrator\[openenv\]"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(name: str, args: dict[str, Any], remedy: str) -> None:
    """Before any server is asked."""
    with pytest.raises(EnvironmentLoadError, match=remedy):
        load_environment(f"openenv::{name}", args)


def test_splits_share_no_seed_and_a_size_makes_them_finite() -> None:
    """A task is a seed and what every reset gets."""
    environment = load_environment(
        "openenv::http://localhost:8000", {"size": 5, "reset": {"level": 2}, "seed": 1}
    )
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    seeds = [{tasks[index]["seed"] for index in range(5)} for tasks in (train, held_out)]
    assert len(train) == 5  # type: ignore[arg-type]  # tasks without end have no length
    assert len(seeds[0] | seeds[1]) == 10
    assert train[0]["level"] == 2


def test_what_a_reply_becomes_follows_from_the_schema() -> None:
    """One field of free text is the reply; a choice or several fields are a tool; a field can be named."""
    text = {"type": "string"}
    one = {"properties": {"message": text, "metadata": {"type": "object"}}}
    choice = {"properties": {"move": {"type": "string", "enum": ["up", "down"]}}}
    two = {"properties": {"message": text, "channel": text}}
    assert action_kind(one, text_field=None, env="e").text_field == "message"
    assert action_kind(choice, text_field=None, env="e").tools
    assert action_kind(two, text_field=None, env="e").tools
    assert action_kind(two, text_field="message", env="e").action_of_text("hi") == {"message": "hi"}
    with pytest.raises(EnvironmentLoadError, match='no field "massage"; did you mean "message"'):
        action_kind(two, text_field="massage", env="e")


def test_an_observation_shows_what_is_in_it_or_the_fields_that_were_asked_for() -> None:
    """A single text is shown as it is; a field may hold what the policy must not see."""
    observation = {"question": "2+2?", "score": None, "extra": {"answer": 4}, "done": False}
    assert observation_text({"question": "2+2?", "score": None, "reward": 1.0}, None) == "2+2?"
    assert observation_text(observation, None) == '{"question":"2+2?","extra":{"answer":4}}'
    assert observation_text(observation, ["question"]) == "2+2?"


def test_lists_say_how_a_server_is_named() -> None:
    """Servers have no names; their line says what to write."""
    loader = find_loader("openenv")
    assert "<URL>" in loader.names()
    assert "http://host:8000" in loader.about("<URL>")  # type: ignore[attr-defined]  # not every loader has it

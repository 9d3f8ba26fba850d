"""The loop with tools: what the policy is told, what it gets back, when it ends."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from envs import FailureKind, Model, ModelSettings, RolloutFailure, chat_with_tools
from envs.builtin.calculator import Calculator
from envs.inference_client import InferenceClient, RetryPolicy
from envs.loader import load_environment
from envs.tools import Tool, tools_of
from tests.support.chat_endpoint import ChatEndpoint, chat_endpoint, completion, status

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


def calls(*named: tuple[str, Any]) -> dict[str, Any]:
    """A reply that calls tools."""
    return completion(
        "",
        finish_reason="tool_calls",
        tool_calls=[
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for number, (name, arguments) in enumerate(named)
        ],
    )


@asynccontextmanager
async def scripted(*answers: Any) -> AsyncIterator[tuple[Model, ChatEndpoint]]:
    """A model whose endpoint gives these answers."""
    retry = RetryPolicy(max_attempts=1)
    async with chat_endpoint() as endpoint, InferenceClient(limit=4, retry=retry) as client:
        endpoint.script(*answers)
        yield Model(ModelSettings("m"), client=client, base_url=endpoint.base_url), endpoint


def results(endpoint: ChatEndpoint) -> list[str]:
    """What the policy was told by tools, as its last request has it."""
    return [message["content"] for message in endpoint.requests[-1]["messages"] if message["role"] == "tool"]


def add(a: int, b: int = 0) -> int:
    """The sum of two numbers.

    Args:
        a: the first
    """
    return a + b


async def double(text: str) -> dict[str, str]:
    """A text twice."""
    return {"text": text * 2}


def broken() -> None:
    """Fails."""
    raise KeyError("no such thing")


def ends() -> None:
    """Ends the process, if it could."""
    raise SystemExit(3)


def test_a_function_becomes_a_tool_of_the_chat_api() -> None:
    """Name, docstring and hints are what the policy is told."""
    assert Tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "default": 0},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


async def test_the_loop_runs_until_the_policy_calls_nothing() -> None:
    """Each call is answered under its id, in order, and the conversation only grows."""
    script = (
        calls(("add", {"a": 1, "b": 2}), ("double", {"text": "x"})),
        calls(("add", {"a": "4"})),
        completion("7"),
    )
    async with scripted(*script) as (model, endpoint):
        chat = await chat_with_tools(model, "how much?", [add, double], temperature=0.5)
    first, second, third = endpoint.requests
    assert first["messages"] == [{"role": "user", "content": "how much?"}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "double"]
    assert third["temperature"] == 0.5
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert [(m["tool_call_id"], m["content"]) for m in third["messages"] if m["role"] == "tool"] == [
        ("call_0", "3"),
        ("call_1", '{"text":"xx"}'),
        ("call_0", "4"),
    ]
    assert (chat.text, chat.stop_reason, chat.used) == ("7", "stop", ["add", "double", "add"])
    assert chat.metrics == {"turns": 3.0, "tool_calls": 3.0, "tool_errors": 0.0}
    assert chat.messages[-1]["content"] == "7"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("broken", {}), "error: KeyError: 'no such thing'"),
        (("ends", {}), "error: RuntimeError: SystemExit: 3"),
        (("add", {"a": "four"}), "error: Expected `int`, got `str` - at `a`"),
        (("add", "{not json"), "error: JSON is malformed"),
        (("ad", {}), 'error: there is no tool "ad"; did you mean "add"?'),
    ],
)
async def test_an_error_goes_back_to_the_policy_as_the_result(call: tuple[str, Any], says: str) -> None:
    """Of the function, of its arguments, of the name; the loop goes on."""
    async with scripted(calls(call), completion("sorry")) as (model, endpoint):
        chat = await chat_with_tools(model, "do it", [add, broken, ends])
    (said,) = results(endpoint)
    assert said.startswith(says)
    assert (chat.text, chat.errors) == ("sorry", 1)


async def test_a_failure_of_the_rollout_is_no_result_of_a_tool() -> None:
    """A tool that finds the rollout impossible says so by RolloutFailure, which ends it."""

    async def give_up() -> None:
        """Gives up."""
        raise RolloutFailure("sandbox", "the sandbox is gone", retryable=True)

    async with scripted(calls(("give_up", {}))) as (model, _):
        with pytest.raises(RolloutFailure, match="the sandbox is gone"):
            await chat_with_tools(model, "do it", [give_up])


async def test_a_limit_of_turns_ends_a_loop_that_would_not_end() -> None:
    """The stop reason says so, and what there is can be handed in."""
    async with scripted(calls(("add", {"a": 1}))) as (model, endpoint):
        chat = await chat_with_tools(model, "go on", [add], max_turns=3)
        rollout = model.rollout(0.0, stop_reason=chat.stop_reason)
    assert len(endpoint.requests) == chat.turns == 3
    assert rollout.stop_reason == "max_turns"


async def test_a_conversation_that_outgrows_the_context_ends_the_loop() -> None:
    """But not in its first turn, where there is nothing to hand in."""
    full = status(400, {"error": {"message": "maximum context length is 10 tokens"}})
    async with scripted(calls(("add", {"a": 1})), full) as (model, _):
        chat = await chat_with_tools(model, "go on", [add])
    assert (chat.stop_reason, chat.turns) == ("context_length", 1)
    async with scripted(full) as (model, _):
        with pytest.raises(RolloutFailure) as caught:
            await chat_with_tools(model, "go on", [add])
    assert caught.value.kind == FailureKind.CONTEXT_LENGTH


class Shelf:
    """State of one rollout: its public methods are tools."""

    def __init__(self) -> None:
        self.things: list[str] = []

    def put(self, thing: str) -> None:
        """Put a thing on the shelf."""
        self.things.append(thing)

    def look(self) -> list[str]:
        """All that is on the shelf."""
        return self.things

    def _hidden(self) -> None: ...


async def test_the_methods_of_an_object_are_tools_with_state() -> None:
    """Two rollouts side by side have two objects."""
    one, other = Shelf(), Shelf()
    async with scripted(calls(("put", {"thing": "cup"}), ("look", {})), completion("ok")) as (
        model,
        endpoint,
    ):
        await chat_with_tools(model, "put", one)
    assert results(endpoint) == ["done", '["cup"]']
    async with scripted(calls(("look", {})), completion("ok")) as (model, endpoint):
        await chat_with_tools(model, "look", [other.look])
    assert results(endpoint) == ["[]"]
    assert [tool.name for tool in tools_of(one)] == ["look", "put"]


async def test_a_function_that_blocks_holds_nobody_else_up() -> None:
    """It runs on a thread; this test would never end if it ran on the loop."""
    released = threading.Event()

    def wait() -> str:
        """Waits until the other one lets it go."""
        return "released" if released.wait(30) else "never"

    async def release() -> None:
        """Lets the other one go."""
        released.set()

    async with (
        scripted(calls(("wait", {})), completion("a")) as (waiting, endpoint),
        scripted(calls(("release", {})), completion("b")) as (releasing, _),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(chat_with_tools(waiting, "wait", [wait]))
        await endpoint.arrived.wait()
        tasks.create_task(chat_with_tools(releasing, "release", [release]))
    assert results(endpoint) == ["released"]


@pytest.mark.parametrize("tools", [Shelf, "add", [add, add]])
def test_tools_that_cannot_be_meant_are_refused(tools: Any) -> None:
    """A class instead of an object, a name, two of one name."""
    with pytest.raises((TypeError, ValueError), match="tools"):
        tools_of(tools)


async def test_the_built_in_calculator_is_a_tool_loop() -> None:
    """The policy asks the tool and passes on what it says; both turns are in the rollout."""
    environment = Calculator()
    script = (calls(("calculate", {"expression": "3+4"})), completion("7", prompt=[1, 2, 3, 10, 11, 4]))
    async with scripted(*script) as (model, endpoint):
        rollout = await environment.rollout({"sum": "3+4", "value": 7}, model)
    rollout.check()
    assert results(endpoint) == ["7"]
    assert (rollout.reward, rollout.metrics["tool_calls"]) == (1.0, 1.0)
    assert len(rollout.sequences) == 1


async def test_the_calculator_of_the_docs_has_twenty_lines_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied as it stands, with a dataset of JSON lines beside it."""
    (source,) = re.findall(
        r"^```python\n(# calculator_of_mine.py\n.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(source.splitlines()) <= 20
    (tmp_path / "calculator_of_mine.py").write_text(source)
    (tmp_path / "train.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    monkeypatch.chdir(tmp_path)
    environment = load_environment("calculator_of_mine:Calculator")
    task = environment.tasks("train")[0]
    async with scripted(calls(("multiply", {"a": 6, "b": 7})), completion("42")) as (model, endpoint):
        rollout = await environment.rollout(task, model)
    assert rollout.reward == 1.0
    assert endpoint.requests[0]["messages"][-1]["content"] == "6 * 7?"
    assert results(endpoint) == ["42.0"]

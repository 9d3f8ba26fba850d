"""A loop with tools: Python functions that the policy may call until it answers.

    chat = await chat_with_tools(model, "What is 12 * 7?", [multiply])
    return model.rollout(reward=float(chat.text == "84"), stop_reason=chat.stop_reason)

A function's name, docstring and type hints are what the policy is told of it (JSON schema); its arguments are checked
against them. What a function raises, an argument that does not fit, a tool that does not exist: each goes back to the
policy as the result of its call. Only a RolloutFailure passes through, as does a cancellation.
State of one rollout is an object made in it: pass its bound methods, or the object itself, whose public methods are
then the tools. Calls of one reply run one after the other; functions that are not async run on a thread of
their own, so that a slow one holds nobody else up.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import msgspec

from envs.errors import FailureKind, RolloutFailure
from envs.importing import nearest
from envs.model import Message, Model, Reply
from envs.signatures import ArgumentsError, Signature, described_parameters

MAX_TURNS = "max_turns"
"""`stop_reason` of a loop that the limit ended."""

_ERROR_CHARS = 2000


class Tool:
    """A function as the policy sees it; `schema` is an entry of the request's `tools`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = Signature(function)
        self.name = self._signature.name
        description, parameters = described_parameters(inspect.getdoc(function) or "")
        schema = self._signature.schema
        for name, described in parameters.items():
            if name in schema["properties"]:
                schema["properties"][name].setdefault("description", described)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": schema},
        }

    async def call(self, arguments: str) -> str:
        """The result of a call as the policy reads it; whatever the function raises passes through."""
        given = self._signature.read(arguments, strict=False)
        if inspect.iscoroutinefunction(self._function):
            value = await self._function(**given)
        else:
            value = await _on_thread(lambda: self._function(**given))
            if inspect.isawaitable(value):
                value = await value
        return _shown(value)


@dataclass(slots=True)
class ToolChat:
    """What came of a loop: the last reply, the whole conversation with it, and how many calls were made.

    `stop_reason` is that of the last reply, or says what ended the loop instead.
    """

    reply: Reply
    messages: list[Message]
    stop_reason: str
    turns: int = 0
    calls: int = 0
    errors: int = 0
    used: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the policy said last."""
        return self.reply.text

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for `Model.rollout`."""
        return {
            "turns": float(self.turns),
            "tool_calls": float(self.calls),
            "tool_errors": float(self.errors),
        }


def tools_of(tools: object) -> list[Tool]:
    """The tools in a list of functions, bound methods and `Tool`s, or an object's public methods."""
    if isinstance(tools, (type, str)):
        raise TypeError(f"tools are functions or an object with methods, not {tools!r}")
    if inspect.isroutine(tools):
        tools = [tools]
    elif not isinstance(tools, Iterable):
        methods = inspect.getmembers(tools, callable)
        tools = [method for name, method in methods if not name.startswith("_")]
    made = [each if isinstance(each, Tool) else Tool(each) for each in tools]
    names = [tool.name for tool in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two tools are called {', '.join(twice)}")
    return made


async def chat_with_tools(
    model: Model, messages: str | Seq[Message], tools: object, *, max_turns: int = 10, **sampling: Any
) -> ToolChat:
    """Ask the policy until it answers without a call, at most `max_turns` times; keyword arguments are the sampling of each turn.

    A conversation that outgrows the context after the first turn ends the loop too, with what there is.
    """
    there = {tool.name: tool for tool in tools_of(tools)}
    schemas = [tool.schema for tool in there.values()]
    said: list[Message] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    )
    chat: ToolChat | None = None
    while chat is None or chat.turns < max_turns:
        try:
            reply = await model.chat(said, tools=schemas, **sampling)
        except RolloutFailure as failure:
            if chat is None or failure.kind != FailureKind.CONTEXT_LENGTH:
                raise
            chat.stop_reason = failure.kind
            return chat
        said.append(reply.message)
        chat = chat or ToolChat(reply, said, "")
        chat.reply, chat.stop_reason = reply, reply.finish_reason
        chat.turns += 1
        if not reply.tool_calls:
            return chat
        said.extend([await _answer(call, there, chat) for call in reply.tool_calls])
    chat.stop_reason = MAX_TURNS
    return chat


async def _answer(call: dict[str, Any], there: dict[str, Tool], chat: ToolChat) -> Message:
    """The message that answers one call, whatever came of it."""
    asked = call.get("function") or {}
    name, arguments = str(asked.get("name", "")), asked.get("arguments") or ""
    chat.calls += 1
    chat.used.append(name)
    try:
        tool = there.get(name)
        if tool is None:
            raise ArgumentsError(f'there is no tool "{name}"; {nearest(name, there)}')
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        content = await tool.call(arguments)
    except RolloutFailure:
        raise
    except ArgumentsError as error:
        chat.errors += 1
        content = f"error: {error}"
    # A tool's own code, which raises what it likes: the policy is told, as a person would be.
    except Exception as error:  # noqa: BLE001  see above
        chat.errors += 1
        content = f"error: {type(error).__name__}: {error}"[:_ERROR_CHARS]
    return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}


async def _on_thread(function: Callable[[], Any]) -> Any:
    """Call a function on a thread of its own.

    A pool would be full of tools that never return; such a thread ends with the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # the rollout was cancelled meanwhile
            return
        if error is None:
            done.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:
            # exit() in a tool is its error, and ends neither the thread's process nor the loop.
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def work() -> None:
        value, raised = None, None
        try:
            value = context.run(function)
        except BaseException as error:  # noqa: BLE001  handed to the one who waits
            raised = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await done


def _shown(value: Any) -> str:
    """A result as the policy reads it: text as it is, nothing as "done", the rest as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "done"
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.EncodeError):
        return str(value)

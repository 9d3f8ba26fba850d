"""What the policy reads and writes in an OpenEnv environment: observations as text, replies as actions. Pure.

An action with a single field of free text is the reply itself. Any other is a tool that the policy calls, whose
parameters are the action's JSON schema; where the environment's action is to call one of its own tools (MCP), the policy is
given these. A policy that writes the arguments as plain JSON, without a call, is understood too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.model import Reply
from envs.text_only import refuse_other_than_text, refuse_pictures

TOOL = "act"
"""Name of the tool that stands for an action."""

LIST_TOOLS: Mapping[str, Any] = {"type": "list_tools"}
"""The action that asks an environment for its tools."""

_NOT_SHOWN = frozenset({"reward", "done", "metadata"})


@dataclass(frozen=True, slots=True)
class Move:
    """One action of a reply, or what is wrong with it. `call_id` is the tool call that asked for it, if one did."""

    action: dict[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ActionKind:
    """How replies become actions: the text of one field, a tool, or one of the environment's own tools."""

    text_field: str | None
    tools: Sequence[Mapping[str, Any]] = ()
    own_tools: bool = False

    def with_tools(self, listed: object) -> "ActionKind":
        """The same, with the tools that the environment listed."""
        tools = [
            _function(tool["name"], tool.get("description", ""), tool.get("input_schema") or {})
            for tool in (listed if isinstance(listed, list) else [])
        ]
        return ActionKind(None, tools, own_tools=True)

    def action_of_text(self, text: str) -> dict[str, Any] | None:
        """The action of a reply without a tool call, None where it has none."""
        if self.text_field is not None:
            return {self.text_field: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            found = msgspec.json.decode(text[start : end + 1]) if 0 <= start < end else None
        except msgspec.DecodeError:
            return None
        if not isinstance(found, dict):
            return None
        if self.own_tools:
            name = found.get("name")
            return _own_call(name, found.get("arguments")) if isinstance(name, str) else None
        return found

    def action_of_call(self, call: Mapping[str, Any]) -> dict[str, Any] | str:
        """The action of a tool call, or what is wrong with it."""
        function = call.get("function") or {}
        written = function.get("arguments") or "{}"
        try:
            arguments = msgspec.json.decode(written) if isinstance(written, str) else written
        except msgspec.DecodeError as error:
            return f"the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "the arguments are not a JSON object"
        if self.own_tools:
            return _own_call(str(function.get("name", "")), arguments)
        return arguments


def action_kind(schema: Mapping[str, Any], *, text_field: str | None, env: str) -> ActionKind:
    """How replies become actions of this JSON schema; `text_field` names the field that takes the reply's text."""
    fields = {
        name: field
        for name, field in (schema.get("properties") or {}).items()
        if name not in _NOT_SHOWN and "const" not in field
    }
    if text_field is not None:
        if text_field not in fields:
            raise EnvironmentLoadError(
                f'{env}: its action has no field "{text_field}"; {nearest(text_field, fields)}'
            )
        return ActionKind(text_field)
    if set(fields) == {"tool_name", "arguments"}:
        return ActionKind(None, own_tools=True)
    if len(fields) == 1:
        name, field = next(iter(fields.items()))
        if field.get("type") == "string" and "enum" not in field:
            return ActionKind(name)
    parameters = {
        key: value for key, value in schema.items() if key not in ("title", "description", "properties")
    }
    parameters["properties"] = fields
    return ActionKind(None, [_function(TOOL, schema.get("description", ""), parameters)])


def moves_of(reply: Reply, kind: ActionKind) -> list[Move]:
    """The actions of a reply in their order."""
    if not reply.tool_calls or kind.text_field is not None:
        action = kind.action_of_text(reply.text)
        return [] if action is None else [Move(action)]
    return [
        Move(kind.action_of_call(call), str(call.get("id") or f"call_{place}"))
        for place, call in enumerate(reply.tool_calls)
    ]


def observation_text(observation: Mapping[str, Any], fields: Collection[str] | None) -> str:
    """An observation for the policy: a single text as it is, anything else as JSON without what is empty."""
    if fields is None and {"tool_name", "result"} <= set(observation):
        return _tool_result(observation)
    shown = {
        name: value
        for name, value in observation.items()
        if (name in fields if fields is not None else name not in _NOT_SHOWN)
        and value not in (None, "", [], {})
    }
    refuse_pictures(shown, "; name the fields that are with args.observation")
    if len(shown) == 1:
        value = next(iter(shown.values()))
        if isinstance(value, str):
            return value
    return msgspec.json.encode(shown).decode() if shown else ""


def _tool_result(observation: Mapping[str, Any]) -> str:
    """What one of the environment's own tools returned: its texts, without the envelope around them."""
    error, result = observation.get("error"), observation["result"]
    if error:
        return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        refuse_other_than_text([{"role": "tool", "content": content}])
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _own_call(name: str, arguments: object) -> dict[str, Any]:
    return {
        "type": "call_tool",
        "tool_name": name,
        "arguments": arguments if isinstance(arguments, dict) else {},
    }


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }

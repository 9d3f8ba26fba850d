"""What a function takes, read from its type hints: a JSON schema of it, and arguments that are checked against it.

Used where arguments come from outside: a model that calls a tool, a table of a configuration. The hints may be
whatever msgspec understands (numbers, text, lists, dicts, Literal, Optional, dataclasses, TypedDicts, …); a
parameter without one takes anything. Pure.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec


class SignatureError(TypeError):
    """A function whose parameters cannot be described; the message names it."""


class ArgumentsError(ValueError):
    """Arguments that a function does not take; the message is one line."""


class Signature:
    """The parameters of one function, or of one class's constructor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        fields = [_field(self.name, *each) for each in _parameters(function)]
        self.names = [name for name, *_ in fields]
        try:
            self._struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            self.schema = _inlined(msgspec.json.schema(self._struct))
        except TypeError as error:
            raise SignatureError(f"{self.name}: its parameters cannot be described: {error}") from None

    def read(self, arguments: Mapping[str, Any] | str, *, strict: bool = True) -> dict[str, Any]:
        """Arguments as the function is called with them, or ArgumentsError. Text is read as JSON.

        Without `strict` a number may come as text, as models write them at times.
        """
        try:
            if isinstance(arguments, str):
                # Some models send nothing for a function without parameters.
                given = msgspec.json.decode(arguments.strip() or "{}", type=dict[str, Any])
            else:
                given = dict(arguments)
            made = msgspec.convert(given, self._struct, strict=strict)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ArgumentsError(" ".join(str(error).replace("`$.", "`").split())) from None
        return {name: getattr(made, name) for name in given}


def _parameters(function: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters with their hints, `Annotated` kept."""
    called = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]  # its signature is what we want
    if not inspect.isroutine(called):
        called = type(called).__call__
    hints = get_type_hints(called, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [(parameter, hints.get(parameter.name, Any)) for parameter in parameters]


def _field(function: str, parameter: inspect.Parameter, hint: Any) -> tuple[str, Any, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise SignatureError(f"{function}: {parameter} cannot be given by name")
    if get_origin(hint) is Annotated:
        # Annotated[int, "what it is"] is the short form of msgspec.Meta(description=…).
        described = hint.__origin__
        for note in hint.__metadata__:
            described = Annotated[
                described, msgspec.Meta(description=note) if isinstance(note, str) else note
            ]
        hint = described
    if parameter.default is parameter.empty:
        return parameter.name, hint, msgspec.NODEFAULT
    if isinstance(parameter.default, (list, dict, set)):
        copied = parameter.default
        return parameter.name, hint, msgspec.field(default_factory=lambda: type(copied)(copied))
    return parameter.name, hint, parameter.default


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments themselves; definitions that it refers to stay beside it."""
    definitions = schema.get("$defs", {})
    inner = dict(definitions.pop("Arguments"))
    inner.pop("title", None)
    return {**inner, "$defs": definitions} if definitions else inner


_ARGUMENT = re.compile(r"^(\s+)(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def described_parameters(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring's text before its "Args:", and what the lines below that say of each parameter."""
    text, found, rest = inspect.cleandoc(docstring).partition("\nArgs:\n")
    if not found:
        return text.strip(), {}
    described: dict[str, str] = {}
    current, indent = "", 0
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section, "Returns:" perhaps
        start = _ARGUMENT.match(line)
        if start and (not current or len(start[1]) <= indent):
            current, indent = start[2], len(start[1])
            described[current] = start[3]
        elif current and line.strip():
            described[current] += " " + line.strip()
    return text.strip(), described

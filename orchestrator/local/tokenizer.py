"""Characters to token ids and back, and the chat template.

One printable ASCII character is one token, so text survives a round trip exactly. The template of a longer
conversation extends that of a shorter one token by token: what a policy wrote in one turn, its end mark
included, is a prefix of the next turn's prompt. No learning, no state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CHARACTERS = "".join(chr(code) for code in range(32, 127))
END = len(CHARACTERS)
"""Closes every message; the policy ends its answer with it."""
NUM_OUTPUTS = END + 1
"""The policy may write the tokens below this: every character and the end mark."""
SYSTEM, USER, ASSISTANT, TOOL, OTHER = range(NUM_OUTPUTS, NUM_OUTPUTS + 5)
"""Role marks that open a message, and the token of any character that is not printable ASCII."""
VOCABULARY = OTHER + 1

ROLE_TOKENS = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_IDS = {character: token for token, character in enumerate(CHARACTERS)}
_MARKS = {
    END: "<end>",
    SYSTEM: "<system>",
    USER: "<user>",
    ASSISTANT: "<assistant>",
    TOOL: "<tool>",
    OTHER: "�",
}


class ChatError(ValueError):
    """A conversation that the template cannot express."""


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [_IDS.get(character, OTHER) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Text of what a policy wrote, without end marks."""
    return "".join(CHARACTERS[token] for token in tokens if token < END)


def describe(token: int) -> str:
    """One token as text, marks included."""
    return CHARACTERS[token] if token < END else _MARKS[token]


def apply_chat_template(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The prompt that asks for the next assistant message."""
    tokens: list[int] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLE_TOKENS:
            raise ChatError(f"messages[{number}].role must be one of {', '.join(ROLE_TOKENS)}; got {role!r}")
        if not isinstance(content, str):
            raise ChatError(f"messages[{number}].content must be a string; got {type(content).__name__}")
        tokens.append(ROLE_TOKENS[role])
        tokens += encode(content)
        tokens.append(END)
    if not tokens:
        raise ChatError("messages must not be empty")
    tokens.append(ASSISTANT)
    return tokens

"""What a conversation may hold: text. Pure.

Whatever else stands in a message (an image, a sound, a file) would be tokens in the prompt whose content no trainer
ever gets, so that such a conversation is refused before the policy is asked.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from envs.errors import FailureKind, RolloutFailure

_TEXT = ("text", "refusal")

_MANY = 1024
"""So many numbers in one list are the pixels of a picture, or something else that nobody reads."""


def refuse_other_than_text(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise RolloutFailure, which names the kind of part, unless all parts of all messages are text."""
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind not in _TEXT:
                raise RolloutFailure(
                    FailureKind.NOT_TEXT,
                    f"a message of role {message.get('role')} has a part of type {kind}; only text works here",
                    retryable=False,
                )


def refuse_pictures(fields: Mapping[str, Any], remedy: str) -> None:
    """Raise RolloutFailure, which names the field, where one is a picture: as a data URL, or as its pixels."""
    for name, value in fields.items():
        if found := _picture_in(value):
            raise RolloutFailure(
                FailureKind.NOT_TEXT, f'"{name}" holds {found}; only text works here{remedy}', retryable=False
            )


def _picture_in(value: object) -> str:
    if isinstance(value, str):
        kind = value[5:].partition("/")[0] if value[:5].lower() == "data:" else ""
        return f"{kind} as a data URL" if kind in ("image", "audio", "video") else ""
    if isinstance(value, Mapping):
        return next(filter(None, map(_picture_in, value.values())), "")
    if isinstance(value, (list, tuple)):
        if _count_numbers(value) >= _MANY:
            return f"{_count_numbers(value)} numbers, as pictures do"
        return next(filter(None, map(_picture_in, value)), "")
    return ""


def _count_numbers(values: list[Any] | tuple[Any, ...]) -> int:
    """Of a list of numbers, or of lists of them, however deep; 0 where anything else is among them."""
    total = 0
    for value in values:
        if isinstance(value, (int, float)):
            total += 1
        elif isinstance(value, (list, tuple)) and (inside := _count_numbers(value)):
            total += inside
        else:
            return 0
    return total

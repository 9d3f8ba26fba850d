"""What a conversation may hold: text. Pure.

Whatever else stands in a message (an image, a sound, a file) would be tokens in the prompt whose content no trainer
ever gets, so that such a conversation is refused before the policy is asked.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from envs.errors import FailureKind, RolloutFailure

_TEXT = ("text", "refusal")


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

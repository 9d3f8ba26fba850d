"""What the adapters of libraries with model clients of their own have in common.

Which of a library's wishes for a turn reach the policy, and a reply in the shape of the OpenAI API. Pure.
"""

from collections.abc import Mapping
from typing import Any

from envs.model import RESERVED, TOKEN_LIMITS, Model, Reply

_CLIENT_OPTIONS = frozenset({"extra_body", "extra_headers", "timeout", "cache_salt"})


def turn_options(model: Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a library wants of one turn, without what is ours to decide.

    The configuration is the operator's word, so it wins over what a library or its program asks for. A
    library's `extra_body` is unpacked as its own client would do.
    """
    configured = set(model.sampling)
    if configured & TOKEN_LIMITS:
        configured |= TOKEN_LIMITS
    flat = {**options, **(options.get("extra_body") or {})}
    refused = RESERVED | configured | _CLIENT_OPTIONS
    return {key: value for key, value in flat.items() if key not in refused and value is not None}


def completion(reply: Reply, *, model: str) -> dict[str, Any]:
    """A reply as the JSON of a chat completion."""
    usage = reply.usage
    return {
        "id": "chatcmpl-rollout",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }

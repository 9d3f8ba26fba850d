"""What an adapter needs of a `Model` beyond `chat`: copies of it, and replies in the shape of the OpenAI API.

A copy (`sibling`) asks the same endpoint with the same settings but records its own turns, so that a library
which plays several roles in one rollout can have only the trained ones handed in. Owns no connection.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.model import RESERVED, Model, Reply

_TOKEN_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})


def sibling(model: Model, *, name: str | None = None) -> Model:
    """A model with the settings of this one and no turns; under another name it is not the policy and not trained."""
    settings = model._settings
    if name is not None and name != settings.model:
        settings = replace(settings, model=name, system_prompt=None, train=False)
    copy = Model(settings, client=model._client, base_url=model._base_url, cache_salt=model._cache_salt)
    copy._headers = model._headers
    return copy


def base_url(model: Model) -> str:
    """Where the model is asked, for programs that look at the endpoint themselves."""
    return model._base_url


def turn_options(model: Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a library wants of one turn, without what is ours to decide.

    The configuration is the operator's word, so it wins over what a library or its program asks for. A
    library's `extra_body` is unpacked as its own client would do.
    """
    configured = set(model._settings.sampling)
    if configured & _TOKEN_LIMITS:
        configured |= _TOKEN_LIMITS
    flat = {**options, **(options.get("extra_body") or {})}
    refused = RESERVED | configured | {"extra_body", "extra_headers", "timeout", "cache_salt"}
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

"""The inference server that Atropos environments are given: answered by the `Model` of the group that asks.

The library's servers retry, tokenise and count by themselves; here none of that is needed. Which group asks is carried by a
context variable, which tasks that the environment starts inherit. Node for node as the library's managed server, but with the
engine's own token ids and log-probabilities.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from atroposlib.envs.server_handling.managed_server import (  # type: ignore[import-not-found]  # only in a virtualenv of its own
    SequenceNode,
)
from atroposlib.envs.server_handling.server_baseline import (  # type: ignore[import-not-found]  # as above
    APIServer,
)
from openai.types import Completion  # type: ignore[import-not-found]  # comes with atroposlib
from openai.types.chat import ChatCompletion  # type: ignore[import-not-found]  # as above

from envs.adapters.atropos_record import Conversation, GroupRecord
from envs.adapters.policy import turn_options
from envs.errors import RolloutFailure

current_group: ContextVar[GroupRecord] = ContextVar("atropos_group")
"""The group whose environment code is running."""

_OURS = frozenset(
    {"messages", "prompt", "input_ids", "model", "n", "tools", "split", "skip_reasoning", "tool_choice"}
)
_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")


class PolicyServer(APIServer):  # type: ignore[misc]  # the library has no types for us
    """As much of a server as environments call. Overrides the public methods, which would retry."""

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def chat_completion(self, **kwargs: Any) -> Any:
        return chat_completion(await _chat(kwargs), self.config.model_name)

    async def completion(self, **kwargs: Any) -> Any:
        return text_completion(await _complete(kwargs), self.config.model_name)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        talks = await _complete(kwargs)
        turns = [talk.turns[-1] for talk in talks if talk.turns]
        if len(turns) != len(talks):
            raise RolloutFailure(
                "no_token_ids",
                "evaluations have no token ids, which this environment asks for",
                retryable=False,
            )
        return (
            turns[0].prompt.tolist(),
            [turn.completion.tolist() for turn in turns],
            [turn.logprobs.tolist() for turn in turns],
            [talk.replies[-1].finish_reason for talk in talks],
        )

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        return await self.chat_completion(**kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        return await self.completion(**kwargs)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        return await self.tokens_and_logprobs_completion(**kwargs)


class ManagedPolicy:
    """What `managed_server()` yields: the same calls, and their conversations as nodes."""

    def __init__(self, model_name: str, tokenizer: Any) -> None:
        self._model_name = model_name
        self._talks: list[Conversation] = []
        self.tokenizer = tokenizer

    async def chat_completion(self, **kwargs: Any) -> Any:
        return chat_completion(self._noted(await _chat(kwargs)), self._model_name)

    async def completion(self, **kwargs: Any) -> Any:
        return text_completion(self._noted(await _complete(kwargs)), self._model_name)

    def get_state(self) -> dict[str, Any]:
        return {"nodes": [self._node(talk) for talk in self._talks]}

    def reset(self) -> None:
        self._talks.clear()

    def _noted(self, talks: list[Conversation]) -> list[Conversation]:
        self._talks += [talk for talk in talks if talk not in self._talks]
        return talks

    def _node(self, talk: Conversation) -> Any:
        before = talk.asked
        if not isinstance(before, str):
            before = self.tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        if talk.turns:
            sequence = talk.sequence
            tokens, sampled = sequence.tokens.tolist(), sequence.mask == 1
            masked = np.where(sampled, sequence.tokens, -100).tolist()
            logprobs = np.where(sampled, sequence.logprobs, 1.0).tolist()
        else:  # an evaluation, which nobody trains on
            prompt, reply = self.tokenizer.encode(before), self.tokenizer.encode(talk.texts[-1])
            tokens, masked = prompt + reply, [-100] * len(prompt) + reply
            logprobs = [1.0] * len(prompt) + [0.0] * len(reply)
        return SequenceNode(
            full_text=before + talk.texts[-1],
            tokens=tokens,
            masked_tokens=masked,
            logprobs=logprobs,
            metadata={"finish_reason": talk.replies[-1].finish_reason},
        )


def managed_server(model_name: str, tokenizer: Any) -> Any:
    """Takes the place of a server manager's method of this name."""

    @asynccontextmanager
    async def managed(tokenizer: Any = tokenizer, **_: Any) -> AsyncIterator[ManagedPolicy]:
        yield ManagedPolicy(model_name, tokenizer)

    return managed


async def _chat(kwargs: Mapping[str, Any]) -> list[Conversation]:
    group = current_group.get()
    return await group.chat(
        kwargs["messages"], kwargs.get("tools"), int(kwargs.get("n") or 1), _options(group, kwargs)
    )


async def _complete(kwargs: Mapping[str, Any]) -> list[Conversation]:
    group = current_group.get()
    prompt = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("prompt")
    assert prompt is not None, "a completion needs a prompt"
    return await group.complete(prompt, int(kwargs.get("n") or 1), _options(group, kwargs))


def _options(group: GroupRecord, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    asked = {key: value for key, value in kwargs.items() if key not in _OURS}
    return turn_options(group.model, asked)


def chat_completion(talks: list[Conversation], model: str) -> Any:
    """The last replies of conversations as one answer of the OpenAI API."""
    return ChatCompletion.model_validate(
        {
            **_answer("chat.completion", model, talks),
            "choices": [
                {
                    "index": place,
                    "message": talk.replies[-1].message,
                    "finish_reason": _finish_reason(talk),
                    "logprobs": None,
                }
                for place, talk in enumerate(talks)
            ],
        }
    )


def text_completion(talks: list[Conversation], model: str) -> Any:
    """The same for raw completions."""
    return Completion.model_validate(
        {
            **_answer("text_completion", model, talks),
            "choices": [
                {
                    "index": place,
                    "text": talk.replies[-1].text,
                    "finish_reason": "length" if talk.replies[-1].truncated else "stop",
                    "logprobs": None,
                }
                for place, talk in enumerate(talks)
            ],
        }
    )


def _answer(kind: str, model: str, talks: list[Conversation]) -> dict[str, Any]:
    prompt = talks[0].replies[-1].usage.prompt_tokens if talks else 0
    completion = sum(talk.replies[-1].usage.completion_tokens for talk in talks)
    return {
        "id": "policy",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _finish_reason(talk: Conversation) -> str:
    reason = talk.replies[-1].finish_reason
    return reason if reason in _FINISH_REASONS else "stop"

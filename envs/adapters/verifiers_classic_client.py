"""The model client that classic verifiers is given: answered by a `Model`, one per rollout.

Speaks the library's messages on one side and ours on the other; what `Model` raises becomes an error that the
library understands, with the original as its cause. Only what the library takes into the trajectory is trained on: not what
an environment asks the policy beside it, nor what a judge that is the policy says while scoring. Owns no connection.
"""

from collections.abc import Mapping
from typing import Any

import verifiers as vf  # type: ignore[import-not-found]  # only in a virtualenv of its own
from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found]  # as above
from verifiers.types import (  # type: ignore[import-not-found]  # as above
    Response,
    ResponseMessage,
    ResponseTokens,
    ToolCall,
    Usage,
)

from envs.adapters.policy import completion, turn_options
from envs.errors import FailureKind, RolloutFailure
from envs.model import Model, Reply

_FINISH_REASONS = ("stop", "length", "tool_calls")


class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]  # the library has no types for us
    """The library's client, answered by a `Model`. One per rollout."""

    def __init__(self, model: Model) -> None:
        super().__init__(OpenAIFacade(model.unrecorded()))
        self._model = model
        self._replies: dict[str, Reply] = {}
        self._scoring = False
        self.overlong: RolloutFailure | None = None
        self.turns = 0

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        messages, _ = await self.to_native_prompt(prompt)
        native_tools = await self.to_native_tools(tools)
        asked = self._model if model == self._model.name else self._model.sibling(name=model)
        if self._scoring and asked is self._model:
            asked = self._model.unrecorded()
        try:
            reply = await asked.chat(
                [_without_nulls(message) for message in messages],
                tools=native_tools,
                **turn_options(self._model, sampling_args or {}),
            )
        except RolloutFailure as failure:
            # The library has a meaning for a prompt that no longer fits: the rollout ends, truncated.
            if failure.kind == FailureKind.CONTEXT_LENGTH:
                self.overlong = failure
                raise vf.OverlongPromptError(failure.message) from failure
            raise vf.ModelError(failure.message) from failure
        self.turns += 1
        response = f"policy-{self.turns}"
        if asked is self._model:
            self._replies[response] = reply
        return _response(reply, model, response)

    def finish(self, trajectory: Any) -> None:
        """The rollout is over, and these are its steps: what else was said, or is said from now on, is no part of it.

        Where the library cut a step to the author's `max_seq_len`, so is what is trained on.
        """
        self._scoring = True
        steps = {getattr(step["response"], "id", ""): step for step in trajectory}
        if not steps.keys() & self._replies.keys():
            return  # an environment that keeps no trajectory
        for response, reply in self._replies.items():
            step = steps.get(response)
            if step is None:
                self._model.trim(reply)
            elif step.get("tokens") is not None:
                self._model.trim(reply, len(step["tokens"]["completion_ids"]))

    async def close(self) -> None:
        """Nothing to close: the connection is the server's."""


class OpenAIFacade:
    """As much of the OpenAI client as environments use that ask the policy by themselves."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.chat = self
        self.completions = self

    async def create(
        self, *, messages: Any, model: str = "", tools: Any = None, extra_body: Any = None, **options: Any
    ) -> Any:
        """`client.chat.completions.create`."""
        from openai.types.chat import ChatCompletion  # type: ignore[import-not-found]  # comes with verifiers

        asked = self._model if model in ("", self._model.name) else self._model.sibling(name=model)
        options["extra_body"] = extra_body
        reply = await asked.chat(messages, tools=tools, **turn_options(self._model, options))
        return ChatCompletion.model_validate(completion(reply, model=asked.name))


def _response(reply: Reply, model: str, response: str) -> Any:
    calls = [
        ToolCall(
            id=call.get("id") or f"call_{place}",
            name=call["function"]["name"],
            arguments=call["function"].get("arguments") or "{}",
        )
        for place, call in enumerate(reply.tool_calls)
    ]
    usage = reply.usage
    return Response(
        id=response,
        created=0,
        model=model,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            reasoning_tokens=0,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        ),
        message=ResponseMessage(
            content=reply.text,
            reasoning_content=reply.reasoning or None,
            finish_reason=reply.finish_reason if reply.finish_reason in _FINISH_REASONS else None,
            is_truncated=reply.truncated,
            tool_calls=calls or None,
            tokens=_tokens(reply),
        ),
    )


def _tokens(reply: Reply) -> Any:
    """The token ids of a turn for authors who look at them; evaluations have none."""
    turn = reply.turn
    if turn is None:
        return None
    return ResponseTokens(
        prompt_ids=turn.prompt.tolist(),
        prompt_mask=[0] * len(turn.prompt),
        completion_ids=turn.completion.tolist(),
        completion_mask=[1] * len(turn.completion),
        completion_logprobs=turn.logprobs.tolist(),
    )


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}

"""The model that Inspect is given: answered by the `Model` of the rollout whose sample asks.

Which sample asks is Inspect's own knowledge (its active sample). Turns while a scorer runs are not the policy's work
and are not recorded. An assistant message goes back to the engine exactly as it came, so that turns extend each other.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import msgspec
from inspect_ai._util.registry import (  # type: ignore[import-not-found]  # only in a virtualenv of its own
    registry_info,
    set_registry_info,
)
from inspect_ai.log._samples import sample_active  # type: ignore[import-not-found]  # as above
from inspect_ai.model import (  # type: ignore[import-not-found]  # as above
    ChatCompletionChoice,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.model._openai import (  # type: ignore[import-not-found]  # as above
    messages_to_openai,
    openai_chat_tool_choice,
    openai_chat_tools,
)
from inspect_ai.tool import ToolCall  # type: ignore[import-not-found]  # as above

from envs.adapters.policy import turn_options
from envs.errors import FailureKind, RolloutFailure
from envs.model import Model, Reply

PROVIDER = "rollouts"
_CONNECTIONS = 4096
_OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}

scoring: ContextVar[bool] = ContextVar("inspect_scoring", default=False)


class Sampled:
    """The rollout of one sample. `failure` is what the model raised, whatever Inspect made of it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.turns = 0
        self.failure: RolloutFailure | None = None
        self._said: dict[str, dict[str, Any]] = {}

    async def ask(
        self, messages: list[Any], tools: list[Any], choice: Any, options: Mapping[str, Any]
    ) -> Any:
        """One turn, in Inspect's words."""
        native = await messages_to_openai(messages)
        for place, message in enumerate(messages):
            if message.role == "assistant" and message.id in self._said:
                native[place] = self._said[message.id]
        self.failure = None
        asked = self.model.unrecorded() if scoring.get() else self.model
        wanted = turn_options(asked, options)
        if tools and choice not in ("auto", "none", None):
            wanted["tool_choice"] = openai_chat_tool_choice(choice)
        try:
            reply = await asked.chat(
                native, tools=openai_chat_tools(tools) if tools and choice != "none" else None, **wanted
            )
        except RolloutFailure as failure:
            if failure.kind == FailureKind.CONTEXT_LENGTH and self.turns:
                # Inspect has a meaning for a prompt that no longer fits: the sample ends, and is scored.
                return ModelOutput.from_content(asked.name, "", stop_reason="model_length")
            self.failure = failure
            raise
        if asked is self.model:
            self.turns += 1
        message = _assistant(reply, asked.name)
        self._said[message.id] = reply.message
        return _output(reply, message, asked.name)


running: dict[str, Sampled] = {}
"""Rollouts by the id of their sample; a process runs one eval, so that ids are unique."""


@modelapi(name=PROVIDER)
class PolicyAPI(ModelAPI):  # type: ignore[misc]  # the library has no types for us
    """The provider. Limits and retries are ours and not Inspect's."""

    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name, config=options.get("config", GenerateConfig()))

    async def generate(self, input: list[Any], tools: list[Any], tool_choice: Any, config: Any) -> Any:  # noqa: A002  as in the base class
        active = sample_active()
        sampled = running.get(str(active.sample.id)) if active is not None else None
        if sampled is None:
            raise RuntimeError("the policy was asked outside of a sample, or by one that has been given up")
        options = {name: getattr(config, name) for name in _OPTIONS}
        return await sampled.ask(input, tools, tool_choice, {**options, "stop": config.stop_seqs})

    def max_connections(self) -> int:
        return _CONNECTIONS

    def should_retry(self, ex: Exception) -> bool:
        return False


def not_recorded(scorer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A scorer whose questions to the policy, as a grader, are no part of the rollout."""

    @wraps(scorer)
    async def scored(*args: Any, **kwargs: Any) -> Any:
        token = scoring.set(True)
        try:
            return await scorer(*args, **kwargs)
        finally:
            scoring.reset(token)

    set_registry_info(scored, registry_info(scorer))
    return scored


def _assistant(reply: Reply, model: str) -> Any:
    calls = []
    for place, call in enumerate(reply.tool_calls):
        function = call["function"]
        arguments, problem = {}, None
        try:
            arguments = msgspec.json.decode(function.get("arguments") or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            problem = f"the arguments are not a JSON object: {error}"
        calls.append(
            ToolCall(
                id=call.get("id") or f"call_{place}",
                function=function["name"],
                arguments=arguments,
                parse_error=problem,
            )
        )
    return ChatMessageAssistant(content=reply.text, tool_calls=calls or None, source="generate", model=model)


def _output(reply: Reply, message: Any, model: str) -> Any:
    usage = reply.usage
    return ModelOutput(
        model=model,
        choices=[
            ChatCompletionChoice(message=message, stop_reason=_STOP_REASONS.get(reply.finish_reason, "stop"))
        ],
        usage=ModelUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        ),
    )

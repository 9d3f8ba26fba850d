"""The policy as an environment sees it: `chat` to ask it, `rollout` to hand in what came of it.

One `Model` belongs to one rollout and is cheap to make; what all rollouts of a client share (model name,
sampling, system prompt, key) is computed once in `ModelSettings`. Every turn is recorded; when the rollout
is trained on, with the token ids and log-probabilities that the engine returned, merged into sequences by
token prefix. Evaluations ask for no token ids and carry no sequences.
Does no HTTP itself: bytes go through a `ChatClient`, whose retries and limits are its own affair.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from envs.completion import Completion, Usage, decode_completion, read_turn
from envs.errors import FailureKind, RolloutFailure, shown_url
from envs.merging import Turn, merge_turns
from envs.rollout import Rollout

Message = Mapping[str, Any]
"""One message of the OpenAI chat API."""

RESERVED = frozenset(
    {"messages", "model", "n", "stream", "stream_options", "tools", "logprobs", "return_token_ids"}
)
"""Request fields that are decided here and that sampling must not set."""


def unpacked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters as a request has them: those of the table `extra_body` beside the others."""
    flat = dict(sampling)
    if isinstance(flat.get("extra_body"), Mapping):
        flat |= flat.pop("extra_body")
    return flat


class ChatClient(Protocol):
    """What a model needs of an HTTP client; `envs.inference_client.InferenceClient` is the real one."""

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Post a chat request and return the body of the answer, or raise RolloutFailure."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What all rollouts of one client share. `sampling` goes into the request as it is; its `extra_body` is unpacked."""

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    api_key: str | None = field(default=None, repr=False)
    train: bool = True
    request: Mapping[str, Any] = field(init=False, repr=False)
    headers: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sampling = unpacked(self.sampling)
        _refuse_reserved(sampling)
        object.__setattr__(self, "sampling", sampling)
        # Fields that every request repeats, computed once.
        request: dict[str, Any] = {"model": self.model, **sampling}
        if self.train:
            request |= {"logprobs": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "headers", headers)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What the policy answered in one turn.

    `message` is the assistant message, ready to be appended to the conversation. `truncated` says that the
    token limit ended it.
    """

    text: str
    message: dict[str, Any]
    finish_reason: str
    tool_calls: list[dict[str, Any]]
    reasoning: str
    usage: Usage
    duration_s: float

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class Model:
    """The policy, for one rollout."""

    __slots__ = (
        "_base_url",
        "_cache_salt",
        "_client",
        "_headers",
        "_replies",
        "_sent",
        "_settings",
        "_started",
        "_transcript",
        "_turns",
    )

    def __init__(
        self,
        settings: ModelSettings,
        *,
        client: ChatClient,
        base_url: str,
        session: str = "",
        cache_salt: str = "",
    ) -> None:
        self._settings = settings
        self._client = client
        self._base_url = base_url
        self._cache_salt = cache_salt
        self._headers = {**settings.headers, "X-Session-ID": session} if session else settings.headers
        self._turns: list[Turn] = []
        self._replies: list[Reply] = []
        self._sent: list[dict[str, Any]] = []
        self._transcript: list[dict[str, Any]] = []
        self._started = time.perf_counter()

    @property
    def train(self) -> bool:
        """Whether the rollout is trained on; evaluations are not."""
        return self._settings.train

    @property
    def name(self) -> str:
        """Name of the model at the endpoint."""
        return self._settings.model

    @property
    def base_url(self) -> str:
        """Where the model is asked."""
        return self._base_url

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The configured sampling, which every turn starts from."""
        return self._settings.sampling

    def sibling(self, *, name: str | None = None) -> "Model":
        """A model with the same settings and no turns yet, for a rollout that plays several roles.

        What it records is handed in only if its own `rollout` is used. Under another name it is another
        model of the endpoint, a judge perhaps, and is never trained on.
        """
        settings = self._settings
        if name is not None and name != settings.model:
            settings = replace(settings, model=name, system_prompt=None, train=False)
        other = Model(settings, client=self._client, base_url=self._base_url, cache_salt=self._cache_salt)
        other._headers = self._headers
        return other

    async def chat(
        self, messages: Seq[Message], *, tools: Seq[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> Reply:
        """Ask the policy for the next message; keyword arguments override the sampling of this turn.

        Raises RolloutFailure, which an environment normally lets pass: it then is a failed rollout, repeated
        if that may help. A prompt that no longer fits is of kind "context_length", for environments that
        would rather hand in what they have.
        """
        conversation = self._with_system_prompt(messages)
        request = {**self._settings.request, "messages": conversation}
        if tools:
            request["tools"] = tools
        if self._cache_salt:
            request["cache_salt"] = self._cache_salt
        if sampling:
            _refuse_reserved(sampling)
            request |= sampling
        started = time.perf_counter()
        body = await self._client.chat(self._base_url, msgspec.json.encode(request), self._headers)
        endpoint = shown_url(self._base_url)
        completion = decode_completion(body, endpoint=endpoint)
        reply = _reply(completion, time.perf_counter() - started)
        if reply.finish_reason == "abort":
            raise RolloutFailure(
                FailureKind.ABORTED,
                f"{endpoint} aborted the request before it was complete",
                retryable=True,
            )
        if self._settings.train:
            self._turns.append(read_turn(completion, endpoint=endpoint))
        self._replies.append(reply)
        self._record(conversation, reply)
        return reply

    def rollout(
        self,
        reward: float,
        *,
        metrics: Mapping[str, float] | None = None,
        messages: Seq[Message] | None = None,
        stop_reason: str | None = None,
        truncated: bool | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> Rollout:
        """What this attempt yields; all but the reward is filled in from the recorded turns unless given."""
        sequences = merge_turns(self._turns)
        if self._turns and not sequences:
            raise RolloutFailure(
                FailureKind.EMPTY_COMPLETION,
                f"{shown_url(self._base_url)} sampled no token in any turn",
                retryable=True,
            )
        if messages is None:
            messages = self._transcript
        if stop_reason is None:
            stop_reason = self._replies[-1].finish_reason if self._replies else "stop"
        if truncated is None:
            truncated = any(reply.truncated for reply in self._replies)
        total = time.perf_counter() - self._started
        inference = sum(reply.duration_s for reply in self._replies)
        return Rollout(
            sequences=sequences,
            reward=reward,
            metrics=dict(metrics or {}),
            messages=[message if isinstance(message, dict) else dict(message) for message in messages],
            stop_reason=stop_reason,
            truncated=truncated,
            timings={"total": total, "inference": inference, **(timings or {})},
        )

    def _with_system_prompt(self, messages: Seq[Message]) -> list[dict[str, Any]]:
        """The conversation as it is sent: the configured system prompt comes first, once."""
        conversation = [message if isinstance(message, dict) else dict(message) for message in messages]
        prompt = self._settings.system_prompt
        if not prompt:
            return conversation
        first = conversation[0] if conversation else None
        if first is None or first.get("role") != "system":
            return [{"role": "system", "content": prompt}, *conversation]
        # Chat templates take one system message; the operator's word comes before the environment's.
        said = first.get("content")
        if isinstance(said, list):
            return [{**first, "content": [{"type": "text", "text": prompt}, *said]}, *conversation[1:]]
        return [{**first, "content": f"{prompt}\n\n{said}" if said else prompt}, *conversation[1:]]

    def _record(self, conversation: list[dict[str, Any]], reply: Reply) -> None:
        """Keep the transcript: only what is new of a conversation that goes on, all of one that begins."""
        fresh = conversation
        if self._sent and conversation[: len(self._sent)] == self._sent:
            fresh = conversation[len(self._sent) :]
            if fresh and fresh[0].get("role") == "assistant":
                fresh = fresh[1:]  # the turn before, recorded as it was said
        self._transcript += fresh
        self._transcript.append(reply.message)
        self._sent = conversation


def _reply(completion: Completion, duration_s: float) -> Reply:
    choice = completion.choices[0]
    # Servers fill the message with nulls; what is sent back in the next turn should hold only what was said.
    message = {key: value for key, value in choice.message.items() if value is not None and value != []}
    message.setdefault("role", "assistant")
    content = message.setdefault("content", "")
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return Reply(
        text=content if isinstance(content, str) else _text_parts(content),
        message=message,
        finish_reason=choice.finish_reason or "stop",
        tool_calls=calls if isinstance(calls, list) else [],
        reasoning=reasoning if isinstance(reasoning, str) else "",
        usage=completion.usage or Usage(),
        duration_s=duration_s,
    )


def _text_parts(content: Any) -> str:
    """Text of a content given as a list of parts."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _refuse_reserved(sampling: Mapping[str, Any]) -> None:
    refused = sorted(RESERVED.intersection(sampling))
    if refused:
        raise ValueError(f"sampling must not set {', '.join(refused)}: the model decides on it")

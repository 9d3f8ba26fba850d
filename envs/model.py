"""The policy as an environment sees it: `chat` or `complete` to ask it, `rollout` to hand in what came of it.

One `Model` belongs to one rollout and is cheap to make; what all rollouts of a client share (model name,
sampling, system prompt, key) is computed once in `ModelSettings`. Every turn is recorded; when the rollout
is trained on, with the token ids and log-probabilities that the engine returned, merged into sequences by
token prefix. Evaluations ask for no token ids and carry no sequences. A rollout that plays several parts has a model
for each (`seat`), with sequences and rewards of their own; calls that are no part of it go through `unrecorded`.
Does no HTTP itself: bytes go through a `ChatClient`, whose retries and limits are its own affair.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from envs.completion import Completion, Usage, decode_completion, decode_text_completion, read_turn
from envs.errors import FailureKind, RolloutFailure, shown_url
from envs.merging import Turn, merge_turns
from envs.rollout import Rollout
from envs.text_only import refuse_other_than_text

Message = Mapping[str, Any]
"""One message of the OpenAI chat API."""

RESERVED = frozenset(
    {"messages", "prompt", "model", "n", "stream", "stream_options", "tools", "logprobs", "return_token_ids"}
)
"""Request fields that are decided here and that sampling must not set."""

TOKEN_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
"""Two names of one limit; a server that is given both takes the second."""


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

    async def complete(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The same for a text completion."""


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
    token limit ended it. `turn` has the token ids and log-probabilities, where the rollout is trained on.
    """

    text: str
    message: dict[str, Any]
    finish_reason: str
    tool_calls: list[dict[str, Any]]
    reasoning: str
    usage: Usage
    duration_s: float
    turn: Turn | None = None

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
        "_seat",
        "_seats",
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
        self._seat = ""
        self._seats: dict[str, Model] = {}
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
        return self._like(settings)

    def seat(self, name: str) -> "Model":
        """The model of one seat of the rollout; the same for the same name.

        Its turns are handed in by the `rollout` of the model that it comes from, as sequences of that seat, and may have
        a reward of their own there. Rewards are compared with those of the same seat in the group's other rollouts.
        """
        if not name or not isinstance(name, str):
            raise ValueError(f"a seat needs a name, got {name!r}")
        if name not in self._seats:
            other = self._like(self._settings)
            other._seat, other._seats = name, self._seats
            self._seats[name] = other
        return self._seats[name]

    def unrecorded(self) -> "Model":
        """The same policy for what is no part of the rollout, a judgement of it for example.

        What is said there is neither trained on nor in the transcript.
        """
        return self._like(replace(self._settings, train=False))

    def _like(self, settings: ModelSettings) -> "Model":
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
        refuse_other_than_text(conversation)
        request = {**self._settings.request, "messages": conversation}
        if tools:
            request["tools"] = tools
        started = time.perf_counter()
        body = await self._client.chat(self._base_url, self._body(request, sampling), self._headers)
        completion = decode_completion(body, endpoint=shown_url(self._base_url))
        reply = self._take(completion, request, time.perf_counter() - started)
        self._record(conversation, reply)
        return reply

    async def complete(self, prompt: str | Seq[int], **sampling: Any) -> Reply:
        """Have the policy go on with a raw text, or with token ids, without a chat template and a system prompt.

        Otherwise as `chat`. Engines stop after 16 tokens unless `max_tokens` says more.
        """
        tokens = None if isinstance(prompt, str) else [int(token) for token in prompt]
        request = {**self._settings.request, "prompt": prompt if tokens is None else tokens}
        if self._settings.train:
            request["logprobs"] = 1  # a number here, where chats have a yes
        for asked in (request, sampling):
            if "max_completion_tokens" in asked:
                asked.setdefault("max_tokens", asked.pop("max_completion_tokens"))
        started = time.perf_counter()
        body = await self._client.complete(self._base_url, self._body(request, sampling), self._headers)
        completion = decode_text_completion(body, endpoint=shown_url(self._base_url))
        reply = self._take(completion, request, time.perf_counter() - started)
        shown = prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"
        self._record([{"role": "user", "content": shown}], reply)
        return reply

    def _body(self, request: dict[str, Any], sampling: Mapping[str, Any]) -> bytes:
        """The request as it is sent, with what this turn wants otherwise."""
        if self._cache_salt:
            request["cache_salt"] = self._cache_salt
        if sampling:
            wanted = unpacked(sampling)
            _refuse_reserved(wanted)
            if not TOKEN_LIMITS.isdisjoint(wanted):
                # The configured one under its other name would win over that of this turn.
                for name in TOKEN_LIMITS:
                    request.pop(name, None)
            request |= wanted
        return msgspec.json.encode(request)

    def _take(self, completion: Completion, request: Mapping[str, Any], duration_s: float) -> Reply:
        """The reply in an answer, its turn recorded."""
        endpoint = shown_url(self._base_url)
        if completion.choices[0].finish_reason == "abort":
            raise RolloutFailure(
                FailureKind.ABORTED,
                f"{endpoint} aborted the request before it was complete",
                retryable=True,
            )
        turn = None
        if self._settings.train:
            prompt = request.get("prompt")
            turn = read_turn(
                completion,
                endpoint=endpoint,
                temperature=request.get("temperature"),
                prompt=None if isinstance(prompt, str) else prompt,
            )
            self._turns.append(turn)
        reply = _reply(completion, duration_s, turn)
        self._replies.append(reply)
        return reply

    def trim(self, reply: Reply, tokens: int = 0) -> None:
        """Train on the first tokens of a reply only; without any, it is no part of the rollout at all."""
        place = next((place for place, one in enumerate(self._replies) if one is reply), None)
        if place is None or reply.turn is None:
            return
        if not tokens:
            del self._replies[place], self._turns[place]
        elif tokens < len(reply.turn.completion):
            turn = reply.turn
            self._turns[place] = replace(
                turn,
                completion=turn.completion[:tokens],
                logprobs=turn.logprobs[:tokens],
                stop_reason="length",
            )

    def rollout(
        self,
        reward: float | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        messages: Seq[Message] | None = None,
        stop_reason: str | None = None,
        truncated: bool | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> Rollout:
        """What this attempt yields; all but the reward is filled in from the recorded turns unless given.

        `rewards` are those of seats; a seat that has none there has the rollout's, which is their mean unless given.
        """
        rewards = dict(rewards or {})
        played = [self] if self._seat else [self, *self._seats.values()]
        if rewards:
            unknown = [seat for seat in rewards if seat not in {model._seat for model in played}]
            if unknown:
                raise ValueError(f"no seat {unknown[0]!r} was played; seats are {sorted(self._seats)}")
        if reward is None:
            if not rewards:
                raise TypeError("rollout needs a reward, or rewards of seats")
            reward = sum(rewards.values()) / len(rewards)
        sequences = [
            sequence
            for model in played
            for sequence in merge_turns(model._turns, seat=model._seat, reward=rewards.get(model._seat))
        ]
        replies = [reply for model in played for reply in model._replies]
        if not sequences and any(model._turns for model in played):
            raise RolloutFailure(
                FailureKind.EMPTY_COMPLETION,
                f"{shown_url(self._base_url)} sampled no token in any turn",
                retryable=True,
            )
        if messages is None:
            messages = [message for model in played for message in model._said()]
        if stop_reason is None:
            stop_reason = replies[-1].finish_reason if replies else "stop"
        if truncated is None:
            truncated = any(reply.truncated for reply in replies)
        total = time.perf_counter() - self._started
        inference = sum(reply.duration_s for reply in replies)
        return Rollout(
            sequences=sequences,
            reward=reward,
            metrics=dict(metrics or {}),
            messages=[message if isinstance(message, dict) else dict(message) for message in messages],
            stop_reason=stop_reason,
            truncated=truncated,
            timings={"total": total, "inference": inference, **(timings or {})},
        )

    def _said(self) -> list[dict[str, Any]]:
        """The transcript; a seat's messages say whose they are."""
        if not self._seat:
            return self._transcript
        return [{**message, "seat": self._seat} for message in self._transcript]

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


def _reply(completion: Completion, duration_s: float, turn: Turn | None) -> Reply:
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
        turn=turn,
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

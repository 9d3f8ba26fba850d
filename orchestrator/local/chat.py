"""The chat API's requests and answers: what is understood of a request, and how a completion is described.

Pure: decoded JSON in, values or a `RequestError` out. Token ids and log-probabilities stand where vLLM puts them.
"""

import time
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from orchestrator.local.engine import Generation, Sampling
from orchestrator.local.tokenizer import ChatError, apply_chat_template, describe

T = TypeVar("T")


class ChatRequest(msgspec.Struct):
    """The part of a chat request that the policy understands; other fields are accepted and mean nothing to it."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class RequestError(Exception):
    """A request that is answered with an error; `status` is HTTP's."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The typed body of a request; RequestError if it is of another shape."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise RequestError(400, "BadRequestError", str(error)) from error


def read_request(body: ChatRequest, *, model: str, max_model_len: int) -> tuple[list[int], Sampling]:
    """Prompt and sampling of a request, or RequestError."""
    if body.model != model:
        raise RequestError(404, "NotFoundError", f"The model `{body.model}` does not exist.")
    if body.stream or (body.n or 1) != 1:
        raise RequestError(400, "BadRequestError", "only one answer, and no stream, can be asked for")
    if (body.top_p or 1.0) != 1.0 or (body.top_k or -1) > 0 or body.min_p:
        raise RequestError(400, "BadRequestError", "top_p, top_k and min_p are not supported by this policy")
    if (body.repetition_penalty or 1.0) != 1.0:
        raise RequestError(400, "BadRequestError", "repetition_penalty is not supported by this policy")
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature < 0:
        raise RequestError(400, "BadRequestError", f"temperature must not be negative; got {temperature}")
    try:
        prompt = apply_chat_template(body.messages)
    except ChatError as error:
        raise RequestError(400, "BadRequestError", str(error)) from error
    room = max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            400,
            "BadRequestError",
            f"This model's maximum context length is {max_model_len} tokens. However, your request has "
            f"{len(prompt)} input tokens.",
        )
    asked = body.max_completion_tokens or body.max_tokens
    if asked is not None and asked < 1:
        raise RequestError(400, "BadRequestError", f"max_tokens must be at least 1; got {asked}")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return prompt, Sampling(min(asked or room, room), temperature, tuple(filter(None, stop)), body.seed)


def describe_completion(body: ChatRequest, completion: Generation) -> dict[str, Any]:
    """The answer to a request, with the token ids and log-probabilities that it asked for."""
    tokens = completion.token_ids
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.text},
        "finish_reason": completion.finish_reason,
    }
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(completion.prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(completion.prompt) + len(tokens),
        },
    }
    if body.logprobs:
        content = [
            {"token": describe(token), "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(tokens, completion.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content}
    if body.return_token_ids:
        choice["token_ids"] = tokens
        answer["prompt_token_ids"] = completion.prompt
    return answer

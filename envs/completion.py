"""Chat and text completions as inference servers return them, decoded once and checked.

Knows where token ids and log-probabilities are: vLLM puts `prompt_token_ids` at the top and `token_ids` in
the choice; SGLang puts both in the choice (`return_token_ids`), or the sampled ids beside the
log-probabilities in `meta_info.output_token_logprobs` (`return_meta_info`), or both in `sglext`. The
log-probabilities are those of OpenAI's `logprobs.content`, else those of `meta_info`. Unknown fields are
skipped without being built. Pure: bytes in, values or a `RolloutFailure` out.
"""

from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from envs.errors import FailureKind, RolloutFailure
from envs.merging import Turn
from envs.rollout import MAX_LOGPROB

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Fits an int32; checked while decoding, where it costs nothing."""

Logprob = Annotated[float, msgspec.Meta(ge=-1e38, le=MAX_LOGPROB)]
"""Finite also as a float32, and of a probability. JSON has no NaN, and engines write null for minus infinity, which is refused."""


class Usage(msgspec.Struct, gc=False, frozen=True):
    """Tokens as the endpoint counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class TokenLogprob(msgspec.Struct, gc=False):
    """One sampled token; its text and alternatives are skipped."""

    logprob: Logprob


class Logprobs(msgspec.Struct):
    """Log-probabilities of the sampled tokens."""

    content: list[TokenLogprob] | None = None


class MetaInfo(msgspec.Struct):
    """SGLang: one (log-probability, token id, text) per sampled token."""

    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None


class SglExt(msgspec.Struct):
    """SGLang: token ids of the prompt, and of each choice."""

    input_ids: list[TokenId] | None = None
    output_ids: list[list[TokenId]] | None = None


class Choice(msgspec.Struct):
    """One answer. We never ask for more than one."""

    message: dict[str, Any]
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    meta_info: MetaInfo | None = None


class Completion(msgspec.Struct):
    """The answer of `/chat/completions`."""

    choices: list[Choice]
    prompt_token_ids: list[TokenId] | None = None
    usage: Usage | None = None
    sglext: SglExt | None = None


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of the sampled tokens as the text completions have them."""

    token_logprobs: list[Logprob] | None = None


class TextChoice(msgspec.Struct):
    """One answer of `/completions`."""

    text: str
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: TextLogprobs | None = None
    meta_info: MetaInfo | None = None


class TextCompletion(msgspec.Struct):
    """The answer of `/completions`."""

    choices: list[TextChoice]
    prompt_token_ids: list[TokenId] | None = None
    usage: Usage | None = None
    sglext: SglExt | None = None


_decoder = msgspec.json.Decoder(Completion)
_text_decoder = msgspec.json.Decoder(TextCompletion)


def decode_text_completion(body: bytes, *, endpoint: str) -> Completion:
    """The answer of `/completions` in the shape of a chat completion: its text is the assistant's message."""
    text = _decode(_text_decoder, body, endpoint, "completion")
    choice = text.choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else None
    return Completion(
        [
            Choice(
                {"role": "assistant", "content": choice.text},
                choice.finish_reason,
                choice.token_ids,
                choice.prompt_token_ids,
                None if logprobs is None else Logprobs([TokenLogprob(value) for value in logprobs]),
                choice.meta_info,
            )
        ],
        text.prompt_token_ids,
        text.usage,
        text.sglext,
    )


def decode_completion(body: bytes, *, endpoint: str) -> Completion:
    """The typed completion; an answer of another shape is a retryable failure that names the endpoint."""
    return _decode(_decoder, body, endpoint, "chat completion")


C = TypeVar("C", Completion, TextCompletion)


def _decode(decoder: "msgspec.json.Decoder[C]", body: bytes, endpoint: str, what: str) -> C:
    try:
        completion = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RolloutFailure(
            FailureKind.BAD_RESPONSE,
            f"{endpoint} did not answer with a {what}: {error}",
            retryable=True,
        ) from None
    if len(completion.choices) != 1:
        raise RolloutFailure(
            FailureKind.BAD_RESPONSE,
            f"{endpoint} answered with {len(completion.choices)} choices where one was asked for",
            retryable=True,
        )
    return completion


def read_turn(completion: Completion, *, endpoint: str, temperature: float | None = None) -> Turn:
    """Token ids and log-probabilities of a completion that is to be trained on, asked for with a temperature."""
    choice = completion.choices[0]
    meta = choice.meta_info.output_token_logprobs if choice.meta_info is not None else None
    prompt = _first(completion.prompt_token_ids, choice.prompt_token_ids)
    sampled = choice.token_ids
    if completion.sglext is not None:
        prompt = _first(prompt, completion.sglext.input_ids)
        if completion.sglext.output_ids:
            sampled = _first(sampled, completion.sglext.output_ids[0])
    if sampled is None and meta is not None:
        sampled = [entry[1] for entry in meta]
    if prompt is None or sampled is None:
        raise _no_token_ids(endpoint, "prompt" if prompt is None else "sampled")
    if choice.logprobs is not None and choice.logprobs.content is not None:
        logprobs = [entry.logprob for entry in choice.logprobs.content]
    elif meta is not None:
        logprobs = [entry[0] for entry in meta]
    else:
        logprobs = []
    if len(logprobs) != len(sampled):
        raise RolloutFailure(
            FailureKind.NO_TOKEN_IDS,
            f"{endpoint} returned {len(sampled)} token ids but {len(logprobs)} log-probabilities; training"
            " needs one for each token: the server must support logprobs together with return_token_ids",
            retryable=False,
        )
    return Turn(
        np.array(prompt, dtype=np.int32),
        np.array(sampled, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
        temperature,
        choice.finish_reason or "stop",
    )


def _first(one: list[TokenId] | None, other: list[TokenId] | None) -> list[TokenId] | None:
    return one if one is not None else other


def _no_token_ids(endpoint: str, which: str) -> RolloutFailure:
    return RolloutFailure(
        FailureKind.NO_TOKEN_IDS,
        f"{endpoint} returned no ids of the {which} tokens, without which nothing can be trained on; it must"
        " support return_token_ids (a recent vLLM or SGLang does; for an older SGLang set"
        " return_meta_info = true and return_prompt_token_ids = true in sampling)",
        retryable=False,
    )

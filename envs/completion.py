"""Chat and text completions as inference servers return them, decoded once and checked.

Knows where token ids and log-probabilities are: vLLM puts `prompt_token_ids` at the top and `token_ids` in
the choice; SGLang puts both in the choice (`return_token_ids`), or the sampled ids beside the
log-probabilities in `meta_info.output_token_logprobs` (`return_meta_info`), or both in `sglext`. The
log-probabilities are those of OpenAI's `logprobs.content`, else those of `meta_info`. Unknown fields are
skipped without being built, and lists of token ids, the longest of all in a conversation that goes on, become arrays
without a Python number for each. Pure: bytes in, values or a `RolloutFailure` out.
"""

import struct
from collections.abc import Sequence as Seq
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from envs.errors import FailureKind, RolloutFailure
from envs.merging import Turn
from envs.rollout import MAX_LOGPROB, Float32s, Int32s

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Fits an int32; checked while decoding, where it costs nothing."""

TokenIds = msgspec.Raw
"""A list of token ids as it was written, read by `_ids`."""

NOTHING = msgspec.Raw()

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
    """Log-probabilities of the sampled tokens: chats have them in `content`, text completions in `token_logprobs`."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[Logprob] | None = None


class MetaInfo(msgspec.Struct):
    """SGLang: one (log-probability, token id, text) per sampled token."""

    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None


class SglExt(msgspec.Struct):
    """SGLang: token ids of the prompt, and of each choice."""

    input_ids: TokenIds = NOTHING
    output_ids: list[TokenIds] | None = None


class Choice(msgspec.Struct):
    """One answer. We never ask for more than one."""

    message: dict[str, Any]
    finish_reason: str | None = None
    token_ids: TokenIds = NOTHING
    prompt_token_ids: TokenIds = NOTHING
    logprobs: Logprobs | None = None
    meta_info: MetaInfo | None = None


class Completion(msgspec.Struct):
    """The answer of `/chat/completions`."""

    choices: list[Choice]
    prompt_token_ids: TokenIds = NOTHING
    usage: Usage | None = None
    sglext: SglExt | None = None


class TextChoice(msgspec.Struct):
    """One answer of `/completions`."""

    text: str
    finish_reason: str | None = None
    token_ids: TokenIds = NOTHING
    prompt_token_ids: TokenIds = NOTHING
    logprobs: Logprobs | None = None
    meta_info: MetaInfo | None = None


class TextCompletion(msgspec.Struct):
    """The answer of `/completions`."""

    choices: list[TextChoice]
    prompt_token_ids: TokenIds = NOTHING
    usage: Usage | None = None
    sglext: SglExt | None = None


_NO_EXTRA = SglExt()
_OF_NUMBERS = b"0123456789,"
_SPACE = b" \t\r\n"
_decoder = msgspec.json.Decoder(Completion)
_text_decoder = msgspec.json.Decoder(TextCompletion)


def decode_text_completion(body: bytes, *, endpoint: str) -> Completion:
    """The answer of `/completions` in the shape of a chat completion: its text is the assistant's message."""
    text = _decode(_text_decoder, body, endpoint, "completion")
    choice = text.choices[0]
    return Completion(
        [
            Choice(
                {"role": "assistant", "content": choice.text},
                choice.finish_reason,
                choice.token_ids,
                choice.prompt_token_ids,
                choice.logprobs,
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


def read_turn(
    completion: Completion,
    *,
    endpoint: str,
    temperature: float | None = None,
    prompt: Seq[int] | None = None,
) -> Turn:
    """Token ids and log-probabilities of a completion that is to be trained on, asked for with a temperature.

    `prompt` is what was asked with, where that were token ids: not every server repeats them.
    """
    choice = completion.choices[0]
    extra = completion.sglext or _NO_EXTRA
    entries = choice.meta_info.output_token_logprobs if choice.meta_info is not None else None
    asked = _ids(endpoint, completion.prompt_token_ids, choice.prompt_token_ids, extra.input_ids)
    sampled = _ids(endpoint, choice.token_ids, *(extra.output_ids or ())[:1])
    if asked is None and prompt is not None:
        asked = np.array(prompt, np.int32)
    if sampled is None and entries is not None:
        sampled = np.array([entry[1] for entry in entries], np.int32)
    if asked is None or sampled is None:
        raise _no_token_ids(endpoint, "prompt" if asked is None else "sampled")
    logprobs = _logprobs(choice.logprobs, entries or ())
    if len(logprobs) != len(sampled):
        raise RolloutFailure(
            FailureKind.NO_TOKEN_IDS,
            f"{endpoint} returned {len(sampled)} token ids but {len(logprobs)} log-probabilities; training"
            " needs one for each token: the server must support logprobs together with return_token_ids",
            retryable=False,
        )
    return Turn(asked, sampled, logprobs, temperature, choice.finish_reason or "stop")


def _ids(endpoint: str, *places: TokenIds) -> Int32s | None:
    """The token ids at the first of these places that has any, None where all are empty or null."""
    for place in places:
        text = bytes(place)
        if text and text != b"null":
            break
    else:
        return None
    # It is known to be JSON; with nothing but digits in one pair of brackets it is a flat list of natural numbers.
    numbers, others = text, text.translate(None, _OF_NUMBERS)
    if others != b"[]":
        numbers, others = text.translate(None, _SPACE), others.translate(None, _SPACE)
    if numbers == b"[]":
        return np.empty(0, np.int32)
    if others == b"[]":
        ids = np.fromstring(numbers[1:-1], np.int64, sep=",")
        if len(ids) == numbers.count(b",") + 1 and ids.item(ids.argmax()) < 2**31:
            return ids.astype(np.int32)
    raise RolloutFailure(
        FailureKind.BAD_RESPONSE,
        f"{endpoint} did not answer with a completion: where token ids should be is {text[:60].decode(errors='replace')}",
        retryable=True,
    )


def _logprobs(said: Logprobs | None, entries: Seq[tuple[float, int, Any]]) -> Float32s:
    """One log-probability per sampled token, or fewer where the server has left them out."""
    if said is not None and said.content is not None:
        values = [entry.logprob for entry in said.content]
    elif said is not None and said.token_logprobs is not None:
        values = said.token_logprobs
    else:
        values = [entry[0] for entry in entries]
    # A third of the time that numpy takes for a list of floats.
    return np.frombuffer(struct.pack(f"={len(values)}f", *values), np.float32)


def _no_token_ids(endpoint: str, which: str) -> RolloutFailure:
    return RolloutFailure(
        FailureKind.NO_TOKEN_IDS,
        f"{endpoint} returned no ids of the {which} tokens, without which nothing can be trained on; it must"
        " support return_token_ids (a recent vLLM or SGLang does; for an older SGLang set"
        " return_meta_info = true and return_prompt_token_ids = true in sampling)",
        retryable=False,
    )

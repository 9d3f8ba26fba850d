"""What an environment gets from `Model`: replies, recorded turns, sequences, and failures with a kind."""

import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from envs import FailureKind, Model, ModelSettings, RolloutFailure
from envs.completion import decode_completion, read_turn
from envs.inference_client import InferenceClient, RetryPolicy
from tests.support.chat_endpoint import ChatEndpoint, chat_endpoint, completion, status, text_completion
from tests.support.chat_only import ChatOnly

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with chat_endpoint() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[InferenceClient]:
    retry = RetryPolicy(max_attempts=2, first_delay_s=0.001, max_delay_s=0.001)
    async with InferenceClient(limit=4, retry=retry) as opened:
        yield opened


def model_of(endpoint: ChatEndpoint, client: InferenceClient, **settings: Any) -> Model:
    return Model(ModelSettings(model="m", **settings), client=client, base_url=endpoint.base_url)


async def test_a_training_request_asks_for_token_ids_and_log_probabilities(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Sampling goes in as configured; the session and the cache salt travel with the request."""
    settings = ModelSettings(model="m", sampling={"temperature": 0.5, "max_tokens": 7})
    model = Model(settings, client=client, base_url=endpoint.base_url, session="g-1", cache_salt="v3")
    await model.chat([USER])
    assert endpoint.requests == [
        {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 7,
            "logprobs": True,
            "return_token_ids": True,
            "messages": [USER],
            "cache_salt": "v3",
        }
    ]
    assert endpoint.headers[0]["X-Session-ID"] == "g-1"
    assert endpoint.headers[0]["Content-Type"] == "application/json"


async def test_an_evaluation_asks_for_nothing_beyond_the_chat_api(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """So that an eval can run against any provider; its rollouts carry no sequences."""
    plain = completion("fine")
    del plain["prompt_token_ids"], plain["choices"][0]["token_ids"], plain["choices"][0]["logprobs"]
    endpoint.script(plain)
    model = model_of(endpoint, client, train=False)
    reply = await model.chat([USER])
    assert endpoint.requests == [{"model": "m", "messages": [USER]}]
    rollout = model.rollout(reward=1.0)
    assert (reply.text, rollout.sequences) == ("fine", [])
    rollout.check(require_sequences=False)


async def test_a_rollout_holds_the_tokens_the_engine_returned(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Arrays, transcript, stop reason and timings come from the recorded turns."""
    endpoint.script(completion("abc", prompt=[5, 6], sampled=[7, 8, 9], logprobs=[-0.5, -1.0, -2.0]))
    model = model_of(endpoint, client)
    reply = await model.chat([USER])
    rollout = model.rollout(reward=0.5, metrics={"length": 3.0})
    rollout.check()
    (sequence,) = rollout.sequences
    assert sequence.tokens.tolist() == [5, 6, 7, 8, 9]
    assert sequence.mask.tolist() == [0, 0, 1, 1, 1]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, -1.0, -2.0]
    assert rollout.messages == [USER, {"role": "assistant", "content": "abc"}]
    assert (rollout.reward, rollout.metrics) == (0.5, {"length": 3.0})
    assert (rollout.stop_reason, rollout.truncated) == ("stop", False)
    assert 0 <= rollout.timings["inference"] <= rollout.timings["total"]
    assert (reply.text, reply.finish_reason, reply.usage.completion_tokens) == ("abc", "stop", 3)


async def test_a_raw_text_is_gone_on_with_and_recorded(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Without a template and a system prompt; what comes of it is trained on as a chat is."""
    endpoint.script(text_completion("def", prompt=[5, 6], sampled=[7, 8]))
    sampling = {"temperature": 0.5, "max_completion_tokens": 9}
    model = model_of(endpoint, client, sampling=sampling, system_prompt="Be brief.")
    reply = await model.complete("abc", stop=["."])
    assert endpoint.requests == [
        {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 9,
            "logprobs": 1,
            "return_token_ids": True,
            "prompt": "abc",
            "stop": ["."],
        }
    ]
    assert (reply.text, reply.truncated) == ("def", True)
    rollout = model.rollout(reward=1.0)
    rollout.check()
    (sequence,) = rollout.sequences
    assert sequence.tokens.tolist() == [5, 6, 7, 8]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert (sequence.temperature, sequence.stop_reason, sequence.truncated) == (0.5, "length", True)
    assert [message["content"] for message in rollout.messages] == ["abc", "def"]


async def test_token_ids_can_be_gone_on_with(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """Turn by turn, what was sampled before included; an engine need not say them back."""
    answers = [text_completion(sampled=[3, 4]), text_completion(sampled=[6])]
    for answer in answers:
        del answer["choices"][0]["prompt_token_ids"]
    endpoint.script(*answers)
    model = model_of(endpoint, client)
    await model.complete([1, 2])
    await model.complete(tuple(np.array([1, 2, 3, 4, 5])))
    assert [request["prompt"] for request in endpoint.requests] == [[1, 2], [1, 2, 3, 4, 5]]
    (sequence,) = model.rollout(reward=1.0).sequences
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequence.mask.tolist() == [0, 0, 1, 1, 0, 1]


async def test_a_completion_fails_as_a_chat_does(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """Retried where that may help, with the same kinds."""
    endpoint.script(status(503), text_completion())
    assert (await model_of(endpoint, client).complete("abc")).text == "ok"
    endpoint.script({"choices": []})
    with pytest.raises(RolloutFailure) as failed:
        await model_of(endpoint, client).complete("abc")
    assert failed.value.kind == FailureKind.BAD_RESPONSE
    endpoint.script(status(400, {"error": {"message": "maximum context length is 9"}}))
    with pytest.raises(RolloutFailure) as failed:
        await model_of(endpoint, client).complete("abc")
    assert failed.value.kind == FailureKind.CONTEXT_LENGTH


async def test_seats_have_sequences_and_rewards_of_their_own(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """A seat without a reward of its own has the rollout's; the same name is the same seat."""
    model = model_of(endpoint, client)
    assert model.seat("white") is model.seat("white")
    await model.chat([USER])
    await model.seat("white").chat([USER], temperature=0.25)
    await model.seat("black").chat([USER])
    rollout = model.rollout(0.5, rewards={"white": 1.0})
    rollout.check()
    assert [(one.seat, one.reward, one.temperature) for one in rollout.sequences] == [
        ("", None, None),
        ("white", 1.0, 0.25),
        ("black", None, None),
    ]
    assert model.rollout(rewards={"white": 1.0, "black": 0.0}).reward == 0.5
    with pytest.raises(ValueError, match="no seat 'green' was played"):
        model.rollout(rewards={"green": 1.0})
    with pytest.raises(TypeError, match="needs a reward"):
        model.rollout()
    with pytest.raises(ValueError, match="a seat needs a name"):
        model.seat("")


async def test_turns_of_several_temperatures_have_none_in_common(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """A trainer must not take one for the other."""
    endpoint.script(completion(prompt=[1], sampled=[2]), completion(prompt=[1, 2, 3], sampled=[4]))
    model = model_of(endpoint, client, sampling={"temperature": 1.0})
    await model.chat([USER])
    await model.chat([USER], temperature=0.5)
    (sequence,) = model.rollout(1.0).sequences
    assert sequence.temperature is None


async def test_what_is_asked_unrecorded_is_neither_trained_on_nor_in_the_transcript(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """The same model, sampling and system prompt; no token ids are asked for."""
    model = model_of(endpoint, client, sampling={"temperature": 0.5}, system_prompt="Be brief.")
    await model.chat([USER])
    verdict = await model.unrecorded().chat([{"role": "user", "content": "judge this"}])
    assert verdict.turn is None
    asked = endpoint.requests[1]
    assert (asked["temperature"], "logprobs" in asked, len(asked["messages"])) == (0.5, False, 2)
    rollout = model.rollout(1.0)
    assert len(rollout.sequences) == 1
    assert "judge this" not in str(rollout.messages)


async def test_a_reply_can_be_cut_short_or_left_out(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """For adapters of libraries that decide afterwards what belongs to a rollout."""
    endpoint.script(
        completion(prompt=[1], sampled=[2, 3, 4]), completion(prompt=[1, 2, 3, 4, 5], sampled=[6])
    )
    model = model_of(endpoint, client)
    first, second = await model.chat([USER]), await model.chat([USER])
    model.trim(second)
    model.trim(first, 2)
    (sequence,) = model.rollout(1.0).sequences
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert sequence.truncated


async def test_a_conversation_is_one_sequence_and_one_transcript(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """The reply's message can be appended as it is; only what is new is added to the transcript."""
    endpoint.script(
        completion("one", prompt=[1], sampled=[2]),
        completion("two", prompt=[1, 2, 3], sampled=[4], tool_calls=[]),
    )
    model = model_of(endpoint, client)
    messages: list[dict[str, Any]] = [USER]
    reply = await model.chat(messages)
    messages += [reply.message, {"role": "user", "content": "more"}]
    await model.chat(messages)
    rollout = model.rollout(reward=1.0)
    assert [sequence.tokens.tolist() for sequence in rollout.sequences] == [[1, 2, 3, 4]]
    assert [message["content"] for message in rollout.messages] == ["hi", "one", "more", "two"]


async def test_an_environment_that_rewrites_replies_does_not_repeat_the_transcript(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Reasoning that is dropped from the history stays readable, and nothing is said twice."""
    endpoint.script(
        completion("a", prompt=[1], sampled=[2], reasoning="think"),
        completion("b", prompt=[1, 9], sampled=[4]),
    )
    model = model_of(endpoint, client)
    first = await model.chat([USER])
    follow_up = {"role": "user", "content": "more"}
    await model.chat([USER, {"role": "assistant", "content": first.text}, follow_up])
    rollout = model.rollout(reward=1.0)
    assert first.reasoning == "think"
    assert rollout.messages == [
        USER,
        {"role": "assistant", "content": "a", "reasoning": "think"},
        follow_up,
        {"role": "assistant", "content": "b"},
    ]
    assert len(rollout.sequences) == 2


async def test_a_second_conversation_is_added_to_the_transcript(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """An environment may ask several things of the policy."""
    model = model_of(endpoint, client)
    await model.chat([USER])
    await model.chat([{"role": "user", "content": "other"}])
    rollout = model.rollout(reward=0.0)
    assert [message["content"] for message in rollout.messages] == ["hi", "ok", "other", "ok"]
    assert len(rollout.sequences) == 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ([USER], [{"role": "system", "content": "be brief"}, USER]),
        ([], [{"role": "system", "content": "be brief"}]),
        (
            [{"role": "system", "content": "own"}, USER],
            [{"role": "system", "content": "be brief\n\nown"}, USER],
        ),
        (
            [{"role": "system", "content": [{"type": "text", "text": "own"}]}],
            [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "own"}],
                }
            ],
        ),
    ],
)
async def test_the_configured_system_prompt_comes_first_and_once(
    endpoint: ChatEndpoint, client: InferenceClient, given: list[dict[str, Any]], sent: list[dict[str, Any]]
) -> None:
    """An environment's own system message is kept behind it, in one message."""
    before = msgspec.json.encode(given)
    await model_of(endpoint, client, system_prompt="be brief").chat(given)
    assert endpoint.requests[0]["messages"] == sent
    assert msgspec.json.encode(given) == before


async def test_a_turn_can_override_the_sampling(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """For this turn only."""
    model = model_of(endpoint, client, sampling={"temperature": 1.0, "max_tokens": 5})
    await model.chat([USER], temperature=0.0, stop=["\n"])
    await model.chat([USER])
    assert (endpoint.requests[0]["temperature"], endpoint.requests[0]["stop"]) == (0.0, ["\n"])
    assert endpoint.requests[1]["temperature"] == 1.0
    assert "stop" not in endpoint.requests[1]


async def test_a_turn_can_override_the_limit_of_tokens_under_either_name(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """A server that is given both takes the configured one, and the turn is longer than it was to be."""
    endpoint.script(completion(), completion(), text_completion(sampled=[1]))
    model = model_of(endpoint, client, sampling={"max_completion_tokens": 4096})
    await model.chat([USER], max_tokens=16)
    await model.chat([USER], max_completion_tokens=17)
    await model.complete([5], max_completion_tokens=18)
    limits = [
        {name: value for name, value in request.items() if name.startswith("max_")}
        for request in endpoint.requests
    ]
    assert limits == [{"max_tokens": 16}, {"max_completion_tokens": 17}, {"max_tokens": 18}]


async def test_extra_body_of_a_turn_is_unpacked_too(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """A server passes over a field that it does not know: the turn would be sampled as if nothing had been said."""
    model = model_of(endpoint, client, sampling={"top_k": -1})
    await model.chat([USER], extra_body={"top_k": 20})
    assert endpoint.requests[0]["top_k"] == 20
    assert "extra_body" not in endpoint.requests[0]
    with pytest.raises(ValueError, match="must not set stream"):
        await model.chat([USER], extra_body={"stream": True})


@pytest.mark.parametrize("field", ["n", "stream", "messages", "logprobs", "return_token_ids", "model"])
def test_sampling_cannot_set_what_the_model_decides(field: str) -> None:
    """More than one choice or a stream would break the recording."""
    with pytest.raises(ValueError, match=field):
        ModelSettings(model="m", sampling={field: 2})


async def test_a_turn_cannot_set_what_the_model_decides(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """The same holds for overrides of one turn."""
    with pytest.raises(ValueError, match="stream"):
        await model_of(endpoint, client).chat([USER], stream=True)
    assert endpoint.requests == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_what_is_not_text_is_refused_before_the_policy_is_asked(
    endpoint: ChatEndpoint, client: InferenceClient, kind: str
) -> None:
    """An image's tokens could not be trained on; parts of text are fine."""
    model = model_of(endpoint, client)
    text = {"type": "text", "text": "What is this?"}
    await model.chat([{"role": "user", "content": [text]}])
    with pytest.raises(
        RolloutFailure, match=f"role user has a part of type {kind}; only text works"
    ) as caught:
        await model.chat([{"role": "user", "content": [text, {"type": kind, kind: {}}]}])
    assert (caught.value.kind, caught.value.retryable, len(endpoint.requests)) == ("not_text", False, 1)


async def test_tools_and_tool_calls_pass_through(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """The calls are in the reply, and the message can be sent back as it is."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = completion(finish_reason="tool_calls", tool_calls=[call])
    answer["choices"][0]["message"]["content"] = None
    endpoint.script(answer)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    model = model_of(endpoint, client)
    reply = await model.chat([USER], tools=[tool])
    assert endpoint.requests[0]["tools"] == [tool]
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("", [call], "tool_calls")
    assert reply.message == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert model.rollout(reward=0.0).stop_reason == "tool_calls"


async def test_a_reply_cut_by_the_token_limit_is_truncated(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Whichever turn it was, the rollout says so; an environment can say otherwise."""
    endpoint.script(completion(finish_reason="length"), completion())
    model = model_of(endpoint, client)
    assert (await model.chat([USER])).truncated
    assert not (await model.chat([USER])).truncated
    assert model.rollout(reward=0.0).truncated
    assert not model.rollout(reward=0.0, truncated=False).truncated
    assert model.rollout(reward=0.0, stop_reason="max_turns").stop_reason == "max_turns"


async def failure_of(
    endpoint: ChatEndpoint, client: InferenceClient, answer: Any, **settings: Any
) -> RolloutFailure:
    endpoint.script(answer)
    with pytest.raises(RolloutFailure) as caught:
        await model_of(endpoint, client, **settings).chat([USER])
    return caught.value


async def test_an_aborted_request_is_a_retryable_failure(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Engines end requests with status 200 and "abort" when weights change; that is no answer."""
    for train in (True, False):
        failure = await failure_of(endpoint, client, completion(finish_reason="abort"), train=train)
        assert (failure.kind, failure.retryable) == ("aborted", True)


@pytest.mark.parametrize("missing", ["prompt", "sampled", "logprobs", "some logprobs"])
async def test_a_training_endpoint_without_token_ids_is_a_clear_failure(
    endpoint: ChatEndpoint, client: InferenceClient, missing: str
) -> None:
    """Final, because it would fail for every rollout; the endpoint and the remedy are named."""
    answer = completion()
    choice = answer["choices"][0]
    if missing == "prompt":
        answer["prompt_token_ids"] = None
    elif missing == "sampled":
        del choice["token_ids"]
    elif missing == "logprobs":
        choice["logprobs"] = None
    else:
        choice["logprobs"]["content"].pop()
    failure = await failure_of(endpoint, client, answer)
    assert (failure.kind, failure.retryable) == ("no_token_ids", False)
    assert endpoint.base_url in failure.message
    assert "return_token_ids" in failure.message


def sglang_choice_ids() -> dict[str, Any]:
    answer = completion()
    answer["choices"][0]["prompt_token_ids"] = answer.pop("prompt_token_ids")
    return answer


def sglang_meta_info() -> dict[str, Any]:
    answer = sglang_choice_ids()
    choice = answer["choices"][0]
    del choice["token_ids"], choice["logprobs"]
    choice["meta_info"] = {"id": "r", "output_token_logprobs": [[-0.5, 10, None], [-0.5, 11, "x"]]}
    return answer


def sglang_extension() -> dict[str, Any]:
    answer = completion()
    answer["sglext"] = {"input_ids": answer.pop("prompt_token_ids"), "output_ids": [[10, 11]]}
    del answer["choices"][0]["token_ids"]
    return answer


@pytest.mark.parametrize(
    "answer", [completion(), sglang_choice_ids(), sglang_meta_info(), sglang_extension()]
)
async def test_token_ids_are_found_where_each_server_puts_them(
    endpoint: ChatEndpoint, client: InferenceClient, answer: dict[str, Any]
) -> None:
    """vLLM's shape and the three of SGLang give the same sequence."""
    endpoint.script(answer)
    model = model_of(endpoint, client)
    await model.chat([USER])
    (sequence,) = model.rollout(reward=0.0).sequences
    assert sequence.tokens.tolist() == [1, 2, 3, 10, 11]
    assert sequence.logprobs.tolist() == [0, 0, 0, -0.5, -0.5]


async def test_an_empty_completion_is_a_retryable_failure_of_the_rollout(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Nothing was sampled, so there is nothing to train on."""
    endpoint.script(completion("", sampled=[]))
    model = model_of(endpoint, client)
    await model.chat([USER])
    with pytest.raises(RolloutFailure) as caught:
        model.rollout(reward=0.0)
    assert (caught.value.kind, caught.value.retryable) == ("empty_completion", True)


async def test_a_sibling_asks_the_same_endpoint_and_records_for_itself(
    endpoint: ChatEndpoint, client: InferenceClient
) -> None:
    """Under another name it is a judge: no system prompt of the policy, no token ids asked for."""
    settings = ModelSettings(model="m", sampling={"max_tokens": 5}, system_prompt="be brief")
    model = Model(settings, client=client, base_url=endpoint.base_url, session="g-1", cache_salt="v3")
    await model.sibling().chat([USER])
    await model.sibling(name="judge").chat([USER])
    same, judge = endpoint.requests
    assert (same["model"], same["return_token_ids"], len(same["messages"])) == ("m", True, 2)
    assert judge == {"model": "judge", "max_tokens": 5, "messages": [USER], "cache_salt": "v3"}
    assert [headers["X-Session-ID"] for headers in endpoint.headers] == ["g-1", "g-1"]
    assert model.rollout(reward=0.0).sequences == []
    assert (model.base_url, dict(model.sampling)) == (endpoint.base_url, {"max_tokens": 5})


async def test_the_api_key_is_sent_and_never_shown(endpoint: ChatEndpoint, client: InferenceClient) -> None:
    """Neither in the settings' representation nor in a failure."""
    settings = ModelSettings(model="m", api_key="hunter2")
    assert "hunter2" not in repr(settings)
    await Model(settings, client=client, base_url=endpoint.base_url).chat([USER])
    assert endpoint.headers[0]["Authorization"] == "Bearer hunter2"


def sampled_body(token: str, logprob: str) -> bytes:
    """A completion with one sampled token, spelt as given."""
    choice = (
        f'{{"message": {{}}, "token_ids": [{token}], "logprobs": {{"content": [{{"logprob": {logprob}}}]}}}}'
    )
    return f'{{"choices": [{choice}], "prompt_token_ids": [1]}}'.encode()


BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"<html>",
    b'{"choices": []}',
    b'{"choices": null}',
    b'{"choices": [{}]}',
    b'{"choices": [{"message": null}]}',
    b'{"choices": [{"message": {}}, {"message": {}}]}',
    b'{"choices": [{"message": {}, "finish_reason": 3}]}',
    b'{"choices": [{"message": {}, "token_ids": [1.5]}], "prompt_token_ids": [1]}',
    sampled_body("-1", "-1"),
    sampled_body("4294967296", "-1"),
    sampled_body("1", "-1e300"),
    sampled_body("1", "null"),
    sampled_body("1", "NaN"),
    b'{"choices": [{"message": {"content": "\xff"}}]}',
    b'{"choices": [{"message": {"content": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", BODIES)
def test_an_answer_that_is_no_completion_is_a_bad_response(body: bytes) -> None:
    """The endpoint is named; another attempt may be answered properly."""
    with pytest.raises(RolloutFailure) as caught:
        read_turn(decode_completion(body, endpoint="http://e/v1"), endpoint="http://e/v1")
    assert (caught.value.kind, caught.value.retryable) == ("bad_response", True)
    assert "http://e/v1" in caught.value.message


class OneAnswer(ChatOnly):
    """A client that answers with the same bytes."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def chat(self, base_url: str, body: bytes, headers: Any) -> bytes:
        return self.body


async def test_odd_answers_end_as_failures_with_a_kind_or_as_sound_rollouts() -> None:
    """Ten thousand mutated completions: no other exception, and nothing that fails its own check."""
    rng = random.Random(7)
    settings = ModelSettings(model="m")
    values: list[Any] = [
        None,
        [],
        {},
        0,
        -1,
        1.5,
        "",
        "x",
        True,
        [1, 2],
        [None],
        {"content": []},
        2**31,
        1e300,
        [[1]],
    ]
    kinds = set()
    for _ in range(10_000):
        answer = completion(
            sampled=[1, 2], content=rng.choice(["text", None, [{"type": "text", "text": "t"}], 3])
        )
        if rng.random() < 0.9:
            mutate(answer, rng, values)
        body = bytearray(msgspec.json.encode(answer))
        if rng.random() < 0.2:
            body[rng.randrange(len(body))] = rng.randrange(256)
        model = Model(settings, client=OneAnswer(bytes(body)), base_url="http://e/v1")
        try:
            await model.chat([USER])
            rollout = model.rollout(reward=0.0)
        except RolloutFailure as failure:
            kinds.add(failure.kind)
        else:
            rollout.check()
            assert isinstance(rollout.stop_reason, str)
            msgspec.msgpack.encode(rollout.messages)
    assert kinds == {FailureKind.BAD_RESPONSE, FailureKind.NO_TOKEN_IDS}


def mutate(answer: dict[str, Any], rng: random.Random, values: list[Any]) -> None:
    """Replace or remove one thing somewhere in the answer."""
    spot: Any = answer
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(spot[key], dict | list) and spot[key] and rng.random() < 0.7:
            spot = spot[key]
        elif rng.random() < 0.3:
            del spot[key]
            return
        else:
            spot[key] = rng.choice(values)
            return


def test_token_ids_keep_their_values() -> None:
    """The largest id of an int32 survives."""
    body = msgspec.json.encode(completion(prompt=[0, 2**31 - 1], sampled=[151_935]))
    turn = read_turn(decode_completion(body, endpoint="e"), endpoint="e")
    assert turn.prompt.tolist() == [0, 2**31 - 1]
    assert turn.prompt.dtype == np.int32


def test_extra_body_is_unpacked_into_the_request() -> None:
    """As the clients of the chat API do it; what it sets is a sampling parameter like any other."""
    settings = ModelSettings(model="m", sampling={"top_p": 0.9, "extra_body": {"mirostat": 2}}, train=False)
    assert settings.request == {"model": "m", "top_p": 0.9, "mirostat": 2}
    assert settings.sampling == {"top_p": 0.9, "mirostat": 2}
    with pytest.raises(ValueError, match="must not set stream"):
        ModelSettings(model="m", sampling={"extra_body": {"stream": True}})

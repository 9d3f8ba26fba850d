"""The HTTP client: what is retried and what is not, what a failure says, and what cancelling does."""

import asyncio
import email.utils
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from envs.errors import RolloutFailure
from envs.inference_client import InferenceClient, RetryPolicy, _retry_after_s
from tests.support.chat_endpoint import ChatEndpoint, chat_endpoint, completion, drop, hang, status

QUICK = RetryPolicy(max_attempts=4, first_delay_s=0.001, max_delay_s=0.002, max_retry_after_s=1.0)
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with chat_endpoint() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[InferenceClient]:
    async with InferenceClient(limit=8, retry=QUICK) as opened:
        yield opened


async def failure_of(client: InferenceClient, base_url: str) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        await client.chat(base_url, b"{}", HEADERS)
    return caught.value


async def test_the_body_of_a_good_answer_is_returned(client: InferenceClient, endpoint: ChatEndpoint) -> None:
    """One request, the bytes as they came."""
    endpoint.script(completion("hello"))
    assert b'"hello"' in await client.chat(endpoint.base_url, b'{"a": 1}', HEADERS)
    assert endpoint.requests == [{"a": 1}]


async def test_a_trailing_slash_of_the_base_url_does_not_matter(
    client: InferenceClient, endpoint: ChatEndpoint
) -> None:
    """Both spellings of a base URL reach the same path."""
    assert await client.chat(endpoint.base_url + "/", b"{}", HEADERS)


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_passing_statuses_are_retried(
    client: InferenceClient, endpoint: ChatEndpoint, code: int
) -> None:
    """A server that is overloaded for a moment costs a pause, not a rollout."""
    endpoint.script(status(code), status(code), completion("late"))
    assert b"late" in await client.chat(endpoint.base_url, b"{}", HEADERS)
    assert len(endpoint.requests) == 3
    assert client.retries == 2


async def test_a_dropped_connection_is_retried(client: InferenceClient, endpoint: ChatEndpoint) -> None:
    """The engine behind a load balancer may go away between two requests."""
    endpoint.script(drop, completion("late"))
    assert b"late" in await client.chat(endpoint.base_url, b"{}", HEADERS)


async def test_an_answer_cut_short_is_retried(client: InferenceClient, endpoint: ChatEndpoint) -> None:
    """A body that ends before its announced length is a broken connection."""

    async def cut(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        assert request.transport is not None
        request.transport.abort()
        return response

    endpoint.script(cut, completion("late"))
    assert b"late" in await client.chat(endpoint.base_url, b"{}", HEADERS)


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (400, "bad_request", False),
        (401, "unauthorized", False),
        (403, "unauthorized", False),
        (404, "unknown_model", False),
        (307, "bad_request", False),
        (429, "overloaded", True),
        (500, "server_error", True),
        (503, "overloaded", True),
    ],
)
async def test_a_failure_has_a_kind_and_says_what_the_server_said(
    client: InferenceClient, endpoint: ChatEndpoint, code: int, kind: str, retryable: bool
) -> None:
    """Only what may pass is worth another attempt; the message names the endpoint, the status and the words."""
    endpoint.script(status(code, {"error": {"message": "the words", "type": "T", "code": code}}))
    failure = await failure_of(client, endpoint.base_url)
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert endpoint.base_url in failure.message
    assert str(code) in failure.message
    assert "the words" in failure.message
    assert len(endpoint.requests) == (QUICK.max_attempts if retryable else 1)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 4000 tokens",
        "The input (4000 tokens) is longer than the model's context length (2048 tokens).",
        "The decoder prompt (length 99) is longer than the maximum model length of 32.",
    ],
)
async def test_a_prompt_that_does_not_fit_is_told_apart(
    client: InferenceClient, endpoint: ChatEndpoint, message: str
) -> None:
    """Environments may want to end a long conversation with what they have."""
    endpoint.script(status(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}))
    failure = await failure_of(client, endpoint.base_url)
    assert (failure.kind, failure.retryable) == ("context_length", False)


@pytest.mark.parametrize(
    "body", ["<html>gateway</html>", "null", '"text"', '{"detail": [{"msg": "x"}]}', "", "{"]
)
async def test_errors_of_any_shape_are_described(
    client: InferenceClient, endpoint: ChatEndpoint, body: str
) -> None:
    """Proxies answer in HTML, frameworks in their own JSON."""
    endpoint.script(status(400, body or " "))
    failure = await failure_of(client, endpoint.base_url)
    assert failure.kind == "bad_request"
    assert "answered 400" in failure.message


async def test_an_endless_error_is_not_read_to_its_end(
    client: InferenceClient, endpoint: ChatEndpoint
) -> None:
    """Only the beginning of an error body is read and shown."""
    endpoint.script(status(400, "x" * 3_000_000))
    failure = await failure_of(client, endpoint.base_url)
    assert len(failure.message) < 1000


async def test_retry_after_is_obeyed(endpoint: ChatEndpoint) -> None:
    """The pause is what the server asked for where that is more than the back-off."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    endpoint.script(status(429, None, Retry_After="0.7"), status(503), completion("late"))
    async with InferenceClient(limit=1, retry=QUICK, sleep=sleep) as client:
        await client.chat(endpoint.base_url, b"{}", HEADERS)
    assert pauses[0] == 0.7
    assert pauses[1] <= QUICK.max_delay_s


async def test_a_retry_after_beyond_patience_ends_the_attempts(
    client: InferenceClient, endpoint: ChatEndpoint
) -> None:
    """A slot is not held for an hour; the failure is retryable, so that it may be tried elsewhere."""
    endpoint.script(status(503, None, Retry_After="3600"))
    failure = await failure_of(client, endpoint.base_url)
    assert (failure.kind, failure.retryable) == ("overloaded", True)
    assert "3600" in failure.message
    assert len(endpoint.requests) == 1


def test_retry_after_may_be_seconds_or_a_date() -> None:
    """Both forms of the header are understood, nonsense is ignored."""
    assert _retry_after_s("2", now=0.0) == 2.0
    assert _retry_after_s("-5", now=0.0) == 0.0
    assert _retry_after_s(email.utils.formatdate(1_000_000_030, usegmt=True), now=1_000_000_000.0) == 30.0
    assert _retry_after_s("soon", now=0.0) is None
    assert _retry_after_s("nan", now=0.0) is None
    assert _retry_after_s("", now=0.0) is None
    assert _retry_after_s(None, now=0.0) is None


def test_pauses_grow_and_are_bounded() -> None:
    """Doubling up to the cap, spread by at most half."""
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=5.0)
    assert [policy.delay_s(attempt, 0.999999) for attempt in (1, 2, 3, 4, 400)] == pytest.approx(
        [1, 2, 4, 5, 5], 1e-3
    )
    assert policy.delay_s(1, 0.0) == 0.5


async def test_an_endpoint_that_does_not_listen_is_a_connection_failure(client: InferenceClient) -> None:
    """The address is named; another attempt may find it up again."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        failure = await failure_of(client, url)
    assert (failure.kind, failure.retryable) == ("connection", True)
    assert url in failure.message


async def test_a_base_url_that_is_none_is_a_clear_failure(client: InferenceClient) -> None:
    """A typing mistake in the configuration ends as a failure that shows it."""
    for wrong in ("127.0.0.1:8000/v1", "localhost", "ftp://x/v1", "http://[/v1", ""):
        failure = await failure_of(client, wrong)
        assert f'"{wrong}"' in failure.message
        assert not failure.retryable


async def test_cancelling_a_request_closes_its_connection(
    client: InferenceClient, endpoint: ChatEndpoint
) -> None:
    """The engine notices and aborts the generation instead of finishing it for nobody."""
    endpoint.script(hang)
    async with asyncio.TaskGroup() as group:
        request = group.create_task(client.chat(endpoint.base_url, b"{}", HEADERS))
        await endpoint.arrived.wait()
        request.cancel()
    async with asyncio.timeout(10):
        await endpoint.aborted.wait()


async def test_connections_are_reused_and_never_more_than_the_limit(endpoint: ChatEndpoint) -> None:
    """Sixty requests through four connections: the others wait for their turn and none fails."""
    async with InferenceClient(limit=4, retry=QUICK) as client, asyncio.TaskGroup() as group:
        for _ in range(60):
            group.create_task(client.chat(endpoint.base_url, b"{}", HEADERS))
    assert len(endpoint.requests) == 60
    assert len(endpoint.connections) <= 4
    assert client.retries == 0


async def test_an_answer_beyond_the_size_limit_is_refused(endpoint: ChatEndpoint) -> None:
    """Announced or not, a huge body is not read into memory."""

    async def streamed(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(100):
                await response.write(b"x" * 10_000)
        except ConnectionError:
            pass  # the client left, as it should
        return response

    async with InferenceClient(limit=1, retry=QUICK, max_response_bytes=50_000) as client:
        for answer in (streamed, status(200, "x" * 100_000)):
            endpoint.script(answer)
            failure = await failure_of(client, endpoint.base_url)
            assert (failure.kind, failure.retryable) == ("bad_response", False)
            assert "50000" in failure.message


async def test_credentials_in_a_base_url_are_never_shown(
    client: InferenceClient, endpoint: ChatEndpoint
) -> None:
    """Messages end up in logs."""
    endpoint.script(status(400))
    failure = await failure_of(client, endpoint.base_url.replace("http://", "http://user:hunter2@"))
    assert "hunter2" not in failure.message


async def test_chunked_answers_are_read_whole(client: InferenceClient, endpoint: ChatEndpoint) -> None:
    """A server need not announce the length."""

    async def chunked(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"ab", b"cd", b"ef"):
            await response.write(piece)
        return response

    endpoint.script(chunked)
    assert await client.chat(endpoint.base_url, b"{}", HEADERS) == b"abcdef"


async def test_a_client_that_was_not_opened_says_so() -> None:
    """Misuse is a programming error, not a failed rollout."""
    with pytest.raises(RuntimeError, match="context manager"):
        await InferenceClient(limit=1).chat("http://127.0.0.1:1/v1", b"{}", HEADERS)
    with pytest.raises(ValueError, match="at least 1"):
        InferenceClient(limit=0)

"""HTTP to inference servers: one connection pool per process, bounded retries, honest failures.

Retried with exponential back-off and jitter: broken connections, 408, 429 and 5xx; a `Retry-After` is
obeyed, or ends the attempts when it asks for more patience than allowed. Everything else the server says is
final. After the last attempt a `RolloutFailure` names the endpoint and what it said. The number of
connections follows the number of rollouts that the process runs at once, so that none queues for a socket.
A cancelled request closes its connection, upon which the engine aborts the generation.
There is no deadline here: whoever runs the rollout owns it and cancels. Only a host that is gone is noticed.
"""

import asyncio
import contextlib
import email.utils
import random
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog
from yarl import URL

from envs.backoff import backoff_s
from envs.errors import FailureKind, RolloutFailure, shown_url
from envs.http_answers import BadAnswerError, TooLargeError
from envs.http_connections import HttpConnections, Target
from envs.memory import keep_freed_memory

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""Largest answer that is read."""

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_ERROR_CHARS = 500
_SPARE_DESCRIPTORS = 256
_KEEP_S = 4.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a request is repeated."""

    max_attempts: int = 6
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0
    max_retry_after_s: float = 60.0
    connect_timeout_s: float = 30.0

    def delay_s(self, attempt: int, draw: float) -> float:
        """Pause after failed attempt `attempt` (from 1); `draw` in [0, 1) spreads it over its upper half."""
        ceiling = backoff_s(attempt, first_s=self.first_delay_s, max_s=self.max_delay_s)
        return float(ceiling * (0.5 + 0.5 * draw))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An attempt that failed."""

    failure: RolloutFailure
    retry_after_s: float = 0.0


class InferenceClient:
    """Posts chat and completion requests. Used as an async context manager, inside a running event loop."""

    def __init__(
        self,
        *,
        limit: int,
        retry: RetryPolicy | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if limit < 1:
            raise ValueError(f"the connection limit must be at least 1, got {limit}")
        self._limit = limit
        self._retry = retry or RetryPolicy()
        self._max_response_bytes = max_response_bytes
        self._sleep = sleep
        self._connections: HttpConnections | None = None
        self._targets: dict[tuple[str, str], Target] = {}
        self._jitter = (
            random.Random()
        )  # spreads retries in time only; nothing that is trained on depends on it
        self.retries = 0
        """Requests that were repeated, since the start."""

    async def __aenter__(self) -> Self:
        raise_descriptor_limit(self._limit + _SPARE_DESCRIPTORS)
        keep_freed_memory()
        # Idle connections go before the server closes them, which uvicorn does after 5 s: a request must
        # not meet a connection that is just being closed.
        self._connections = HttpConnections(
            limit=self._limit, connect_timeout_s=self._retry.connect_timeout_s, keep_s=_KEEP_S
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection. Requests under way fail."""
        if self._connections is not None:
            await self._connections.aclose()

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The body of a successful answer of `<base_url>/chat/completions`, or RolloutFailure."""
        return await self._post(base_url, "/chat/completions", body, headers)

    async def complete(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The same of `<base_url>/completions`."""
        return await self._post(base_url, "/completions", body, headers)

    async def _post(self, base_url: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        target = self._targets.get((base_url, path))
        if target is None:
            target = self._targets[base_url, path] = Target(_url(base_url, path))
        attempt = 0
        while True:
            attempt += 1
            answer = await self._try_post(target, body, headers)
            if isinstance(answer, bytes):
                return answer
            failure = answer.failure
            if not failure.retryable:
                raise failure
            if attempt >= self._retry.max_attempts:
                raise RolloutFailure(failure.kind, f"{failure.message} ({attempt} attempts)", retryable=True)
            if answer.retry_after_s > self._retry.max_retry_after_s:
                asked = f"it asks to wait {answer.retry_after_s:.0f} s"
                raise RolloutFailure(failure.kind, f"{failure.message} ({asked})", retryable=True)
            delay = max(answer.retry_after_s, self._retry.delay_s(attempt, self._jitter.random()))
            self.retries += 1
            log.debug("inference.retried", attempt=attempt, delay_s=round(delay, 3), kind=failure.kind)
            await self._sleep(delay)

    async def _try_post(self, target: Target, body: bytes, headers: Mapping[str, str]) -> "bytes | _Refusal":
        """One attempt: the body, or what went wrong with the pause that the server asked for."""
        if self._connections is None:
            raise RuntimeError("the client is not open; use it as an async context manager")
        url = target.url
        try:
            answer = await self._connections.post(target, headers, body, max_bytes=self._max_response_bytes)
            content = answer.body()
        except OSError as error:
            kind, said = FailureKind.CONNECTION, _describe(error)
        except BadAnswerError as error:
            kind, said = FailureKind.BAD_RESPONSE, _describe(error)
        except TooLargeError:
            raise RolloutFailure(
                FailureKind.BAD_RESPONSE,
                f"{shown_url(str(url))}: the answer is larger than {self._max_response_bytes} bytes",
                retryable=False,
            ) from None
        else:
            if answer.status == 200:
                return content
            asked = answer.headers.get(b"retry-after", b"").decode("latin1")
            pause = _retry_after_s(asked, now=time.time())
            return _Refusal(_failure(url, answer.status, content.decode(errors="replace")), pause or 0.0)
        return _Refusal(RolloutFailure(kind, f"{shown_url(str(url))}: {said}", retryable=True))


def _url(base_url: str, path: str) -> URL:
    try:
        url = URL(base_url.rstrip("/") + path)
        usable = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:
        usable = False
    if not usable:
        raise RolloutFailure(
            FailureKind.BAD_REQUEST,
            f'"{shown_url(base_url)}" is not a base URL like http://127.0.0.1:8000/v1',
            retryable=False,
        )
    return url


def _failure(url: URL, status: int, text: str) -> RolloutFailure:
    """What a status other than 200 means for the rollout."""
    said = _error_message(text)
    message = (
        f"{shown_url(str(url))} answered {status}: {said}"
        if said
        else f"{shown_url(str(url))} answered {status}"
    )
    if status in (429, 503, 529):
        return RolloutFailure(FailureKind.OVERLOADED, message, retryable=True)
    if status in _RETRIED or status >= 500:
        return RolloutFailure(FailureKind.SERVER_ERROR, message, retryable=True)
    if status in (401, 403):
        return RolloutFailure(
            FailureKind.UNAUTHORIZED, f"{message}; check the variable that api_key_env names", retryable=False
        )
    if status == 404:
        return RolloutFailure(
            FailureKind.UNKNOWN_MODEL,
            f"{message}; check the model's name and the base URL, which usually ends in /v1",
            retryable=False,
        )
    lowered = said.lower()
    if status in (400, 413, 422) and any(phrase in lowered for phrase in _CONTEXT_PHRASES):
        return RolloutFailure(FailureKind.CONTEXT_LENGTH, message, retryable=False)
    return RolloutFailure(FailureKind.BAD_REQUEST, message, retryable=False)


# How vLLM, SGLang and the OpenAI API word a prompt that does not fit.
_CONTEXT_PHRASES = (
    "context length",
    "context_length",
    "maximum model length",
    "max_model_len",
    "maximum allowed length",
    "longer than the model",
    "too long",
)


def _error_message(text: str) -> str:
    """The sentence in an error body, whichever of the usual shapes it has."""
    found: Any = text
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(text)
        for _ in range(3):
            if not isinstance(found, dict):
                break
            found = next((found[key] for key in ("error", "message", "detail") if key in found), str(found))
    return " ".join(str(found).split())[:_ERROR_CHARS]


def _retry_after_s(value: str | None, *, now: float) -> float | None:
    """Seconds that a `Retry-After` asks for, which is either a number of seconds or a date."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds else None


def _describe(error: BaseException) -> str:
    """An error in words; some say nothing."""
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


def raise_descriptor_limit(wanted: int) -> None:
    """Allow as many open files as the process may have, if it needs them: the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
